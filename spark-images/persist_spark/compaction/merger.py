"""Runs the chunks of a compaction on Spark. Each chunk is a Spark job, and each range of its keys is a task.

The driver plans and swaps results in, with the engine's code. A task reads and writes blobs and knows no log. Spark starts the tasks of an
earlier chunk first. So at most as many chunks are in progress as tasks run at once, and only these are lost with the driver. Every other
chunk was swapped in as soon as its last task ended.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
from persist_engine import Merged, MergeJob, MergeTask
from persist_engine.base.env import SystemEnv, process_cpu_ns
from persist_engine.base.errors import InvalidUsage, MissingBlob
from persist_engine.base.settings import (
    GIB,
    MEMORY_BYTES_LEAST,
    MIB,
    CompactionSettings,
    RetrySettings,
    Settings,
    within_memory,
)
from pyspark.sql import SparkSession

from persist_spark.datasource import is_connect
from persist_spark.memory import ExecutorMemory, give_back_freed_memory
from persist_spark.partitions import STORE_GIVE_UP_MS, carrying_errors, store_at
from persist_spark.session import parallelism_of

#: The most and the least input bytes for one task. Keys may force a task to merge more. Tasks are not made smaller than the least even if
#: cores are free.
TASK_BYTES_MAX, TASK_BYTES_MIN = 256 * MIB, 16 * MIB
#: The most ranges of one chunk. The driver compares each range with each part of the chunk.
RANGES_MAX = 512
#: The memory of a task if the configuration of executors does not state it: the default of a compaction in a pod.
TASK_MEMORY_BYTES = GIB
#: A compaction is not given up before this time: its first tasks may wait for executors that a cluster still starts.
TIMEOUT_MS_MIN = 15 * 60 * 1000
#: The number of cores that a Spark Connect client assumes, because it does not see the executors.
CONNECT_CORES = 16
#: The interval at which a driver that waits for tasks checks whether the compaction should continue.
_LOOK_S = 1.0

#: One row for each task: its output, or the key of the missing input, and the CPU time of its Python process.
MERGED_SCHEMA = pa.schema(
    [("range", pa.int64()), ("parts", pa.binary()), ("missing", pa.string()), ("cpu_ns", pa.int64())]
)
MERGED_DDL = "range bigint, parts binary, missing string, cpu_ns bigint"


class CpuTime:
    """A sum to which many threads add."""

    def __init__(self) -> None:
        self._lock, self.ns = threading.Lock(), 0

    def add(self, ns: int) -> None:
        with self._lock:
            self.ns += ns


class MergeRanges:
    """Runs on executors: for number i of `spark.range(n)` it merges range i of one chunk."""

    def __init__(self, *, blob: str, settings: Settings, staging_floor_ms: int, tasks: Sequence[MergeTask]) -> None:
        self.blob, self.settings, self.staging_floor_ms, self.tasks = blob, settings, staging_floor_ms, tuple(tasks)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields one row of MERGED_SCHEMA for each range. A repeated task writes other parts. The driver links the parts of one attempt."""
        give_back_freed_memory()
        with carrying_errors():
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    before_ns = process_cpu_ns()
                    parts, missing = self._merged(self.tasks[number])
                    columns = [[number], [parts], [missing], [process_cpu_ns() - before_ns]]
                    yield pa.RecordBatch.from_arrays(
                        [pa.array(column, field.type) for column, field in zip(columns, MERGED_SCHEMA, strict=True)],
                        schema=MERGED_SCHEMA,
                    )

    def _merged(self, task: MergeTask) -> tuple[bytes | None, str | None]:
        store = store_at(self.blob, task.shard_id, self.settings, staging_floor_ms=self.staging_floor_ms)
        try:
            return task.run_remote(store), None
        except MissingBlob as error:
            return None, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnExecutors:
    """Merges chunks on the executors of a session, classic or over Connect."""

    spark: SparkSession
    blob: str
    settings: Settings
    """The settings of the tasks and of the client that plans, because the plan must fit the memory of a task."""
    cores: int
    spent: CpuTime = field(default_factory=CpuTime, compare=False)
    """The CPU time of the tasks whose results have arrived."""

    @classmethod
    def of(cls, spark: SparkSession, *, blob: str) -> OnExecutors:
        """For a shard with its parts in `blob`. Raises InvalidUsage when executors leave a task too little memory to merge."""
        memory = ExecutorMemory.of(lambda name: spark.conf.get(name, None))
        memory_bytes = TASK_MEMORY_BYTES if memory is None else memory.worker_bytes
        if memory_bytes < MEMORY_BYTES_LEAST:
            raise InvalidUsage(
                f"a task that compacts needs {MEMORY_BYTES_LEAST // MIB} MiB beside the heap of its executor, and has "
                f"{memory_bytes // MIB} MiB: raise spark.executor.memoryOverhead, or lower spark.executor.cores"
            )
        # Appends from Spark claim merges but do not do them. So a claim does not mean that work is in progress.
        settings = Settings(
            compaction=CompactionSettings(claim_ms=0, timeout_ms_min=TIMEOUT_MS_MIN),
            retry=RetrySettings(give_up_ms=STORE_GIVE_UP_MS),
        )
        cores = CONNECT_CORES if is_connect(spark) else parallelism_of(spark)
        return cls(spark=spark, blob=blob, settings=within_memory(settings, memory_bytes), cores=cores)

    def merged(self, job: MergeJob) -> Generator[Merged, None, None]:
        """See the engine's Merger. Yields a finished chunk at once. When the compaction ends early, it interrupts running tasks and leaves
        their parts to the orphan scan. It deletes outputs that the driver knows.
        """
        ranges = [job.task(chunk).split(count) for chunk, count in zip(job.chunks, self._counts(job), strict=True)]
        tag = f"persist-compaction-{SystemEnv().random_bytes(8).hex()}"
        pool = ThreadPoolExecutor(max(1, min(self.cores, len(ranges))), thread_name_prefix="persist-compact-spark")
        chunk_of = {
            pool.submit(self._run, job, tasks, tag): chunk for tasks, chunk in zip(ranges, job.chunks, strict=True)
        }
        left = set(chunk_of)
        try:
            while left:
                done, _ = wait(left, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                job.check()
                for future in done:
                    outputs = future.result()
                    left.remove(future)
                    yield chunk_of[future], outputs if isinstance(outputs, MissingBlob) else job.joined(outputs)
        finally:
            self._end(job, pool, left, tag)

    def _counts(self, job: MergeJob) -> list[int]:
        """The number of ranges for each chunk."""
        sizes = [job.task(chunk).bytes_estimate for chunk in job.chunks]
        share = max(min(TASK_BYTES_MAX, max(TASK_BYTES_MIN, -(-sum(sizes) // self.cores))), 1)
        return [min(RANGES_MAX, -(-max(size, 1) // share)) for size in sizes]

    def _run(self, job: MergeJob, tasks: Sequence[MergeTask], tag: str) -> tuple[bytes, ...] | MissingBlob:
        """The outputs of all ranges of one chunk, in order. When a blob is missing, the outputs of the other ranges are deleted."""
        merge = MergeRanges(
            blob=self.blob, settings=self.settings, staging_floor_ms=job.store.staging_floor_ms, tasks=tasks
        )
        with self._tagged(tag):
            numbers = self.spark.range(0, len(tasks), 1, len(tasks))
            rows = sorted(numbers.mapInArrow(merge, MERGED_DDL).collect(), key=lambda row: row["range"])
        self.spent.add(sum(row["cpu_ns"] for row in rows))
        outputs = tuple(bytes(row["parts"]) for row in rows if row["parts"] is not None)
        missing = next((row["missing"] for row in rows if row["missing"] is not None), None)
        if missing is None:
            return outputs
        job.discard(job.joined(outputs))
        return MissingBlob(missing)

    @contextmanager
    def _tagged(self, tag: str) -> Iterator[None]:
        """Within the block, the jobs of this thread have `tag`.

        SUBTLE: a classic session knows its own tags only in the thread that added them. It finds the tag of a job from every thread.
        """
        if is_connect(self.spark):
            add, remove = self.spark.addTag, self.spark.removeTag
        else:
            add, remove = self.spark.sparkContext.addJobTag, self.spark.sparkContext.removeJobTag
        add(tag)
        try:
            yield
        finally:
            remove(tag)

    def _interrupt(self, tag: str) -> None:
        """Interrupts the jobs of all threads that have `tag`."""
        if is_connect(self.spark):
            self.spark.interruptTag(tag)
        else:
            self.spark.sparkContext.cancelJobsWithTag(tag)

    def _end(
        self,
        job: MergeJob,
        pool: ThreadPoolExecutor,
        left: set[Future[tuple[bytes, ...] | MissingBlob]],
        tag: str,
    ) -> None:
        """Stops the chunks in progress, and deletes the outputs that were not yielded."""
        try:
            if left:
                pool.shutdown(wait=False, cancel_futures=True)
                going = {future for future in left if not future.cancelled()}
                while going:
                    # More than once, because a chunk may be about to begin its job.
                    self._interrupt(tag)
                    _, going = wait(going, timeout=_LOOK_S)
        finally:
            pool.shutdown(wait=True)
            for future in left:
                if future.cancelled() or future.exception() is not None:
                    continue
                outputs = future.result()
                if not isinstance(outputs, MissingBlob):
                    job.discard(job.joined(outputs))
