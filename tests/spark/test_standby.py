"""A stream on standby: it compares, takes over from the driver that writes, and no row is lost or doubled."""

import random
import threading
import uuid
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from persist_engine import Antichain, Appended
from persist_engine.base.errors import Fenced
from persist_kit.depth import draws
from persist_spark.envelopes.compared import Difference
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input
from persist_spark.streaming import batches, standby, stream
from persist_spark.streaming.interval import Commit, Interval
from persist_spark.streaming.position import Position
from persist_spark.streaming.standby import Judgement
from standby_world import APPEND, APPENDED, SCHEMA, UPSERT, UPSERTED, WAIT_S, StandbyWorld

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def world(local_spark, tmp_path, monkeypatch):
    start = stream._start

    def started(spec, source, progress, env):
        """Spark stops a query when the same process starts another one with its id. The drivers of a sink are processes."""
        found = start(spec, source, progress, env)
        return replace(found, query=str(uuid.UUID(bytes=env.random_bytes(16)))) if spec.stream.stands_by else found

    monkeypatch.setattr(stream, "_start", started)
    made = StandbyWorld(local_spark, tmp_path)
    yield made
    made.close()


def appended(world):
    """What the shard must hold after the batches of its position, each of ten rows."""
    return Counter((id_, id_ % 7) for id_ in range(10 * (world.position().batch + 1)))


def upserted(world):
    values = range(10 * (world.position().batch + 1))
    return Counter((id_, max(value for value in values if value % 4 == id_)) for id_ in range(4))


@pytest.mark.parametrize(("sql", "envelope", "held"), [(APPENDED, APPEND, appended), (UPSERTED, UPSERT, upserted)])
def test_an_equal_stream_takes_over_under_load_and_nothing_is_lost_or_doubled(world, sql, envelope, held):
    blue = world.blue(sql=sql, envelope=envelope)
    # Other SQL with the same rows.
    green = world.green(sql=f"select * from ({sql}) where true", envelope=envelope)
    proven = green.log.until("followed", stage="Proven")
    assert (proven["missing"], proven["extra"], proven["compared"] > 0) == (0, 0, True)
    assert world.position().run == "r-1"
    assert "minted" not in {one["event"] for one in green.log.seen}
    green.promoted.set()
    green.log.until("batch", 2)
    assert isinstance(blue.ended().error, Fenced)
    assert "of run r-2" in str(blue.error)
    green.stopped()
    gap_ms = green.log.events("batch")[0]["at_ms"] - blue.log.events("batch")[-1]["at_ms"]
    print(f"from the last batch of the former driver to the first one of the new one: {gap_ms} ms")
    assert gap_ms < 60_000  # some 2 s on a quiet machine
    assert (green.error, green.report.stopped, world.position().run) == (None, True, "r-2")
    assert world.rows() == held(world)


def test_other_sql_differs_by_so_many_rows_and_takes_over_all_the_same_when_it_is_told_to(world):
    """Of ten rows a batch, the green one writes two with another value and leaves two out."""
    world.blue()
    sql = "select value as id, if(value % 10 < 2, 100, value % 7) as n from input where value % 10 < 8"
    green = world.green(sql=sql)
    first = green.log.until("followed", stage="Differs")
    assert (first["missing"], first["extra"]) == (2, 4)  # of one batch: several together decide nothing
    again = green.log.until("followed", count=2, stage="Differs", is_decided=True)
    assert again["missing"] > first["missing"]
    assert not [one for one in green.log.events("followed") if one["stage"] == "Proven"]
    assert world.position().run == "r-1"
    green.promoted.set()
    taken = green.log.until("taken_over")["batch"]
    green.log.until("batch")
    green.stopped()
    before = {(value, value % 7) for value in range(10 * (taken + 1))}
    after = {
        (value, 100 if value % 10 < 2 else value % 7)
        for value in range(10 * (taken + 1), 10 * (world.position().batch + 1))
        if value % 10 < 8
    }
    assert world.rows() == Counter(before | after)


def test_an_upsert_that_leaves_keys_out_differs(world):
    world.blue(sql=UPSERTED, envelope=UPSERT)
    green = world.green(sql=f"{UPSERTED} where value % 4 <> 3", envelope=UPSERT)
    found = green.log.until("followed", stage="Differs")
    # The value that the key had, and the one that it got: two updates that this stream would not have written.
    assert found["missing"] > 0 or found["extra"] > 0
    green.stopped()
    assert green.report.to_json(duration_ms=0)["outcome"] == "Stopped"
    assert world.position().run == "r-1"


def test_a_commit_between_the_look_and_the_takeover_is_taken_along(world, monkeypatch):
    """The former driver commits after the new one has read the position, and before it commits its own."""
    blue, green = world.blue(), world.green()
    green.log.until("followed", stage="Proven")
    append, raced = standby.append_position, []

    def late(writer, spec, position, *, expected):
        if not raced:
            raced.append(blue.log.until("batch", len(blue.log.events("batch")) + 1))
        return append(writer, spec, position, expected=expected)

    monkeypatch.setattr(standby, "append_position", late)
    green.promoted.set()
    green.log.until("batch", 2)
    assert len(green.log.events("take_over_again")) == 1
    blue.ended()
    green.stopped()
    assert world.rows() == appended(world)


