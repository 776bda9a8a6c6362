"""The clock of a table: chosen when it is created, kept with the shard, and where the times of all its writes come from."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest
from persist_engine import connect
from persist_engine.base.errors import Incompatible, InvalidUsage
from persist_engine.model.frontier import MINIMUM
from persist_engine.model.queries import clock_of, clock_time
from persist_engine.model.state import CLOCK, SourceProgress
from persist_kit.states import first_state


@pytest.fixture
def counted(db):
    return db.create("counted", key="id BIGINT", value="name STRING", clock="counter", retain=100)


def test_a_counter_counts_the_writes(counted, db):
    assert counted.describe().clock == "counter, one more with each write", "also before the first"
    times = [counted.append([{"id": 1, "name": "a"}]).time]
    times += [counted.upsert([{"id": 2, "name": name}]).time for name in "bcde"]  # some read, later ones know all keys
    times.append(counted.delete("id = 2").time)
    times.append(counted.overwrite([{"id": 3, "name": "x"}]).time)
    assert times == [1, 2, 3, 4, 5, 6, 7]
    assert (counted.last_time, counted.at(3).to_pylist()[1]["name"]) == (7, "c")
    assert [change.time for change in counted.changes(since=5)] == [6, 7, 7]
    assert counted.describe().last_write == 7
    assert counted.describe().retain == "100 writes"
    assert counted.history().column("time").to_pylist()[:7] == [7, 6, 5, 4, 3, 2, 1]


def test_a_correction_may_be_the_first_write_of_a_counter(counted):
    assert counted.overwrite([{"id": 1, "name": "a"}]).time == 1
    assert counted.upsert([{"id": 1, "name": "b"}]).time == 2


def test_what_is_retained_without_a_word_fits_the_clock(db):
    """It was seven days for a counter too, which a counter refuses."""
    assert db.create("days", key="id BIGINT").describe().retain == "7d"
    counted = db.create("writes", key="id BIGINT", clock="counter")
    assert counted.describe().retain == "1000 writes"
    assert db.create("writes", key="id BIGINT", clock="counter", exist_ok=True).id == counted.id
    counted.alter(retain="none")
    counted.alter(retain="default")
    assert counted.describe().retain == "1000 writes"


def test_the_clock_is_kept_with_the_shard(tmp_path):
    place = tmp_path / "shop"
    with connect(place, maintain=False) as db:
        db.create("counted", key="id BIGINT", clock="counter", retain=None).append([{"id": 1}])
        db.create("plain", key="id BIGINT", clock="ms")
    with connect(place, maintain=False) as db:
        table = db.table("counted")
        table.vacuum()
        assert table.append([{"id": 2}]).time == 2
        assert db.create("counted", key="id BIGINT", clock="counter", retain=None, exist_ok=True).id == table.id
        with pytest.raises(
            InvalidUsage, match="^table counted: it exists with the clock 'counter', which a table keeps"
        ):
            db.create("counted", key="id BIGINT", exist_ok=True)
        assert db["plain"].describe().clock == "wall clock, milliseconds since 1970"
        assert db.client.inspect(table.id).progress == {}, "it is no progress of a sink"
        writer = db.client.open_writer(table.id, db.client.schema(table.id), purpose="test")
        with writer, pytest.raises(InvalidUsage, match="persist:clock is that of the clock, which a shard keeps"):
            writer.compare_and_append([], expected_upper=3, new_upper=4, progress=(CLOCK, b"ms"))


def test_a_retention_of_writes(counted):
    for number in range(30):
        counted.append([{"id": number, "name": "a"}])
    counted.alter(retain=10)
    counted.append([{"id": 0, "name": "b"}])
    assert counted.at(25).count() == 25
    with pytest.raises(InvalidUsage, match="the rows at 15 can no longer be read; the earliest time is 22"):
        counted.at(15).count()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"clock": "us"}, "clock is 'ms' or 'counter', not 'us'"),
        (
            {"clock": "counter", "retain": "7 days"},
            "retain: a table that counts its writes keeps a number of them, such as 1000, or none, not str '7 days'",
        ),
        (
            {"clock": "counter", "retain": dt.timedelta(1)},
            "retain: a table that counts its writes keeps a number of them",
        ),
        ({"clock": "counter", "retain": 0}, "retain must be a span"),
    ],
)
def test_what_is_no_clock(db, arguments, text):
    with pytest.raises(InvalidUsage, match=f"^table t: {text}"):
        db.create("t", key="id BIGINT", **arguments)
    assert db.tables() == []


@pytest.mark.parametrize(
    "time", ["-1h", "2026-01-01T00:00:00Z", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.timedelta(1)]
)
def test_a_date_is_no_time_of_a_counter(counted, time):
    counted.append([{"id": 1, "name": "a"}])
    for ask in (counted.at, counted.changes, lambda at: counted.overwrite([], expected=at)):
        with pytest.raises(
            InvalidUsage, match="^table counted: .*: the table counts its writes, so a time is a number"
        ):
            ask(time)
    with pytest.raises(InvalidUsage, match="at 2 is in the future: the last write was at 1"):
        counted.at(2)


def test_a_clock_of_newer_code():
    state, _ = first_state()
    assert (clock_of(state), clock_time(state, 7)) == ("ms", 7)
    counter = replace(state, progress=state.progress.set(CLOCK, SourceProgress(b"counter", MINIMUM)))
    assert (clock_of(counter), clock_time(counter, 7)) == ("counter", 1)
    newer = replace(state, progress=state.progress.set(CLOCK, SourceProgress(b"vector", MINIMUM)))
    with pytest.raises(Incompatible, match="has the clock b'vector', which this code does not know: upgrade it"):
        clock_of(newer)
