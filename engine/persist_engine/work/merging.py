"""Merges the chunks of a compaction: reads their runs, writes one sorted run of parts, and links nothing (spec 13.5).

A `MergeTask` is a chunk, or the rows of a chunk within a range of keys, as a value that can be sent to another machine. Running it needs
blobs only, never the log. So tasks can run in this process (`InThisProcess`) or on other machines; a `Merger` decides where. The ranges of
a chunk are disjoint and complete, so each row lies in exactly one. Their outputs, one after the other, therefore form the same run as a
merge of the whole chunk.

This module knows neither state nor the spine: `compact` swaps the results in.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from persist_engine.base.errors import MissingBlob, PersistError
from persist_engine.codec.batch import decode_batch, encode_batch
from persist_engine.model.batch import HollowBatch, Part, RunKind, RunMeta, RunOrder
from persist_engine.model.frontier import Description
from persist_engine.model.ids import ShardId
from persist_engine.model.spine.compaction_plan import MERGING_SHARE, CompactionChunk, InputRun
from persist_engine.parts.even_ranges import choose_ranges
from persist_engine.parts.fetch import CompactionFilter, PartSource, RunToRead, read_consolidated
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.sifting import Sifting, age_ends
from persist_engine.parts.write import PartStore, delete_parts, write_part
from persist_engine.rows.schema import Schema

_log = logging.getLogger(__name__)

#: The number of parts that are encoded and uploaded at once.
UPLOAD_THREADS = 2
#: The tasks for the ranges of a chunk together fetch at most this many times the chunk's bytes. A part that holds keys of several ranges is
#: fetched once for each of them.
FETCHED_TIMES_MAX = 2


@dataclass(frozen=True, slots=True)
class Output:
    """The durable parts that a merge wrote. There are none when all updates vanished."""

    left: tuple[Part, ...]
    """The parts of the rows that are left, in order."""
    kind: RunKind = RunKind.ANY
    """The kind of the run of these rows."""
    cancelled: tuple[tuple[Part, ...], ...] = ()
    """The parts of the rows that were sifted out, one run for each age, oldest first."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return tuple(itertools.chain(self.left, *self.cancelled))

    def runs(self, meta: RunMeta) -> list[tuple[RunMeta, tuple[Part, ...]]]:
        """The runs and their parts. `meta` holds what all runs have in common."""
        kinds = ((self.kind, self.left), *((RunKind.BALANCED, parts) for parts in self.cancelled))
        return [
            (replace(meta, kind=kind, rows=sum(part.rows for part in parts)), parts) for kind, parts in kinds if parts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTask:
    """Runs to merge into one sorted run under `desc`, or their rows within `key_range`. Holds no store and no secret."""

    shard_id: ShardId
    schema: Schema
    schema_id: int
    desc: Description
    runs: tuple[InputRun, ...]
    outstanding_parts: int
    """The number of parts that may be in memory at once while they are written."""
    is_sifted: bool = False
    """Whether rows that cancelled go to runs of their own, one for each age."""
    age_ends: tuple[int, ...] = ()
    """See Sifting."""
    key_range: KeyRange | None = None
    filtered: tuple[str, ...] = ()
    """The columns for which its parts get Bloom filters."""

    @property
    def bytes_estimate(self) -> int:
        """The bytes of its parts, which are the most that it fetches."""
        return sum(part.hollow_bytes + part.inline_bytes for run in self.runs for part in run.parts)

    def split(self, count: int) -> list[MergeTask]:
        """At most `count` tasks for disjoint ranges of keys, in the order of keys, which together do the work of this one. Returns fewer,
        but at least one, when statistics support fewer ranges, or when parts that span many ranges would be fetched too often.
        """
        batches = [HollowBatch.of_runs(run.desc, 0, [(run.meta, run.parts)]) for run in self.runs]
        while count > 1:
            tasks = [self._within(each) for each in choose_ranges(batches, self.schema, count)]
            if sum(task.bytes_estimate for task in tasks) <= FETCHED_TIMES_MAX * self.bytes_estimate:
                return tasks
            count //= 2
        return [self]

    def _within(self, key_range: KeyRange | None) -> MergeTask:
        if key_range is None:
            return self
        kept = (replace(run, parts=tuple(filter(key_range.may_hold, run.parts))) for run in self.runs)
        return replace(self, runs=tuple(run for run in kept if run.parts), key_range=key_range)

    def run(
        self,
        store: PartStore,
        *,
        check: Callable[[], None] = lambda: None,
        on_fetched: Callable[[int], None] | None = None,
    ) -> Output:
        """Merges the runs and returns the output, which is durable. Deletes the parts that it wrote when it fails. Calls `check` between
        two tables; `check` raises an exception to end the task.

        Uses at most `store.settings.compaction.memory_bytes_max` of memory. A repetition writes other parts.
        """
        writer = _RunWriter(store, self)
        try:
            writer.write_run(_checked(self._merged(store, on_fetched), check))
            return writer.output()
        except BaseException:
            writer.abandon()
            raise

    def run_remote(self, store: PartStore) -> bytes:
        """Like `run`, but returns the output encoded, for `MergeJob.joined` in the process that swaps it in."""
        output = self.run(store)
        rows = sum(part.rows for part in output.parts)
        return encode_batch(HollowBatch.of_runs(self.desc, rows, output.runs(RunMeta(order=RunOrder.STRUCTURED))))

    def _merged(self, store: PartStore, on_fetched: Callable[[int], None] | None) -> Iterator[pa.Table]:
        source = PartSource(
            self.shard_id,
            store.blob,
            self.schema,
            store.retry,
            store.metrics,
            path="compaction",
            key_range=self.key_range,
        )
        runs: list[RunToRead] = []
        for run in self.runs:
            pieces = [run.parts] if run.is_sorted else [(part,) for part in run.parts]
            runs += [RunToRead.of(run.desc, piece, is_sorted=run.is_sorted) for piece in pieces]
        return read_consolidated(
            source,
            runs,
            CompactionFilter(self.desc.since),
            memory_bytes=store.settings.compaction.memory_bytes_max // MERGING_SHARE,
            key_range=self.key_range,
            on_fetched=on_fetched,
        )


@dataclass(frozen=True, slots=True)
class MergeJob:
    """The chunks of one pass over a request, which a Merger merges."""

    store: PartStore
    chunks: tuple[CompactionChunk, ...]
    schema: Schema
    schema_id: int
    check: Callable[[], None]
    """Raises an exception when the compaction must not go on. A Merger must call it while it waits."""
    on_fetched: Callable[[int], None] | None = None
    """Receives the bytes of inputs as they are read, in any thread."""

    def task(self, chunk: CompactionChunk) -> MergeTask:
        """The whole of `chunk`."""
        size_bytes = sum(part.hollow_bytes + part.inline_bytes for run in chunk.runs for part in run.parts)
        is_sifted = chunk.is_last and size_bytes >= self.store.settings.compaction.sift_bytes_min
        since = -1 if chunk.desc.since.time is None else chunk.desc.since.time
        lasts = [(run.last_time, sum(part.rows for part in run.parts)) for run in chunk.runs]
        return MergeTask(
            shard_id=self.store.shard_id,
            schema=self.schema,
            schema_id=self.schema_id,
            desc=chunk.desc,
            runs=chunk.runs,
            outstanding_parts=chunk.outstanding_parts,
            filtered=tuple(self.store.filtered),
            is_sifted=is_sifted,
            age_ends=age_ends(lasts, since) if is_sifted else (),
        )

    def joined(self, outputs: Iterable[bytes]) -> Output:
        """The output of a chunk, joined from the outputs of its ranges in order (`run_remote`). Raises CorruptData for other bytes."""
        left: list[Part] = []
        cancelled: list[list[tuple[Part, ...]]] = []
        is_distinct = True
        for output in outputs:
            runs = list(decode_batch(output, key="output of a merge").part_runs())
            left += itertools.chain(*(parts for meta, parts in runs if not meta.is_balanced))
            # SUBTLE: if a range has no rows of an age, its output lacks that run. Older rows then join the runs of newer rows, and cancel
            # there, too.
            cancelled.append([parts for meta, parts in reversed(runs) if meta.is_balanced])
            is_distinct = is_distinct and all(meta.kind is not RunKind.ANY for meta, _ in runs)
        ages = [tuple(itertools.chain(*age)) for age in itertools.zip_longest(*cancelled, fillvalue=())]
        return Output(tuple(left), RunKind.DISTINCT if is_distinct else RunKind.ANY, tuple(reversed(ages)))

    def discard(self, output: Output) -> None:
        """Deletes an output that was not yielded."""
        discard(self.store, output.parts)


#: A chunk and its output, or the error that names a missing blob of its inputs. In the second case no output was kept.
Merged = tuple[CompactionChunk, Output | MissingBlob]


class Merger(Protocol):
    """Runs tasks, here or in other processes."""

    def merged(self, job: MergeJob) -> Generator[Merged, None, None]:
        """Yields each chunk of `job` once, in any order, as soon as its output is durable. When the iterator is closed or fails, it deletes
        the outputs of chunks that it did not yield, as far as it knows them.
        """


class InThisProcess:
    """Merges one chunk after the other in this process. It begins a chunk after the one before was swapped in. It has no state."""

    def merged(self, job: MergeJob) -> Generator[Merged, None, None]:
        """See Merger."""
        for chunk in job.chunks:
            try:
                output = job.task(chunk).run(job.store, check=job.check, on_fetched=job.on_fetched)
            except MissingBlob as error:
                yield chunk, error
            else:
                yield chunk, output


def _checked(tables: Iterator[pa.Table], check: Callable[[], None]) -> Iterator[pa.Table]:
    for table in tables:
        check()
        yield table


def discard(store: PartStore, parts: Sequence[Part]) -> None:
    """Deletes written parts that were not offered to state. If the store refuses the deletion, they leak."""
    try:
        delete_parts(store, parts)
    except PersistError as error:
        text = "%d parts of an abandoned compaction of shard %s leak: %s"
        _log.warning(text, len(parts), store.shard_id, error, extra={"shard": store.shard_id})


class _RunWriter:
    """Cuts sorted tables into parts of about the target size and writes them in the background, in order. Writes one run, or several when
    it sifts out the rows that cancelled.
    """

    def __init__(self, store: PartStore, task: MergeTask) -> None:
        self._store, self._task = store, task
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="persist-compact")
        self._outstanding: deque[tuple[_Gathered, Future[Part]]] = deque()
        self._left, *self._cancelled = self._runs = [_Gathered() for _ in range(len(task.age_ends) + 2)]
        self._kind = RunKind.ANY

    def write_run(self, tables: Iterator[pa.Table]) -> None:
        """Writes `tables`, sorted and consolidated. All parts are durable when it returns.

        At most `outstanding_parts` parts of the task are in memory at once, including the one being gathered. If the limit is one, merging
        waits while that part is written. There are also never more than the number of parallel writes plus one: further parts would only
        wait.
        """
        if self._task.is_sifted:
            sifting = Sifting(self._task.age_ends)
            for sides in sifting.tables(tables):
                for run, rows in zip(self._runs, sides, strict=True):
                    self._gather(run, rows)
            self._kind = RunKind.DISTINCT if sifting.is_distinct else RunKind.ANY
        else:
            for table in tables:
                self._gather(self._left, table)
        for run in self._runs:
            self._submit(run)
        while self._outstanding:
            self._finish()

    def output(self) -> Output:
        """The runs that `write_run` wrote. Ends the threads that write."""
        self._pool.shutdown()
        return Output(tuple(self._left.parts), self._kind, tuple(tuple(run.parts) for run in self._cancelled))

    def abandon(self) -> None:
        """Deletes the written parts."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for run, future in self._outstanding:
            if not future.cancelled() and future.exception() is None:
                run.parts.append(future.result())
        discard(self._store, [part for run in self._runs for part in run.parts])

    def _gather(self, run: _Gathered, table: pa.Table) -> None:
        """Adds rows to a run. All runs together gather at most about one part; then the run that gathered most is written."""
        target = self._store.settings.batch.target_part_bytes
        for piece in _pieces(table, target) if table.num_rows else ():
            gathered_bytes = sum(each.bytes for each in self._runs)
            if gathered_bytes and gathered_bytes + piece.nbytes > target:
                self._submit(max(self._runs, key=lambda each: each.bytes))
            run.tables.append(piece)
            run.bytes += piece.nbytes

    def _submit(self, run: _Gathered) -> None:
        if not run.tables:
            return
        table, run.tables, run.bytes = pa.concat_tables(run.tables), [], 0
        self._outstanding.append((run, self._pool.submit(self._write, table)))
        while len(self._outstanding) >= min(self._task.outstanding_parts, UPLOAD_THREADS + 1):
            self._finish()

    def _finish(self) -> None:
        """Waits for the oldest write. It stays outstanding when it fails."""
        run, future = self._outstanding[0]
        run.parts.append(future.result())
        self._outstanding.popleft()

    def _write(self, table: pa.Table) -> Part:
        task = self._task
        return write_part(
            self._store,
            table,
            desc=task.desc,
            schema=task.schema,
            schema_id=task.schema_id,
            inline_bytes_max=0,
            filtered=task.filtered,
        )


@dataclass(slots=True)
class _Gathered:
    """The written parts of one run, and the rows gathered for its next part."""

    parts: list[Part] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    bytes: int = 0


def _pieces(table: pa.Table, target_bytes: int) -> Iterator[pa.Table]:
    """`table` cut into slices of at most about `target_bytes`."""
    rows = max(1, table.num_rows * target_bytes // max(1, table.nbytes))
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)
