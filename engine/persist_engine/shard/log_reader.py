"""Reading the log of a shard's states: diffs in consensus, rollups in blob (spec 7).

Owns all reads of the log; `shard.versions` changes it. Keeps no state of its own: `shard.applier` caches. Every fetch is
bounded, or its docstring says that it is not. This module relies on one invariant: the newest rollup that the last diff
names exists in blob, unless that diff is stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from persist_engine.base.env import Env
from persist_engine.base.errors import (
    CorruptData,
    InvalidUsage,
    InvariantViolated,
    MissingBlob,
    ShardNotFound,
    check,
)
from persist_engine.base.metrics import Metrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import Settings
from persist_engine.base.versioned import SCAN_ALL, SeqNo, VersionedData
from persist_engine.codec.keys import blob_key, is_rollup_key
from persist_engine.codec.state import Rollup, decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.diff.state_diff import StateDiff, check_birth, check_same_entry, forked_log
from persist_engine.model.diff.state_diff import apply as apply_state_diff
from persist_engine.model.ids import ShardId
from persist_engine.model.queries import sealed
from persist_engine.model.state import ShardState
from persist_engine.shard.creation import Creation
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus

#: Diffs fetched at once in search of an unlinked rollup: memory stays bounded however long the log is.
_SEARCHED_DIFFS = 1024
T = TypeVar("T")

LiveDiffs = Sequence[VersionedData]
"""Encoded state diffs with consecutive, rising seqnos."""


@dataclass(frozen=True, slots=True)
class LiveDiffBounds:
    """The two ends of the diffs that consensus holds for a shard; seqnos between them are dense."""

    earliest: SeqNo
    current: SeqNo

    @property
    def count(self) -> int:
        """The number of live diffs."""
        return self.current - self.earliest + 1


class LiveStates:
    """A walk over the live states of a shard, oldest first, one diff at a time. It stands on one state, at first on the
    earliest. Does no I/O, because `LogReader` fetched everything. Raises ForkedLog when an entry does not follow the one
    before it, or when the first entry does not belong to the earliest state. Not thread-safe.
    """

    def __init__(
        self, earliest: ShardState, diffs: Sequence[tuple[VersionedData, StateDiff]], *, count: Callable[[str], None]
    ) -> None:
        check(
            diffs[0][1].seqno_to == earliest.seqno,
            f"live diffs begin at {diffs[0][1].seqno_to}, not at {earliest.seqno}",
        )
        check_same_entry(earliest, diffs[0][1].tag)
        self._state = earliest
        self._count = count
        self.initial_diff = diffs[0][1]
        """The diff that led to the earliest state, which already includes it."""
        self._diffs = [diff for _, diff in diffs[1:]]
        self._encoded_bytes = sum(len(entry.data) for entry, _ in diffs)
        self._next = 0

    @property
    def state(self) -> ShardState:
        """The state on which the walk stands."""
        return self._state

    @property
    def seqno(self) -> SeqNo:
        """The version on which the walk stands."""
        return self._state.seqno

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all fetched diffs."""
        return self._encoded_bytes

    def advance(self) -> StateDiff | None:
        """Advances by one version and returns the diff that led there. Returns None at the end, without moving."""
        if self._next == len(self._diffs):
            return None
        diff = self._diffs[self._next]
        self._next += 1
        self._state = apply_state_diff(self._state, diff, count=self._count)
        return diff


