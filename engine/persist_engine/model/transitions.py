"""The effect of each command on a state: one pure function per command (spec 9).

`transition` receives a state that already carries the new seqno and walltime (see `step`). It returns `Applied`, a new state to
commit, or `Refused`, an answer that needs no commit and is therefore not linearized. Misuse raises InvalidUsage, a broken rule
raises InvariantViolated; neither changes anything. Must not know: clocks, the scheduling of rollups and GC, storage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from persist_engine.base.errors import (
    Fenced,
    FinalizationError,
    InvalidUsage,
    check,
)
from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands as c
from persist_engine.model.append import compare_and_append, with_held_since
from persist_engine.model.batch import HollowBatch
from persist_engine.model.commands import Applied, Refused
from persist_engine.model.frontier import EMPTY, MINIMUM, Description
from persist_engine.model.queries import (
    durable_since,
    is_finalized,
    is_tombstone,
    latest_rollup,
    rollup_seqnos,
)
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.trace import MergeOutcome, MergeReq, Trace
from persist_engine.model.state import CriticalReader, LeasedReader, ShardState

__all__ = ["Applied", "Refused", "transition"]


def transition(state: ShardState, cmd: c.Command, *, now_ms: int) -> Applied | Refused:
    """Apply `cmd` to `state`."""
    match cmd:
        case c.CompareAndAppend():
            return compare_and_append(state, cmd, now_ms)
        case c.RegisterLeasedReader():
            return _register_leased_reader(state, cmd, now_ms)
        case c.HeartbeatLeasedReader():
            return _heartbeat_leased_reader(state, cmd, now_ms)
        case c.DowngradeSince():
            return _downgrade_since(state, cmd, now_ms)
        case c.ExpireLeasedReader(reader_id):
            after = replace(state, leased_readers=state.leased_readers.remove(reader_id))
            return _expired(state, after, existed=reader_id in state.leased_readers)
        case c.ExpireWriter(writer_id):
            after = replace(state, writers=state.writers.remove(writer_id))
            return _expired(state, after, existed=writer_id in state.writers)
        case c.ExpireCriticalReader(critical_id):
            after = replace(state, critical_readers=state.critical_readers.remove(critical_id))
            return _expired(state, after, existed=critical_id in state.critical_readers)
        case c.RegisterCriticalReader():
            return _register_critical_reader(state, cmd)
        case c.CompareAndDowngradeSince():
            return _compare_and_downgrade_since(state, cmd)
        case c.AddRollup():
            return _add_rollup(state, cmd)
        case c.RemoveRollups():
            return _remove_rollups(state, cmd)
        case c.ApplyMergeRes():
            return _apply_merge_res(state, cmd)
        case c.RegisterSchema():
            return _register_schema(state, cmd)
        case c.CompareAndEvolveSchema():
            return _evolve_schema(state, cmd)
        case c.SpineExert():
            return _spine_exert(state, cmd, now_ms)
        case c.ClaimCompactions():
            return _claim_compactions(state, cmd, now_ms)
        case c.RaiseStagingFloor():
            return _raise_staging_floor(state, cmd)
        case c.SetRetention():
            return _set_retention(state, cmd)
        case c.BecomeTombstone():
            return _become_tombstone(state)
        case _:
            assert_never(cmd)


def _register_leased_reader(state: ShardState, cmd: c.RegisterLeasedReader, now_ms: int) -> Applied | Refused:
    """Hold this version and since. Registering again replaces the old registration."""
    if is_tombstone(state):
        return Refused(
            c.Registered(EMPTY, SeqNo(state.seqno - 1))
        )  # nothing commits, so the current version is the one before
    durable = durable_since(state) if cmd.since_from_critical else None
    since = state.trace.since if durable is None else durable
    reader = LeasedReader(state.seqno, since, now_ms, cmd.lease_ms, cmd.debug)
    readers = state.leased_readers.set(cmd.reader_id, reader)
    return Applied(replace(state, leased_readers=readers), c.Registered(since, state.seqno))


def _heartbeat_leased_reader(state: ShardState, cmd: c.HeartbeatLeasedReader, now_ms: int) -> Applied | Refused:
    """Commits whether or not the reader exists, so that the answer is linearized. A tombstone has no readers and takes no commit."""
    reader = state.leased_readers.get(cmd.reader_id)
    if reader is None:
        answer = c.HeartbeatSeen(existed=False)
        return Refused(answer) if is_tombstone(state) else Applied(state, answer)
    reader = replace(reader, last_heartbeat_ms=max(reader.last_heartbeat_ms, now_ms))
    readers = state.leased_readers.set(cmd.reader_id, reader)
    return Applied(replace(state, leased_readers=readers), c.HeartbeatSeen(existed=True))


def _downgrade_since(state: ShardState, cmd: c.DowngradeSince, now_ms: int) -> Applied | Refused:
    """If the reader is gone, for example because its machine slept, it no longer holds anything. The answer is then an empty
    since, not an error. The shard's since follows the readers, except after a heartbeat that does not move its reader's since.
    Otherwise the heartbeat would move since after the expiry of another reader, which left since alone (spec 9.9, bug 22),
    although no caller requested a move.
    """
    before = state.leased_readers.get(cmd.reader_id)
    if before is None:
        return Refused(c.SinceDowngraded(EMPTY))
    hold = state.seqno if cmd.outstanding_seqno is None else min(cmd.outstanding_seqno, state.seqno)
    if hold < before.seqno:
        raise InvalidUsage(f"reader {cmd.reader_id} holds {before.seqno} and cannot hold {hold} again")
    reader = replace(
        before,
        seqno=hold,
        since=before.since.join(cmd.new_since),
        last_heartbeat_ms=max(before.last_heartbeat_ms, now_ms),
    )
    state = replace(state, leased_readers=state.leased_readers.set(cmd.reader_id, reader))
    after = state if cmd.is_heartbeat and reader.since == before.since else with_held_since(state)
    return Applied(after, c.SinceDowngraded(reader.since))


def _expired(state: ShardState, after: ShardState, *, existed: bool) -> Applied | Refused:
    """Commits whether or not the holder existed. Since does not move (spec 9.9)."""
    answer = c.Expired(existed)
    return Refused(answer) if is_tombstone(state) else Applied(after, answer)


def _register_critical_reader(state: ShardState, cmd: c.RegisterCriticalReader) -> Applied | Refused:
    """An existing reader keeps since and opaque, whatever the caller passes: the opaque decides later which owner may move it."""
    if is_tombstone(state):
        return Refused(c.CriticalRegistered(EMPTY, cmd.opaque))
    existing = state.critical_readers.get(cmd.reader_id)
    since, opaque = (state.trace.since, cmd.opaque) if existing is None else (existing.since, existing.opaque)
    readers = state.critical_readers.set(cmd.reader_id, CriticalReader(since, opaque, cmd.debug))
    return Applied(replace(state, critical_readers=readers), c.CriticalRegistered(since, opaque))


def _compare_and_downgrade_since(state: ShardState, cmd: c.CompareAndDowngradeSince) -> Applied | Refused:
    """A matching opaque is always replaced, even if since stays: the caller that receives "downgraded" owns the reader."""
    if is_tombstone(state):
        return Refused(c.CriticalDowngraded(EMPTY))
    reader = state.critical_readers.get(cmd.reader_id)
    if reader is None:
        raise Fenced(
            f"critical reader {cmd.reader_id} is not registered: it was expired; register it again",
            reader_id=cmd.reader_id,
        )
    if reader.opaque != cmd.expected_opaque:
        return Applied(state, c.OpaqueMismatch(reader.opaque, reader.since))
    reader = replace(reader, opaque=cmd.new_opaque, since=reader.since.join(cmd.new_since))
    state = replace(state, critical_readers=state.critical_readers.set(cmd.reader_id, reader))
    return Applied(with_held_since(state), c.CriticalDowngraded(reader.since))


def _add_rollup(state: ShardState, cmd: c.AddRollup) -> Applied | Refused:
    """Commits even if the rollup is not linked, so that "not applied" is linearized and the blob may be deleted.

    A rollup is not linked if its seqno already has another rollup, or if it is older than all linked rollups. Such an old
    rollup starts no live version. An earlier attempt may also have linked it before it was unlinked and collected; linking it
    again would name a deleted blob.
    """
    if not cmd.seqno < state.seqno:
        raise InvalidUsage(f"rollup for {cmd.seqno} cannot be linked at {state.seqno}")
    existing = state.rollups.get(cmd.seqno)
    if existing is not None:
        return Applied(state, c.RollupAdded(applied=existing.key == cmd.rollup.key))
    if cmd.seqno < rollup_seqnos(state)[0]:
        return Applied(state, c.RollupAdded(applied=False))
    rollups = state.rollups.set(cmd.seqno, cmd.rollup)
    return Applied(replace(state, rollups=rollups, active_rollup=None), c.RollupAdded(applied=True))


def _remove_rollups(state: ShardState, cmd: c.RemoveRollups) -> Applied | Refused:
    """Never removes the newest rollup: a state cannot be opened without one.

    SUBTLE: every rollup older than a removed one is removed too, such as one that a slow writer linked meanwhile. The log is
    truncated past the removed rollup, so an older one starts no live version. If it stayed, the removed rollup would not be
    older than all linked rollups, and a late attempt could link it again after its blob is deleted (_add_rollup).
    """
    if not cmd.rollups or (is_tombstone(state) and not _ends_before_a_tombstone(state, cmd)):
        return Refused(c.RollupsRemoved(()))
    latest, _ = latest_rollup(state)
    removed = []
    for seqno, rollup in cmd.rollups:
        existing = state.rollups.get(seqno)
        if existing is not None and existing.key == rollup.key:
            check(seqno != latest, f"the newest rollup {seqno} cannot be removed")
            removed.append(seqno)
    newest = max(removed, default=None)
    removed = [] if newest is None else [seqno for seqno in rollup_seqnos(state) if seqno <= newest]
    rollups = state.rollups.edited(dict.fromkeys(removed))
    return Applied(replace(state, rollups=rollups, active_gc=None), c.RollupsRemoved(tuple(removed)))


def _ends_before_a_tombstone(state: ShardState, cmd: c.RemoveRollups) -> bool:
    """Whether a tombstone accepts a commit that removes these rollups. Rollups from before the tombstone hold data and must go.
    It keeps two rollups of its own: each removal makes another rollup due, so removing the last but one would never end.
    """
    latest, _ = latest_rollup(state)
    named = [seqno for seqno, rollup in cmd.rollups if seqno < latest and state.rollups.get(seqno) == rollup]
    return len(named) > 1 or any(seqno < state.last_gc_req for seqno in named)


def _apply_merge_res(state: ShardState, cmd: c.ApplyMergeRes) -> Applied | Refused:
    """Commits whatever the outcome, so that "not applied" is linearized and the output may be deleted."""
    if is_tombstone(state):
        return Refused(c.MergeApplied(MergeOutcome.NOT_APPLIED_NO_MATCH))
    if cmd.res.output.staged_before(state.staging_floor_ms) is not None:
        # The compaction took so long that an orphan scan may have deleted its parts. The request is offered again when its claim lapses.
        return Applied(state, c.MergeApplied(MergeOutcome.NOT_APPLIED_NO_MATCH))
    trace, outcome = state.trace.apply_merge_res(cmd.res)
    return Applied(replace(state, trace=trace), c.MergeApplied(outcome))


def _register_schema(state: ShardState, cmd: c.RegisterSchema) -> Applied | Refused:
    """Find the schema, newest first, or add it as the first. Further schemas come only from schema evolution."""
    for schema_id, pair in reversed(state.schemas.items()):
        if pair == cmd.pair:
            return Refused(c.SchemaRegistered(schema_id))
    if state.schemas or is_tombstone(state):
        return Refused(c.SchemaRegistered(None))
    return Applied(replace(state, schemas=state.schemas.set(0, cmd.pair)), c.SchemaRegistered(0))


def _evolve_schema(state: ShardState, cmd: c.CompareAndEvolveSchema) -> Applied | Refused:
    newest = max(state.schemas, default=None)
    if newest is None or is_tombstone(state):
        return Refused(c.SchemaIdMismatch(None))
    if cmd.expected_id != newest:
        return Refused(c.SchemaIdMismatch(newest))
    if state.schemas[newest] == cmd.pair:
        return Refused(c.SchemaEvolved(newest))
    return Applied(replace(state, schemas=state.schemas.set(newest + 1, cmd.pair)), c.SchemaEvolved(newest + 1))


def _spine_exert(state: ShardState, cmd: c.SpineExert, now_ms: int) -> Applied | Refused:
    if is_tombstone(state):
        return Refused(c.Exerted())
    trace, requests, worked = state.trace.exert(cmd.fuel)
    if not worked:
        return Refused(c.Exerted())
    for request in requests:
        trace = trace.claim(request.id, now_ms)
    return Applied(replace(state, trace=trace), c.Exerted(requests))


def _claim_compactions(state: ShardState, cmd: c.ClaimCompactions, now_ms: int) -> Applied | Refused:
    trace = state.trace
    free = trace.fueled_requests(
        claimed_before_ms=now_ms - cmd.claim_ms,
        claimed_until_ms=now_ms + cmd.claim_ms,
        min_version=cmd.claim_min_version,
    )
    requests = _fitting(free, cmd.max_bytes)[: max(cmd.max_requests, 0)]
    if not requests or is_tombstone(state):
        return Refused(c.CompactionsClaimed())
    for request in requests:
        trace = trace.claim(request.id, now_ms)
    return Applied(replace(state, trace=trace), c.CompactionsClaimed(requests))


def _fitting(requests: tuple[MergeReq, ...], max_bytes: int | None) -> tuple[MergeReq, ...]:
    """The requests in order, without each one that would bring the total over `max_bytes`. Inspects the inputs only if there is a limit."""
    if max_bytes is None:
        return requests
    left, out = max_bytes, []
    for request in requests:
        if request.size_bytes <= left:
            left -= request.size_bytes
            out.append(request)
    return tuple(out)


def _raise_staging_floor(state: ShardState, cmd: c.RaiseStagingFloor) -> Applied | Refused:
    """Commits even if the floor is already higher. An append decided before this commit then loses its race and is decided
    again. A tombstone takes no parts, so it needs no floor.
    """
    floor_ms = max(state.staging_floor_ms or 0, cmd.floor_ms)
    if is_tombstone(state):
        return Refused(c.StagingFloor(floor_ms))
    return Applied(replace(state, staging_floor_ms=floor_ms or None), c.StagingFloor(floor_ms))


def _set_retention(state: ShardState, cmd: c.SetRetention) -> Applied | Refused:
    """Commits even if nothing changes, so that the answer is linearized. A shorter retention, or none, advances since at once;
    since stays if nothing holds it.
    """
    if is_tombstone(state):
        return Refused(c.RetentionSet(None, EMPTY))
    if cmd.retain_ms is not None and not 1 <= cmd.retain_ms < 1 << 63:
        raise InvalidUsage(
            f"retain_ms must be from 1 to 2**63 - 1, or None for no retention; {cmd.retain_ms} was given"
        )
    after = with_held_since(replace(state, retain_ms=cmd.retain_ms))
    return Applied(after, c.RetentionSet(after.retain_ms, after.trace.since))


def _become_tombstone(state: ShardState) -> Applied | Refused:
    """Take one bounded step: remove all writers and readers and empty one batch. The last step replaces all batches by one empty batch."""
    since, upper = state.trace.since, state.trace.upper
    if not (since.is_empty() and upper.is_empty()):
        text = f"shard {state.shard_id} has since {since} and upper {upper}; both must be empty to finalize it"
        text += "" if state.retain_ms is None else f"; retention of {state.retain_ms} ms holds since"
        raise FinalizationError(text, since=since, upper=upper)
    was_tombstone = is_tombstone(state)
    out = replace(state, writers=SharedMap(), leased_readers=SharedMap(), critical_readers=SharedMap())
    # This is the last collection request of the shard. Rollups older than it hold data; see _remove_rollups.
    out = replace(out, last_gc_req=state.seqno, retain_ms=None)
    with_data = next((batch.desc for batch in state.trace.batches() if not batch.is_empty()), None)
    if with_data is not None:
        out = replace(out, trace=out.trace.empty_out(with_data))
    elif state.trace.batch_count > 1:
        empty = HollowBatch.empty(Description(MINIMUM, EMPTY, EMPTY))
        trace = Trace(structured=out.trace.structured).downgrade_since(EMPTY).push_without_requests(empty)
        out = replace(out, trace=trace)
    elif was_tombstone:
        return Refused(c.TombstoneStep(finalized=is_finalized(state), progressed=False))
    return Applied(out, c.TombstoneStep(finalized=is_finalized(out), progressed=True))
