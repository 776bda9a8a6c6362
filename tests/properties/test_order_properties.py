"""Sorting by words against Python's own sort: every type, nulls, ties, prefixes."""

from __future__ import annotations

import decimal
import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.parts.consolidate import row_key
from persist_engine.rows.columns import compare_adjacent, flatten_columns, same_as_before
from persist_engine.rows.sorting import order_and_equal
from persist_kit.depth import draws

TYPES = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.sampled_from([-(2**63), 2**63 - 1, -1, 0, 1, 7])),
    "small int64": (pa.int64(), st.integers(0, 3)),
    "float32": (pa.float32(), st.floats(width=32)),
    "float64": (pa.float64(), st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 5e-324, 1.5, math.inf, math.nan])),
    "text": (pa.string(), st.text(alphabet="aé\x00\U0001f600", max_size=12)),
    "text with a prefix": (pa.string(), st.text(alphabet="ab", max_size=3).map("the same for all ".__add__)),
    "text that ties on eight bytes": (pa.string(), st.text(alphabet="ab", max_size=2).map(lambda t: "x" * 9 + t)),
    "binary": (pa.binary(), st.binary(max_size=10)),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "decimal": (pa.decimal128(38, 2), st.decimals(-(10**30), 10**30, places=2)),
    "small decimal": (pa.decimal128(20, 2), st.decimals(-5, 5, places=2)),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Up to three key columns of any type with few distinct values, cut into chunks, and times."""
    rows = draw(st.integers(0, 40))
    fields, arrays = [], []
    for index in range(draw(st.integers(1, 3))):
        data_type, values = TYPES[draw(st.sampled_from(sorted(TYPES)))]
        some = draw(st.lists(st.none() | values, min_size=1, max_size=6))
        picked = draw(st.lists(st.sampled_from(some), min_size=rows, max_size=rows))
        fields.append(pa.field(f"c{index}", data_type))
        arrays.append(pa.array(picked, data_type))
    times = pa.array(draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), pa.int64())
    key = pa.StructArray.from_arrays(arrays, fields=fields)
    table = pa.table({"key": key, "val": pa.array([{}] * rows, pa.struct([])), "time": times})
    cut = draw(st.integers(0, rows))
    return pa.concat_tables([table.slice(0, cut), table.slice(cut)])


@pytest.mark.slow
@given(tables(), st.booleans())
@settings(max_examples=draws(120), deadline=None)
def test_order_and_equality_are_those_of_rows(table: pa.Table, is_in_runs: bool) -> None:
    columns = flatten_columns(table)
    keys = [row_key(columns, index) for index in range(table.num_rows)]
    order, equal = order_and_equal(columns, table.num_rows, is_in_runs=is_in_runs)
    assert sorted(order.tolist()) == list(range(table.num_rows))
    ordered = [keys[index] for index in order]
    assert ordered == sorted(keys)
    pairs = list(itertools.pairwise(ordered))
    assert equal.tolist() == [a == b for a, b in pairs]
    taken = flatten_columns(table.take(pa.array(order)))
    in_order, same = compare_adjacent(taken, table.num_rows)
    assert in_order
    assert same.tolist() == equal.tolist()
    assert same_as_before(taken, table.num_rows).tolist() == equal.tolist()
    assert same_as_before(columns, table.num_rows).tolist() == [a == b for a, b in itertools.pairwise(keys)]
    lies_in_order = all(a <= b for a, b in itertools.pairwise(keys))
    assert compare_adjacent(columns, table.num_rows)[0] == lies_in_order


@pytest.mark.parametrize("greatest", [1 << 40, 1 << 62], ids=["packed with its position", "not"])
def test_words_of_any_width_are_sorted(greatest: int) -> None:
    values = np.random.default_rng(1).integers(-greatest, greatest, 5000)
    values[::7] = values[0]
    ties = np.random.default_rng(2).integers(0, greatest, 5000)
    order, _ = order_and_equal([pa.chunked_array([values]), pa.chunked_array([ties])], 5000)
    assert np.array_equal(order, np.lexsort((ties, values)))


@pytest.mark.parametrize("twice", [False, True], ids=["distinct", "one twice"])
@pytest.mark.parametrize("step", [1, 3, 9], ids=["dense", "with gaps", "far apart"])
def test_numbers_that_lie_densely_are_sorted(step: int, twice: bool) -> None:
    values = np.random.default_rng(step).permutation(5000) * step - 7000
    values[3] = values[4] if twice else values[3]
    order, equal = order_and_equal([pa.chunked_array([values])], 5000)
    assert np.array_equal(values[order], np.sort(values))
    assert sorted(order.tolist()) == list(range(5000))
    assert equal.sum() == twice


def test_few_equal_neighbours_among_many_are_found() -> None:
    keys, values = np.arange(1000), np.zeros(1000, np.int64)
    keys[[10, 500, 999]] -= 1
    values[500] = 1
    same = same_as_before([pa.chunked_array([keys[:300], keys[300:]]), pa.chunked_array([values])], 1000)
    assert np.flatnonzero(same).tolist() == [9, 998]


@pytest.mark.parametrize("rows_of_group", [3, 40])
@pytest.mark.parametrize("bit", [0, 3, 62], ids=["lowest bit", "a low bit", "highest bit"])
def test_words_that_do_not_fit_beside_their_group_are_sorted_by_every_bit(bit: int, rows_of_group: int) -> None:
    rng = np.random.default_rng(bit)
    groups = np.repeat(np.arange(2000), rows_of_group)
    words = rng.integers(0, 1 << 63, 2000)[groups] ^ (rng.integers(0, 2, len(groups)) << bit)
    mixed = rng.permutation(len(groups))
    columns = [pa.chunked_array([each[mixed]]) for each in (groups, words)]
    order, equal = order_and_equal(columns, len(groups))
    ordered = np.stack([column.to_numpy()[order] for column in columns])
    assert np.array_equal(ordered, np.stack([groups, words])[:, np.lexsort((words, groups))])
    assert np.array_equal(equal, (ordered[:, 1:] == ordered[:, :-1]).all(axis=0))


def test_no_column_is_asked_for_once_all_rows_differ() -> None:
    columns = iter([pa.chunked_array([[1, 2, 1]]), pa.chunked_array([[0, 0, 1]]), pa.chunked_array([[0, 0, 0]])])
    assert order_and_equal(columns, 3)[0].tolist() == [0, 2, 1]
    assert next(columns).to_pylist() == [0, 0, 0]


def test_decimals_that_need_all_their_bits() -> None:
    texts = ["-99999999999999999999999999999999999999", "-1", "0", "18446744073709551616", "9" * 38]
    column = pa.chunked_array([pa.array([decimal.Decimal(text) for text in reversed(texts)], pa.decimal128(38, 0))])
    assert order_and_equal([column], 5)[0].tolist() == [4, 3, 2, 1, 0]
