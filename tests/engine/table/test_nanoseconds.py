"""Columns of nanoseconds: refused by name, taken as microseconds on request, and cut off on another request."""

from __future__ import annotations

import datetime as dt

import pandas as pd
import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage, SchemaMismatch

_NS = pa.timestamp("ns", "UTC")


@pytest.mark.parametrize("call", ["append", "upsert", "overwrite"])
@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_nanoseconds_become_microseconds_on_request_alone(db, call, kind):
    at = dt.datetime(1961, 4, 12, 6, 7, 0, 1, tzinfo=dt.UTC)
    table = db.create("t", key="id BIGINT", value="at TIMESTAMP")
    frame = pd.DataFrame({"id": [1], "at": pd.Series([at]).dt.as_unit("ns")})
    late = frame.assign(at=frame["at"] + pd.Timedelta(999, "ns"))

    def write(rows, **options):
        given = pa.Table.from_pandas(rows)
        return getattr(table, call)(given if kind == "rows" else given.to_reader(), **options)

    for rows in (frame, late):
        with pytest.raises(SchemaMismatch, match="at is .*: it has nanoseconds, .*: coerce='us' takes it"):
            write(rows)
    with pytest.raises(
        SchemaMismatch, match="^table t: at is .* would lose data.*; coerce='truncate' cuts off the rest"
    ):
        write(late, coerce="us")
    with pytest.raises(InvalidUsage, match="^table t: coerce is 'us' or 'truncate', or left out, not 'ns'"):
        write(frame, coerce="ns")
    assert (table.count(), table.last_time) == (0, None)
    write(frame, coerce="us")
    assert table.to_pylist() == [{"id": 1, "at": at}]
    table.overwrite([])
    write(late, coerce="truncate")
    assert table.to_pylist() == [{"id": 1, "at": at}], "cut off towards the past, also before 1970"


@pytest.mark.parametrize(
    ("value", "column", "cut"),
    [
        ("v STRUCT<t: TIMESTAMP>", pa.array([{"t": -1}, None], pa.struct([("t", _NS)])), [{"t": -1}, None]),
        ("v ARRAY<TIMESTAMP>", pa.array([[1001, None], None], pa.list_(_NS)), [[1, None], None]),
        ("v ARRAY<TIMESTAMP>", pa.array([[1001], [1]], pa.list_view(_NS)), [[1], [0]]),
        ("v MAP<STRING, TIMESTAMP>", pa.array([[("a", -1001)], None], pa.map_(pa.string(), _NS)), [{"a": -2}, None]),
        ("v TIMESTAMP", pa.array([1001, 1001], _NS).dictionary_encode(), [1, 1]),
    ],
)
def test_nanoseconds_within_values(db, value, column, cut):
    table = db.create("t", key="id BIGINT", value=value)
    rows = pa.table({"id": [1, 2], "v": column})
    for options, text in (({}, "it has nanoseconds"), ({"coerce": "us"}, "would lose data")):
        with pytest.raises(SchemaMismatch, match=text):
            table.append(rows, **options)
    table.append(rows, coerce="truncate")

    def instants(found):
        if isinstance(found, dt.datetime):
            return round((found - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) / dt.timedelta(microseconds=1))
        if isinstance(found, dict):
            return {name: instants(each) for name, each in found.items()}
        return [instants(each) for each in found] if isinstance(found, list) else found

    assert instants([row["v"] for row in table.to_pylist()]) == cut
