"""A Streaming sink: every row of its source once, wherever its drivers die."""

import io
import json
import os
import random
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, Incompatible
from persist_kit.depth import draws
from persist_spark.failures import classify
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, OnError, SinkSpec, Stream, Write
from persist_spark.streaming import batches, few_rows, stream
from persist_spark.streaming.position import NO_BATCH, Position, decode_position, encode_position
from persist_spark.streaming.stream import run_stream
from pyspark.errors import StreamingQueryException

pytestmark = [pytest.mark.spark, pytest.mark.slow]
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


@pytest.fixture
def world(local_spark, tmp_path):
    made = World(local_spark, tmp_path)
    yield made
    made.client.close()


def test_each_batch_is_committed_with_its_position_and_the_next_driver_goes_on(world):
    log, stop = Acts(), threading.Event()
    log.act, log.at, log.left = stop.set, "batch", 3
    report = world.run_rate(log, stop=stop)
    assert (report.batches, report.rows_read, report.updates_written, report.stopped) == (3, 30, 30, True)
    assert report.upper == world.client.recent_upper(world.shard).time
    assert [line["batch"] for line in log.events("batch")] == [0, 1, 2]
    first = world.position()
    assert (first.batch, first.run, first.source) == (2, "r-1", "rate-micro-batch")
    assert world.until(1, run="r-2").batches == 1
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(40))
    assert (world.position().query, world.position().run, world.position().batch) == (first.query, "r-2", 3)


@pytest.mark.parametrize("seed", range(draws(1)))
def test_drivers_that_die_lose_and_double_nothing(world, seed, monkeypatch):
    """Ten drivers in a row die: before their commit, between their commit and Spark's, or later. Only the shard outlives them. Each one
    stages its rows itself, or on executors.
    """
    dice, died = random.Random(seed), 0
    for _ in range(10):
        monkeypatch.setattr(few_rows, "FEW_ROWS", dice.choice([9, 10]))
        log = Acts(die, dice.choice(["minted", "staged", "appended", "batch"]), dice.choice([1, 1, 2]))
        with pytest.raises(Died):
            world.run_rate(log)
        died += 1
    report = world.until(2)
    assert (died, report.batches, report.stopped) == (10, 2, True)
    position = world.position()
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(10 * (position.batch + 1)))


def looks(monkeypatch):
    """The number of rows that each look of the driver shows from now on."""
    seen, look = [], few_rows._Look.at

    def looked(self, batch, limit):
        found = look(self, batch, limit)
        seen.append(found.num_rows)
        return found

    monkeypatch.setattr(few_rows._Look, "at", looked)
    return seen


def test_a_driver_stages_few_rows_itself_and_looks_again_after_a_batch_of_few(world, monkeypatch):
    """Batches of 10 rows, of which 1, 10 or 4 pass. Where 9 are few, the driver looks at a batch after each one that had few."""
    seen = looks(monkeypatch)
    monkeypatch.setattr(few_rows, "FEW_ROWS", 9)
    passes = "(value < 10 and value = 3) or (value between 10 and 29) or (value between 30 and 49 and value % 3 = 0)"
    world.until(5, input=replace(RATE, sql=f"{RATE.sql} where {passes}"))
    assert seen == [1, 10, 3]
    assert {id_ for id_, _ in world.rows()} == {3, *range(10, 30), *range(30, 50, 3)}


def test_one_look_shows_whether_a_batch_has_no_rows_few_or_many(world, monkeypatch):
    """Batches of 40 rows in 8 partitions, of which 1, none, none, 8, and 40 pass. A look brings at most 4 times the few, so it can tell from
    less than 5 rows alone that these are all: 8 are already too many, and after them there is no look.
    """
    seen, scheduler = looks(monkeypatch), world.spark.sparkContext._jsc.sc().dagScheduler()
    monkeypatch.setattr(few_rows, "FEW_ROWS", 9)
    before, counts = scheduler.numTotalJobs(), []
    log, stop = Acts(event="batch", count=5), threading.Event()
    log.act = stop.set
    noted, log.event = (
        log.event,
        lambda event, **fields: (
            counts.append(scheduler.numTotalJobs()) if event == "batch" else None,
            noted(event, **fields),
        ),
    )
    many = replace(RATE, options={"rowsPerBatch": "40", "numPartitions": "8"})
    passes = "value = 3 or value between 120 and 127 or value >= 160"
    world.run_rate(log, stop=stop, input=replace(many, sql=f"{RATE.sql} where {passes}"))
    assert seen == [1, 0, 0, 8]
    jobs = [after - first for first, after in pairwise([before, *counts])]
    assert jobs[:3] == [1, 1, 1], "jobs of batches that the driver stages, or has nothing to do with"
    tracker = world.spark.sparkContext.statusTracker()
    assert [len(tracker.getJobInfo(job).stageIds) for job in range(before, before + 3)] == [1, 1, 1], "no shuffle"
    assert {id_ for id_, _ in world.rows()} == {3, *range(120, 128), *range(160, 200)}


