"""The options of the JVMs that tests start. These JVMs live for seconds and process few rows.

An optimising compiler and a parallel collector would cost such a JVM more than they save. With the archive of the classes that Spark loads
(`tests/spark/class_archive.py` writes it, and `make setup` calls that) a start takes a third less processor time. Without the archive, or
with a stale one, a JVM starts more slowly but works the same.
"""

from __future__ import annotations

from pathlib import Path

#: A JVM without its optimising compiler has only 48 MiB for code. The JVM that all tests of a process share compiles more than that, and
#: would compile the same methods again and again.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
#: The archive of this checkout.
ARCHIVE = Path(__file__).parents[3] / "build" / "spark.jsa"


def options() -> str:
    """The options of a JVM that Spark starts with the class path of its jars: a driver, or an executor."""
    if not ARCHIVE.exists():
        return SHORT_LIVED
    # Unless its log is off, a JVM that ignores an archive reports this on standard output, where drivers write their reports.
    return f'{SHORT_LIVED} -XX:SharedArchiveFile="{ARCHIVE}" -Xlog:disable -Xlog:all=error:stderr'


def environ() -> dict[str, str]:
    """The environment for a process that starts Spark: the options of its driver's JVM, and of the JVM that launches the driver."""
    return {"SPARK_SUBMIT_OPTS": options(), "SPARK_LAUNCHER_OPTS": SHORT_LIVED}


def executor_properties() -> str:
    """Lines for Spark's properties file. They give executors, which are separate processes, the same options, and a small page, so that a
    task takes little memory.
    """
    return (
        f"spark.executor.extraJavaOptions {options()}\n"
        # A task that sorts, groups or joins allocates a page. By default a page has many megabytes, which keeps the garbage collector busy.
        "spark.buffer.pageSize 256k\n"
    )
