"""The world of tests of Streaming sinks: a source, the shard of a sink, and drivers that tests end where they choose."""

import io
import json
import threading
from collections import Counter
from dataclasses import replace

from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_spark.report import Log
from persist_spark.spec import Envelope, EnvelopeType, Input, SinkSpec, Stream, Write
from persist_spark.streaming.position import decode_position
from persist_spark.streaming.stream import run_stream

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")
SQL = "select key.id as id, val.n as n from input"
#: 10 rows a batch with ids from 0, always the same ones.
RATE = Input(
    format="rate-micro-batch",
    options={"rowsPerBatch": "10", "numPartitions": "1"},
    sql="select value as id, value % 7 as n from input",
)
SINK = "ns/s"


class Died(Exception):
    """The driver is gone. Its checkpoint is, too."""


class Acts(Log):
    """A log that acts when an event is logged for the n-th time."""

    def __init__(self, act=None, event="", count=1):
        super().__init__(io.StringIO(), SystemEnv())
        self.act, self.at, self.left = act, event, count
        self.names = []

    def event(self, event, **fields):
        super().event(event, **fields)
        self.names.append(event)
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
            write=Write(parallelism=1),
            stream=Stream(is_bounded=True),
        )
        return replace(spec, **changes)

    def run(self, log=None, stop=None, **changes):
        """One driver, from its start to its end."""
        log = log or Acts()
        return run_stream(self.spark, self.spec(**changes), stop=stop or threading.Event(), env=SystemEnv(), log=log)

    def run_rate(self, log=None, **changes):
        """A driver over RATE, without a pause between batches. `log` must end it."""
        return self.run(log, **{"input": RATE, "stream": Stream(commit_interval_s=0), **changes})

    def until(self, batches, **changes):
        """Runs a driver over RATE and stops it after so many batches, which it commits."""
        stop = threading.Event()
        return self.run_rate(Acts(stop.set, "batch", batches), stop=stop, **changes)

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
