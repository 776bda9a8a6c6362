"""Proves that everything retracted before a time is gone, or lists what is left: where, why, what holds it, and what to do.

The proof needs four facts. In the newest version, no retraction as old as that is waiting (spec 13.12). No released content holds one as
old (spec 14.13). The newest version names every blob of the shard. The bucket keeps no old versions of its objects. This module changes
nothing. It reads the log, the rollups and listings, but no rows.

SUBTLE: the listing comes before the walk over the versions, as in `references`. So a blob that is linked meanwhile counts as named.

SUBTLE: every stored retraction happened before now. A recorded time after now comes from a clock that is ahead, and does not show when the
retraction happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage
from persist_engine.base.wording import counted, dated
from persist_engine.codec.keys import (
    PartKey,
    RollupKey,
    blob_key,
    created_key,
    parse_blob_key,
    parse_deletions_key,
    shard_prefix,
)
from persist_engine.model.batch import NOTHING_WAITS, HollowBatch
from persist_engine.model.spine.owed import waits_from_ms
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.references import Bucket, References
from persist_engine.work.audit.uncollected import Uncollected, rollup_waits_from_ms
from persist_engine.work.holds import Hold, holds_of

#: The limit on findings that are listed. All are counted.
LISTED_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """One place that may hold data retracted before the time. `since_ms` is when its deletion became owed; None when unknown."""

    where: str
    kind: str
    why: str
    held_by: str
    remedy: str
    since_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result at version `seqno`. It is a proof iff nothing remains. `remains` lists the first LISTED_MAX of `remains_count` findings.
    The other counts say what was examined; `kept` counts old object versions.
    """

    shard_id: str
    before_ms: int
    proven: bool
    seqno: int
    since: int | None
    owed_from_ms: int | None
    blobs: int
    versions: int
    rollups: int
    kept: int
    remains_count: int
    remains: tuple[Remains, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return asdict(self) | {"remains": [asdict(one) for one in self.remains]}


def prove(machine: Machine, *, before_ms: int) -> Proof:
    """Determines whether everything that was retracted at or before `before_ms` (milliseconds since 1970) is gone. Retries storage errors.
    Raises MissingBlob when the earliest version has no readable rollup, or a listing of parts is gone. Raises CorruptData for damaged
    bytes.
    """
    prefix = shard_prefix(machine.shard_id)
    # Records of deletions hold no rows.
    list_all = lambda: sorted(  # noqa: E731 - bound to this shard
        info.key for info in machine.blob.list_prefix(prefix) if parse_deletions_key(info.key) is None
    )
    listed = machine.retry.external("list", list_all, shard=machine.shard_id)
    list_kept = lambda: sorted(  # noqa: E731
        (one.key, one.version) for one in machine.blob.list_kept(prefix) if parse_deletions_key(one.key) is None
    )
    kept = machine.retry.external("list versions", list_kept, shard=machine.shard_id)
    references = References(machine)
    references.check_listings()
    found = _Found(machine, references, before_ms)
    remains = [*found.waiting(), *found.released(listed), *found.unnamed(listed), *_old_versions(kept)]
    state = references.newest
    return Proof(
        shard_id=str(machine.shard_id),
        before_ms=before_ms,
        proven=not remains,
        seqno=int(state.seqno),
        since=state.trace.since.time,
        owed_from_ms=min(
            (at for at in (waits_from_ms(state.trace), found.released_ms) if at is not None), default=None
        ),
        blobs=len(listed),
        versions=int(state.seqno) - found.earliest + 1,
        rollups=sum(isinstance(_parsed(key), RollupKey) for key in listed),
        kept=len(kept),
        remains_count=len(remains),
        remains=tuple(remains[:LISTED_MAX]),
    )


class _Found:
    """What remains, by its cause."""

    def __init__(self, machine: Machine, references: References, before_ms: int) -> None:
        self._machine, self._references, self._before_ms = machine, references, before_ms
        self._holds = holds_of(machine).holds
        bounds = machine.versions.live_diff_bounds(machine.shard_id)
        self.earliest = int(references.newest.seqno if bounds is None else bounds.earliest)
        self.released_ms = Uncollected().from_ms(machine, earliest=self.earliest)
        self._now_ms = machine.env.now_ms()  # after all that was read

    def _may_be_owed(self, since_ms: int) -> bool:
        """Whether a retraction that waits since `since_ms`, if there is one, may have happened at or before the time of the proof."""
        return since_ms != NOTHING_WAITS and (since_ms <= self._before_ms or since_ms > self._now_ms)

    def waiting(self) -> Iterator[Remains]:
        """The blobs of the newest version in which a retraction waits, and the older blobs, which may hold what it retracts."""
        trace = self._references.newest.trace
        batches = list(trace.batches())
        owing = [index for index, batch in enumerate(batches) if self._may_be_owed(batch.waits_from_ms)]
        if not owing:
            return
        since = trace.since
        held = [hold for hold in self._holds if hold.blocks_since]
        for index, batch in enumerate(batches[: owing[-1] + 1]):
            waits_ms = batch.waits_from_ms if index in owing else None
            last = batch if index in owing else batches[owing[-1]]
            is_passed = (
                last.desc.upper.time is not None and since.time is not None and last.desc.upper.time - 1 <= since.time
            )
            what = "a retraction waits in it" if index in owing else "it may hold what a later batch retracts"
            if is_passed:
                why, by, remedy = f"{what}; since has passed it", "", "persist maintain compact --full"
            else:
                why = f"{what}; since is {dated(since.time) if since.time is not None else 'closed'}, before the end of the batch"
                by = _named(held)
                remedy = "end the holds (persist admin holds), or wait for since; then persist maintain compact --full"
            for where, kind in self._places(batch):
                yield Remains(where=where, kind=kind, why=why, held_by=by, remedy=remedy, since_ms=waits_ms)

    def _places(self, batch: HollowBatch) -> Iterator[tuple[str, str]]:
        for key in batch.blob_keys():
            yield blob_key(self._machine.shard_id, key), "part"
        if batch.inline_bytes:
            yield f"log {self._machine.shard_id}, batch {batch.desc}", "inline"

    def released(self, listed: list[str]) -> Iterator[Remains]:
        """The blobs that only older versions name, if they may hold a retraction as old as the time of the proof."""
        if self.released_ms is None or not self._may_be_owed(self.released_ms):
            return
        held = [hold for hold in self._holds if hold.blocks_collection]
        by, since_ms = _named(held), self.released_ms
        remedy = (
            "end the reader (persist admin holds), then persist maintain gc --full"
            if held
            else "persist maintain gc --full"
        )
        for key in listed:
            parsed = _parsed(key)
            why = ""
            if isinstance(parsed, PartKey) and self._references.bucket(parsed) is Bucket.REFERENCED_NOT_CURRENT:
                why = "versions of the log still name it"
            elif isinstance(parsed, RollupKey) and self._rollup_owes(key):
                why = "it contains rows or bounds of rows of former versions"
            if why:
                kind = "rollup" if isinstance(parsed, RollupKey) else "part"
                yield Remains(where=key, kind=kind, why=why, held_by=by, remedy=remedy, since_ms=since_ms)
        text = f"log {self._machine.shard_id}, v{self.earliest} to {self._references.newest.seqno}"
        yield Remains(
            where=text,
            kind="log",
            why="its entries name what was replaced",
            held_by=by,
            remedy=remedy,
            since_ms=since_ms,
        )

    def _rollup_owes(self, key: str) -> bool:
        data = self._machine.retry.external("get", lambda: self._machine.blob.get(key), shard=self._machine.shard_id)
        try:
            owed_ms = NOTHING_WAITS if data is None else rollup_waits_from_ms(data, key=key)
        except (CorruptData, Incompatible):
            return True
        return self._may_be_owed(owed_ms)

    def unnamed(self, listed: list[str]) -> Iterator[Remains]:
        """The blobs that no version names: a killed process left them, or a process is about to link them. Their contents are unknown."""
        for key in listed:
            parsed = _parsed(key)
            if parsed is None:
                if key != created_key(self._machine.shard_id):
                    yield Remains(
                        where=key, kind="unknown", why="persist did not write it", held_by="", remedy="delete it"
                    )
            elif self._references.bucket(parsed) in (Bucket.LEAKED, Bucket.NOT_LEAKED_NOT_REFERENCED):
                staged_ms = parsed.part_id.staged_ms if isinstance(parsed, PartKey) else None
                yield Remains(
                    where=key,
                    kind="orphan",
                    why="no version names it: a process left it, or is about to link it",
                    held_by="",
                    remedy="persist admin orphans --older-than 1h --commit, once it is older than that",
                    since_ms=staged_ms,
                )


def _old_versions(kept: list[tuple[str, str]]) -> Iterator[Remains]:
    for key, version in kept:
        yield Remains(
            where=f"{key} version {version}",
            kind="old version",
            why="the bucket keeps versions of deleted objects",
            held_by="the bucket's versioning",
            remedy="give the bucket a rule that expires noncurrent versions, or delete this version",
        )


def _named(holds: list[Hold]) -> str:
    shown = [
        f"{hold.kind} {hold.id} ({hold.purpose or 'no purpose'}, {hold.hostname or 'no host'})" for hold in holds[:5]
    ]
    more = [counted(len(holds) - 5, "other hold")] if len(holds) > 5 else []
    return ", ".join([*shown, *more])


def _parsed(key: str) -> PartKey | RollupKey | None:
    try:
        return parse_blob_key(key)
    except InvalidUsage:
        return None
