"""A Streaming sink: every row of its source once, wherever its drivers die."""

import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from persist_engine import Schema
from persist_engine.base.errors import Fenced, Incompatible
from persist_kit.depth import draws
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Stream
from persist_spark.streaming import batches, few_rows
from persist_spark.streaming.position import NO_BATCH, Position, encode_position
from stream_world import RATE, A, Acts, Died, World, die

pytestmark = [pytest.mark.spark, pytest.mark.slow]


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


@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT])
def test_after_a_batch_without_rows_a_driver_asks_before_it_looks(world, monkeypatch, kind):
    """Batches of 10 rows, of which 1, none, none, none, 2, and none pass. Of what an Upsert looks at, one column is a text."""
    seen = looks(monkeypatch)
    passes = "value = 3 or value between 45 and 46"
    world.until(6, input=replace(RATE, sql=f"{RATE.sql} where {passes}"), envelope=Envelope(type=kind))
    assert seen == [1, 0, 2, 0]
    assert {id_ for id_, _ in world.rows()} == {3, 45, 46}
    assert world.position().batch == 5


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


def test_rows_with_times_of_their_own(world):
    timed = replace(RATE, sql="select value as id, 0 as n, 1000 + value as t from input")
    world.until(2, input=timed, envelope=Envelope(type=EnvelopeType.APPEND, timestamp_column="t"))
    assert world.client.recent_upper(world.shard) == A(1020)
    assert sum(world.rows().values()) == 20


def test_a_stored_position_that_does_not_fit_is_refused_and_stays(world):
    world.write(1)
    stored = Position(source=f"persist {world.shard}", query="q", batch=NO_BATCH, run="r-1", driver="d", offsets=None)
    newer = encode_position(stored).replace(b'"format":2', b'"format":3')
    for token, error, message in [
        (b"uid-7", ConfigurationError, "in runs over a batch source, the last one uid-7"),
        (newer, Incompatible, "has format 3, and this release reads format 2"),
        (encode_position(stored), ConfigurationError, f"has read persist {world.shard} up to its batch -1"),
    ]:
        world.store(token)
        with pytest.raises(error, match=message):
            world.run()
        assert world.progress().token == token
    assert world.rows() == Counter()


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
