"""Physical compaction in this process: many runs become few, times advance, what cancels vanishes (spec 13).

Order: output blobs first, then one merge result swapped into state. Output blobs are deleted only when it is certain
that no attempt linked them (spec 20, bug 1b); input blobs never: those are garbage collection's, which knows who
still reads them. Memory: `settings.compaction.memory_bytes_max`, by reading the inputs in chunks of runs that fit
(model.plans).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from persist_engine.base.errors import MissingBlob, PersistError
from persist_engine.codec.schema import Schema
from persist_engine.model.batch import HollowBatch, Part, RunMeta, RunOrder
from persist_engine.model.ids import RunId
from persist_engine.model.plans import CompactionChunk, compaction_chunks, validate_request
from persist_engine.model.spine import MergeReq, MergeRes
from persist_engine.model.state import ShardState
from persist_engine.shard.fetch import CompactionFilter, PartSource, RunToRead, read_consolidated
from persist_engine.shard.machine import Machine
from persist_engine.shard.parts import delete_parts, write_part
from persist_engine.shard.runs import expand, spill_runs
from persist_engine.work.outcome import CompactOutcome, Ending

_log = logging.getLogger(__name__)

#: Told the bytes of each input part as it is taken up, and the bytes of all inputs; for progress bars.
OnRead = Callable[[int, int], None]

#: Parts encoded and uploaded at once. More outstanding parts than this only wait in memory.
UPLOAD_THREADS = 2
#: More than any spine asks for at once: its levels, and the batches within them, are logarithmic in the number of
#: appends.
REQUESTS_MAX = 1024


def compact_due(
    machine: Machine, max_requests: int = REQUESTS_MAX, *, on_read: OnRead | None = None
) -> list[CompactOutcome]:
    """Claim up to `max_requests` compactions that nobody works on and do them, oldest first; one outcome each.

    Claims older than `settings.compaction.claim_ms` count as abandoned. A compaction done twice is harmless: one
    result is applied, the other removed.
    """
    machine.refresh()
    claimed, _ = machine.claim_compactions(max_requests=max_requests)
    return [compact(machine, req, on_read=on_read) for req in claimed.requests]


def compact(machine: Machine, req: MergeReq, *, on_read: OnRead | None = None) -> CompactOutcome:
    """Do `req`. Readers see the same contents at every time at or past `req.desc.since`, before, during and after.

    May be killed at any point: blobs leak, nothing is lost. When reading or writing fails the blobs written so far
    are removed. CONFLICT when others were faster, whether they left the inputs in place until the end or not.
    """
    validate_request(req)
    started_s = machine.env.monotonic_s()
    total_bytes = sum(batch.size_bytes for _, batch in req.inputs)
    writer = _RunWriter(machine, req)
    try:
        inputs = expand(machine, (batch for _, batch in req.inputs))
        to_read = replace(req, inputs=tuple(zip((spine_id for spine_id, _ in req.inputs), inputs, strict=True)))
        for chunk in compaction_chunks(to_read, machine.settings):
            if chunk.over_budget:
                machine.metrics.count("compaction_memory_exceeded")
            merged = _merged(machine, req, chunk, writer.schema, total_bytes=total_bytes, on_read=on_read)
            writer.write_run(merged, outstanding_parts=chunk.outstanding_parts)
        output = spill_runs(machine, writer.output())
    except MissingBlob as error:
        writer.abandon()
        if not _is_replaced(machine.refresh(), req):
            raise
        # No lease holds the inputs: others compacted them, and their blobs are collected. We are late, nothing is lost.
        machine.metrics.count("compaction", outcome="inputs_replaced")
        return CompactOutcome(
            shard_id=machine.shard_id,
            seqno=machine.state.seqno,
            ending=Ending.CONFLICT,
            message=f"{req.id} {req.desc}: others replaced the inputs meanwhile: {error}",
            duration_ms=round((machine.env.monotonic_s() - started_s) * 1000),
            id=req.id,
        )
    except BaseException:
        writer.abandon()
        raise
    answer, maintenance = machine.apply_merge_res(
        MergeRes(output=output, input=req.id, inputs=tuple(batch for _, batch in req.inputs))
    )
    if not answer.applied:
        delete_parts(machine, output.parts)
    machine.metrics.count("compaction", outcome=answer.value)
    rows_before = sum(batch.rows for _, batch in req.inputs)
    done = f"{req.id} {req.desc}: {rows_before} rows in {_runs(req)} runs, now {output.rows} in {len(output.run_metas)}"
    return CompactOutcome(
        shard_id=machine.shard_id,
        seqno=machine.state.seqno,
        ending=Ending.SUCCEEDED if answer.applied else Ending.CONFLICT,
        message=done if answer.applied else f"{req.id} {req.desc}: not applied, {answer.value}",
        duration_ms=round((machine.env.monotonic_s() - started_s) * 1000),
        bytes_read=total_bytes,
        bytes_written=output.size_bytes,
        blobs_deleted=0 if answer.applied else sum(part.blob_count for part in output.parts),
        id=req.id,
        applied=int(answer.applied),
        rows_before=rows_before,
        rows_after=output.rows,
        maintenance=maintenance,
    )


def _is_replaced(state: ShardState, req: MergeReq) -> bool:
    """Whether some part that `req` reads is no longer named by `state`, hence by no later one."""
    live = {key for batch in state.trace.batches() for key in batch.blob_keys()}
    return any(key not in live for _, batch in req.inputs for key in batch.blob_keys())


def _runs(req: MergeReq) -> int:
    return sum(len(batch.run_metas) for _, batch in req.inputs)


def _merged(
    machine: Machine,
    req: MergeReq,
    chunk: CompactionChunk,
    schema: Schema,
    *,
    total_bytes: int,
    on_read: OnRead | None,
) -> Iterator[pa.Table]:
    source = PartSource(machine.shard_id, machine.blob, schema, machine.versions.retry, machine.metrics)
    # The plan gives inputs all but two parts' worth; the merge itself works in what an output part needs.
    memory_bytes = 2 * machine.settings.batch.target_part_bytes
    runs = [RunToRead(run.desc, run.parts, is_sorted=run.meta.order is RunOrder.STRUCTURED) for run in chunk.runs]
    told = None if on_read is None else (lambda count: on_read(count, total_bytes))
    return read_consolidated(source, runs, CompactionFilter(req.desc.since), memory_bytes=memory_bytes, on_fetched=told)


class _RunWriter:
    """Cuts sorted tables into parts of about the target size and writes them in the background, in order, one run per
    call.
    """

    def __init__(self, machine: Machine, req: MergeReq) -> None:
        self._machine = machine
        self._desc = req.desc
        # The newest now: newer than any input's, and never one of them is shown under an older.
        self._schema_id = machine.schema_id
        self.schema = Schema.from_pair(machine.state.schemas[self._schema_id])
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="persist-compact")
        self._outstanding: deque[Future[Part]] = deque()
        self._parts: list[Part] = []
        self._run_ends: list[int] = []
        self._run_rows: list[int] = []

    def write_run(self, tables: Iterator[pa.Table], *, outstanding_parts: int) -> None:
        """Write `tables`, sorted and consolidated, as one run; all of its parts are durable when it returns.

        At most `outstanding_parts` parts are held in memory while they are uploaded.
        """
        target = self._machine.settings.batch.target_part_bytes
        gathered: list[pa.Table] = []
        gathered_bytes = rows = 0
        for table in tables:
            rows += table.num_rows
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
        if rows:
            self._run_ends.append(len(self._parts))
            self._run_rows.append(rows)

    def output(self) -> HollowBatch:
        """The batch of all runs written; no parts at all when everything cancelled."""
        self._pool.shutdown()
        metas = tuple(
            RunMeta(
                order=RunOrder.STRUCTURED,
                run_id=RunId.from_bytes(self._machine.env.random_bytes(16)),
                schema_id=self._schema_id,
                rows=rows,
            )
            for rows in self._run_rows
        )
        return HollowBatch(self._desc, sum(self._run_rows), tuple(self._parts), tuple(self._run_ends[:-1]), metas)

    def abandon(self) -> None:
        """Delete what was written: nothing of it was offered to state. Blobs leak when the store refuses that too."""
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
        while len(self._outstanding) >= outstanding_parts:
            self._parts.append(self._outstanding.popleft().result())
        self._outstanding.append(self._pool.submit(self._write, table))

    def _write(self, table: pa.Table) -> Part:
        return write_part(
            self._machine,
            table,
            desc=self._desc,
            schema=self.schema,
            schema_id=self._schema_id,
            inline_bytes_max=0,
        )


def _pieces(table: pa.Table, target_bytes: int) -> Iterator[pa.Table]:
    """`table` cut into slices of at most about `target_bytes`."""
    rows = max(1, table.num_rows * target_bytes // max(1, table.nbytes))
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)