class Died(Exception):
    """The driver is gone."""


def _dying():
    raise Died


#: When a driver on standby dies: before its compare-and-set, between it and all else, or at an event of its first batch as the one that writes.
#: None: it lives.
_DEATHS = ["before", "after", "position", "staged", "appended", "batch", None]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(draws(1)))
@pytest.mark.parametrize(("sql", "envelope", "held"), [(APPENDED, APPEND, appended), (UPSERTED, UPSERT, upserted)])
def test_takeovers_there_and_back_that_die_at_any_step_lose_and_double_nothing(
    world, monkeypatch, seed, sql, envelope, held
):
    """In turn, drivers of two revisions take over from each other. The driver that writes is held within a batch meanwhile, or it is not."""
    dice, append, mode = random.Random(f"{seed} {envelope.type}"), standby.append_position, [None]
    deaths = dice.sample(_DEATHS[:-1], 3) + [None, dice.choice(_DEATHS), None]
    revisions = [{"sql": f"select * from ({sql}) where {each}", "envelope": envelope} for each in ("true", "1 = 1")]

    def appending(*given, **expected):
        if mode[0] == "before":
            raise Died
        answer = append(*given, **expected)
        if mode[0] == "after":
            raise Died
        return answer

    monkeypatch.setattr(standby, "append_position", appending)
    writes = world.blue(**revisions[0])
    for turn, death in enumerate(deaths, 1):
        spec = world.spec(**revisions[turn % 2])
        green = world._started(f"g-{turn}", replace(spec, stream=replace(spec.stream, stands_by=True)))
        if dice.random() < 0.5:
            green.log.until("followed", stage="Proven")
        mode[0] = death
        if death not in (None, "before", "after"):
            event = "decided" if death == "staged" and envelope is UPSERT else death
            green.log.acts[event] = _dying
        if dice.random() < 0.5:  # the takeover comes while a batch is in flight
            within = dice.choice(["decided"] if envelope is UPSERT else ["minted", "staged"])
            writes.log.acts[within] = partial(green.log.until, "taken_over" if death is None else "end")
        green.promoted.set()
        if death is None:
            green.log.until("batch")
        else:
            assert isinstance(green.ended().error, Died)
        if death == "before":
            writes.log.until("batch", len(writes.log.events("batch")) + 1)
            continue
        assert isinstance(writes.ended().error, Fenced)
        if death is not None:
            assert world.rows() == held(world), f"after turn {turn}, {death}"
            green = world._started(f"p-{turn}", spec)
            green.log.until("batch")
        writes = green
    assert writes.stopped().error is None
    assert world.rows() == held(world)


