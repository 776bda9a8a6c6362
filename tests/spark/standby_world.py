"""A shard, the driver of a stream that writes it (blue), and a driver on standby (green), in threads of one process."""

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

SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")
SINK = "ns/s"
APPEND, UPSERT = Envelope(type=EnvelopeType.APPEND), Envelope(type=EnvelopeType.UPSERT, order_column="o")
#: Ten rows a batch with numbers from 0, always the same ones.
APPENDED = "select value as id, value % 7 as n from input"
UPSERTED = "select value % 4 as id, value as n, value as o from input"
WAIT_S = 120


class Heard(Log):
    """A log whose events a test waits for, and on which it acts, in the thread that logs."""

    def __init__(self):
        super().__init__(io.StringIO(), SystemEnv())
        self.heard, self.seen, self.acts = threading.Condition(), [], {}

    def event(self, event, **fields):
        super().event(event, **fields)
        with self.heard:
            self.seen.append(
                {"event": event, "at_ms": SystemEnv().now_ms(), **json.loads(json.dumps(fields, default=str))}
            )
            self.heard.notify_all()
        act = self.acts.pop(event, None)
        if act is not None:
            act()

    def events(self, name):
        with self.heard:
            return [one for one in self.seen if one["event"] == name]

    def until(self, name, count=1, **fields):
        """Waits for an event that has these fields, for the count-th time. Returns it."""

        def found():
            return [one for one in self.seen if one["event"] == name and fields.items() <= one.items()]

        with self.heard:
            assert self.heard.wait_for(
                lambda: len(found()) >= count or "end" in {e["event"] for e in self.seen}, WAIT_S
            )
            assert len(found()) >= count, self.seen[-5:]
            return found()[count - 1]


class Driver:
    """One driver of the stream in a thread."""

    def __init__(self, world, run, spec):
        self.log, self.stop, self.promoted = Heard(), threading.Event(), threading.Event()
        self.report = self.error = None
        self.spec = replace(spec, run_id=run)
        self.thread = threading.Thread(target=self._run, args=(world.spark,), daemon=True)
        self.thread.start()

    def _run(self, spark):
        try:
            self.report = run_stream(
                spark, self.spec, stop=self.stop, env=SystemEnv(), log=self.log, is_promoted=self.promoted.is_set
            )
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.log.event("end")

    def ended(self):
        """Waits for its end."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self

    def stopped(self):
        self.stop.set()
        return self.ended()


class StandbyWorld:
    def __init__(self, spark, folder):
        self.spark = spark
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.client = PersistClient.open(self.location, settings=Settings(retain_ms=None))
        self.shard, self.drivers = ShardId.new(), []
        self.client.initialise(self.shard, SCHEMA)

    def spec(self, sql=APPENDED, envelope=APPEND, **changes):
        rate = {"rowsPerBatch": "10", "numPartitions": "1"}
        spec = SinkSpec(
            sink_id=SINK,
            run_id="r",
            shard_id=self.shard,
            key_ddl="id BIGINT",
            value_ddl="n BIGINT",
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=Input(format="rate-micro-batch", options=rate, sql=sql),
            envelope=envelope,
            write=Write(parallelism=1),
            stream=Stream(commit_interval_s=1),
        )
        return replace(spec, **changes)

    def blue(self, **changes):
        """A driver that writes, after its first commits."""
        driver = self._started("r-1", self.spec(**changes))
        driver.log.until("batch", 2)
        return driver

    def green(self, **changes):
        """A driver on standby."""
        spec = self.spec(**changes)
        return self._started("r-2", replace(spec, stream=replace(spec.stream, stands_by=True)))

    def source(self):
        """Another shard, for a stream over its changes."""
        return Source(self)

    def _started(self, run, spec):
        self.drivers.append(Driver(self, run, spec))
        return self.drivers[-1]

    def rows(self):
        upper = self.client.recent_upper(self.shard).time
        with (
            self.client.open_leased_reader(self.shard, purpose="t") as reader,
            reader.snapshot(Antichain.of(upper - 1)) as found,
        ):
            rows = found.to_table().to_pylist()
        return Counter({(row["key"]["id"], row["val"]["n"]): row["diff"] for row in rows})

    def position(self):
        return decode_position(self.client.progress(self.shard, SINK).token, sink_id=SINK)

    def close(self):
        for driver in self.drivers:
            driver.stop.set()
        for driver in self.drivers:
            driver.thread.join(WAIT_S)
        self.client.close()


class Source:
    """A shard that a stream reads."""

    def __init__(self, world):
        self.client, self.shard = world.client, ShardId.new()
        self.client.initialise(self.shard, SCHEMA)
        options = {
            "shard": str(self.shard),
            "blob": world.location.blob,
            "consensus": world.location.consensus,
            "rows": "updates",
        }
        #: What the shard holds, by what was written.
        self.rows = Counter()
        self.input = Input(format="persist", options=options, is_shard=True)

    def write(self, *updates):
        """One append of updates, each a row and its diff."""
        with self.client.open_writer(self.shard, SCHEMA, purpose="test") as writer:
            lower = writer.fetch_recent_upper().time
            rows = [(((id_,), (n,)), lower, diff) for (id_, n), diff in updates]
            answer = writer.compare_and_append(
                rows, expected_upper=Antichain.of(lower), new_upper=Antichain.of(lower + 1)
            )
            assert isinstance(answer, Appended)
        for row, diff in updates:
            self.rows[row] += diff
        self.rows = Counter({row: diff for row, diff in self.rows.items() if diff})
