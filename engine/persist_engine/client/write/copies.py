"""Stale copies: batches that may have been appended before (spec 10.6).

A batch that came as bytes may have been appended from another copy of the same bytes. If an append ended without an
answer, it may have appended the batch. This module owns two decisions about such batches: whether an append must stage
their updates again, and which of their blobs a deletion must keep. It links and deletes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist_engine.base.errors import BatchExpired, MissingBlob
from persist_engine.client.write.batch import Batch, BatchBuilder
from persist_engine.client.write.outcomes import ProgressMismatch, UpperMismatch
from persist_engine.model.diff.state_diff import inserted_blobs, live_blobs
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.model.ids import ShardId
from persist_engine.model.state import SourceProgress, is_expected
from persist_engine.parts.fetch import CompactionFilter, PartSource, read_consolidated, runs_of
from persist_engine.shard.log_reader import LogReader
from persist_engine.shard.machine import Machine


def stale_copies(
    machine: Machine,
    batches: Sequence[Batch],
    desc: Description,
    progress: tuple[str, bytes] | None,
    expected_progress: bytes | SourceProgress | None,
) -> list[Batch] | UpperMismatch | ProgressMismatch:
    """Returns the `batches` whose blobs the shard may have linked before and unlinked since. An append must not link these
    blobs again, even when the shard names none of them now. Returns a refusal when the append would be refused anyway,
    because staging again would then be wasted.

    SUBTLE: a batch that is appended at its own lower is safe, however many copies there are: an append of a copy would
    have moved the upper past it. With `progress`, a batch is also safe while the stored progress of the sink ends at or
    before the batch's lower: an append of a copy would have moved that progress. For a rewritten batch this proves
    nothing: the deletion of a copy that was not rewritten looks only for appends before that copy's own upper.
    """
    stale = [batch for batch in batches if batch.may_have_copies and batch.lower < desc.lower and batch.has_blobs]
    if not stale or desc.lower == desc.upper:  # the append itself refuses data in an empty interval
        return []
    state = machine.refresh()
    if progress is not None:
        stored = state.progress.get(progress[0])
        if not is_expected(stored, expected_progress):
            return ProgressMismatch(current=stored)
        stale = [each for each in stale if each.is_rewritten or (stored and not stored.upper <= each.lower)]
    if stale and state.trace.upper != desc.lower:
        return UpperMismatch(current=state.trace.upper, expected=desc.lower)
    return stale


def restaged(batches: Sequence[Batch], desc: Description, machine: Machine) -> Batch:
    """A new batch of [desc.lower, desc.upper) with the updates of `batches` in this interval, in parts of its own. The
    caller owns the new batch and must append or delete it. It has the newest schema of the shard, so that no update loses
    a field.

    `batches` stay as they are. Holds a few parts in memory. Raises BatchExpired when a blob is gone, because no live
    version names it any more.
    """
    schema = machine.schema
    source = PartSource(machine.shard_id, machine.blob, schema, machine.retry, machine.metrics)
    memory_bytes = 2 * machine.settings.batch.target_part_bytes
    with BatchBuilder(machine, desc.lower, schema=schema, schema_id=machine.schema_id, upper=desc.upper) as builder:
        try:
            runs = runs_of(source.expanded(batch.hollow.with_desc(desc) for batch in batches))
            for table in read_consolidated(source, runs, CompactionFilter(MINIMUM), memory_bytes=memory_bytes):
                builder.add(table)
        except MissingBlob as error:
            key = error.detail.get("key")
            text = f"blob {key} of a batch of shard {machine.shard_id} that may have been appended before is gone"
            raise BatchExpired(f"{text}: stage the updates in {desc} again", key=key) from error
        return builder.finish(desc.upper)


def named_keys(machine: Machine, batches: Sequence[Batch]) -> frozenset[str]:
    """The partial keys of parts and listings that live versions name; empty if certainly none of `batches` was appended. A
    deletion of the batches must keep the blobs under these keys.

    SUBTLE: an append that its caller gave up may still be under way, and may commit after the state was read. `overtake`
    commits a version of its own. The version on which that append was decided is then no longer the newest, so the append
    fails.
    """
    upper = machine.refresh().trace.upper
    if any(upper < batch.upper for batch in batches):
        upper = machine.overtake().trace.upper
    if all(upper <= batch.lower for batch in batches):  # no append has reached the batches
        return frozenset()
    return live_part_keys(machine.versions, machine.shard_id)


def live_part_keys(log: LogReader, shard_id: ShardId) -> frozenset[str]:
    """The partial keys of all parts, and listings of parts, that any live version names. Includes at least the versions that
    were acknowledged before the call.

    The newest version alone is not enough: a reader that holds an older one may still read its parts. Unbounded: fetches
    all live diffs and a rollup.
    """
    walk = log.fetch_all_live_states(shard_id)
    if walk is None:
        return frozenset()
    keys = {blob.partial_key for blob in live_blobs(walk.state) if blob.kind != "rollup"}
    while (diff := walk.advance()) is not None:
        keys.update(blob.partial_key for blob in inserted_blobs(diff) if blob.kind != "rollup")
    return frozenset(keys)
