"""The difference between two states of a shard, and its application (spec 8).

`apply(a, between(a, b)) == b`. Structure is diffed as flat collections. A state shares everything unchanged with its successor,
and `between` inspects only the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from persist_engine.base.errors import ForkedLog, InvariantViolated, check
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowBatch, HollowRollup, HollowRun, InlinePart
from persist_engine.model.diff.field_diff import (
    Delete,
    FieldDiff,
    Insert,
    Update,
    applied_to_map,
    applied_to_value,
    field_diff,
    map_diffs,
    updated_value,
)
from persist_engine.model.diff.legacy_diff import apply_unstructured
from persist_engine.model.diff.trace_diff import TraceDiff, apply_structured, changes
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, ShardId, WriterId
from persist_engine.model.queries import latest_rollup, sealed
from persist_engine.model.spine.flat import SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import (
    Claim,
    CriticalReader,
    LeasedReader,
    SchemaPair,
    ShardState,
    SourceProgress,
    Writer,
)

__all__ = [
    "BlobRef",
    "Delete",
    "FieldDiff",
    "Insert",
    "StateDiff",
    "Update",
    "apply",
    "between",
    "check_birth",
    "check_same_entry",
    "deleted_blobs",
    "forked_log",
    "inserted_blobs",
    "live_blobs",
]

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class StateDiff:
    """One version of the log. Scalars use the key None and Update (optional claims: Insert, Update or Delete). Tuples are
    sorted by key. `latest_rollup_key` is the new state's newest rollup, so that a reader of the last diff can start there.
    `shard_id` and `birth` name the log that the diff belongs to.
    """

    applier_version: str
    shard_id: ShardId
    birth: bytes
    seqno_from: SeqNo
    seqno_to: SeqNo
    walltime_ms: int
    latest_rollup_key: str
    hostname: tuple[FieldDiff[None, str], ...] = ()
    last_gc_req: tuple[FieldDiff[None, SeqNo], ...] = ()
    active_rollup: tuple[FieldDiff[None, Claim], ...] = ()
    active_gc: tuple[FieldDiff[None, Claim], ...] = ()
    rollups: tuple[FieldDiff[SeqNo, HollowRollup], ...] = ()
    leased_readers: tuple[FieldDiff[LeasedReaderId, LeasedReader], ...] = ()
    critical_readers: tuple[FieldDiff[CriticalReaderId, CriticalReader], ...] = ()
    writers: tuple[FieldDiff[WriterId, Writer], ...] = ()
    schemas: tuple[FieldDiff[int, SchemaPair], ...] = ()
    progress: tuple[FieldDiff[str, SourceProgress], ...] = ()
    since: tuple[FieldDiff[None, Antichain], ...] = ()
    legacy_batches: tuple[FieldDiff[HollowBatch, None], ...] = ()
    hollow_batches: tuple[FieldDiff[SpineId, HollowBatch], ...] = ()
    spine_batches: tuple[FieldDiff[SpineId, ThinSpineBatch], ...] = ()
    merges: tuple[FieldDiff[SpineId, ThinMerge], ...] = ()
    staging_floor_ms: tuple[FieldDiff[None, int], ...] = ()
    retain_ms: tuple[FieldDiff[None, int], ...] = ()
    predecessor: bytes = b""
    """Tag of the preceding entry; empty in a log's first entry."""
    tag: bytes = field(default=b"", compare=False)
    """Tag of the entry from which the diff was decoded."""


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob that state names, by its partial key. A "run" is a listing; the reference covers only the listing itself. A
    process must read the listing to know the blobs that it lists (parts.listings).
    """

    kind: Literal["part", "run", "rollup"]
    partial_key: str


def between(before: ShardState, after: ShardState) -> StateDiff:
    """Return the diff from `before` to `after`. If `after` was made from the sealed state `before`, the cost is proportional to the
    changes.

    Raises InvariantViolated if they are not two versions of one shard in order.
    """
    if before.shard_id != after.shard_id:
        raise InvariantViolated(f"states of two shards: {before.shard_id} and {after.shard_id}")
    if before.codecs is not after.codecs and before.codecs != after.codecs:
        raise InvariantViolated(f"codecs of {after.shard_id} changed from {before.codecs} to {after.codecs}")
    if not before.seqno < after.seqno:
        raise InvariantViolated(f"states out of order: {before.seqno} and {after.seqno}")
    trace = changes(before.trace, after.trace)
    return StateDiff(
        applier_version=after.applier_version,
        seqno_from=before.seqno,
        seqno_to=after.seqno,
        walltime_ms=after.walltime_ms,
        latest_rollup_key=latest_rollup(after)[1].key,
        hostname=field_diff(None, before.hostname, after.hostname),
        last_gc_req=field_diff(None, before.last_gc_req, after.last_gc_req),
        active_rollup=field_diff(None, before.active_rollup, after.active_rollup),
        active_gc=field_diff(None, before.active_gc, after.active_gc),
        rollups=map_diffs(before.rollups, after.rollups),
        leased_readers=map_diffs(before.leased_readers, after.leased_readers),
        critical_readers=map_diffs(before.critical_readers, after.critical_readers),
        writers=map_diffs(before.writers, after.writers),
        schemas=map_diffs(before.schemas, after.schemas),
        progress=map_diffs(before.progress, after.progress),
        since=trace.since,
        legacy_batches=trace.legacy_batches,
        hollow_batches=trace.hollow_batches,
        spine_batches=trace.spine_batches,
        merges=trace.merges,
        staging_floor_ms=field_diff(None, before.staging_floor_ms, after.staging_floor_ms),
        retain_ms=field_diff(None, before.retain_ms, after.retain_ms),
        birth=after.birth,
        predecessor=before.tag,
        shard_id=after.shard_id,
    )


def _ignore(_path: str) -> None:
    """The default counter: counts nothing."""


def apply(state: ShardState, diff: StateDiff, *, count: Callable[[str], None] = _ignore) -> ShardState:
    """Return the state after `diff`, sealed. Idempotent: the diff that produced the state changes nothing.

    Raises ForkedLog if the diff belongs to another history: its predecessor is not the state's entry, or it is another entry at
    the state's seqno. Strict: raises InvariantViolated if the diff starts at another seqno or an old value differs from the
    current one. Only the host name is applied without that check, because code once wrote wrong ones (spec 20, bug 24). `count`
    receives the path taken: "hostname_mismatch", and for the trace one of "structured", "structured_full", "fast_append",
    "fast_empty", "fast_compaction", "lenient", "slow", "reconstruction".
    """
    if state.seqno == diff.seqno_to:
        if diff.tag:
            check_same_entry(state, diff.tag)
        return state
    try:
        return _applied(state, diff, count)
    except InvariantViolated as error:
        text = f"diff {diff.seqno_to} does not apply to {state.seqno} of shard {state.shard_id}: {error}"
        raise InvariantViolated(text, shard_id=state.shard_id, seqno=diff.seqno_to, **error.detail) from error


def check_birth(state: ShardState, birth: bytes) -> None:
    """Raise ForkedLog, naming both births, unless `birth` is the birth of `state`'s log."""
    if state.birth != birth:
        raise forked_log(
            state,
            f"it was wiped and written anew: this process knows the log born as {state.birth.hex()}, but found one "
            f"born as {birth.hex()}",
            known_birth=state.birth.hex(),
            found_birth=birth.hex(),
        )


