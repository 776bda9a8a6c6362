"""`writeMode: ReadOnly` of a stream: it says of each batch what it would have written, and changes nothing."""

import io
import json
import os
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_spark.progress.live import Live
from persist_spark.report import Log
from persist_spark.spec import Envelope, EnvelopeType, Input, SinkSpec, Stream, Write, WriteMode
from persist_spark.streaming.stream import run_stream

pytestmark = pytest.mark.spark
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")


class World:
    """A shard that holds (1, 10) and (2, 20), and a folder of files, each of them a batch."""

    def __init__(self, spark, folder):
        self.spark, self.folder = spark, folder
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client, self.shard, self.files = PersistClient.open(self.location), ShardId.new(), 0
        (folder / "input").mkdir()
        with self.client.open_writer(self.shard, SCHEMA, purpose="test") as writer:
            rows = [(((key,), (key * 10,)), 0, 1) for key in (1, 2)]
            writer.compare_and_append(rows, expected_upper=0, new_upper=1)

    def file(self, *rows):
        self.files += 1
        path = self.folder / "input" / f"{self.files}.parquet"
        pq.write_table(pa.table({"id": [row[0] for row in rows], "n": [row[1] for row in rows]}), path)
        os.utime(path, (self.files, self.files))

    def run(self, write_mode=WriteMode.READ_ONLY):
        options = {"path": str(self.folder / "input"), "maxFilesPerTrigger": "1"}
        spec = SinkSpec(
            sink_id="ns/s", run_id="r-1", shard_id=self.shard, key_ddl="id BIGINT", value_ddl="n BIGINT",
            blob=self.location.blob, consensus=self.location.consensus,
            input=Input(format="parquet", options=options, schema="id BIGINT, n BIGINT"),
            envelope=Envelope(type=EnvelopeType.UPSERT), write=Write(parallelism=1), stream=Stream(is_bounded=True),
            write_mode=write_mode,
        )  # fmt: skip
        self.text, self.live = io.StringIO(), Live()
        log = Log(self.text, SystemEnv())
        log.listener = self.live.note
        return run_stream(self.spark, spec, stop=threading.Event(), env=SystemEnv(), log=log)

    def batches(self):
        lines = map(json.loads, self.text.getvalue().splitlines())
        return [(line["stage"], line["missing"], line["extra"]) for line in lines if line["event"] == "compared_batch"]

    def kept(self):
        state = self.client.inspect(self.shard)
        return self.client.recent_upper(self.shard), self.client.progress(self.shard, "ns/s"), len(state.readers)


@pytest.fixture
def world(local_spark, tmp_path):
    made = World(local_spark, tmp_path)
    yield made
    made.client.close()


def test_each_batch_is_compared_with_the_shard_and_nothing_is_written(world):
    world.file((1, 10), (2, 20))
    world.file((2, 21), (3, 30))
    before = world.kept()
    assert before == (Antichain.of(1), None, 0)
    for _ in range(2):  # no position is kept, so another driver finds the same
        report = world.run()
        assert (report.batches, report.missing, report.extra, report.updates_written) == (2, 2, 1, 0)
        assert world.batches() == [("Proven", 0, 0), ("Differs", 2, 1)]
        assert (
            json.loads(world.live.text()).items()
            >= {"stage": "Differs", "batches": 2, "missing": 2, "extra": 1, "compared": 4}.items()
        )
        assert (
            "compared batches: 2, rows missing in the shard: 2, rows too many: 1"
            in report.to_json(duration_ms=1)["message"]
        )
        assert world.kept() == before


def test_a_sink_that_wrote_before_goes_on_after_its_position_and_keeps_it(world):
    world.file((1, 11))
    assert world.run(WriteMode.READ_WRITE).updates_written == 2
    before = world.kept()
    world.file((1, 11), (2, 22))
    report = world.run()
    assert (report.batches, report.missing, report.extra) == (1, 1, 1)
    assert world.kept() == before
    assert world.run(WriteMode.READ_WRITE).updates_written == 2, "what it would have written"


def test_a_shard_without_a_write_lacks_everything(local_spark, world):
    world.shard = ShardId.new()
    world.client.initialise(world.shard, SCHEMA)
    world.file((1, 10), (2, 20))
    report = world.run()
    assert (report.batches, report.missing, report.extra, report.upper) == (1, 2, 0, 0)
