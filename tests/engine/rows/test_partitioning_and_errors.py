"""Rows to workers: equal rows to the same one. Rows and errors in one collection: there and back."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.rows.errors_column import split_errors, tag_errors, tag_rows, with_errors
from persist_engine.rows.partitioning import _SLICE_BYTES, deal, hash_rows
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import normalise
from persist_kit.depth import draws
from persist_kit.world import SCHEMA

WIDE = Schema.from_ddl(
    "a BIGINT, b STRING, c STRUCT<x: DOUBLE, y: BOOLEAN>",
    "d DECIMAL(20, 2), e DATE, f TIMESTAMP, g BINARY, h TINYINT, i FLOAT, j SMALLINT, k INT",
)


def wide(rows) -> pa.Table:
    keys = [{"a": a, "b": b, "c": None if x is None else {"x": x, "y": x > 0}} for a, b, x in rows]
    vals = [
        {"d": None, "e": None, "f": None, "g": b and b.encode(), "h": 1, "i": x, "j": 2, "k": 3} for _, b, x in rows
    ]
    return pa.table(
        [
            pa.array(keys, WIDE.key_type),
            pa.array(vals, WIDE.val_type),
            pa.array(range(len(rows)), pa.int64()),
            pa.array([1] * len(rows), pa.int64()),
        ],
        schema=WIDE.updates_schema,
    )


some_rows = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(-3, 3)),
        st.one_of(st.none(), st.text(max_size=5)),
        st.one_of(st.none(), st.sampled_from([0.0, -0.0, math.nan, 1.5])),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(some_rows, st.integers(0, 12), st.integers(1, 5))
@settings(max_examples=draws(40), deadline=None)
def test_equal_rows_meet_wherever_they_come_from(rows, cut, workers):
    whole, pieces = wide(rows), pa.concat_tables([wide(rows).slice(0, cut), wide(rows).slice(cut)])
    assert (hash_rows(whole) == hash_rows(pieces)).all()
    reversed_rows = wide([*reversed(rows)])
    assert (hash_rows(whole) == hash_rows(reversed_rows)[::-1]).all()
    dealt = deal(whole, workers)
    assert len(dealt) == workers
    assert sorted(time for share in dealt for time in share["time"].to_pylist()) == list(range(len(rows)))
    for share in dealt:
        assert share["time"].to_pylist() == sorted(share["time"].to_pylist())


def test_zeros_and_nans_are_one():
    words = hash_rows(wide([(1, "a", 0.0), (1, "a", -0.0)]))
    assert words[0] == words[1]


@pytest.mark.slow
def test_shares_are_even_for_numbers_texts_and_long_common_prefixes():
    rows = 6_000
    for name in (lambda i: "x", lambda i: f"{'prefix' * 5}{i}", lambda i: f"{i}{'suffix' * 5}"):
        table = next(normalise([(((i,), (name(i),)), 0, 1) for i in range(rows)], SCHEMA))
        for share in deal(table, 3):
            assert abs(share.num_rows - rows / 3) < rows / 15
    assert len(np.unique(hash_rows(table))) == min(rows, table.num_rows)


def test_texts_longer_than_a_slice_are_hashed_whole():
    table = next(normalise([(((1,), ("a" * (_SLICE_BYTES + 100) + end,)), 0, 1) for end in ("x", "y", "x")], SCHEMA))
    words = hash_rows(table)
    assert words[0] == words[2] != words[1]


# -- rows and errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [SCHEMA, WIDE, Schema.from_ddl("id BIGINT NOT NULL", "")])
def test_rows_and_errors_come_back_as_they_went_in(schema):
    """Spec 26.5."""
    tagged = with_errors(schema)
    rows = schema.updates_schema.empty_table()
    if schema is SCHEMA:
        rows = next(normalise([(((1,), ("a",)), 3, 1), (((2,), (None,)), 4, -1)], SCHEMA))
    errors = tag_errors([("no", 5, 1), ("", 6, -1)], tagged)
    both = pa.concat_tables([tag_rows(rows, tagged), errors])
    assert both.schema == tagged.updates_schema
    back_rows, back_errors = split_errors(both, schema)
    assert back_rows.equals(rows.cast(schema.updates_schema))
    assert back_errors.to_pylist() == [{"err": "no", "time": 5, "diff": 1}, {"err": "", "time": 6, "diff": -1}]


def test_what_is_no_error_is_refused():
    tagged = with_errors(SCHEMA)
    assert tag_errors([], tagged).num_rows == 0
    for wrong in ([("a", 1)], [(1, 2, 3)], [(None, 1, 1)], [("a", "b", 1)]):
        with pytest.raises(InvalidUsage):
            tag_errors(wrong, tagged)
    with pytest.raises(SchemaMismatch, match="expected err, time, diff"):
        tag_errors(pa.table({"e": ["x"]}), tagged)


def test_a_key_called_err_is_refused():
    with pytest.raises(InvalidUsage, match=r"key\.err"):
        with_errors(Schema.from_ddl("err STRING", ""))
