"""A few rows are consolidated as many are: Python's sort and Arrow's kernels agree."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvariantViolated
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import ROWS_MAX, consolidate, consolidate_small, normalise
from persist_kit import strategies
from persist_kit.depth import draws

SCHEMA = Schema.from_ddl("id BIGINT, s STRING")


def table_of(*rows: tuple[int | None, str | None, int, int]) -> pa.Table:
    (table,) = normalise([(((number, text), ()), time, diff) for number, text, time, diff in rows], SCHEMA)
    return table


@pytest.mark.slow
@given(st.data())
@settings(max_examples=draws(50), deadline=None)
def test_python_and_arrow_agree(data: st.DataObject) -> None:
    table = data.draw(strategies.updates(data.draw(strategies.schemas())))
    few = consolidate_small(table)
    if few is None:
        return
    # The same collection in more rows than Python sorts: copies that cancel each other.
    copies = [
        table.set_column(3, table.schema.field("diff"), pa.array([diff] * table.num_rows, pa.int64()))
        for diff in (1, -1)
    ]
    many = consolidate(pa.concat_tables([table, *copies * (ROWS_MAX // table.num_rows + 1)]))
    assert repr(few.to_pylist()) == repr(many.to_pylist())
    assert few.schema == many.schema


def test_it_is_used_for_the_common_types_and_leaves_alone_what_lies_right() -> None:
    everything = Schema.from_ddl(
        "b BOOLEAN, i TINYINT, j SMALLINT, k INT, l BIGINT, s STRING, r BINARY, d DATE, t TIMESTAMP, w TIMESTAMP_NTZ, f DOUBLE"
    )
    row = (True, 1, 2, 3, 4, "x", b"y", None, None, None, 1.5)
    (table,) = normalise([((row, ()), 1, 1), ((row, ()), 0, 1)], everything)
    ordered = consolidate_small(table)
    assert ordered is not None
    assert ordered.column("time").to_pylist() == [0, 1]
    assert consolidate_small(ordered) is ordered


def test_nulls_come_last_and_equal_rows_add_up() -> None:
    table = table_of(
        (None, "a", 0, 1), (1, None, 0, 1), (1, "é", 0, 2), (1, "z", 0, 5), (1, "é", 0, 3), (1, "z", 0, -5)
    )
    out = consolidate_small(table)
    assert out is not None
    keys = [(row["key"]["id"], row["key"]["s"], row["diff"]) for row in out.to_pylist()]
    assert keys == [(1, "é", 5), (1, None, 1), (None, "a", 1)]


def test_sums_beyond_int64_are_refused_and_passing_ones_are_not() -> None:
    most = 2**63 - 1
    with pytest.raises(InvariantViolated, match="int64"):
        consolidate_small(table_of((1, "", 0, most), (1, "", 0, 1)))
    out = consolidate_small(table_of((1, "", 0, most), (1, "", 0, 1), (1, "", 0, -1)))
    assert out is not None
    assert out.column("diff").to_pylist() == [most]


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), None])
def test_floats_that_have_two_forms_are_left_to_arrow(value: float | None) -> None:
    (table,) = normalise([(((value,), ()), 0, 1)], Schema.from_ddl("x DOUBLE"))
    assert consolidate_small(table) is None
    assert consolidate(table).num_rows == 1


def test_many_rows_and_none_are_left_to_arrow() -> None:
    assert consolidate_small(table_of(*[(n, "", 0, 1) for n in range(ROWS_MAX + 1)])) is None
    assert consolidate_small(SCHEMA.updates_schema.empty_table()) is None