def test_an_error_of_the_rows_is_that_of_the_look(world):
    """Also after a batch without rows."""
    sql = "select value as id, bigint(int(value << if(value < 20, 0, 40))) as n from input where value < 10 or value >= 20"
    with pytest.raises(Exception, match="CAST_OVERFLOW"):
        world.run_rate(input=replace(RATE, sql=sql))
    assert {id_ for id_, _ in world.rows()} == set(range(10))


def test_the_second_driver_of_a_sink_fences_the_first(world):
    log = Acts(lambda: world.until(2, run="r-2"), "staged")
    with pytest.raises(Fenced, match=r"driver [0-9a-f]+ of run r-2 \(its batch 1\) of sink ns/s appended to"):
        world.run_rate(log, run="r-1")
    assert world.position().run == "r-2"
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(20))


def test_a_stop_lets_the_batch_in_flight_be_committed(world):
    stop = threading.Event()
    report = world.run_rate(Acts(stop.set, "minted", 2), stop=stop)
    assert (report.stopped, report.batches) == (True, 2)
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(20))
    assert report.to_json(duration_ms=0)["outcome"] == "Stopped"


def test_a_batch_that_takes_too_long_to_stop_is_left_to_the_next_driver(world):
    class Holding(Acts):
        """Holds the second batch until the driver has given it up."""

        def __init__(self):
            super().__init__(self.hold, "minted", 2)
            self.stop, self.given_up = threading.Event(), threading.Event()

        def hold(self):
            self.stop.set()
            assert self.given_up.wait(60)

        def event(self, event, **fields):
            super().event(event, **fields)
            if event == "not_committed":
                self.given_up.set()

    log = Holding()
    report = world.run_rate(log, stop=log.stop, stream=Stream(commit_interval_s=0, stop_s=0))
    assert report.stopped
    world.until(1)
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(10 * (world.position().batch + 1)))


def test_batches_without_rows_commit_the_first_position_and_the_last(world):
    """No row passes the filter. The first batch fixes where the stream began. The end commits the rest, and the upper stays."""
    log, stop = Acts(), threading.Event()
    log.act, log.at, log.left = stop.set, "batch", 3
    none = replace(RATE, sql="select value as id, value as n from input where value < 0")
    report = world.run_rate(log, stop=stop, input=none)
    assert (report.batches, report.updates_written, report.upper) == (3, 0, None)
    assert [line["batch"] for line in log.events("position")] == [NO_BATCH, 0, 2]
    assert world.position().batch == 2
    assert world.client.recent_upper(world.shard) == A(0)
    world.until(1)
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(30, 40))


def test_the_position_of_batches_without_rows_is_committed_after_a_while(world, monkeypatch):
    monkeypatch.setattr(batches, "IDLE_COMMIT_S", 0.0)
    stop, log, reasons = threading.Event(), Acts(), []

    def stopping(name, **fields):
        Acts.event(log, name, **fields)
        if log.names.count("position") == 3 or log.names.count("batch") == 30:
            reasons.append(name)
            stop.set()

    monkeypatch.setattr(log, "event", stopping)
    none = replace(RATE, sql="select value as id, value as n from input where value < 0")
    world.run_rate(log, stop=stop, input=none, stream=Stream(commit_interval_s=1))
    assert reasons[0] == "position", "the start, the first batch, and another one while the stream goes on"