def check_same_entry(state: ShardState, tag: bytes) -> None:
    """Raise ForkedLog unless `tag`, of the entry found in the log at the seqno of `state`, belongs to the entry that made `state`."""
    if tag != state.tag:
        raise forked_log(state, f"the log has another entry at {state.seqno}", known=state.tag.hex(), found=tag.hex())


def check_follows(state: ShardState, diff: StateDiff) -> None:
    """Raise ForkedLog unless the entry that `diff` names as its predecessor made `state`."""
    if diff.predecessor != state.tag:
        what = f"{diff.seqno_to} follows another entry"
        raise forked_log(state, what, known=state.tag.hex(), found=diff.predecessor.hex())


def forked_log(state: ShardState, what: str, **detail: Any) -> ForkedLog:
    """Return the error for a log to which `state` does not belong."""
    return ForkedLog(
        f"the log of shard {state.shard_id} is not the log that {state.seqno} belongs to: {what}; consensus lost or "
        "replaced acknowledged versions. Nothing was changed. If a copy of the lost versions exists, restore it; then restart "
        "this process to continue with the log in the store",
        key=str(state.shard_id),
        shard_id=state.shard_id,
        seqno=state.seqno,
        **detail,
    )


def _applied(state: ShardState, diff: StateDiff, count: Callable[[str], None]) -> ShardState:
    check(diff.shard_id == state.shard_id, f"the diff belongs to shard {diff.shard_id}")
    check(state.seqno == diff.seqno_from, f"diff {diff.seqno_from} to {diff.seqno_to} applied to {state.seqno}")
    check(diff.seqno_from < diff.seqno_to, f"diff from {diff.seqno_from} to {diff.seqno_to} goes back")
    check_birth(state, diff.birth)
    check_follows(state, diff)
    hostname = state.hostname
    for change in diff.hostname:
        if not isinstance(change, Update):
            raise InvariantViolated(f"hostname: {type(change).__name__.lower()} of a field that can only be updated")
        if change.old != hostname:
            count("hostname_mismatch")
        hostname = change.to
    return sealed(
        replace(
            state,
            applier_version=diff.applier_version,
            seqno=diff.seqno_to,
            walltime_ms=diff.walltime_ms,
            hostname=hostname,
            last_gc_req=updated_value("last_gc_req", state.last_gc_req, diff.last_gc_req),
            active_rollup=applied_to_value("active_rollup", state.active_rollup, diff.active_rollup),
            active_gc=applied_to_value("active_gc", state.active_gc, diff.active_gc),
            rollups=applied_to_map("rollups", state.rollups, diff.rollups),
            leased_readers=applied_to_map("leased_readers", state.leased_readers, diff.leased_readers),
            critical_readers=applied_to_map("critical_readers", state.critical_readers, diff.critical_readers),
            writers=applied_to_map("writers", state.writers, diff.writers),
            schemas=applied_to_map("schemas", state.schemas, diff.schemas),
            progress=applied_to_map("progress", state.progress, diff.progress),
            trace=_applied_trace(state.trace, diff, count),
            staging_floor_ms=applied_to_value("staging_floor_ms", state.staging_floor_ms, diff.staging_floor_ms),
            retain_ms=applied_to_value("retain_ms", state.retain_ms, diff.retain_ms),
            tag=diff.tag,
        )
    )