def test_a_stream_over_files_stands_by_and_reads_no_file_twice(world, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    files = iter(range(1000))

    def drop():
        number = next(files)
        (folder / f"tmp-{number}").write_text("".join(f'{{"id": {number * 10 + i}, "n": {i}}}\n' for i in range(10)))
        (folder / f"tmp-{number}").rename(folder / f"{number}.json")

    drop()
    source = Input(
        format="json", options={"path": str(folder), "pathGlobFilter": "*.json"}, schema="id BIGINT, n BIGINT"
    )
    blue = world._started("r-1", world.spec(input=source))
    blue.log.until("batch")
    green = world.green(input=source)
    green.log.until("standing_by")
    for count in range(2, 30):  # it may look for the first time after some of these commits
        drop()
        blue.log.until("batch", count)
        if len(green.log.events("followed")) > 1:
            break
    assert green.log.until("followed", count=2, stage="Proven")["missing"] == 0
    green.promoted.set()
    green.log.until("taken_over")
    drop()
    green.log.until("batch")
    green.stopped()
    assert world.rows() == Counter((number * 10 + i, i) for number in range(next(files)) for i in range(10))


def test_other_writers_of_the_shard_do_not_count_as_a_difference(world):
    world.blue()
    green = world.green()
    with world.client.open_writer(world.shard, SCHEMA, purpose="other") as writer:
        for number in range(3):
            green.log.until("followed", count=number + 1)
            upper = writer.fetch_recent_upper()
            while True:
                rows = [(((-1 - number,), (0,)), upper.time, 1)]
                answer = writer.compare_and_append(rows, expected_upper=upper, new_upper=Antichain.of(upper.time + 1))
                if isinstance(answer, Appended):
                    break
                upper = answer.current
    assert green.log.until("followed", count=5)["stage"] != "Differs"
    green.stopped()


def test_regression_another_writer_before_a_commit_without_rows_does_not_count_as_a_difference(
    world, tmp_path, monkeypatch
):
    """The other writer raises the upper after the standby's look, and then the stream commits a batch that has no rows."""
    monkeypatch.setattr(batches, "IDLE_COMMIT_S", 0.0)
    look, may_look = standby.Standby._look, threading.Event()
    may_look.set()

    def looking(self):
        assert may_look.wait(WAIT_S)
        return look(self)

    monkeypatch.setattr(standby.Standby, "_look", looking)
    folder = tmp_path / "in"
    folder.mkdir()
    options = {"path": str(folder), "maxFilesPerTrigger": "1"}
    source = Input(format="json", options=options, schema="id BIGINT, n BIGINT", sql="select * from input where id > 0")

    def drop(name, id_):
        (folder / f".{name}").write_text(f'{{"id": {id_}, "n": 0}}\n')
        (folder / f".{name}").rename(folder / f"{name}.json")

    drop("a", 1)
    blue = world._started("r-1", world.spec(input=source))
    blue.log.until("batch")
    green = world.green(input=source)
    green.log.until("standing_by")
    drop("b", 2)
    green.log.until("followed", stage="Proven")
    may_look.clear()
    with world.client.open_writer(world.shard, SCHEMA, purpose="other") as writer:
        upper = writer.fetch_recent_upper()
        rows = [(((-9,), (9,)), upper.time + 5, 1)]
        answer = writer.compare_and_append(rows, expected_upper=upper, new_upper=Antichain.of(upper.time + 6))
        assert isinstance(answer, Appended)
    drop("c", -1)
    blue.log.until("position", batch=2)
    may_look.set()
    assert green.log.until("followed", count=2)["stage"] == "Proven"
    green.stopped()


def test_a_batch_that_another_driver_has_taken_over_is_not_one_commit():
    """The bare commit of the driver that takes over hides the commit of the batch, which had rows."""
    at = Position(source="s", query="q", batch=3, run="r-1", driver="a", offsets="v1")
    spec = SimpleNamespace(envelope=APPEND)
    before, batch = Commit(at, 10), replace(at, batch=4)
    assert Interval.between(before, Commit(batch, 20), spec).after == 18
    assert Interval.between(before, Commit(replace(batch, has_rows=False), 20), spec).after == 19
    taken = Interval.between(before, Commit(replace(batch, driver="b", has_rows=False), 20), spec)
    assert (taken.after, taken.upto, taken.is_one_batch) == (9, 19, False)


def test_a_position_of_another_source_is_refused_before_anything_is_compared(world, tmp_path):
    world.blue()
    (tmp_path / "in").mkdir()
    source = Input(format="json", options={"path": str(tmp_path / "in")}, schema="id BIGINT, n BIGINT")
    green = world.green(input=source).ended()
    assert isinstance(green.error, ConfigurationError)
    assert "create another sink for another source" in str(green.error)
    assert world.position().run == "r-1"


def test_a_stream_without_a_position_is_taken_over_at_the_beginning(world):
    """No driver has committed: there is nothing to compare and nothing to fence."""
    green = world.green()
    green.log.until("standing_by")
    green.promoted.set()
    green.log.until("batch", 2)
    green.stopped()
    assert world.rows() == appended(world)


def test_a_stream_over_a_shard_stands_by(world):
    """The changes of another shard, with their diffs."""
    source = world.source()
    diff = Envelope(type=EnvelopeType.DIFF, diff_column="_diff")
    spec = {"input": source.input, "envelope": diff}
    source.write(((1, 0), 1), ((2, 0), 1))
    blue = world._started("r-1", world.spec(**spec))
    blue.log.until("batch")
    green = world.green(**spec)
    green.log.until("standing_by")
    source.write(((1, 0), -1), ((3, 0), 1))
    for count in range(2, 30):  # it may look for the first time after some of these commits
        blue.log.until("batch", count)
        if green.log.events("followed"):
            break
        source.write(((3, 0), 1), ((100 + count, 0), 1))
        source.write(((100 + count, 0), -1))
    proven = green.log.until("followed", stage="Proven")
    assert (proven["missing"], proven["extra"], proven["compared"] > 0) == (0, 0, True)
    green.promoted.set()
    green.log.until("taken_over")
    source.write(((3, 0), 2))
    green.log.until("batch")
    green.stopped()
    assert world.rows() == source.rows


def test_what_was_compared_is_judged():
    judged = Judgement()
    equal, other = Difference(rows=5, errors=0, missing=0, extra=0), Difference(rows=5, errors=0, missing=1, extra=2)
    nothing = Difference(rows=0, errors=0, missing=0, extra=0)
    assert judged.add(nothing, is_one_batch=True)
    assert judged.stage == "StandingBy"  # nothing was written, so nothing is proven
    assert judged.add(equal, is_one_batch=False)
    assert (judged.stage, judged.compared) == ("Proven", 5)
    assert not judged.add(other, is_one_batch=False)
    assert (judged.stage, judged.missing) == ("StandingBy", 0)
    judged.add(equal, is_one_batch=True)
    judged.add(other, is_one_batch=True)
    judged.add(equal, is_one_batch=True)
    assert (judged.stage, judged.missing, judged.extra) == ("Differs", 1, 2)
