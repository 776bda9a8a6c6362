"""Writes an archive of the classes that Spark loads for a sink. A JVM that maps the archive needs a third less CPU time to start.

`python tests/spark/class_archive.py FILE` runs a small sink and some queries, and has the JVM archive its classes when it ends (JEP 350).
`persist_kit.jvm` has the options that use it. A JVM ignores an archive of another Java, or of other jars: it starts as if there were none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from persist_kit.jvm import SHORT_LIVED

_RUN = "--run"


def archive(file: Path) -> None:
    """Writes `file`, whole or not at all. Does nothing if the file is newer than Java and the jars. Exits with what Spark printed if Spark
    fails.
    """
    if file.exists() and file.stat().st_mtime > max(path.stat().st_mtime for path in _sources()):
        return
    print(
        f"archiving Spark's classes into {file}: a minute, and each later start of Spark takes some six seconds less",
        flush=True,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = Path(folder) / file.name
        options = f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={part} -Xlog:disable"
        environ = {
            **os.environ,
            "SPARK_SUBMIT_OPTS": options,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [sys.executable, __file__, _RUN, folder]
        # The JVM outlives its Python and holds the pipe open until it has written the archive.
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        run = subprocess.run(command, env=environ, check=False, **pipe)
        if run.returncode or not part.exists():
            sys.exit(f"{run.stdout}\nSpark ended with {run.returncode} and its classes were not archived")
        part.replace(file)


def _sources() -> list[Path]:
    """This file, the `java` that Spark starts, and the folder of Spark's jars."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    spark = importlib.util.find_spec("pyspark")
    if java is None or spark is None or spark.origin is None:
        sys.exit("Java or pyspark is missing: run `make setup`")
    return [Path(__file__), Path(java).resolve(), Path(spark.origin).parent / "jars"]


def _use_spark(folder: Path) -> None:
    """One session that does what sinks and readers do: CSV, SQL, a Mirror, a read with a join, a write, a stream."""
    from persist_engine import Location, PersistClient, Schema, ShardId, SystemEnv
    from persist_spark.main import use_properties
    from persist_spark.report import Log
    from persist_spark.session import start_session
    from persist_spark.sink import run_sink
    from persist_spark.spec import SinkSpec

    properties = folder / "spark-defaults.conf"
    properties.write_text(
        "spark.master local[2]\nspark.ui.enabled false\nspark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
        "spark.sql.shuffle.partitions 2\nspark.log.level ERROR\n"
    )
    use_properties(properties, os.environ)
    location = {"blob": f"file://{folder}/blobs", "consensus": f"sqlite://{folder}/consensus.db"}
    shard = ShardId.new()
    with PersistClient.open(Location(**location)) as client:
        client.initialise(shard, Schema.from_ddl("id BIGINT", "name STRING, n BIGINT"))
    (folder / "in.csv").write_text("id,name\n1,a\n2,b\n3,a\n")
    (folder / "streamed").mkdir()
    (folder / "streamed" / "1.csv").write_text("1,a\n2,b\n")
    sql = "select i.id, i.name, c.n from input i join (select name, count(*) n from input group by name) c on i.name = c.name"
    source = {
        "name": "csv",
        "schema": "id BIGINT, name STRING",
        "options": {"path": f"{folder}/in.csv", "header": "true"},
        "sql": sql,
    }
    document: dict[str, Any] = {
        "sink_id": "archive", "run_id": "1", "shard_id": shard, "schema": {"key": "id BIGINT", "value": "name STRING, n BIGINT"},
        "location": location, "input": {"type": "Format", "format": source}, "envelope": {"type": "Mirror"}, "write": {"parallelism": 2},
    }  # fmt: skip
    env = SystemEnv()
    spark = start_session("archive")
    run_sink(spark, SinkSpec.parse(document), env=env, log=Log(sys.stdout, env))
    rows = spark.read.format("csv").options(header="true").load(f"{folder}/in.csv")
    rows.write.parquet(f"{folder}/out")
    print(spark.read.parquet(f"{folder}/out").where("id > 1").orderBy("id").toPandas())
    stream = spark.readStream.schema("id BIGINT, name STRING").csv(f"{folder}/streamed")
    stream.writeStream.trigger(availableNow=True).foreachBatch(
        lambda frame, _: frame.count()
    ).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == [_RUN]:
        _use_spark(Path(sys.argv[2]))
    else:
        archive(Path(sys.argv[1]).absolute())