def _applied_trace(trace: Trace, diff: StateDiff, count: Callable[[str], None]) -> Trace:
    changed = TraceDiff(diff.since, diff.legacy_batches, diff.hollow_batches, diff.spine_batches, diff.merges)
    if changed.is_empty():
        return trace
    return apply_structured(trace, changed, count) if trace.structured else apply_unstructured(trace, changed, count)


def inserted_blobs(diff: StateDiff) -> Iterator[BlobRef]:
    """Yield the blobs named by entries that this diff adds. One diff may insert and delete the same blob."""
    for _, to in _versions_of_rollups(diff):
        if to is not None:
            yield BlobRef("rollup", to.key)
    for _, new in _versions_of_batches(diff):
        if new is not None:
            yield from blobs_of(new)


def deleted_blobs(diff: StateDiff) -> Iterator[BlobRef]:
    """Yield the blobs named by entries that this diff removes. Other entries may still name them: subtract the live blobs."""
    for old, _ in _versions_of_rollups(diff):
        if old is not None:
            yield BlobRef("rollup", old.key)
    for gone, _ in _versions_of_batches(diff):
        if gone is not None:
            yield from blobs_of(gone)


def named_batches(diff: StateDiff) -> Iterator[HollowBatch]:
    """Yield every hollow batch that this diff adds or removes. The encoded diff contains all of them, with their inline parts."""
    for versions in _versions_of_batches(diff):
        yield from (batch for batch in versions if batch is not None)


def removes_content(diff: StateDiff) -> bool:
    """Whether this diff removes a batch with parts. Older versions, and the diff itself, still hold the content of that batch."""
    return any(gone is not None and bool(gone.parts) for gone, _ in _versions_of_batches(diff))


def live_blobs(state: ShardState) -> Iterator[BlobRef]:
    """Yield every blob that `state` names."""
    for rollup in state.rollups.values():
        yield BlobRef("rollup", rollup.key)
    for batch in state.trace.batches():
        yield from blobs_of(batch)


def blobs_of(batch: HollowBatch) -> Iterator[BlobRef]:
    """Yield every blob that `batch` itself names."""
    for part in batch.parts:
        if not isinstance(part, InlinePart):
            yield BlobRef("run" if isinstance(part, HollowRun) else "part", part.key)


def _versions_of_rollups(diff: StateDiff) -> Iterator[tuple[HollowRollup | None, HollowRollup | None]]:
    for change in diff.rollups:
        yield _old(change), _to(change)


def _versions_of_batches(diff: StateDiff) -> Iterator[tuple[HollowBatch | None, HollowBatch | None]]:
    for change in diff.legacy_batches:
        if not isinstance(change, Update):  # an update is from unit to unit: it adds and removes no batch (spec 7.7)
            yield (change.key, None) if isinstance(change, Delete) else (None, change.key)
    for hollow in diff.hollow_batches:
        yield _old(hollow), _to(hollow)


def _old(change: FieldDiff[K, V]) -> V | None:
    return None if isinstance(change, Insert) else change.old


def _to(change: FieldDiff[K, V]) -> V | None:
    return None if isinstance(change, Delete) else change.to
