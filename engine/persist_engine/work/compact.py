"""Physical compaction in this process: many runs become few, times advance, and cancelling updates vanish (spec 13).

Order: output blobs first, then one merge result for each chunk of the plan (model.compaction_plan). Each is swapped into state as soon as
it is written, so a compaction that ends early keeps its progress. Output blobs are deleted only when certainly no attempt linked them (spec
20, bug 1b). Input blobs are never deleted here: garbage collection deletes them, because it knows which versions are still read. No output
ever names an input blob (bug 15). Memory: `settings.compaction.memory_bytes_max`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pyarrow as pa

from persist_engine.base.errors import MissingBlob, PersistError
from persist_engine.model.batch import HollowBatch, Part, RunMeta, RunOrder
from persist_engine.model.frontier import Description
from persist_engine.model.ids import RunId
from persist_engine.model.spine.compaction_plan import (
    MERGING_SHARE,
    CompactionChunk,
    compaction_chunks,
    compaction_timeout_ms,
    newest_schema_id,
    validate_request,
)
from persist_engine.model.spine.spine import IdBatch, MergeReq, MergeRes
from persist_engine.model.state import ShardState
from persist_engine.parts.fetch import CompactionFilter, PartSource, RunToRead, read_consolidated
from persist_engine.parts.listings import expand, spill_runs
from persist_engine.parts.write import delete_parts, write_part
from persist_engine.rows.schema import Schema
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine
from persist_engine.work.attempts import Attempts
from persist_engine.work.outcome import CompactOutcome, Ending

_log = logging.getLogger(__name__)

#: Receives the bytes of each input part as it is read, and the bytes of all inputs; for progress bars.
OnBytesRead = Callable[[int, int], None]

#: Parts encoded and uploaded at once.
UPLOAD_THREADS = 2
#: More than any spine requests at once: its levels, and the batches within them, are logarithmic in the number of appends.
REQUESTS_MAX = 1024
#: Passes over one request. Each leaves at most half as many runs, so this many are never needed.
PASSES_MAX = 64


def compact_due(
    machine: Machine,
    max_requests: int = REQUESTS_MAX,
    *,
    on_read: OnBytesRead | None = None,
    attempts: Attempts | None = None,
) -> list[CompactOutcome]:
    """Claims up to `max_requests` unclaimed compactions and does them, oldest first. Returns one outcome for each. When one raises, the
    others are still done; then the errors are raised as by `Attempts.end`, or left to the caller's `attempts`.

    Claims older than `settings.compaction.claim_ms` count as abandoned. A compaction done twice is harmless: one result is applied, and the
    other is deleted.
    """
    if not machine.settings.compaction.enabled:
        _log.warning("compaction of shard %s is disabled", machine.shard_id, extra={"shard": machine.shard_id})
        return []
    machine.refresh()
    claimed, _ = machine.claim_compactions(max_requests=max_requests)
    outcomes: list[CompactOutcome] = []
    tried = attempts or Attempts(machine.shard_id)
    others_bytes = sum(_input_bytes(req) for req in claimed.requests)
    for req in claimed.requests:
        others_bytes -= _input_bytes(req)
        progress = None if on_read is None else partial(_add_others, on_read, others_bytes)
        with tried.of(f"compaction {req.id} {req.desc}"):
            outcomes.append(compact(machine, req, on_read=progress))
            others_bytes += outcomes[-1].bytes_read
    if attempts is None:
        tried.end()
    return outcomes


def _input_bytes(req: MergeReq) -> int:
    return sum(batch.size_bytes for _, batch in req.inputs)


def _add_others(on_read: OnBytesRead, others_bytes: int, count: int, own_bytes: int) -> None:
    """Reports the progress of one compaction as progress of all: adds the input bytes of the others."""
    on_read(count, others_bytes + own_bytes)


def compact(
    machine: Machine,
    req: MergeReq,
    *,
    on_read: OnBytesRead | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> CompactOutcome:
    """Does `req`. Readers see the same contents at every time at or past `req.desc.since`, before, during and after.

    May be killed at any point: blobs leak, nothing is lost, and applied results stay. When reading or writing fails, the blobs not yet
    offered to state are deleted. CONFLICT when another compaction was faster, whether the inputs disappeared or not. FAILED when it
    took longer than `compaction_timeout_ms`, or when `is_stopped`, which is checked between two tables. SKIPPED when there was nothing to
    merge.
    """
    validate_request(req)
    machine.metrics.count("compaction_started")
    try:
        outcome = _Compaction(machine, req, on_read, is_stopped).run()
    except BaseException:
        machine.metrics.count("compaction_failed")
        raise
    machine.metrics.observe_s("compaction", outcome.duration_ms / 1000)
    return outcome


class _GivenUp(Exception):
    """The compaction must not continue: the deadline passed, or it was stopped, between two tables."""


class _Compaction:
    """One request being compacted."""

    def __init__(
        self, machine: Machine, req: MergeReq, on_read: OnBytesRead | None, is_stopped: Callable[[], bool]
    ) -> None:
        self._machine, self._req, self._on_read = machine, req, on_read
        self._is_stopped = is_stopped
        self._started_s = machine.env.monotonic_s()
        self._timeout_ms = compaction_timeout_ms(req, machine.settings.compaction)
        # As new as the inputs, so that none is shown under an older schema. The shard's newest when the inputs name none.
        schema_id = newest_schema_id(req)
        self._schema_id = machine.schema_id if schema_id is None else schema_id
        machine.metrics.count("compaction_schema", choice="handle" if schema_id is None else "newest_input")
        self._schema = Schema.from_pair(machine.state.schemas[self._schema_id])
        self._total_bytes = 0
        self._bytes_read = self._bytes_written = self._blobs_deleted = 0
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
            replaced = [chunk.replaced(left) for chunk in chunks]
            self._total_bytes += sum(batch.size_bytes for batches in replaced for batch in batches)
            for chunk, batches in zip(chunks, replaced, strict=True):
                try:
                    refusal = self._do(chunk, batches)
                except _GivenUp as given_up:
                    return self._outcome(Ending.FAILED, str(given_up))
                if refusal is not None:
                    return self._outcome(*refusal)
            left = self._left()
        if not self._applied:
            self._machine.metrics.count("compaction", outcome="noop")
            return self._outcome(Ending.SKIPPED, "nothing to merge")
        return self._outcome(Ending.SUCCEEDED, "")

    def _expanded(self, req: MergeReq) -> MergeReq:
        """`req` with the parts that its inputs name through hollow runs."""
        ids, batches = [spine_id for spine_id, _ in req.inputs], (batch for _, batch in req.inputs)
        return replace(req, inputs=tuple(zip(ids, expand(self._machine, batches), strict=True)))

    def _late(self, inputs: Iterable[IdBatch], error: MissingBlob) -> tuple[Ending, str]:
        """The ending when a blob of `inputs` is missing. No lease holds the inputs, so another compaction may have replaced them and
        garbage collection deleted them; this compaction is then late, and nothing is lost. Otherwise raises `error`.
        """
        if not _is_replaced(self._machine.refresh(), inputs):
            raise error
        self._machine.metrics.count("compaction", outcome="inputs_replaced")
        return Ending.CONFLICT, f"others replaced the inputs meanwhile: {error}"

    def _do(self, chunk: CompactionChunk, replaced: tuple[HollowBatch, ...]) -> tuple[Ending, str] | None:
        """Merges, writes and swaps in one chunk in place of `replaced`. None when applied, else the ending and its reason."""
        machine = self._machine
        machine.metrics.count("compaction_chunks")
        machine.metrics.count("compaction_runs", len(chunk.runs))
        if chunk.over_budget:
            machine.metrics.count("compaction_memory_exceeded")
        writer = _RunWriter(machine, chunk.desc, self._schema, self._schema_id)
        try:
            writer.write_run(self._in_time(self._merged(chunk)), outstanding_parts=chunk.outstanding_parts)
            output = spill_runs(machine, writer.output())
        except MissingBlob as error:
            writer.abandon()
            return self._late(((chunk.input, batch) for batch in replaced), error)
        except BaseException:
            writer.abandon()
            raise
        self._bytes_read += sum(batch.size_bytes for batch in replaced)
        answer, maintenance = machine.apply_merge_res(MergeRes(output, chunk.input, replaced, chunk.run_ids))
        self._maintenance = self._maintenance.merge(maintenance)
        self._bytes_written += output.size_bytes
        machine.metrics.count("compaction", outcome=answer.value)
        if not answer.applied:
            delete_parts(machine, output.parts)
            self._blobs_deleted += sum(part.blob_count for part in output.parts)
            return Ending.CONFLICT, f"not applied, {answer.value}"
        self._applied += 1
        self._rows_gone += sum(batch.rows for batch in replaced) - output.rows
        return None

    def _merged(self, chunk: CompactionChunk) -> Iterator[pa.Table]:
        machine = self._machine
        source = PartSource(
            machine.shard_id, machine.blob, self._schema, machine.retry, machine.metrics, path="compaction"
        )
        runs: list[RunToRead] = []
        for run in chunk.runs:
            pieces = [run.parts] if run.is_sorted else [(part,) for part in run.parts]
            runs += [RunToRead.of(run.desc, piece, is_sorted=run.is_sorted) for piece in pieces]
        on_read, total_bytes = self._on_read, self._total_bytes
        on_fetched = None if on_read is None else (lambda count: on_read(count, total_bytes))
        memory_bytes = machine.settings.compaction.memory_bytes_max // MERGING_SHARE
        row_filter = CompactionFilter(chunk.desc.since)
        return read_consolidated(source, runs, row_filter, memory_bytes=memory_bytes, on_fetched=on_fetched)

    def _in_time(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for table in tables:
            if (self._machine.env.monotonic_s() - self._started_s) * 1000 > self._timeout_ms:
                self._machine.metrics.count("compaction_timed_out")
                raise _GivenUp(f"given up after {self._timeout_ms / 1000:.0f} s")
            if self._is_stopped():
                raise _GivenUp("stopped")
            yield table

    def _left(self) -> MergeReq | None:
        """The remaining request of the request's spine batch, as it is now. None when it is done, or merged further."""
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


