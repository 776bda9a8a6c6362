"""Computes the next version of a state: everything between reading a state and committing its successor.

This is pure: the applier in the shard room calls `step`, encodes the diff and does the compare-and-set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from persist_engine.base.errors import InvariantViolated
from persist_engine.base.settings import Settings
from persist_engine.base.version import parse_version
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowRollup
from persist_engine.model.commands import (
    AddRollup,
    Answer,
    Appended,
    BecomeTombstone,
    Command,
    CompactionsClaimed,
    Exerted,
    RemoveRollups,
)
from persist_engine.model.diff.state_diff import StateDiff, between
from persist_engine.model.ids import ShardId
from persist_engine.model.invariants import check_invariants
from persist_engine.model.leases import expire_at
from persist_engine.model.maintenance import Maintenance, gc_due, rollup_due
from persist_engine.model.queries import is_tombstone, sealed_maps
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import (
    CLOCK,
    Claim,
    Clock,
    CodecNames,
    CriticalReader,
    DebugInfo,
    FirstHold,
    SchemaPair,
    ShardState,
    SourceProgress,
)
from persist_engine.model.transitions import Refused, transition

__all__ = ["Refused", "Stepped", "initial_state", "step"]


@dataclass(frozen=True, slots=True)
class Stepped:
    """The successor and its diff, ready to commit. After the commit, `answer` holds and `maintenance` is due."""

    state: ShardState
    diff: StateDiff
    answer: Answer
    maintenance: Maintenance


def step(
    state: ShardState,
    cmd: Command,
    *,
    now_ms: int,
    hostname: str,
    applier_version: str,
    settings: Settings,
    is_write: bool,
) -> Stepped | Refused:
    """Apply `cmd` to `state`. Return Refused if there is nothing to commit. With `is_write`, garbage collection may be assigned to the
    caller.

    The successor carries the next seqno, a walltime that rises even if the clock does not, and the highest version that ever
    wrote. The caller must read `now_ms` anew for every attempt.

    SUBTLE: leases expire after the command, not before. So a late heartbeat revives its reader, and a writer that retries finds
    its token.
    """
    was_tombstone = is_tombstone(state)
    # The highest writer version never decreases; otherwise old code could write again after an upgrade. A tombstone keeps its version.
    version = state.applier_version if was_tombstone else max(state.applier_version, applier_version, key=parse_version)
    clone = replace(
        state,
        seqno=state.seqno.next(),
        walltime_ms=max(now_ms, state.walltime_ms + 1),
        hostname=hostname,
        applier_version=version,
        tag=b"",
        **sealed_maps(state),
    )
    if settings.maintenance.structure_flat_traces and not state.trace.structured and not was_tombstone:
        clone = replace(clone, trace=replace(state.trace, structured=True))
    outcome = transition(clone, cmd, now_ms=now_ms)
    if isinstance(outcome, Refused):
        return outcome
    if was_tombstone and not isinstance(cmd, AddRollup | RemoveRollups | BecomeTombstone):
        raise InvariantViolated(f"shard {state.shard_id} is a tombstone and takes no {type(cmd).__name__}")
    after, maintenance = _with_maintenance(expire_at(outcome.state, now_ms), outcome.answer, now_ms, settings, is_write)
    check_invariants(state, after)
    return Stepped(after, between(state, after), outcome.answer, maintenance)


def _with_maintenance(
    state: ShardState,
    answer: Answer,
    now_ms: int,
    settings: Settings,
    is_write: bool,  # noqa: FBT001
) -> tuple[ShardState, Maintenance]:
    """Determine what fell due and record its claims in the same version."""
    rollup = rollup_due(state, settings.maintenance, now_ms=now_ms)
    if rollup is not None:
        state = replace(state, active_rollup=Claim(rollup, now_ms))
    gc = gc_due(state, settings.maintenance, now_ms=now_ms, is_write=is_write)
    if gc is not None:
        # On a tombstone, last_gc_req stays at the version that made it one: see transitions._remove_rollups.
        requested = state.last_gc_req if is_tombstone(state) else gc
        state = replace(state, last_gc_req=requested, active_gc=Claim(gc, now_ms))
    requests = answer.requests if isinstance(answer, Appended | Exerted | CompactionsClaimed) else ()
    return state, Maintenance(rollup, gc, requests)


def initial_state(
    *,
    shard_id: ShardId,
    codecs: CodecNames,
    schema: SchemaPair,
    now_ms: int,
    hostname: str,
    applier_version: str,
    rollup: HollowRollup,
    birth: bytes,
    retain_ms: int | None = None,
    critical: FirstHold | None = None,
    clock: Clock = "ms",
) -> tuple[ShardState, StateDiff]:
    """Return the first version of a shard, v1, and the diff from v0. The state has its rollup linked at v1, its schema under id 0, the
    critical reader of `critical`, and its clock. The caller must draw `birth` at random: it distinguishes this log from any other log of
    the same shard.
    """
    nothing = ShardState(
        applier_version=applier_version,
        shard_id=shard_id,
        birth=birth,
        codecs=codecs,
        seqno=SeqNo(0),
        walltime_ms=0,
        hostname="",
    )
    first = replace(
        nothing,
        seqno=SeqNo(1),
        walltime_ms=now_ms,
        hostname=hostname,
        rollups=SharedMap({SeqNo(1): rollup}),
        schemas=SharedMap({0: schema}),
        retain_ms=retain_ms,
    )
    if critical is not None:
        reader = CriticalReader(first.trace.since, critical.opaque, DebugInfo(hostname, critical.purpose))
        first = replace(first, critical_readers=first.critical_readers.set(critical.reader_id, reader))
    if clock != "ms":
        first = replace(first, progress=first.progress.set(CLOCK, SourceProgress(clock.encode(), first.trace.upper)))
    check_invariants(None, first, deep=True)
    return first, between(nothing, first)
