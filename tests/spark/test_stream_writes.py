"""`df.writeStream.format("persist")`: each batch once, also when Spark repeats it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.model.ownership import Owner
from persist_spark.datasource import register
from pyspark.errors import StreamingQueryException

pytestmark = pytest.mark.spark

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")


class Stream:
    """A folder of files, a query over it, and the shard that the query writes."""

    def __init__(self, folder):
        self.folder, self.files, self.checkpoint = folder, folder / "files", folder / "checkpoint"
        self.files.mkdir()
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client, self.id = PersistClient.open(self.location), ShardId.new()
        self.client.open_writer(self.id, SCHEMA, purpose="test").expire()
        self.given = {"shard": str(self.id), "blob": self.location.blob, "consensus": self.location.consensus}

    def drop(self, *numbers):
        """One file for each number, with the rows (number, 0), (number, 1)."""
        for number in numbers:
            path = self.files / f".{number}"
            path.write_text("\n".join(json.dumps({"id": number, "n": n}) for n in (0, 1)))
            path.rename(self.files / f"{number:04}.json")

    def parts(self):
        """The blobs with rows."""
        return list((self.folder / "blobs" / str(self.id)).glob("n*/*"))

    def source(self, spark, files=1):
        reader = spark.readStream.format("json").schema("id BIGINT, n BIGINT").option("maxFilesPerTrigger", files)
        return reader.load(str(self.files))

    def run(self, frame, mode="append", **options):
        """Writes everything that is there, and returns the numbers of the batches that had rows."""
        writer = frame.writeStream.format("persist").options(**{**self.given, **options}).outputMode(mode)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
        return [progress.batchId for progress in query.recentProgress if progress.numInputRows]

    def rows(self):
        upper = self.client.recent_upper(self.id).time
        if upper == 0:
            return Counter()
        with self.client.open_leased_reader(self.id, purpose="test") as reader, reader.snapshot(A(upper - 1)) as found:
            rows = found.to_table().to_pylist()
        return Counter({(each["key"]["id"], each["val"]["n"]): each["diff"] for each in rows})

    def uncommit(self, batch):
        """The checkpoint as a driver leaves it that dies after the append of `batch` and before Spark notes its end."""
        for name in (str(batch), f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)


def both(*numbers):
    return Counter((number, n) for number in numbers for n in (0, 1))


@pytest.fixture(scope="module")
def spark(local_spark):
    register(local_spark)
    return local_spark


@pytest.fixture
def stream(tmp_path):
    made = Stream(tmp_path)
    yield made
    made.client.close()


def test_each_batch_is_written_once_also_when_spark_repeats_it(spark, stream):
    stream.drop(1, 2, 3)
    assert stream.run(stream.source(spark)) == [0, 1, 2]
    assert stream.rows() == both(1, 2, 3)
    upper = stream.client.recent_upper(stream.id)
    stream.uncommit(2)
    assert stream.run(stream.source(spark)) == [2]
    assert stream.rows() == both(1, 2, 3)
    assert stream.client.recent_upper(stream.id) == upper
    stream.drop(4, 5)
    stream.uncommit(2)
    assert stream.run(stream.source(spark, files=5)) == [2, 3]
    assert stream.rows() == both(1, 2, 3, 4, 5)


def test_a_run_without_new_rows_changes_nothing(spark, stream):
    stream.drop(1)
    stream.run(stream.source(spark))
    upper = stream.client.recent_upper(stream.id)
    assert stream.run(stream.source(spark)) == []
    assert stream.client.recent_upper(stream.id) == upper


def test_an_old_copy_of_a_checkpoint_is_refused(spark, stream, tmp_path):
    stream.drop(1)
    stream.run(stream.source(spark))
    shutil.copytree(stream.checkpoint, tmp_path / "copy")
    stream.drop(2, 3)
    stream.run(stream.source(spark))
    shutil.rmtree(stream.checkpoint)
    (tmp_path / "copy").rename(stream.checkpoint)
    stream.drop(4)
    with pytest.raises(StreamingQueryException, match=r"has batch 2 of query .* but the checkpoint repeats batch 1"):
        stream.run(stream.source(spark, files=3))
    assert stream.rows() == both(1, 2, 3)


@pytest.fixture
def elsewhere(stream, tmp_path):
    """The same files and the same checkpoint, and another shard."""
    (tmp_path / "other").mkdir()
    made = Stream(tmp_path / "other")
    made.files, made.checkpoint = stream.files, stream.checkpoint
    yield made
    made.client.close()


@pytest.mark.parametrize("mode", ["append", "complete"])
def test_a_checkpoint_of_another_shard_is_refused_by_name(either_spark, stream, elsewhere, mode):
    """The shard lacks the rows of the batches before, so it must not get later ones. The query goes on where it was."""
    register(either_spark)

    def frame():
        rows = stream.source(either_spark).selectExpr("explode(sequence(1, 3000)) AS more", "id", "n")
        grouped = rows.groupBy("id", "n", "more").count() if mode == "complete" else rows
        return grouped.selectExpr("id * 3000 + more AS id", "cast(hash(id, n, more) as bigint) AS n")

    stream.drop(1)
    assert stream.run(frame(), mode) == [0]
    rows = stream.rows()
    stream.drop(2)
    refusal = (
        rf"checkpoint of query .* in .*{stream.checkpoint} continues with batch 1, "
        rf"but shard {elsewhere.id} has no .*new checkpointLoc"
    )
    for _ in range(2):
        with pytest.raises(Exception, match=refusal):
            elsewhere.run(frame(), mode)
    assert elsewhere.rows() == Counter()
    assert elsewhere.parts() == [], "what the tasks staged is gone"
    assert stream.run(frame(), mode) == [1]
    assert stream.rows() > rows
    elsewhere.checkpoint = elsewhere.folder / "checkpoint"
    elsewhere.run(frame(), mode)
    assert elsewhere.rows() == stream.rows(), "a checkpoint of its own begins at the beginning"
    assert elsewhere.parts()


@pytest.mark.parametrize("condition", ["id > 3", "false"])
def test_batches_without_rows_are_no_reason_to_refuse(spark, stream, condition):
    """The first batches of a query have no rows, of `false` not even a partition. The query has changed when the last one is repeated."""
    for number in range(3):
        stream.drop(number)
        stream.run(stream.source(spark).where(condition))
    assert stream.rows() == Counter()
    stream.uncommit(2)
    stream.drop(5)
    assert stream.run(stream.source(spark)) == [2, 3]
    assert stream.rows() == both(2, 5)


def test_a_fresh_checkpoint_over_a_shard_with_rows_and_a_renamed_one(spark, stream):
    """A query is known by its id in the shard, whatever the shard is called."""
    with stream.client.open_writer(stream.id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([(((9,), (9,)), 0, 1)], expected_upper=A(0), new_upper=A(1))
    first, second = (Owner("tests", "demo", name) for name in ("first", "second"))
    stream.client.adopt(first, stream.id, stream.id, take_over=True)
    stream.drop(0)
    stream.run(stream.source(spark), shard="demo/first")
    stream.client.rename(stream.id, old=first, new=second)
    stream.drop(1)
    stream.run(stream.source(spark), shard="demo/second")
    assert stream.rows() == both(0, 1) + Counter([(9, 9)])


def test_complete_output_keeps_the_shard_equal_to_the_result(spark, stream):
    for numbers in ((1, 2), (3, 4)):
        stream.drop(*numbers)
        counts = stream.source(spark, files=2).groupBy("n").count().selectExpr("n AS id", "count AS n")
        stream.run(counts, "complete")
        assert stream.rows() == Counter({(0, numbers[-1]): 1, (1, numbers[-1]): 1})


def test_wrong_columns_and_options_stop_the_query_with_a_reason(spark, stream):
    stream.drop(1)
    with pytest.raises(StreamingQueryException, match="not in the shard's schema: more"):
        stream.run(stream.source(spark).selectExpr("*", "1 AS more"))
    with pytest.raises(Exception, match="option allow_empty: needs mode overwrite"):
        stream.run(stream.source(spark), allow_empty="true")
    assert stream.rows() == Counter()


PROGRAM = """
    import sys
    from pyspark.sql import SparkSession
    from persist_spark.datasource import register
    files, checkpoint, shard, blob, consensus = sys.argv[1:]
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    source = spark.readStream.format("json").schema("id BIGINT, n BIGINT").option("maxFilesPerTrigger", 1).load(files)
    writer = source.writeStream.format("persist").options(shard=shard, blob=blob, consensus=consensus)
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
"""


@pytest.mark.timeout(900)  # a JVM starts, possibly on a busy machine
def test_a_killed_driver_loses_and_doubles_nothing(spark, stream, tmp_path):
    """Kills the driver, Python and Java, after the shard shows the given number of files; then another driver ends the work."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    stream.drop(*range(8))
    arguments = [sys.executable, str(program), str(stream.files), str(stream.checkpoint), *stream.given.values()]
    # Configured as the session `spark`.
    driver = subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait = stream.client.machine(stream.id).wait
        assert wait(lambda: driver.poll() is not None or len(stream.rows()) >= 6 or None, 600)
        assert driver.poll() is None
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert stream.run(stream.source(spark))
    assert stream.rows() == both(*range(8))
