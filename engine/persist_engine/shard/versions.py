"""The durable log of a shard's states: diffs in consensus, rollups in blob (spec 7).

Owns every consensus call and every rollup blob. Keeps no state of its own: `shard.applier` caches. Every fetch is
bounded or says that it is not. Invariant relied upon: the newest rollup that the last diff names exists in blob,
unless that diff is stale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from persist_engine.base.env import Env
from persist_engine.base.errors import (
    CodecMismatch,
    CorruptData,
    InvalidUsage,
    InvariantViolated,
    MissingBlob,
    ShardLost,
    ShardNotFound,
    check,
)
from persist_engine.base.metrics import Metrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import Settings
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.base.versioned import SCAN_ALL, CasResult, SeqNo, VersionedData
from persist_engine.codec.keys import blob_key, is_rollup_key, rollup_key
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.batch import HollowRollup
from persist_engine.model.diff.state_diff import StateDiff, check_birth, check_same_entry, forked_log
from persist_engine.model.diff.state_diff import apply as apply_state_diff
from persist_engine.model.ids import RollupId, ShardId
from persist_engine.model.queries import latest_rollup, sealed
from persist_engine.model.state import CodecNames, SchemaPair, ShardState
from persist_engine.model.step import initial_state
from persist_engine.shard.creation import Creation
from persist_engine.shard.live_states import LiveStates
from persist_engine.shard.roundtrip import validate_roundtrip
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.notify import NoPush, Push

_FIRST = SeqNo(1)
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
        """How many diffs are live."""
        return self.current - self.earliest + 1


class StateVersions:
    """Init, compare-and-set, fetch, rollup, truncate: for any shard of one location. Thread-safe.

    Unless a method says otherwise it retries storage errors until `settings.retry.give_up_ms` (Unavailable), may be
    repeated, and is linearized: it sees everything acknowledged before it was called. Damaged bytes raise
    CorruptData with their key, bytes of newer code Incompatible.
    """

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        *,
        env: Env,
        settings: Settings,
        metrics: Metrics,
        push: Push | None = None,
    ) -> None:
        self.blob, self.consensus = blob, consensus
        self.push = push or NoPush()
        self.env, self.settings, self.metrics = env, settings, metrics
        self.retry = Retry(env, settings.retry, metrics)
        self.creation = Creation(blob, consensus, self.retry)

    # -- init and compare-and-set -------------------------------------------------------------------------------------

    def maybe_init_shard(
        self, shard_id: ShardId, codecs: CodecNames, schema: SchemaPair, *, retain_ms: int | None = None
    ) -> ShardState:
        """The shard's current state, after creating it when it did not exist. Idempotent; any number of processes
        may race.

        `schema` and `retain_ms` count only for the creator: the caller compares the schema with that of the state. CodecMismatch for
        another's codecs. ShardLost where blobs tell that there was a log: nothing is created over them.
        """
        recent = self.fetch_recent_live_diffs(shard_id)
        if not recent:
            ruin = self.creation.first_ruin(shard_id)
            if ruin is None:
                created = self._try_init_shard(shard_id, codecs, schema, retain_ms)
                if created is not None:
                    return created
            # Another creator may have been faster than the listing: then its log is there by now.
            recent = self.fetch_recent_live_diffs(shard_id)
            if ruin is not None and not recent:
                raise ShardLost(self.creation.lost(shard_id, ruin), shard_id=shard_id, key=ruin)
        state = self.fetch_current_state(shard_id, recent)
        check_codecs(state, codecs)
        if set(state.rollups) == {_FIRST} and not self.creation.is_marked(shard_id):
            # Its creator may have died before it left the mark: that is seen to before anything is written.
            self.creation.mark(shard_id)
        return state

    def _try_init_shard(
        self, shard_id: ShardId, codecs: CodecNames, schema: SchemaPair, retain_ms: int | None
    ) -> ShardState | None:
        key = rollup_key(_FIRST, RollupId.from_bytes(self.env.random_bytes(16)))
        state, diff = initial_state(
            shard_id=shard_id,
            codecs=codecs,
            schema=schema,
            now_ms=self.env.now_ms(),
            hostname=self.env.hostname(),
            applier_version=APPLIER_VERSION,
            rollup=HollowRollup(key, None),
            birth=self.env.random_bytes(16),
            retain_ms=retain_ms,
        )
        new = VersionedData(state.seqno, encode_state_diff(diff))
        state = replace(state, tag=new.tip.tag)
        self._set_blob(shard_id, key, encode_rollup(Rollup(state, ())))
        # Repeated on every error: an attempt of unknown outcome then shows as a mismatch, and is told apart below by
        # its key.
        result = self.retry.external(
            "init", lambda: self.consensus.compare_and_set(shard_id, None, new), shard=shard_id
        )
        if result is CasResult.COMMITTED:
            self.creation.mark(shard_id)
            return sealed(state)
        winner = self.fetch_current_state(shard_id)
        if all(rollup.key != key for rollup in winner.rollups.values()):
            # Either another process won, or we won and our rollup has been replaced and truncated since: nobody
            # needs it.
            self.delete_rollup(shard_id, key)
        return None

    def try_compare_and_set_current(
        self, *, before: ShardState, state: ShardState, diff: StateDiff
    ) -> ShardState | None:
        """Append `diff`, which leads to `state`, iff the log still ends with the very entry of `before`. `state` with the
        tag of its entry when it was committed, None when not. One round trip.

        Retries nothing: Determinate surely left the shard as it was, and whoever decided on `state` decides anew (its
        clock has moved on); Indeterminate has an unknown outcome, and `shard.machine` knows what may follow.
        """
        expected = before.seqno
        if not diff.seqno_to == state.seqno == expected + 1:
            raise InvariantViolated(f"diff to {diff.seqno_to} for state {state.seqno} after {expected}")
        data = self._timed("encode", "diff", lambda: encode_state_diff(diff))
        if self.settings.maintenance.validate_roundtrip:
            validate_roundtrip(before, data, state)
        new = VersionedData(state.seqno, data)
        shard_id = state.shard_id
        result = self.consensus.compare_and_set(shard_id, before.tip, new)
        if result is not CasResult.COMMITTED:
            return None
        self.metrics.count("state_diff_bytes", len(data), shard=shard_id)
        self.push.publish(shard_id, new)
        return replace(state, tag=new.tip.tag)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def fetch_current_state(self, shard_id: ShardId, hint: LiveDiffs | None = None) -> ShardState:
        """The state at the end of `hint` (diffs just fetched, through the head), or of a fresh fetch when hint is
        None or empty.

        ShardNotFound when the shard was never initialised. MissingBlob when the head itself names a rollup that does
        not exist: the blob store was wiped or is not the one that belongs to this consensus.
        """
        rollup, live = self._fetch_newest_rollup(shard_id, hint)
        return self._apply_successors(rollup.state, live)

    def fetch_later_state(self, known: ShardState, hint: LiveDiffs | None = None) -> ShardState:
        """As `fetch_current_state`, for a process that knows the state `known`. ForkedLog when `known` is no state of the
        log's past. Where its entry was truncated the newest rollup tells some LINEAGE_MAX versions back; what is older is
        believed, and counted.
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
            raise forked_log(known, f"another entry stood there, says rollup {rollup.state.seqno}")
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
                # Blobs are written before they are linked and deleted after they are unlinked: a head that still
                # names a rollup after its blob was seen missing cannot be stale.
                raise MissingBlob(
                    f"rollup {blob_key(shard_id, key)}, which the shard's newest version names, is missing in "
                    f"{self.blob.address()}: it was wiped or does not belong to {self.consensus.address()}",
                    key=blob_key(shard_id, key),
                )
            missing = key
            self.metrics.count("fetch_state_stale_rollup")
            live = self.fetch_recent_live_diffs(shard_id)

    def fetch_recent_live_diffs(self, shard_id: ShardId) -> LiveDiffs:
        """Through the head: all live diffs when they are few, else those from the newest rollup on. Empty: not
        initialised.
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
                return []  # consensus has lost the log since
            rollup_seqno = SeqNo.parse(self._decode_diff(shard_id, head).latest_rollup_key.split("/")[0])
            # Never from beyond the head, whatever it names: found nothing, it would be fetched for ever.
            live = self._scan(shard_id, min(rollup_seqno, head.seqno), SCAN_ALL)
            if head in live or (live and live[0].seqno > head.seqno):
                return live
            # Consensus has lost the head since: what the other log has from that version on need not reach back to its rollup.

    def fetch_diffs_from(self, known: ShardState, *, limit: int) -> LiveDiffs | None:
        """At most `limit` live diffs that come after `known`; None when others truncated its entry, and so nothing tells
        here whether they follow it. ForkedLog when the log ends before it, or holds another entry in its place.
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
        """Live diffs with seqnos above `seqno`, at most `limit`. Does not start at seqno + 1 when those were
        truncated.
        """
        return self._scan(shard_id, seqno.next(), limit)

    def fetch_all_live_diffs(self, shard_id: ShardId) -> LiveDiffs:
        """All of them. Unbounded: for maintenance and inspection only."""
        return self._scan(shard_id, SeqNo(0), SCAN_ALL)

    def fetch_all_live_states(self, shard_id: ShardId, *, through: SeqNo | None = None) -> LiveStates | None:
        """A walk over all live states, standing on the earliest; None when the shard was never initialised.

        `through` bounds how far the walk reaches and what is fetched (always at least the earliest version).
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
                first = self._fetch_rollup_at(shard_id, live)
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
        """Earliest and current live version; None when the shard was never initialised. Two small reads."""
        first = self._scan(shard_id, SeqNo(0), 1)
        if not first:
            return None
        head = self.retry.external("head", lambda: self.consensus.head(shard_id), shard=shard_id)
        return None if head is None else LiveDiffBounds(earliest=first[0].seqno, current=head.seqno)

    def tag_at(self, shard_id: ShardId, seqno: SeqNo) -> bytes | None:
        """The tag of the entry of that version; None when it is not live. One small read."""
        found = self._scan(shard_id, seqno, 1)
        return found[0].tip.tag if found and found[0].seqno == seqno else None

    def count_apply(self, path: str) -> None:
        """For `model.state_diff.apply`: which way a diff was applied."""
        self.metrics.count("apply_diff", path=path)

    def decode_diffs_after(self, shard_id: ShardId, seqno: SeqNo, live: LiveDiffs) -> Iterator[StateDiff]:
        """Those of `live` above `seqno`, decoded in order."""
        return (self._decode_diff(shard_id, entry) for entry in live if entry.seqno > seqno)

    # -- rollups and truncation ---------------------------------------------------------------------------------------

    def write_rollup_for_state(self, state: ShardState) -> tuple[str, int] | None:
        """Write `state` with the diffs since its latest rollup as a blob; its partial key and size. Links nothing: see
        Machine.add_rollup. None when there is nothing to write: the state is its own latest rollup, or others
        truncated past it.
        """
        shard_id = state.shard_id
        after, previous = latest_rollup(state)
        missing = state.seqno - after
        diffs = (
            [e for e in self.fetch_diffs_after(shard_id, after, limit=missing) if e.seqno <= state.seqno]
            if missing
            else []
        )
        if not missing:
            self.metrics.count("rollup_write", outcome="noop_latest")
            return None
        if not diffs or diffs[0].seqno != after + 1:
            self.metrics.count("rollup_write", outcome="noop_truncated")
            return None
        if diffs[-1].seqno < state.seqno:
            raise forked_log(state, f"{self.consensus.address()} ends before it")
        check(
            len(diffs) == missing,
            f"diffs of {shard_id} between {after} and {state.seqno} are not dense",
        )
        check_same_entry(state, diffs[-1].tip.tag)
        key = rollup_key(state.seqno, RollupId.from_bytes(self.env.random_bytes(16)))
        rollup = Rollup(state, tuple(diffs), self._lineage(shard_id, previous.key))
        data = self._timed("encode", "rollup", lambda: encode_rollup(rollup))
        self._set_blob(shard_id, key, data)
        self.metrics.count("rollup_write", outcome="written")
        return key, len(data)

    def delete_rollup(self, shard_id: ShardId, key: str) -> None:
        """Delete the blob of a rollup that no live state names. `key` is partial. Idempotent."""
        self.retry.external("delete rollup", lambda: self.blob.delete(blob_key(shard_id, key)), shard=shard_id)

    def truncate_diffs(self, to: ShardState) -> int:
        """Delete the diffs before the state `to`, a former one; how many there were. The caller owes that a rollup of it
        exists. Idempotent. ForkedLog, and nothing is deleted, when the log does not hold its entry, nor comes after it.
        """
        key = to.shard_id
        dropped = self.retry.external("truncate", lambda: self.consensus.truncate(key, to.tip), shard=key)
        if dropped is None:
            raise forked_log(to, f"{self.consensus.address()} ends before it, or holds another entry in its place")
        return dropped

    def list_shards(self) -> Iterator[ShardId]:
        """Every shard that consensus knows, in no particular order; keys that name no shard are not ours and left out."""
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

    def _fetch_rollup_at(self, shard_id: ShardId, live: LiveDiffs) -> ShardState | None:
        """The state at live[0], from a rollup there; None when none is found (others truncated in between, or it is
        lost).
        """
        earliest = live[0].seqno
        current = self.fetch_current_state(shard_id)
        linked = current.rollups.get(earliest)
        keys = [linked.key] if linked is not None else []
        # It may have been unlinked already: the diff that linked it and the one that did that mention it.
        if linked is None:
            keys += self._rollup_keys_mentioned(shard_id, live, of=earliest)
        for key in dict.fromkeys(keys):
            data = self._get_blob(shard_id, key)
            if data is not None:
                if linked is None:
                    self.metrics.count("rollup_migrated")
                return self._decode_rollup(shard_id, key, data).state
        return None

    def _rollup_keys_mentioned(self, shard_id: ShardId, live: LiveDiffs, *, of: SeqNo) -> Iterator[str]:
        """Partial keys of rollups at version `of` that diffs name or unlink: those of `live`, and of later ones, a page
        at a time, where these say nothing.
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

    def _lineage(self, shard_id: ShardId, previous: str) -> bytes:
        """What the rollup after the one at the partial key `previous` tells of the entries before it; nothing where that one
        cannot be read.
        """
        with contextlib.suppress(CorruptData):
            data = self._get_blob(shard_id, previous)
            if data is not None:
                return self._decode_rollup(shard_id, previous, data).lineage_of_next()
        return b""

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

    def _set_blob(self, shard_id: ShardId, key: str, data: bytes) -> None:
        self.metrics.count("shard_blob_sets", shard=shard_id)
        self.retry.external("set rollup", lambda: self.blob.set(blob_key(shard_id, key), data), shard=shard_id)

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


def check_codecs(state: ShardState, requested: CodecNames) -> None:
    """Raise CodecMismatch unless the shard was made with `requested`."""
    if state.codecs != requested:
        raise CodecMismatch(
            f"shard {state.shard_id} was made with codecs {state.codecs}, not {requested}",
            requested=requested,
            actual=state.codecs,
        )
