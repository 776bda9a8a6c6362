"""Compare-and-append, the only command that adds data (spec 9.3, 9.4).

The order of the checks is part of the contract. A repeated call must find its token before it learns that the upper moved,
because the call itself moved the upper.
"""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.errors import BatchExpired, InvalidEmptyTimeInterval, InvalidUsage, InvariantViolated, check
from persist_engine.model.commands import (
    AlreadyCommitted,
    Appended,
    Applied,
    CompareAndAppend,
    InlineBackpressure,
    ProgressMismatch,
    Refused,
    StagedTooEarly,
    UpperMismatch,
)
from persist_engine.model.frontier import EMPTY
from persist_engine.model.ids import ShardId, staged_ms
from persist_engine.model.queries import held_since, is_tombstone
from persist_engine.model.spine.trace import MergeReq, Trace
from persist_engine.model.state import COMMIT_INFO, ShardState, SourceProgress, Writer, is_expected


def compare_and_append(state: ShardState, cmd: CompareAndAppend, now_ms: int) -> Applied | Refused:
    """Return Applied(Appended), or Refused with AlreadyCommitted, StagedTooEarly, ProgressMismatch, UpperMismatch or
    InlineBackpressure.

    Raises InvalidEmptyTimeInterval for data in an empty interval and InvalidUsage for a batch advanced beyond the shard's
    since. An append to an empty interval commits too, so that idle writers can stay registered.
    """
    desc = cmd.batch.desc
    if is_tombstone(state):
        return Refused(UpperMismatch(current=EMPTY, expected=desc.lower, writer_upper=EMPTY))
    writer = state.writers.get(cmd.writer_id) or Writer(now_ms, cmd.lease_ms, cmd.debug)
    refusal = _refusal(state, writer, cmd)
    if refusal is not None:
        return refusal
    trace, requests = (state.trace, ()) if desc.lower == desc.upper else _push_and_claim(state.trace, cmd, now_ms)
    if not writer.most_recent_write_upper <= desc.upper:
        raise InvariantViolated(f"upper of writer {cmd.writer_id} would step back to {desc.upper}")
    writer = Writer(
        last_heartbeat_ms=max(writer.last_heartbeat_ms, now_ms),
        lease_ms=writer.lease_ms,
        debug=writer.debug,
        most_recent_write_token=cmd.token,
        most_recent_write_upper=desc.upper,
    )
    progress = state.progress if cmd.progress is None else state.progress.set(*cmd.progress)
    if cmd.commit_info is not None:
        progress = progress.set(COMMIT_INFO, SourceProgress(cmd.commit_info, desc.upper))
    writers = state.writers.set(cmd.writer_id, writer)
    after = replace(state, writers=writers, progress=progress, trace=trace)
    if after.retain_ms is not None:
        after = with_held_since(after)
    return Applied(after, Appended(requests))


def is_refusal_certain(
    state: ShardState, cmd: CompareAndAppend, *, earliest_ms: int, held_ms: int, now_ms: int
) -> bool:
    """Whether a mismatch on `state`, after an attempt with unknown outcome, proves that no attempt succeeded: a success would
    show in the writer's registration. `earliest_ms` is a time at or before the decision of the first of these attempts.
    `held_ms` is the end of the lease that the writer had before any success. If the registration disappeared before that time,
    it was removed explicitly, and the record of a success may have been removed with it.
    """
    writer = state.writers.get(cmd.writer_id)
    if writer is not None:
        return not writer.most_recent_write_upper >= cmd.batch.desc.upper > cmd.batch.desc.lower
    if is_tombstone(state):  # finalizing removed all writers, regardless of their leases
        return False
    # Other processes expire this writer by their own clocks, which may be far ahead of this one. No state is older than the
    # clock that committed it.
    newest_ms = max(now_ms, state.walltime_ms)
    return newest_ms - earliest_ms < cmd.lease_ms and newest_ms > held_ms


def batch_expired(shard_id: ShardId, refusal: StagedTooEarly) -> BatchExpired:
    """Return the error to raise for `refusal`."""
    staged = staged_ms(refusal.key)
    return BatchExpired(
        f"part {refusal.key} of shard {shard_id} was staged at {staged}, before the floor {refusal.floor_ms} that an orphan "
        f"scan set: stage the batch again (or set the clock of the machine that staged it)",
        key=refusal.key,
        staged_ms=staged,
        floor_ms=refusal.floor_ms,
    )


def _refusal(state: ShardState, writer: Writer, cmd: CompareAndAppend) -> Refused | None:
    desc, upper = cmd.batch.desc, state.trace.upper
    if desc.lower == desc.upper and (cmd.batch.parts or cmd.batch.rows):
        parts = tuple(cmd.batch.blob_keys())
        raise InvalidEmptyTimeInterval(
            f"updates in the empty interval {desc}", lower=desc.lower, upper=desc.upper, parts=parts
        )
    if not desc.since <= state.trace.since:
        raise InvalidUsage(f"batch {desc} is advanced beyond the shard's since {state.trace.since}")
    if cmd.token == writer.most_recent_write_token:
        check(desc.upper == writer.most_recent_write_upper, f"token {cmd.token} was used for another upper", desc=desc)
        check(desc.upper <= upper, f"token {cmd.token} succeeded, but upper is {upper}", desc=desc)
        return Refused(AlreadyCommitted())
    early = cmd.batch.staged_before(state.staging_floor_ms)
    if early is not None:
        return Refused(StagedTooEarly(early, state.staging_floor_ms or 0))
    if cmd.progress is not None:
        stored = state.progress.get(cmd.progress[0])
        if not is_expected(stored, cmd.expected_progress):
            return Refused(ProgressMismatch(stored))
    if desc.lower != upper:
        return Refused(UpperMismatch(current=upper, expected=desc.lower, writer_upper=writer.most_recent_write_upper))
    inline_bytes = cmd.batch.inline_bytes
    if inline_bytes > 0 and state.trace.inline_bytes + inline_bytes >= cmd.inline_total_bytes_max:
        return Refused(InlineBackpressure())
    return None


def with_held_since(state: ShardState) -> ShardState:
    """Advance the trace's since to what readers and retention hold. It stays if nothing holds it, and it never moves back."""
    held = held_since(state)
    return state if held is None else replace(state, trace=state.trace.downgrade_since(state.trace.since.join(held)))


def _push_and_claim(trace: Trace, cmd: CompareAndAppend, now_ms: int) -> tuple[Trace, tuple[MergeReq, ...]]:
    """Push the batch and claim the merges that fell due. If none did and the batch has data, also take over the oldest
    unclaimed compactions: otherwise a request lost with its writer would never be done. `claim_percent` sets how many: one per
    full hundred, and one more with the probability of the remainder. The token decides that draw, so that a retry of the same
    call claims the same compactions.
    """
    trace, requests = trace.push(cmd.batch)
    if (
        cmd.batch.rows > 0 and not requests
    ):  # no request has only empty inputs, because the spine merges two empty batches at once
        stale = trace.fueled_requests(
            claimed_before_ms=now_ms - cmd.claim_ms,
            claimed_until_ms=now_ms + cmd.claim_ms,
            min_version=cmd.claim_min_version,
        )
        count, rest = divmod(max(cmd.claim_percent, 0), 100)
        count += int.from_bytes(cmd.token.to_bytes()) % 100 < rest
        requests = stale[:count]
    for request in requests:
        trace = trace.claim(request.id, now_ms)
    return trace, requests
