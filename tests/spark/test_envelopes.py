"""Upsert: after each run the shard holds the last value of each key, whatever the runs hold and others write."""

from __future__ import annotations

import io
import json
import random
import re
from typing import Any

import pytest
from envelope_run import Row, upserted
from hypothesis import HealthCheck, given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from landing_run import RivalLog
from persist_engine import Snapshot
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.batch import HollowPart
from persist_kit.depth import draws
from persist_spark import sink, staging
from persist_spark.failures import ExitCode, classify
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Write

pytestmark = [pytest.mark.spark, pytest.mark.slow]
KEY, VALUE = ("id", "at"), ("name", "seq")
COLUMNS = "id BIGINT, at DOUBLE, name STRING, seq BIGINT"


def upsert(**columns: str) -> Envelope:
    return Envelope(type=EnvelopeType.UPSERT, **columns)


#: An envelope, the columns of its input, and whether its order is that of the shard.
KINDS: dict[str, tuple[Envelope, str]] = {
    "no order, nulls remove": (upsert(), COLUMNS),
    "order beside, delete column": (
        upsert(order_column="lsn", delete_column="gone"),
        f"{COLUMNS}, lsn BIGINT, gone BOOLEAN",
    ),
    "order of the shard": (upsert(order_column="seq"), COLUMNS),
    "order of the shard, delete column": (upsert(order_column="seq", delete_column="gone"), f"{COLUMNS}, gone BOOLEAN"),
}


def drawn_rows(draw: random.Random, envelope: Envelope) -> list[Row]:
    """The rows of one run: some hundred keys, several rows of a key, in any order, some twice."""
    rows: list[Row] = []
    for id_ in draw.sample(range(60), draw.randint(0, 40)):
        for at in draw.sample([None, 0.5, "NaN", 0.0, -1.5], draw.randint(1, 3)):
            orders = draw.sample([None, *range(-4, 9)], draw.choice([1, 1, 2, 4]) if envelope.order_column else 1)
            for order in orders:
                row: Row = {"id": id_, "at": -0.0 if at == 0.0 and draw.random() < 0.5 else at}
                row["name"] = draw.choice([None, "a", "b", "long" * 20])
                row["seq"] = draw.choice([None, 1, 2, 3])
                if envelope.order_column is not None:
                    row[envelope.order_column] = order
                if envelope.delete_column is not None:
                    row[envelope.delete_column] = draw.choice([True, False, None])
                rows += [row] * draw.choice([1, 1, 2])
    draw.shuffle(rows)
    return rows


def meant(rows: list[Row]) -> list[Row]:
    """The rows as the oracle takes them: JSON has NaN as a text only."""
    return [row | {"at": float("nan") if row["at"] == "NaN" else row["at"]} for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1 << 32))