def test_a_source_that_begins_with_now_chooses_once(world):
    """rate begins with the time of its start, which Spark keeps in sources/0/0. A driver that dies before its first batch has stored it."""
    rate = Input(format="rate", options={"rowsPerSecond": "100"}, sql="select value as id, 0 as n from input")
    with pytest.raises(Died):
        world.run_rate(Acts(die, "minted", 1), input=rate)
    began = world.position().logs if world.progress() else None
    stop = threading.Event()
    world.run_rate(Acts(stop.set, "batch", 2), stop=stop, input=rate)
    assert set(world.position().logs) == {"0/0"}
    assert began in (None, world.position().logs)
    rows = world.rows()
    assert rows == Counter((id_, 0) for id_ in range(len(rows)))


def test_rows_with_times_of_their_own(world):
    timed = replace(RATE, sql="select value as id, 0 as n, 1000 + value as t from input")
    world.until(2, input=timed, envelope=Envelope(type=EnvelopeType.APPEND, timestamp_column="t"))
    assert world.client.recent_upper(world.shard) == A(1020)
    assert sum(world.rows().values()) == 20


REFUSED = {
    "count": (RATE, "select count(*) as id, 0 as n from input", "Aggregate keeps a state"),
    "distinct": (RATE, "select distinct value as id, 0 as n from input", "Aggregate keeps a state"),
    "limit": (RATE, "select value as id, 0 as n from input limit 3", "Limit keeps a state"),
    "join": (RATE, "select a.value as id, 0 as n from input a join input b on a.value = b.value", "Join keeps a state"),
    "in": (RATE, "select value as id, 0 as n from input where value in (select value from input)", "not allowed in"),
    "files": (Input(format="json", schema="id BIGINT, n BIGINT", options={"latestFirst": "true"}), None, "latestFirst"),
    "no schema": (Input(format="json"), None, "input.format: "),
    "format": (Input(format="nonsense"), None, "input.format: "),
    "columns": (RATE, "select value as id from input", "n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_keep_its_promise_for_is_refused_and_nothing_is_written(world, tmp_path, name):
    source, sql, message = REFUSED[name]
    options = {**source.options, **({"path": str(tmp_path)} if source.format == "json" else {})}
    with pytest.raises(ConfigurationError, match=message):
        world.run(input=replace(source, sql=sql, options=options))
    assert world.progress() is None


def test_joins_with_tables_and_unions_are_streams(world):
    sql = (
        "with c as (select value from input) select c.value as id, r.id as n from c join range(3) r on c.value = r.id "
        "union all select value, 9 from c where value >= 8"
    )
    world.until(1, input=replace(RATE, sql=sql))
    assert set(world.rows()) == {(0, 0), (1, 1), (2, 2), (8, 9), (9, 9)}


def test_a_stored_position_that_does_not_fit_is_refused_and_stays(world):
    world.write(1)
    stored = Position(source=f"persist {world.shard}", query="q", batch=NO_BATCH, run="r-1", driver="d", offsets=None)
    newer = encode_position(stored).replace(b'"format":1', b'"format":2')
    for token, error, message in [
        (b"uid-7", ConfigurationError, "in runs over a batch source, the last one uid-7"),
        (newer, Incompatible, "has format 2, and this release reads format 1"),
        (encode_position(stored), ConfigurationError, f"has read persist {world.shard} up to its batch -1"),
    ]:
        world.store(token)
        with pytest.raises(error, match=message):
            world.run()
        assert world.progress().token == token
    assert world.rows() == Counter()


def test_the_changes_of_another_shard_are_a_source(world):
    world.write(1, 2, 3)
    log = Acts()
    report = world.run(log)
    assert world.rows() == both(1, 2, 3)
    assert (report.batches, report.rows_read, report.updates_written, report.stopped) == (3, 6, 6, False)
    assert [line["batch"] for line in log.events("batch")] == [0, 1, 2]
    assert (world.position().batch, world.position().source) == (2, f"persist {world.source}")
    world.write(4)
    assert world.run().batches == 1
    assert world.rows() == both(1, 2, 3, 4)


def test_upserts_of_a_stream_leave_the_last_value_of_each_key(world):
    rows = replace(RATE, sql="select value % 5 as id, value as n, value >= 28 as gone from input")
    envelope = Envelope(type=EnvelopeType.UPSERT, order_column="n", delete_column="gone")
    with pytest.raises(ConfigurationError, match="gone"):
        world.run_rate(input=rows, envelope=Envelope(type=EnvelopeType.UPSERT, order_column="n"))
    world.until(2, input=rows, envelope=envelope)
    assert world.rows() == Counter({(number % 5, number): 1 for number in range(15, 20)})
    world.until(1, input=rows, envelope=envelope)
    assert world.rows() == Counter({(0, 25): 1, (1, 26): 1, (2, 27): 1})


def test_change_events_of_a_stream(world):
    row = "named_struct('id', value % 5, 'n', value)"
    sql = f"select if(value = 14, {row}, null) as before, if(value = 14, null, {row}) as after, if(value = 14, 'd', 'c') as op, value as ts_ms from input"
    world.until(2, input=replace(RATE, sql=sql), envelope=Envelope(type=EnvelopeType.DEBEZIUM))
    assert world.rows() == Counter({(number % 5, number): 1 for number in range(15, 20)})
    sql = sql.replace("value = 14", "value % 10 = 9")
    world.until(1, input=replace(RATE, sql=sql), envelope=Envelope(type=EnvelopeType.DEBEZIUM))
    assert world.rows() == Counter({(number % 5, number): 1 for number in range(25, 29)})


@pytest.mark.parametrize("sql", [None, "select id + 0 as id, n from input where n < 100"])
@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT])
def test_bad_records_of_a_stream_are_errors_once_although_its_drivers_die(world, tmp_path, kind, sql):
    folder, dice = tmp_path / "in", random.Random(f"{kind} {sql}")
    folder.mkdir()
    schema = Schema.from_ddl("id BIGINT, err STRING", "n BIGINT")
    shard = ShardId.new()
    world.client.initialise(shard, schema)
    input_ = Input(
        format="json",
        schema="id BIGINT, n BIGINT",
        options={"path": str(folder), "maxFilesPerTrigger": "1"},
        sql=sql,
        keeps_malformed=True,
    )
    to = {"shard_id": shard, "key_ddl": schema.key_ddl, "value_ddl": schema.val_ddl, "input": input_}
    to["envelope"] = Envelope(type=kind, on_error=OnError.COLLECT)
    for numbers in (range(3), range(3, 5)):
        for number in numbers:
            (folder / f"{number}.json").write_text(
                f'{{"id": {number}, "n": 1}}\n{{"id": {number}, "n": "x{number}"}}\n'
            )
        before = "staged" if kind is EnvelopeType.APPEND else "decided"
        with pytest.raises(Died):
            world.run(Acts(die, dice.choice([before, "appended"]), 2), **to)
    log = Acts()
    report = world.run(log, **to)
    assert report.errors == sum(line["errors"] for line in log.events("batch")) > 0
    upper = world.client.recent_upper(shard).time
    with world.client.open_leased_reader(shard, purpose="t") as reader, reader.snapshot(A(upper - 1)) as found:
        rows = found.to_table().to_pylist()
    assert {row["diff"] for row in rows} == {1}
    assert sorted(row["key"]["id"] for row in rows if row["key"]["err"] is None) == list(range(5))
    errors = sorted(row["key"]["err"] for row in rows if row["key"]["err"])
    assert [f'"x{number}"' in error and f"/{number}.json" in error for number, error in enumerate(errors)] == [True] * 5


