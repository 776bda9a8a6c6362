"""The Spark session of a driver: what the operator's spark-defaults.conf says, and the few settings that this code
needs to be right.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

#: Rows in one Arrow record from the JVM to Python. Staging with Spark's default of 10,000 is a third slower (measured).
ARROW_RECORD_ROWS = 65_536
_REQUIRED = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_RECORD_ROWS),
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


def parallelism_of(spark: SparkSession) -> int:
    """Cores of the executors that have registered (or of this machine, when local)."""
    return max(1, int(spark.sparkContext.defaultParallelism))


def executor_count(spark: SparkSession) -> int:
    """Executors registered now; 1 when the driver is its own executor."""
    infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return max(1, len(infos) - 1)
