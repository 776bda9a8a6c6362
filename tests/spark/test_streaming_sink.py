"""A Streaming sink: every row of its source once, wherever its drivers die. The source is another shard, which also is the oracle."""

import io
import json
import os
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, Incompatible
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, SinkSpec, Stream
from persist_spark.streaming.position import NO_BATCH, Position, decode_position, encode_position
from persist_spark.streaming.stream import run_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")
SQL = "select key.id as id, val.n as n from input where val.n >= 0"
SINK = "ns/s"
DEPTH = int(os.environ.get("PERSIST_DEPTH", "1"))


class Died(Exception):
    """The driver is gone. Its checkpoint is, too."""


class Acts(Log):
    """A log that acts when an event is logged for the n-th time."""

    def __init__(self, act=None, event="", count=1):
        super().__init__(io.StringIO(), SystemEnv())
        self.act, self.at, self.left = act, event, count

    def event(self, event, **fields):
        super().event(event, **fields)
        if event == self.at:
            self.left -= 1
            if self.left == 0 and self.act is not None:
                self.act()

    def events(self, name):
        lines = (json.loads(line) for line in self._stream.getvalue().splitlines())
        return [line for line in lines if line["event"] == name]


def die():
    raise Died


class World:
    """A source shard, the shard of a sink, and the drivers of the sink."""

    def __init__(self, spark, folder):
        self.spark = spark
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client = PersistClient.open(self.location, settings=Settings(retain_ms=None))
        self.source, self.shard, self.upper = ShardId.new(), ShardId.new(), 0
        for shard in (self.source, self.shard):
            self.client.initialise(shard, SCHEMA)

    def write(self, *numbers, n=0):
        """One append to the source for each number, with the rows (number, n) and (number, n + 1)."""
        with self.client.open_writer(self.source, SCHEMA, purpose="test") as writer:
            for number in numbers:
                lower, self.upper = self.upper, self.upper + 10
                updates = [(((number,), (n + i,)), lower, 1) for i in (0, 1)]
                answer = writer.compare_and_append(updates, expected_upper=A(lower), new_upper=A(self.upper))
                assert isinstance(answer, Appended)

    def spec(self, run="r-1", **changes):
        options = {"shard": str(self.source), "rows": "updates", "startingTime": "0", "maxBytesPerTrigger": "1"}
        spec = SinkSpec(
            sink_id=SINK,
            run_id=run,
            shard_id=self.shard,
            key_ddl="id BIGINT",
            value_ddl="n BIGINT",
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=Input(format="persist", options=options, sql=SQL),
            envelope=Envelope(type=EnvelopeType.APPEND),
            stream=Stream(commit_interval_s=1, is_bounded=True),
        )
        return replace(spec, **changes)

    def run(self, log=None, stop=None, **changes):
        """One driver, from its start to its end."""
        log = log or Acts()
        return run_stream(
            self.spark, self.spec(**changes), stop=stop or threading.Event(), env=SystemEnv(), log=log
        )

    def rows(self):
        upper = self.client.recent_upper(self.shard).time
        if upper == 0:
            return Counter()
        with self.client.open_leased_reader(self.shard, purpose="t") as reader, reader.snapshot(A(upper - 1)) as found:
            rows = found.to_table().to_pylist()
        return Counter({(row["key"]["id"], row["val"]["n"]): row["diff"] for row in rows})

    def progress(self):
        return self.client.progress(self.shard, SINK)

    def position(self):
        return decode_position(self.progress().token, sink_id=SINK)

    def store(self, token):
        """Another driver of the sink commits `token` without rows."""
        with self.client.open_writer(self.shard, SCHEMA, purpose="test") as writer:
            upper, stored = writer.fetch_recent_upper(), self.progress()
            answer = writer.compare_and_append_batch(
                [],
                expected_upper=upper,
                new_upper=upper,
                progress=(SINK, token),
                expected_progress=None if stored is None else stored.token,
            )
            assert isinstance(answer, Appended)


def both(*numbers):
    return Counter((number, n) for number in numbers for n in (0, 1))


@pytest.fixture
def world(local_spark, tmp_path):
    made = World(local_spark, tmp_path)
    yield made
    made.client.close()


def test_each_batch_is_committed_with_its_position_and_the_next_driver_goes_on(world):
    world.write(1, 2, 3)
    log = Acts()
    report = world.run(log)
    assert world.rows() == both(1, 2, 3)
    assert (report.batches, report.rows_read, report.updates_written, report.stopped) == (3, 6, 6, False)
    assert report.upper == world.client.recent_upper(world.shard).time
    assert [line["batch"] for line in log.events("batch")] == [0, 1, 2]
    first = world.position()
    assert (first.batch, first.run, first.source) == (2, "r-1", f"persist {world.source}")
    assert world.run().batches == 0
    world.write(4)
    log = Acts()
    assert world.run(log, run="r-2").batches == 1
    assert world.rows() == both(1, 2, 3, 4)
    assert [line["batch"] for line in log.events("batch")] == [3]
    assert (world.position().query, world.position().run) == (first.query, "r-2")