def test_a_folder_of_files_is_read_once_although_its_drivers_die(world, tmp_path):
    """More files than Spark lists before it compacts its list, over several drivers that share nothing but the shard."""
    folder, dice = tmp_path / "in", random.Random(5)
    folder.mkdir()
    options = {"path": str(folder), "maxFilesPerTrigger": "1"}
    source = Input(format="json", schema="id BIGINT, n BIGINT", options=options)
    for numbers in (range(6), range(6, 14), range(14, 16)):
        for number in numbers:
            (folder / f"{number:02}.json").write_text(json.dumps({"id": number, "n": 0}))
        log = Acts(die, dice.choice(["staged", "appended"]), 2)
        with pytest.raises(Died):
            world.run(log, input=source)
    world.run(input=source)
    assert world.rows() == Counter((number, 0) for number in range(16))
    (folder / "99.json").write_text(json.dumps({"id": 99, "n": 0}))
    assert world.run(input=source).updates_written == 1


def test_the_source_keeps_the_files_of_a_batch_that_failed(world, tmp_path, monkeypatch):
    """Spark deletes files of batches that it takes for committed."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(5):
        value = 1 << 40 if number == 1 else number
        (folder / f"{number}.json").write_text(json.dumps({"id": number, "n": value}))
        os.utime(folder / f"{number}.json", (1_700_000_000 + number,) * 2)
    options = {"path": str(folder), "maxFilesPerTrigger": "1", "cleanSource": "delete"}
    source = Input(
        format="json", schema="id BIGINT, n BIGINT", options=options, sql="select id, bigint(int(n)) as n from input"
    )

    def let_it_run_on(_, query):
        with suppress(StreamingQueryException):
            query.awaitTermination(60)

    monkeypatch.setattr(stream._Driver, "_stop", let_it_run_on)
    with pytest.raises(Exception, match="CAST_OVERFLOW"):
        world.run(input=source)
    assert world.rows() == Counter([(0, 0)])
    assert {path.name for path in folder.iterdir()} >= {"1.json", "2.json", "3.json", "4.json"}


WIDER = Schema.from_ddl("id BIGINT", "n BIGINT, more STRING")


@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT])
def test_the_shard_evolves_while_a_stream_writes_it(world, kind):
    """An Append goes on, and its rows lack the new field. An Upsert would compare values that it does not see, so it stops by name. The next
    driver needs the new schema either way.
    """
    envelope = Envelope(type=kind)
    stop, log = threading.Event(), Acts(lambda: world.client.evolve_schema(world.shard, WIDER), "batch")

    def heard(name, **fields):
        Acts.event(log, name, **fields)
        if log.names.count("batch") == 3:
            stop.set()

    log.event, upper = heard, None
    if kind is EnvelopeType.APPEND:
        assert world.run_rate(log, stop=stop, envelope=envelope).batches >= 3
    else:
        with pytest.raises(ConfigurationError, match=r"schema: .*evolved"):
            world.run_rate(log, stop=stop, envelope=envelope)
        # The next batch may be committed before the driver reads the shard again: no row has the new field yet.
        assert world.position().batch in (0, 1)
    assert world.rows() == Counter((id_, id_ % 7) for id_ in range(10 * (world.position().batch + 1)))
    upper = world.client.recent_upper(world.shard)
    with pytest.raises(ConfigurationError, match="schema: differs from that of shard"):
        world.until(1, run="r-2", envelope=envelope)
    assert world.client.recent_upper(world.shard) == upper
    wide = "select value as id, value % 7 as n, 'x' as more from input"
    input_ = replace(RATE, sql=wide)
    world.until(1, run="r-3", envelope=envelope, value_ddl="n BIGINT, more STRING", input=input_)
    assert set(world.rows()) == {(id_, id_ % 7) for id_ in range(10 * (world.position().batch + 1))}


def test_a_file_of_another_schema_stops_a_stream_by_its_name_and_the_next_driver_goes_on_there(world, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()

    def drop(number, n):
        pq.write_table(pa.table({"id": [number], "n": [n]}), folder / f".{number}")
        os.utime(folder / f".{number}", (1_700_000_000 + number,) * 2)
        (folder / f".{number}").rename(folder / f"{number}.parquet")

    for number, n in enumerate([0, 1, "two", 3]):
        drop(number, n)
    source = Input(
        format="parquet", schema="id BIGINT, n BIGINT", options={"path": str(folder), "maxFilesPerTrigger": "1"}
    )
    for _ in range(2):
        with pytest.raises(Exception, match="MISMATCH") as raised:
            world.run(input=source)
        failure = classify(raised.value)
        assert (failure.failure_class, "2.parquet" in failure.message) == ("Configuration", True)
        assert world.rows() == Counter([(0, 0), (1, 1)])
    drop(2, 2)
    assert world.run(input=source).batches == 2
    assert world.rows() == Counter((number, number) for number in range(4))
