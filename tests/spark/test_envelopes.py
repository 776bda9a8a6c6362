"""Upsert: after each run the shard holds the last value of each key, whatever the runs hold and others write."""

from __future__ import annotations

import random
from typing import Any

import pytest
from envelope_run import Row, key_of, upserted
from hypothesis import HealthCheck, given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from persist_kit.depth import draws
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
