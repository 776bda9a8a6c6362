"""Physical compaction: many runs become few, times advance, and cancelling updates vanish (spec 13).

The plan (model.compaction_plan) cuts a request into chunks. The output blobs of a chunk are written first. Then its merge result is swapped
into state at once, so a compaction that ends early keeps its progress. Output blobs are deleted only when certainly no attempt linked them
(spec 20, bug 1b). Input blobs are never deleted here: garbage collection deletes them, because it knows which versions are still read. No
output ever names an input blob (bug 15). `merging` reads the inputs and writes the outputs, in this process or where a Merger runs its
tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial

from persist_engine.base.errors import MissingBlob
from persist_engine.codec.deletions import Cause
from persist_engine.model.batch import HollowBatch, RunMeta, RunOrder
from persist_engine.model.diff.state_diff import blobs_of
from persist_engine.model.ids import RunId
from persist_engine.model.spine.compaction_plan import (
    CompactionChunk,
    compaction_chunks,
    compaction_timeout_ms,
    newest_schema_id,
    validate_request,
)
from persist_engine.model.spine.owed import waits_of_output
from persist_engine.model.spine.spine import IdBatch, MergeReq, MergeRes
from persist_engine.model.state import ShardState
from persist_engine.parts.listings import expand, spill_runs, with_nested
from persist_engine.parts.write import delete_parts
from persist_engine.rows.schema import Schema
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine
from persist_engine.work.attempts import Attempts
from persist_engine.work.deletions import DeletionRecords
from persist_engine.work.merging import InThisProcess, MergeJob, Merger, Output, discard
from persist_engine.work.outcome import CompactOutcome, Ending

_log = logging.getLogger(__name__)

#: Receives the bytes of each input part as it is read, and the bytes of all inputs; for progress bars.
OnBytesRead = Callable[[int, int], None]

#: More than any spine requests at once: the number of its levels, and of batches in them, is logarithmic in the number of appends.
REQUESTS_MAX = 1024
#: The limit on passes over one request. Each pass leaves at most half as many runs, so this many are never needed.
PASSES_MAX = 64


def compact_due(
    machine: Machine,
    max_requests: int = REQUESTS_MAX,
    *,
    max_bytes: int | None = None,
    on_read: OnBytesRead | None = None,
    attempts: Attempts | None = None,
    merger: Merger | None = None,
) -> list[CompactOutcome]:
    """Claims up to `max_requests` unclaimed compactions and does them, oldest first. Returns one outcome for each. When one raises, the
    others are still done; then the errors are raised as by `Attempts.end`, or left to the caller's `attempts`. With `max_bytes`, it leaves
    out a compaction whose inputs would bring the total over this limit. A merge that takes several passes reads more than its inputs.

    Claims older than `settings.compaction.claim_ms` count as abandoned. A compaction done twice is harmless: one result is applied, and the
    other is deleted.
    """
    if not machine.settings.compaction.enabled:
        _log.warning("compaction of shard %s is disabled", machine.shard_id, extra={"shard": machine.shard_id})
        return []
    machine.refresh()
    claimed, _ = machine.claim_compactions(max_requests=max_requests, max_bytes=max_bytes)
    outcomes: list[CompactOutcome] = []
    tried = attempts or Attempts(machine.shard_id)
    others_bytes = sum(req.size_bytes for req in claimed.requests)
    for req in claimed.requests:
        others_bytes -= req.size_bytes
        progress = None if on_read is None else partial(_add_others, on_read, others_bytes)
        with tried.of(f"compaction {req.id} {req.desc}"):
            outcomes.append(compact(machine, req, on_read=progress, merger=merger))
            others_bytes += outcomes[-1].bytes_read
    if attempts is None:
        tried.end()
    return outcomes


def _add_others(on_read: OnBytesRead, others_bytes: int, count: int, own_bytes: int) -> None:
    """Reports the progress of one compaction as progress of all, by adding the input bytes of the others."""
    on_read(count, others_bytes + own_bytes)


def compact(
    machine: Machine,
    req: MergeReq,
    *,
    on_read: OnBytesRead | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    merger: Merger | None = None,
) -> CompactOutcome:
    """Carries out `req`. Readers see the same contents at every time at or past `req.desc.since`, before, during and after. `merger`
    decides where its chunks are merged; None merges them in this process.

    May be killed at any point: blobs leak, nothing is lost, and applied results stay. When reading or writing fails, deletes the blobs that
    were not yet offered to state. The outcome is CONFLICT when another compaction was faster, whether the inputs disappeared or not. It is
    FAILED when the compaction took longer than `compaction_timeout_ms`, or when `is_stopped` (checked between two tables) returned true. It
    is SKIPPED when there was nothing to merge.
    """
    validate_request(req)
    machine.metrics.count("compaction_started")
    try:
        outcome = _Compaction(machine, req, on_read, is_stopped, merger or InThisProcess()).run()
    except BaseException:
        machine.metrics.count("compaction_failed")
        raise
    machine.metrics.observe_s("compaction", outcome.duration_ms / 1000)
    return outcome


_Refusal = tuple[Ending, str] | None


class _GivenUp(Exception):
    """The compaction must not continue: the deadline passed, or it was stopped."""


class _Compaction:
    """One request being compacted."""

    def __init__(
        self,
        machine: Machine,
        req: MergeReq,
        on_read: OnBytesRead | None,
        is_stopped: Callable[[], bool],
        merger: Merger,
    ) -> None:
        self._machine, self._req, self._on_read, self._merger = machine, req, on_read, merger
        self._is_stopped = is_stopped
        self._started_s = machine.env.monotonic_s()
        self._timeout_ms = compaction_timeout_ms(req, machine.settings.compaction)
        # The schema is as new as that of every input, so that no row is shown under an older one. If the inputs name none, it is the
        # shard's newest.
        schema_id = newest_schema_id(req)
        self._schema_id = machine.schema_id if schema_id is None else schema_id
        machine.metrics.count("compaction_schema", choice="handle" if schema_id is None else "newest_input")
        self._schema = Schema.from_pair(machine.state.schemas[self._schema_id])
        self._total_bytes = 0
        self._bytes_read = self._bytes_written = self._blobs_deleted = 0
        self._records = DeletionRecords(machine, Cause.COMPACTION)
        self._rows_gone = 0
        self._applied = 0
        self._maintenance = NO_MAINTENANCE

    def run(self) -> CompactOutcome:
        """Runs all passes; see `compact`."""
        left: MergeReq | None = self._req
        for _ in range(PASSES_MAX):
            if left is None:
                break
            try:
                chunks = compaction_chunks(self._expanded(left), self._machine.settings)
            except MissingBlob as error:
                return self._outcome(*self._late(left.inputs, error))
            if not chunks:
                break
            self._total_bytes += sum(batch.size_bytes for chunk in chunks for batch in chunk.replaced(left))
            try:
                with closing(self._merger.merged(self._job(chunks))) as results:
                    for chunk, merged in results:
                        refusal = self._finish(chunk, chunk.replaced(left), merged)
                        if refusal is not None:
                            return self._outcome(*refusal)
            except _GivenUp as given_up:
                return self._outcome(Ending.FAILED, str(given_up))
            left = self._left()
        if not self._applied:
            self._machine.metrics.count("compaction", outcome="noop")
            return self._outcome(Ending.SKIPPED, "nothing to merge")
        return self._outcome(Ending.SUCCEEDED, "")

    def _expanded(self, req: MergeReq) -> MergeReq:
        """`req`, with each hollow run of its inputs replaced by the parts that it lists."""
        ids, batches = [spine_id for spine_id, _ in req.inputs], (batch for _, batch in req.inputs)
        return replace(req, inputs=tuple(zip(ids, expand(self._machine, batches), strict=True)))

    def _late(self, inputs: Iterable[IdBatch], error: MissingBlob) -> tuple[Ending, str]:
        """The ending when a blob of `inputs` is missing. No lease holds the inputs. Another compaction may have replaced them, and garbage
        collection may have deleted them; then this compaction is late, and nothing is lost. Otherwise raises `error`.
        """
        if not _is_replaced(self._machine.refresh(), inputs):
            raise error
        self._machine.metrics.count("compaction", outcome="inputs_replaced")
        return Ending.CONFLICT, f"others replaced the inputs meanwhile: {error}"

    def _finish(
        self, chunk: CompactionChunk, replaced: tuple[HollowBatch, ...], merged: Output | MissingBlob
    ) -> _Refusal:
        """Replaces `replaced` in state by the output of one chunk. Returns None when that was applied, otherwise the ending and its
        reason.
        """
        if isinstance(merged, MissingBlob):
            return self._late(((chunk.input, batch) for batch in replaced), merged)
        machine = self._machine
        self._bytes_read += sum(batch.size_bytes for batch in replaced)
        output = self._output(chunk, replaced, merged)
        answer, maintenance = machine.apply_merge_res(MergeRes(output, chunk.input, replaced, chunk.run_ids))
        self._maintenance = self._maintenance.merge(maintenance)
        self._bytes_written += output.size_bytes
        machine.metrics.count("compaction", outcome=answer.value)
        if not answer.applied:
            keys = [blob.partial_key for blob in with_nested(machine, blobs_of(output))]
            with self._records.intended(keys, seqno=machine.state.seqno):
                delete_parts(machine, output.parts)
            self._records.prune()
            self._blobs_deleted += len(keys)
            return Ending.CONFLICT, f"not applied, {answer.value}"
        self._applied += 1
        self._rows_gone += sum(batch.rows for batch in replaced) - output.rows
        return None

    def _output(self, chunk: CompactionChunk, replaced: tuple[HollowBatch, ...], merged: Output) -> HollowBatch:
        """The batch of the durable output `merged`, which takes the place of `replaced`. It has no parts when all updates vanished."""
        parts = merged.parts
        if not parts:
            return HollowBatch.empty(chunk.desc)
        rows = sum(part.rows for part in parts)
        waits_from_ms = waits_of_output(
            replaced, chunk.desc, parts, all_runs=chunk.run_ids is None, now_ms=self._machine.env.now_ms()
        )
        meta = RunMeta(RunOrder.STRUCTURED, None, self._schema_id, waits_from_ms=waits_from_ms)
        new_id = partial(self._machine.env.random_bytes, 16)
        runs = [(replace(each, run_id=RunId.from_bytes(new_id())), written) for each, written in merged.runs(meta)]
        try:
            return spill_runs(self._machine, HollowBatch.of_runs(chunk.desc, rows, runs))
        except BaseException:
            discard(self._machine, parts)
            raise

    def _job(self, chunks: tuple[CompactionChunk, ...]) -> MergeJob:
        machine = self._machine
        for chunk in chunks:
            machine.metrics.count("compaction_chunks")
            machine.metrics.count("compaction_runs", len(chunk.runs))
            if chunk.over_budget:
                machine.metrics.count("compaction_memory_exceeded")
        on_read, total_bytes = self._on_read, self._total_bytes
        on_fetched = None if on_read is None else (lambda count: on_read(count, total_bytes))
        return MergeJob(machine, chunks, self._schema, self._schema_id, self._check, on_fetched)

    def _check(self) -> None:
        """Raises _GivenUp when the compaction must not go on."""
        if (self._machine.env.monotonic_s() - self._started_s) * 1000 > self._timeout_ms:
            self._machine.metrics.count("compaction_timed_out")
            raise _GivenUp(f"given up after {self._timeout_ms / 1000:.0f} s")
        if self._is_stopped():
            raise _GivenUp("stopped")

    def _left(self) -> MergeReq | None:
        """The request that remains for the spine batch, given its present runs. None when it is compact, or was merged further."""
        for batch in self._machine.state.trace.spine_batches():
            if batch.id == self._req.id and not batch.is_compact:
                return batch.request()
        return None

    def _outcome(self, ending: Ending, text: str) -> CompactOutcome:
        req, machine = self._req, self._machine
        rows_before = sum(batch.rows for _, batch in req.inputs)
        rows_after = rows_before - self._rows_gone
        runs = sum(len(batch.run_metas) for _, batch in req.inputs)
        done = f"{rows_before} rows in {runs} runs, now {rows_after}, {self._applied} merges"
        return CompactOutcome(
            shard_id=machine.shard_id,
            seqno=machine.state.seqno,
            ending=ending,
            message=f"{req.id} {req.desc}: {'; '.join(filter(None, [text, done if self._applied else '']))}",
            duration_ms=round((machine.env.monotonic_s() - self._started_s) * 1000),
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
            blobs_deleted=self._blobs_deleted,
            deletion_record=self._records.last,
            id=req.id,
            applied=min(1, self._applied),
            rows_before=rows_before,
            rows_after=rows_after,
            maintenance=self._maintenance,
        )


def _is_replaced(state: ShardState, inputs: Iterable[IdBatch]) -> bool:
    """Whether some blob that `inputs` name is no longer named by `state`, and hence by no later state."""
    live = {key for batch in state.trace.batches() for key in batch.blob_keys()}
    return any(key not in live for _, batch in inputs for key in batch.blob_keys())