class _RunWriter:
    """Cuts sorted tables into parts of about the target size and writes them in the background, in order, as one run."""

    def __init__(self, machine: Machine, desc: Description, schema: Schema, schema_id: int) -> None:
        self._machine = machine
        self._desc = desc
        self._schema, self._schema_id = schema, schema_id
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="persist-compact")
        self._outstanding: deque[Future[Part]] = deque()
        self._parts: list[Part] = []

    def write_run(self, tables: Iterator[pa.Table], *, outstanding_parts: int) -> None:
        """Writes `tables`, sorted and consolidated, as one run. All of its parts are durable when it returns.

        At most `outstanding_parts` parts are in memory at once, including the one being gathered. With one, merging waits while it is
        written. The limit is also one more than the number of parallel writes: further parts would only wait.
        """
        outstanding_parts = min(outstanding_parts, UPLOAD_THREADS + 1)
        target = self._machine.settings.batch.target_part_bytes
        gathered: list[pa.Table] = []
        gathered_bytes = 0
        for table in tables:
            for piece in _pieces(table, target):
                if gathered and gathered_bytes + piece.nbytes > target:
                    self._submit(pa.concat_tables(gathered), outstanding_parts)
                    gathered, gathered_bytes = [], 0
                gathered.append(piece)
                gathered_bytes += piece.nbytes
        if gathered:
            self._submit(pa.concat_tables(gathered), outstanding_parts)
        while self._outstanding:
            self._parts.append(self._outstanding.popleft().result())

    def output(self) -> HollowBatch:
        """The batch of the written run. It has no parts when everything cancelled."""
        self._pool.shutdown()
        if not self._parts:
            return HollowBatch.empty(self._desc)
        rows = sum(part.rows for part in self._parts)
        run_id = RunId.from_bytes(self._machine.env.random_bytes(16))
        meta = RunMeta(order=RunOrder.STRUCTURED, run_id=run_id, schema_id=self._schema_id, rows=rows)
        return HollowBatch(self._desc, rows, tuple(self._parts), (), (meta,))

    def abandon(self) -> None:
        """Deletes the written parts, none of which was offered to state. They leak when the store refuses the deletion too."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for future in self._outstanding:
            if not future.cancelled() and future.exception() is None:
                self._parts.append(future.result())
        try:
            delete_parts(self._machine, self._parts)
        except PersistError as error:
            text = "%d parts of an abandoned compaction of shard %s leak: %s"
            shard_id = self._machine.shard_id
            _log.warning(text, len(self._parts), shard_id, error, extra={"shard": shard_id})

    def _submit(self, table: pa.Table, outstanding_parts: int) -> None:
        self._outstanding.append(self._pool.submit(self._write, table))
        while len(self._outstanding) >= outstanding_parts:
            self._parts.append(self._outstanding[0].result())
            self._outstanding.popleft()

    def _write(self, table: pa.Table) -> Part:
        return write_part(
            self._machine,
            table,
            desc=self._desc,
            schema=self._schema,
            schema_id=self._schema_id,
            inline_bytes_max=0,
        )


def _pieces(table: pa.Table, target_bytes: int) -> Iterator[pa.Table]:
    """`table` cut into slices of at most about `target_bytes`."""
    rows = max(1, table.num_rows * target_bytes // max(1, table.nbytes))
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)
