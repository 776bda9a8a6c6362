"""The rules of a state (spec 1.7): cheap checks on every transition, deep checks on decode and in tests."""

from __future__ import annotations

from persist_engine.base.errors import InvariantViolated
from persist_engine.model.queries import held_since, latest_rollup
from persist_engine.model.state import ShardState


def check_invariants(before: ShardState | None, after: ShardState, *, deep: bool = False) -> None:
    """Raise InvariantViolated unless `after` is a sound state and a legal successor of `before` (None: checked alone).

    The cheap checks cost O(levels) plus the maps that changed. `deep` also walks all batches, readers and rollups.
    """
    _check_alone(after)
    if before is not None:
        _check_successor(before, after)
    after.trace.validate(deep=deep)
    if deep:
        _check_deep(after)


def _need(condition: bool, state: ShardState, rule: str, value: object = "") -> None:  # noqa: FBT001 - reads as the assertion it is
    """Raise unless `condition`. `rule` and `value` are formatted only on failure, because this runs on every commit."""
    if not condition:
        text = f"shard {state.shard_id} at {state.seqno}: {rule} {value}".rstrip()
        raise InvariantViolated(text, shard_id=state.shard_id)


def _check_alone(state: ShardState) -> None:
    _need(state.seqno >= 1, state, "the first version is v1")
    newest, _ = latest_rollup(state)
    _need(newest <= state.seqno, state, "the newest rollup is of a later version")
    _need(state.last_gc_req <= state.seqno, state, "garbage collection was requested beyond this version")
    held = held_since(state)
    _need(held is None or state.trace.since <= held, state, "since is beyond what a reader holds")


def _check_successor(before: ShardState, after: ShardState) -> None:
    _need(before.shard_id == after.shard_id, after, "succeeds a state of", before.shard_id)
    _need(after.seqno == before.seqno + 1, after, "succeeds", before.seqno)
    _need(after.walltime_ms > before.walltime_ms, after, "walltime does not rise")
    _need(before.trace.since <= after.trace.since, after, "since steps back from", before.trace.since)
    _need(before.trace.upper <= after.trace.upper, after, "upper steps back from", before.trace.upper)
    _need(before.last_gc_req <= after.last_gc_req, after, "last_gc_req steps back")
    _need((before.staging_floor_ms or 0) <= (after.staging_floor_ms or 0), after, "the staging floor decreases")
    _need(before.codecs == after.codecs, after, "codecs changed")
    _need(before.birth == after.birth, after, "the birth of the log changed")
    _need(before.trace.structured <= after.trace.structured, after, "the trace lost its structure")


def _check_deep(state: ShardState) -> None:
    for reader_id, reader in state.leased_readers.items():
        _need(reader.seqno <= state.seqno, state, f"reader {reader_id} holds a later version {reader.seqno}")
        _need(state.trace.since <= reader.since, state, f"since is beyond that of reader {reader_id}")
    for critical_id, critical in state.critical_readers.items():
        _need(state.trace.since <= critical.since, state, f"since is beyond that of critical reader {critical_id}")
    for writer_id, writer in state.writers.items():
        _need(writer.most_recent_write_upper <= state.trace.upper, state, f"writer {writer_id} wrote beyond upper")
    seen: set[str] = set()
    for batch in state.trace.batches():
        for key in batch.blob_keys():
            _need(key not in seen, state, f"part {key} appears twice")
            seen.add(key)
