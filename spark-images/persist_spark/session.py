"""The Spark session of a driver: the settings of the operator's spark-defaults.conf, and a few settings that this code requires."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from persist_engine.base.settings import MIB
from pyspark.sql import SparkSession

from persist_spark.memory import ExecutorMemory
from persist_spark.spec import PARALLELISM_MAX

#: Rows in one Arrow record from the JVM to Python. Staging with Spark's default of 10,000 is a third slower (measured).
ARROW_RECORD_ROWS = 65_536
#: Bytes in one such record. Both sides hold one or two records. With only a limit on rows, wide rows would take hundreds of MiB.
ARROW_RECORD_BYTES = 4 * MIB
#: The partitions of a shuffle before Spark merges adjacent ones. If each has the size of a task, they hold 16 GiB.
SHUFFLE_PIECES = 512
#: The bytes of a part in memory for each shuffled byte. Measured: flights 1.5 to 2.0, random numbers and text 1.0 to 1.4, natural text 3 to
#: 4. With this ratio most tasks write one part or a few.
ARROW_PER_SHUFFLED_BYTE = 2
#: The keys that Spark samples per partition, to find ranges of equal size. Spark's default of 100 brings up to three times 51,200 keys of
#: up to a KiB to the driver, whose heap may be only 512 MiB. With 20 keys, a partition's size is off by a fifth, which evens out if several
#: partitions become one task.
SAMPLED_ROWS = 20
#: To use free cores, tasks shrink to this fraction (1/4) of the full size. Smaller tasks are hardly worth their start.
LEAST_SHARE = 4
#: The same divisor for tasks that read more than their input.
READING_SHARE = 64
_ADAPTIVE = "spark.sql.adaptive"
_REQUIRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_RECORD_ROWS),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_RECORD_BYTES),
    # Timestamps in SQL must not depend on the driver's time zone.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
}
_AT_START = {
    # Otherwise pyspark records the place in the program of each use of a column, with ten calls of the JVM.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}


def start_session(app_name: str) -> SparkSession:
    """The session of the process, in client mode. Spark itself reads master, host and executors from its file of properties."""
    builder = SparkSession.builder.appName(app_name)
    for name, value in (_REQUIRED | _AT_START).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def set_required(spark: SparkSession) -> None:
    """Restores the required settings that a session can change. For use after the user's code had the session."""
    for name, value in _REQUIRED.items():
        spark.conf.set(name, value)


@contextmanager
def shuffled_by_bytes(spark: SparkSession, *, part_bytes: int, share: int = LEAST_SHARE) -> Iterator[None]:
    """Within the block, shuffles without a number of partitions result in tasks of about one part each, by the bytes actually shuffled.
    There is at least one task per core unless the tasks become tiny (`share`, see LEAST_SHARE), and there are at most PARALLELISM_MAX.

    Adaptive execution does this, also for the shuffles of the input's own query. The user's own settings are kept. If the user has turned
    adaptive execution off, there are `spark.sql.shuffle.partitions` tasks. After the block the session has its earlier settings again.
    """
    task_bytes = max(MIB, part_bytes // ARROW_PER_SHUFFLED_BYTE)
    pieces = min(PARALLELISM_MAX, max(SHUFFLE_PIECES, 4 * parallelism_of(spark)))
    wanted = {
        f"{_ADAPTIVE}.advisoryPartitionSizeInBytes": f"{task_bytes}b",
        f"{_ADAPTIVE}.coalescePartitions.minPartitionSize": f"{max(MIB, task_bytes // share)}b",
        f"{_ADAPTIVE}.coalescePartitions.parallelismFirst": "true",
        f"{_ADAPTIVE}.coalescePartitions.initialPartitionNum": str(pieces),
        "spark.sql.execution.rangeExchange.sampleSizePerPartition": str(SAMPLED_ROWS),
    }
    with _set(spark, {name: value for name, value in wanted.items() if spark.conf.get(name, None) is None}):
        yield


@contextmanager
def planned_once(spark: SparkSession) -> Iterator[None]:
    """Within the block, Spark plans each query once, before it runs. After the block the session has its earlier setting again.

    Adaptive execution would run each shuffle as a job of its own, to plan the rest by its bytes. A shuffle that moves one row per task has
    nothing to plan, and costs 25 ms less without it (measured).
    """
    with _set(spark, {f"{_ADAPTIVE}.enabled": "false"}):
        yield


@contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Within the block the session has `settings`, and after it the earlier ones."""
    earlier = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, before in earlier.items():
            if before is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)


def parallelism_of(spark: SparkSession) -> int:
    """The cores of the registered executors, or of this machine in local mode."""
    return max(1, int(spark.sparkContext.defaultParallelism))


def executor_memory(spark: SparkSession) -> ExecutorMemory | None:
    """The memory of the executors' pods. None when the configuration does not state it."""
    # `getConf` copies all settings, which takes 12 ms.
    return ExecutorMemory.of(spark.sparkContext._conf.get)


def executor_count(spark: SparkSession) -> int:
    """The number of registered executors; 1 in local mode, where the driver is the executor."""
    infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return max(1, len(infos) - 1)
