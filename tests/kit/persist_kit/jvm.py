"""The options of the JVMs that tests start: they live for seconds, on few rows.

An optimising compiler and a parallel collector would cost such a JVM more than they save. With the archive of the classes that Spark loads
(`tests/spark/class_archive.py` writes it, and `make setup` calls that) a start takes a third less processor time. Without the archive, or
with a stale one, a JVM starts more slowly and does the same.
"""

from __future__ import annotations

from pathlib import Path

#: A JVM without its optimising compiler has 48 MiB for code. The one that all tests of a process share compiles more than that, and would
#: compile the same methods again and again.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
#: Where the archive of this checkout is.
ARCHIVE = Path(__file__).parents[3] / "build" / "spark.jsa"


def options() -> str:
    """The options of a JVM that Spark starts with the class path of its jars: a driver, or an executor."""
    if not ARCHIVE.exists():
        return SHORT_LIVED
    # A JVM says on standard output that it ignores an archive, unless its log is off. Drivers write their reports there.
    return f'{SHORT_LIVED} -XX:SharedArchiveFile="{ARCHIVE}" -Xlog:disable -Xlog:all=error:stderr'


def environ() -> dict[str, str]:
    """What the environment of a process needs that starts Spark: the options of its driver's JVM, and of the JVM that starts that one."""
    return {"SPARK_SUBMIT_OPTS": options(), "SPARK_LAUNCHER_OPTS": SHORT_LIVED}


def executor_properties() -> str:
    """The lines for Spark's file of properties that give executors, which are processes of their own, the same options, and let them
    take little memory.
    """
    return (
        f"spark.executor.extraJavaOptions {options()}\n"
        # A task that sorts, groups or joins takes a page. By default it has many megabytes, which keeps the garbage collector busy.
        "spark.buffer.pageSize 256k\n"
    )