@drawn(max_examples=draws(1), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_histories_of_runs_equal_the_oracle(make_target: Any, kind: str, seed: int):
    draw, (envelope, columns) = random.Random(seed), KINDS[kind]
    target, state = make_target("id BIGINT, at DOUBLE", "name STRING, seq BIGINT"), {}
    for turn in range(3):
        rows = drawn_rows(draw, envelope)
        state = upserted(state, meant(rows), key=KEY, value=VALUE, envelope=envelope)
        write = Write(parallelism=draw.choice([None, 2]) if turn else 3)
        report = target.run(rows, columns, envelope, input={"allow_empty": True}, write=write)
        assert report.rows_read == len(rows)
        assert target.state() == state


@pytest.fixture
def target(make_target: Any) -> Any:
    """A shard with one value of two keys, written by a sink."""
    made = make_target("id BIGINT NOT NULL", "name STRING, seq BIGINT NOT NULL")
    made.write({((1,), ("one", 1)): 1, ((2,), ("two", 5)): 1})
    return made


SIMPLE = "id BIGINT, name STRING, seq BIGINT"


def rows_of(*rows: tuple[Any, ...], names: str = "id name seq") -> list[Row]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def test_a_repeated_run_and_an_unchanged_input_write_nothing(target: Any):
    rows, envelope = rows_of((1, "one", 1), (3, "three", 3)), upsert(order_column="seq")
    first = target.run(rows, SIMPLE, envelope, run_id="u-1")
    assert (first.rows_read, first.updates_written) == (2, 1)
    target.write({((3,), ("three", 3)): -1})
    again = target.run(rows, SIMPLE, envelope, run_id="u-1")
    assert again.already_done
    assert target.state() == {(1,): ("one", 1), (2,): ("two", 5)}
    assert target.run(rows, SIMPLE, envelope, run_id="u-2").updates_written == 1
    assert target.run(rows, SIMPLE, envelope, run_id="u-3").updates_written == 0
    assert target.state() == {(1,): ("one", 1), (2,): ("two", 5), (3,): ("three", 3)}


BY_SEQ = upsert(order_column="seq")
REFUSED: dict[str, tuple[Envelope, str, list[Row], str]] = {
    "several rows without an order": (
        upsert(),
        SIMPLE,
        rows_of((7, "a", 1), (8, "a", 1), (8, "b", 1)),
        r'several different rows for key \{"id":8\} .*envelope\.orderColumn',
    ),
    "equal orders": (
        BY_SEQ,
        SIMPLE,
        rows_of((8, "a", 2), (8, "b", 2), (8, "c", 1)),
        r'several different rows for key \{"id":8\}',
    ),
    "null in the key": (
        upsert(),
        SIMPLE,
        rows_of((None, "a", 1)),
        r'key field id is NOT NULL and null .*\{"id":null\}',
    ),
    "null in the value": (
        upsert(delete_column="gone"),
        f"{SIMPLE}, gone BOOLEAN",
        rows_of((4, "a", None, False), names="id name seq gone"),
        r'value field seq is NOT NULL and null in a row with key \{"id":4\}',
    ),
    "no rows": (upsert(), SIMPLE, [], "input is empty"),
    "order of the key": (upsert(order_column="id"), SIMPLE, [], "orderColumn: id is a field of the key"),
    "order of structs": (
        upsert(order_column="o"),
        f"{SIMPLE}, o STRUCT<a: INT>",
        [],
        r"orderColumn: o is struct<a:int>, which has no order",
    ),
    "a text as delete column": (
        upsert(delete_column="gone"),
        f"{SIMPLE}, gone STRING",
        [],
        "deleteColumn: gone is string, must be boolean",
    ),
    "a missing order column": (upsert(order_column="lsn"), SIMPLE, [], r"missing: lsn \(orderColumn\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_decided_are_refused_before_anything_is_written(target: Any, case: str):
    envelope, columns, rows, message = REFUSED[case]
    before = target.footprint()
    with pytest.raises(ConfigurationError, match=message):
        target.run(rows, columns, envelope)
    assert target.footprint() == before


@pytest.mark.parametrize("other", [{((2,), ("other", 6)): 1}, {((2,), ("two", 5)): -2}])
def test_a_key_with_other_than_one_value_is_refused_and_named(target: Any, other: dict[Any, int]):
    target.write(other)
    before = target.footprint()
    with pytest.raises(InvalidUsage, match="nothing was appended") as caught:
        target.run(rows_of((2, "new", 7)), SIMPLE, upsert())
    failure = classify(caught.value)
    assert failure.exit_code is ExitCode.CONFIGURATION
    assert re.search(
        r'the shard holds \d values of key \{"id":2\} with a total diff of -?\d: an Upsert', failure.message
    )
    assert target.footprint() == before
    assert target.run(rows_of((1, "new", 7)), SIMPLE, upsert()).updates_written == 2, "other keys may be written"
    target.write({row: -diff for row, diff in other.items()})


def test_only_parts_that_can_hold_keys_of_the_run_are_read(target: Any, monkeypatch: Any):
    splits = []
    real = Snapshot.splits
    monkeypatch.setattr(Snapshot, "splits", lambda *given: splits.append(real(*given)) or splits[-1])
    target.write({((800,), ("far", 1)): 1})
    target.run(rows_of((900, "new", 2)), SIMPLE, BY_SEQ)
    target.write({((900,), ("new", 2)): -1})
    target.run(rows_of((1, "new", 2), (2, "new", 6)), SIMPLE, BY_SEQ)
    parts = [[part for batch in split.batches for part in batch.part_list()] for (split,) in splits]
    assert parts[0] == []
    assert [part.rows for part in parts[1] if isinstance(part, HollowPart)] == [2], "inline parts have no statistics"
    assert target.state() == {(1,): ("new", 2), (2,): ("new", 6), (800,): ("far", 1)}


def test_keys_and_orders_of_every_type(make_target: Any):
    key = "d DECIMAL(9,2), t TIMESTAMP, w TIMESTAMP_NTZ, y DATE, b BINARY, s STRUCT<x: FLOAT, y: STRING>, ok BOOLEAN"
    target = make_target(key, "")
    row = {
        "d": "1.50",
        "t": "2024-01-01T00:00:00Z",
        "w": "2024-01-01T00:00:00",
        "y": "2024-01-01",
        "b": "AAE=",
        "ok": True,
    }
    full = row | {"s": {"x": 0.5, "y": None}, "o": "2024-01-01T00:00:00Z"}
    later = full | {"gone": True, "o": "2024-01-02T00:00:00Z"}
    other = full | {"s": None, "gone": False}
    envelope, columns = upsert(order_column="o", delete_column="gone"), f"{key}, o TIMESTAMP, gone BOOLEAN"
    for _ in range(2):
        target.run([full, other, {}], columns, envelope)
        assert len(target.state()) == 3
    assert target.run([later, full], columns, envelope).updates_written == 1
    assert len(target.state()) == 2


ORDERS = {
    "interval of months": "make_ym_interval(0, n)",
    "interval of seconds": "make_dt_interval(0, 0, 0, n)",
    "double": "CASE WHEN n = 14 THEN double('NaN') ELSE double(n) END",
    "binary": "cast(lpad(cast(n as string), 3, '0') as binary)",
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_types_that_no_shard_holds(target: Any, order: str):
    rows = [{"id": id_, "name": f"{n}", "seq": 1, "n": n} for id_ in (1, 9) for n in (3, 14, None, 2)]
    sql = f"select id, name, seq, {ORDERS[order]} as o from input"
    target.run(rows, f"{SIMPLE}, n INT", upsert(order_column="o"), input={"sql": sql})
    assert target.state() == {(1,): ("14", 1), (2,): ("two", 5), (9,): ("14", 1)}


def test_keys_may_be_times_that_python_does_not_have(make_target: Any):
    target = make_target("day DATE, at TIMESTAMP", "name STRING")
    sql = "select date_add(DATE '1970-01-01', days) as day, timestamp_micros(us) as at, name from input"

    def run(names: dict[tuple[int, int], str]) -> int:
        rows = [{"days": days, "us": us, "name": name} for (days, us), name in names.items()]
        return target.run(rows, "days INT, us BIGINT, name STRING", upsert(), input={"sql": sql}).updates_written

    year_10000, before_1 = 2_932_897, -719_163
    for far in (year_10000, before_1):  # alone, so that one bound of the run's keys is known and the other one is not
        us = far * 24 * 60 * 60 * 1_000_000
        assert run({(far, us): "a", (0, 0): "a"}) == (2 if far == year_10000 else 1)
        assert run({(far, us): "b", (0, 0): "a"}) == 2
        assert run({(far, us): "b", (0, 0): "a"}) == 0
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        held = reader.snapshot(target.client.recent_upper(target.id).time - 1).to_table().flatten()
    found = zip(held["key.day"].cast("int32").to_pylist(), held["val.name"].to_pylist(), strict=True)
    assert set(found) == {(before_1, "b"), (0, "a"), (year_10000, "b")}


def test_two_upserts_on_the_same_keys_end_as_if_one_ran_after_the_other(target: Any):
    """The second commits between the staging and the append of the first, twice: once on other keys, once on the same."""
    mine, theirs = rows_of((1, "mine", 9), (2, None, None), (3, "mine", 9)), rows_of((1, "theirs", 8), (4, "theirs", 1))
    acts = [
        lambda: target.run(theirs, SIMPLE, upsert(), sink_id="ns/other", run_id="o-1"),
        lambda: target.run(
            rows_of((3, "theirs", 2), (2, "two", 6)), SIMPLE, upsert(), sink_id="ns/other", run_id="o-2"
        ),
    ]
    assert nested(target, mine, upsert(), acts).count("corrected") == 2
    assert target.state() == {(1,): ("mine", 9), (3,): ("mine", 9), (4,): ("theirs", 1)}


def test_a_value_of_another_writer_with_a_greater_order_wins_in_the_race(target: Any):
    mine, theirs = rows_of((1, "mine", 4), (2, "mine", 9)), rows_of((1, "theirs", 6), (2, "theirs", 7))
    acts = [lambda: target.run(theirs, SIMPLE, BY_SEQ, sink_id="ns/other", run_id="o-1")]
    assert "recompute" in nested(target, mine, BY_SEQ, acts)
    assert target.state() == {(1,): ("theirs", 6), (2,): ("mine", 9)}


def nested(target: Any, rows: list[Row], envelope: Envelope, acts: list[Any]) -> list[str]:
    """The events of a run during which others run, each before one of its first appends."""
    log = RivalLog(io.StringIO(), SystemEnv())
    log.acts = acts
    sink.run_sink(target.spark, target.spec(rows, SIMPLE, envelope), log=log)
    return [json.loads(line)["event"] for line in log._stream.getvalue().splitlines()]


def lose_copies(target: Any) -> int:
    """Does what the loss of all executors does to the rows of `localCheckpoint`. Returns how many copies there were."""
    copies = dict(target.spark.sparkContext._jsc.getPersistentRDDs())
    return len([copy.unpersist(True) for copy in copies.values()])


@pytest.mark.parametrize("excess", [0, 1])
def test_a_run_starts_over_when_executors_take_its_copy_of_the_input_with_them(
    target: Any, monkeypatch: Any, excess: int
):
    """Spark cannot compute these rows again, and fails the job."""
    real, lost, losses = staging.copied, [], sink.LOST_COPIES_MAX + excess

    def copied(*given: Any) -> Any:
        commands = real(*given)
        if len(lost) < losses:
            lost.append(lose_copies(target))
        return commands

    monkeypatch.setattr(staging, "copied", copied)
    before = target.footprint()
    if excess:
        with pytest.raises(Exception, match="CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND"):
            target.run(rows_of((1, "uno", 2)), SIMPLE, upsert())
        assert target.footprint() == before
    else:
        target.run(rows_of((1, "uno", 2), (1, "uno", 2)), SIMPLE, upsert())
        assert target.state() == {(1,): ("uno", 2), (2,): ("two", 5)}
    assert target.events().count("lost_copy") == sink.LOST_COPIES_MAX
    assert len(lost) == losses
    assert all(lost), "each round had a copy to lose"