class LogReader:
    """Reads the log of any shard of one location. Thread-safe.

    Unless its docstring says otherwise, a method retries storage errors until `settings.retry.give_up_ms` has passed, and then
    raises Unavailable. It may be repeated. It is linearized: it sees everything acknowledged before it was called. Damaged
    bytes raise CorruptData with their key. Bytes of newer code or of another format raise Incompatible.
    """

    def __init__(self, blob: Blob, consensus: Consensus, *, env: Env, settings: Settings, metrics: Metrics) -> None:
        self.blob, self.consensus = blob, consensus
        self.env, self.settings, self.metrics = env, settings, metrics
        self.retry = Retry(env, settings.retry, metrics)
        self.creation = Creation(blob, consensus, self.retry)

    def fetch_current_state(self, shard_id: ShardId, hint: LiveDiffs | None = None) -> ShardState:
        """The state at the end of `hint` (diffs just fetched, through the head), or of a fresh fetch when `hint` is None
        or empty.

        Raises ShardNotFound when the shard was never initialised. Raises MissingBlob when the head itself names a rollup that
        does not exist: the blob store was wiped, or does not belong to this consensus store.
        """
        rollup, live = self._fetch_newest_rollup(shard_id, hint)
        return self._apply_successors(rollup.state, live)

    def fetch_later_state(self, known: ShardState, hint: LiveDiffs | None = None) -> ShardState:
        """Like `fetch_current_state`, for a process that knows the state `known`. Raises ForkedLog when `known` is not in the
        past of the log. If the entry of `known` was truncated, the lineage of the newest rollup decides; it covers the last
        LINEAGE_MAX versions. An older `known` cannot be checked: it counts as part of the log, and a metric counts the case.
        """
        rollup, live = self._fetch_newest_rollup(known.shard_id, hint)
        check_birth(known, rollup.state.birth)
        if live[-1].seqno < known.seqno:
            raise forked_log(known, f"{self.consensus.address()} ends before it")
        for entry in live:
            if entry.seqno == known.seqno:
                check_same_entry(known, entry.tip.tag)
                return self._apply_successors(rollup.state, live)
        is_known = rollup.knows(known.tip)
        if is_known is None:
            self.metrics.count("update_state", path="unproven")
        elif not is_known:
            raise forked_log(known, f"by the lineage of rollup {rollup.state.seqno}, another entry stood there")
        return self._apply_successors(rollup.state, live)

    def _fetch_newest_rollup(self, shard_id: ShardId, hint: LiveDiffs | None) -> tuple[Rollup, LiveDiffs]:
        live = hint or self.fetch_recent_live_diffs(shard_id)
        missing: str | None = None
        while True:
            if not live:
                raise self._not_found(shard_id)
            key = self._decode_diff(shard_id, live[-1]).latest_rollup_key
            data = self._get_blob(shard_id, key)
            if data is not None:
                return self._decode_rollup(shard_id, key, data), live
            if key == missing:
                # Blobs are written before they are linked and deleted after they are unlinked. So a head that was read after the
                # blob was seen missing, and that still names it, is not stale: the blob is lost.
                raise MissingBlob(
                    f"rollup {blob_key(shard_id, key)}, which the shard's newest version names, is missing in "
                    f"{self.blob.address()}: it was wiped or does not belong to {self.consensus.address()}",
                    key=blob_key(shard_id, key),
                )
            missing = key
            self.metrics.count("fetch_state_stale_rollup")
            live = self.fetch_recent_live_diffs(shard_id)

    def fetch_recent_live_diffs(self, shard_id: ShardId) -> LiveDiffs:
        """Live diffs through the head: all of them if they are few, otherwise those from the newest rollup on. Empty when the
        shard is not initialised.
        """
        limit = self.settings.maintenance.recent_diffs_max
        live = self._scan(shard_id, SeqNo(0), limit)
        if len(live) < limit:
            self.metrics.count("fetch_recent_diffs", path="fast")
            return live
        self.metrics.count("fetch_recent_diffs", path="slow")
        while True:
            head = self.retry.external("head", lambda: self.consensus.head(shard_id), shard=shard_id)
            if head is None:
                return []  # consensus lost the log since the scan
            rollup_seqno = SeqNo.parse(self._decode_diff(shard_id, head).latest_rollup_key.split("/")[0])
            # The scan must not begin beyond the head, whatever rollup the head names. It would find nothing, and the loop would not end.
            live = self._scan(shard_id, min(rollup_seqno, head.seqno), SCAN_ALL)
            if head in live or (live and live[0].seqno > head.seqno):
                return live
            # Consensus lost the head since. The log that is there now may have its rollup before this version, so try again.

    def fetch_diffs_from(self, known: ShardState, *, limit: int) -> LiveDiffs | None:
        """At most `limit` live diffs that come after `known`. Returns None when another process truncated the entry of `known`:
        the log then does not show whether its diffs follow `known`. Raises ForkedLog when the log ends before that entry, or
        holds another in its place.
        """
        live = self._scan(known.shard_id, known.seqno, limit + 1)
        if not live:
            raise forked_log(known, f"{self.consensus.address()} ends before it")
        if live[0].seqno != known.seqno:
            return None
        if live[0].tip != known.tip:
            check_birth(known, self._decode_diff(known.shard_id, live[0]).birth)
            check_same_entry(known, live[0].tip.tag)
        return live[1:]

    def fetch_diffs_after(self, shard_id: ShardId, seqno: SeqNo, *, limit: int = SCAN_ALL) -> LiveDiffs:
        """At most `limit` live diffs with seqnos above `seqno`. If diffs from seqno + 1 on were truncated, they begin later."""
        return self._scan(shard_id, seqno.next(), limit)

    def fetch_all_live_diffs(self, shard_id: ShardId) -> LiveDiffs:
        """All live diffs. Unbounded: for maintenance and inspection only."""
        return self._scan(shard_id, SeqNo(0), SCAN_ALL)

    def fetch_all_live_states(
        self, shard_id: ShardId, *, through: SeqNo | None = None, known: ShardState | None = None
    ) -> LiveStates | None:
        """A walk over all live states, standing on the earliest; None when the shard was never initialised.

        `through` bounds how far the walk reaches and what is fetched (always at least the earliest version). `known` is a state of the
        shard. If it names the rollup of the earliest version, as it usually does, the newest state need not be fetched to find that name.
        """
        seen: SeqNo | None = None
        while True:
            bounds = self.live_diff_bounds(shard_id)
            if bounds is None:
                return None
            reach = bounds.current if through is None else min(through, bounds.current)
            last = max(bounds.earliest, reach)
            live = self._scan(shard_id, bounds.earliest, last - bounds.earliest + 1)
            if live and live[0].seqno == bounds.earliest:
                first = self._fetch_rollup_at(shard_id, live, known)
                if first is not None:
                    diffs = [(entry, self._decode_diff(shard_id, entry)) for entry in live]
                    return LiveStates(first, diffs, count=self.count_apply)
            if bounds.earliest == seen:
                raise MissingBlob(
                    f"shard {shard_id} has no readable rollup at its earliest version {bounds.earliest} in "
                    f"{self.blob.address()}",
                    key=blob_key(shard_id, f"{bounds.earliest}/"),
                )
            seen = bounds.earliest

    def live_diff_bounds(self, shard_id: ShardId) -> LiveDiffBounds | None:
        """The earliest and the current live version; None when the shard was never initialised. Makes two small reads."""
        first = self._scan(shard_id, SeqNo(0), 1)
        if not first:
            return None
        head = self.retry.external("head", lambda: self.consensus.head(shard_id), shard=shard_id)
        return None if head is None else LiveDiffBounds(earliest=first[0].seqno, current=head.seqno)

    def tag_at(self, shard_id: ShardId, seqno: SeqNo) -> bytes | None:
        """The tag of the entry of that version; None when it is not live. Makes one small read."""
        live = self._scan(shard_id, seqno, 1)
        return live[0].tip.tag if live and live[0].seqno == seqno else None

    def count_apply(self, path: str) -> None:
        """Counts the path that `model.diff.state_diff.apply` took."""
        self.metrics.count("apply_diff", path=path)

    def decode_diffs_after(self, shard_id: ShardId, seqno: SeqNo, live: LiveDiffs) -> Iterator[StateDiff]:
        """The diffs of `live` with seqnos above `seqno`, decoded in order."""
        return (self._decode_diff(shard_id, entry) for entry in live if entry.seqno > seqno)

    def list_shards(self) -> Iterator[ShardId]:
        """Every shard that consensus knows, in no particular order. Skips keys that are not shard ids."""
        for key in self.retry.external("list shards", lambda: list(self.consensus.list_keys())):
            with contextlib.suppress(InvalidUsage):
                yield ShardId(key)

    # -- private ------------------------------------------------------------------------------------------------------

    def _not_found(self, shard_id: ShardId) -> ShardNotFound:
        ruin = self.creation.first_ruin(shard_id)
        text = f"shard {shard_id} does not exist in {self.consensus.address()}"
        return ShardNotFound(
            text if ruin is None else f"{text}: {self.creation.lost(shard_id, ruin)}", shard_id=shard_id
        )

    def _fetch_rollup_at(self, shard_id: ShardId, live: LiveDiffs, known: ShardState | None) -> ShardState | None:
        """The state at the version of live[0], read from a rollup of that version. None when there is no such rollup: another
        process truncated the log in between, or the rollup is lost.
        """
        earliest = live[0].seqno
        named = None if known is None else known.rollups.get(earliest)
        if named is not None and (found := self._rollup_state(shard_id, named.key)) is not None:
            return found
        linked = self.fetch_current_state(shard_id).rollups.get(earliest)
        if linked is not None:
            return self._rollup_state(shard_id, linked.key)
        # The rollup may be unlinked already. The diff that linked it and the diff that unlinked it still name it.
        for key in dict.fromkeys(self._rollup_keys_mentioned(shard_id, live, of=earliest)):
            found = self._rollup_state(shard_id, key)
            if found is not None:
                self.metrics.count("rollup_migrated")
                return found
        return None

    def _rollup_state(self, shard_id: ShardId, key: str) -> ShardState | None:
        data = self._get_blob(shard_id, key)
        return None if data is None else self._decode_rollup(shard_id, key, data).state

    def _rollup_keys_mentioned(self, shard_id: ShardId, live: LiveDiffs, *, of: SeqNo) -> Iterator[str]:
        """Partial keys of the rollups at version `of` that diffs link or unlink. Searches the diffs of `live` first. If they name
        none, searches later diffs, a page at a time.
        """
        found = False
        page = live
        while page:
            for entry in page:
                for change in self._decode_diff(shard_id, entry).rollups:
                    values = [getattr(change, name, None) for name in ("old", "to")] if change.key == of else []
                    for key in [value.key for value in values if value is not None]:
                        found = True
                        yield key
            page = () if found else self.fetch_diffs_after(shard_id, page[-1].seqno, limit=_SEARCHED_DIFFS)

    def _apply_successors(self, state: ShardState, live: LiveDiffs) -> ShardState:
        for entry in live:
            if entry.seqno == state.seqno:
                check_same_entry(state, entry.tip.tag)
            elif entry.seqno == state.seqno + 1:
                diff = self._decode_diff(state.shard_id, entry)
                state = apply_state_diff(state, diff, count=self.count_apply)
        if state.seqno != live[-1].seqno:
            raise InvariantViolated(
                f"diffs of shard {state.shard_id} have a gap after {state.seqno}, before {live[-1].seqno}",
                shard_id=state.shard_id,
            )
        return sealed(state)

    def _scan(self, shard_id: ShardId, from_seqno: SeqNo, limit: int) -> LiveDiffs:
        return self.retry.external("scan", lambda: self.consensus.scan(shard_id, from_seqno, limit), shard=shard_id)

    def _timed(self, op: str, what: str, call: Callable[[], T]) -> T:
        started_s = self.env.monotonic_s()
        result = call()
        self.metrics.observe_s("codec", self.env.monotonic_s() - started_s, op=op, what=what)
        return result

    def _get_blob(self, shard_id: ShardId, key: str) -> bytes | None:
        self.metrics.count("shard_blob_gets", shard=shard_id)
        return self.retry.external("get rollup", lambda: self.blob.get(blob_key(shard_id, key)), shard=shard_id)

    def _decode_rollup(self, shard_id: ShardId, key: str, data: bytes) -> Rollup:
        whole_key = blob_key(shard_id, key)
        rollup = self._timed("decode", "rollup", lambda: decode_rollup(data, key=whole_key, lazily=True))
        state = rollup.state
        if state.shard_id != shard_id or state.seqno != SeqNo.parse(key.split("/", maxsplit=1)[0]):
            text = f"rollup {whole_key} holds {state.seqno} of shard {state.shard_id}"
            raise CorruptData(text, key=whole_key)
        return rollup

    def _decode_diff(self, shard_id: ShardId, entry: VersionedData) -> StateDiff:
        key = f"{shard_id} {entry.seqno}"
        diff = self._timed("decode", "diff", lambda: decode_state_diff(entry.data, key=key))
        if diff.seqno_to != entry.seqno:
            raise CorruptData(f"diff {key} leads to {diff.seqno_to}", key=key)
        if diff.shard_id != shard_id:
            raise CorruptData(f"diff {key} belongs to shard {diff.shard_id}", key=key)
        if not is_rollup_key(diff.latest_rollup_key):
            raise CorruptData(f"diff {key} names no rollup: {diff.latest_rollup_key!r}", key=key)
        return diff
