"""Rollup: a full copy of the current state. With it, readers need not start at the first version, and older diffs can be deleted (spec
14.2).

Order: blob first, then the link in state. A crash in between leaks one blob. The blob is deleted only when certainly no attempt linked it
(spec 20, bug 1c).
"""

from __future__ import annotations

from persist_engine.codec.deletions import Cause
from persist_engine.model.batch import HollowRollup
from persist_engine.shard.machine import Machine
from persist_engine.work.deletions import DeletionRecords
from persist_engine.work.outcome import Ending, RollupOutcome


def write_rollup(machine: Machine) -> RollupOutcome:
    """Writes and links a rollup of the newest state. Safe to repeat and to race: one writer wins, the others clean up."""
    started_s = machine.env.monotonic_s()
    state = machine.refresh()

    def ended(ending: Ending, message: str, **more: object) -> RollupOutcome:
        duration_s = machine.env.monotonic_s() - started_s
        machine.metrics.observe_s("rollup", duration_s)
        duration_ms = round(duration_s * 1000)
        fields = {"ending": ending, "message": message, "duration_ms": duration_ms, **more}
        return RollupOutcome(shard_id=machine.shard_id, seqno=state.seqno, **fields)  # type: ignore[arg-type]  # by name

    written = machine.versions.write_rollup_for_state(state)
    if written is None:
        return ended(Ending.SKIPPED, f"{state.seqno} needs no rollup: it has one already, or newer versions exist")
    key, size_bytes = written
    answer, maintenance = machine.add_rollup(state.seqno, HollowRollup(key, size_bytes))
    if not answer.applied:
        records = DeletionRecords(machine, Cause.ROLLUP)
        with records.intended([key], seqno=state.seqno):
            machine.versions.delete_rollup(machine.shard_id, key)
        records.prune()
        message = f"another rollup of {state.seqno} was linked first"
        deleted = {"blobs_deleted": 1, "deletion_record": records.last}
        return ended(Ending.CONFLICT, message, bytes_written=size_bytes, **deleted, maintenance=maintenance)
    message = f"wrote a rollup of {state.seqno}"
    return ended(Ending.SUCCEEDED, message, bytes_written=size_bytes, key=key, maintenance=maintenance)
