"""The Spark session of a driver: what the operator's spark-defaults.conf says, and the few settings that this code
needs to be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.settings import MIB
from pyspark.sql import SparkSession

from persist_spark.memory import ExecutorMemory
from persist_spark.spec import PARALLELISM_MAX

#: Rows in one Arrow record from the JVM to Python. Staging with Spark's default of 10,000 is a third slower (measured).
ARROW_RECORD_ROWS = 65_536
#: Bytes of it: both sides hold one or two. Wide rows would be hundreds of MiB by their number alone.
ARROW_RECORD_BYTES = 4 * MIB
#: Pieces that a shuffle is cut into before neighbours are put together: so many of the size of a task make 16 GiB.
SHUFFLE_PIECES = 512
#: A part in memory is about two of what Spark shuffles for it. Measured: flights 1.5 to 2.0, random numbers and text 1.0
#: to 1.4, text as people write it 3 to 4. So most tasks write one part, or a few.
ARROW_PER_SHUFFLED_BYTE = 2
#: Keys that are looked at for each of those pieces, to find ranges of equal size. Spark's 100 bring up to three times 51,200 of
#: them to the driver, whose heap may be 512 MiB and whose keys may have a KiB. With 20 a piece is a fifth larger or smaller than
#: it should be, which evens out where several become one task.
SAMPLED_ROWS = 20
#: Cores that are free take tasks down to this share of that size; below it a task is hardly worth its start.
_LEAST_SHARE = 4
_ADAPTIVE = "spark.sql.adaptive"
_REQUIRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_RECORD_ROWS),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_RECORD_BYTES),
    # Instants and wall clocks in SQL must not depend on where the driver runs.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
}


def start_session(app_name: str) -> SparkSession:
    """The process's session, in client mode. Master, host, executors come from SPARK_CONF_DIR/spark-defaults.conf,
    which Spark reads itself.
    """
    builder = SparkSession.builder.appName(app_name)
    for name, value in _REQUIRED.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@contextmanager
def shuffled_by_bytes(spark: SparkSession, *, part_bytes: int) -> Iterator[None]:
    """Within, shuffles that name no number of partitions end in tasks of about one part each, by what was really
    shuffled: as many as there are cores as long as they are not tiny, PARALLELISM_MAX at most.

    Adaptive execution does it, for the shuffles of the input's own query too. What the user has set of it stays; where
    that is off, there are `spark.sql.shuffle.partitions` tasks. The session is as before afterwards.
    """
    task_bytes = max(MIB, part_bytes // ARROW_PER_SHUFFLED_BYTE)
    pieces = min(PARALLELISM_MAX, max(SHUFFLE_PIECES, 4 * parallelism_of(spark)))
    wanted = {
        f"{_ADAPTIVE}.advisoryPartitionSizeInBytes": f"{task_bytes}b",
        f"{_ADAPTIVE}.coalescePartitions.minPartitionSize": f"{max(MIB, task_bytes // _LEAST_SHARE)}b",
        f"{_ADAPTIVE}.coalescePartitions.parallelismFirst": "true",
        f"{_ADAPTIVE}.coalescePartitions.initialPartitionNum": str(pieces),
        "spark.sql.execution.rangeExchange.sampleSizePerPartition": str(SAMPLED_ROWS),
    }
    ours = {name: value for name, value in wanted.items() if spark.conf.get(name, None) is None}
    for name, value in ours.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in ours:
            spark.conf.unset(name)


def parallelism_of(spark: SparkSession) -> int:
    """Cores of the executors that have registered (or of this machine, when local)."""
    return max(1, int(spark.sparkContext.defaultParallelism))


def executor_memory(spark: SparkSession) -> ExecutorMemory | None:
    """What the executors' pods have; None when nothing says so."""
    return ExecutorMemory.of(lambda name: spark.sparkContext.getConf().get(name))


def executor_count(spark: SparkSession) -> int:
    """Executors registered now; 1 when the driver is its own executor."""
    infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return max(1, len(infos) - 1)
