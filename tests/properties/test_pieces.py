"""The union of consolidated tables, of which a large one may be patched with the few rows of the others, is what sorting all rows gives."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvariantViolated
from persist_engine.parts import pieces as merging
from persist_engine.parts.pieces import consolidate_pieces
from persist_engine.rows import updates
from persist_engine.rows.schema import Schema
from persist_kit.depth import draws
from persist_kit.strategies import updates_table

FIRST: dict[str, list[Any]] = {
    "k BIGINT": [-(2**63), -1, 0, 1, 2, 3, 4, 2**63 - 1, None],
    "k BIGINT NOT NULL": [*range(30)],
    "k TINYINT NOT NULL": [-128, -1, 0, 5, 127, *range(20, 30)],
    "k STRING NOT NULL": ["", "a", "a\x00", "ab", "é", "\U0001f600", *map(str, range(20))],
    "k STRING": [*map(str, range(9)), None],
    "k BINARY NOT NULL": [b"", b"\x00", b"\xff", *(bytes([at, at]) for at in range(9))],
    "k DOUBLE": [-math.inf, -0.0, 1.5, 2.5, 3.5, 4.5, math.nan, None],
    "k STRUCT<a: INT>": [None, *({"a": at} for at in (None, *range(9)))],
}


@st.composite
def pieces_(draw: st.DrawFn) -> list[pa.Table]:
    """A few consolidated tables of one schema, each in some chunks. The first has most rows; the others often retract rows of it."""
    ddl = draw(st.sampled_from(sorted(FIRST)))
    has_more = draw(st.booleans())
    schema = Schema.from_ddl(ddl + (", n STRING" if has_more else ""), "x DOUBLE, l ARRAY<INT>")
    firsts, seconds = st.sampled_from(FIRST[ddl]), st.sampled_from(["", "b", None]) if has_more else st.none()
    keys = st.tuples(firsts, seconds).map(lambda key: {"k": key[0]} | ({"n": key[1]} if has_more else {}))
    vals = st.sampled_from([{"x": x, "l": each} for x in (0.0, -0.0, math.nan, None) for each in ([], [1, None], None)])
    times = st.integers(0, draw(st.integers(0, 1)))
    row = st.tuples(keys, vals, times, st.sampled_from([-2, -1, 1, 2, 3]))
    by_first = repr if draw(st.integers(0, 4)) == 0 else (lambda row: repr(row[0]["k"]))
    large = draw(st.lists(row, min_size=6, max_size=20, unique_by=by_first))
    others: list[list[Any]] = []
    there = list(large)
    for _ in range(draw(st.integers(0, 3))):
        # What a table adds, a later one may retract.
        known = st.sampled_from(there)
        retraction = st.tuples(known, times).map(lambda pair: [(*pair[0][:2], pair[1], -pair[0][3])])
        again = known.map(lambda row: [row])
        update = st.tuples(known, vals).map(
            lambda pair: [(*pair[0][:3], -pair[0][3]), (pair[0][0], pair[1], pair[0][2], 1)]
        )
        change = st.one_of(retraction, update, again, row.map(lambda row: [row]))
        others.append(draw(st.lists(change, max_size=3)))
        there += [row for rows in others[-1] for row in rows if row[3] > 0]
    several = [large, *(list(itertools.chain.from_iterable(changes)) for changes in others)]
    tables = [updates.consolidate(updates_table(schema, rows)) for rows in several]
    cuts = [draw(st.integers(0, table.num_rows)) for table in tables]
    cut = [pa.concat_tables([table.slice(0, at), table.slice(at)]) for table, at in zip(tables, cuts, strict=True)]
    return list(draw(st.permutations(cut)))


@pytest.mark.slow
@pytest.mark.parametrize("stretches_max", [1, 8])
def test_the_union_of_pieces_is_what_consolidating_their_rows_gives(
    monkeypatch: pytest.MonkeyPatch, stretches_max: int
) -> None:
    monkeypatch.setattr(merging, "STRETCHES_MAX", stretches_max)
    monkeypatch.setattr(merging, "LARGE_FACTOR", 1)
    monkeypatch.setattr(merging, "LARGE_ROWS_MIN", 1)
    monkeypatch.setattr(merging, "consolidate_small", lambda _: None)
    patched = []
    real = merging._placed
    monkeypatch.setattr(merging, "_placed", lambda *given: patched.append(1) or real(*given))

    @given(pieces_())
    @settings(max_examples=draws(150), deadline=None)
    def law(pieces: list[pa.Table]) -> None:
        found = consolidate_pieces(pieces)
        assert repr(found.to_pylist()) == repr(updates.consolidate(pa.concat_tables(pieces)).to_pylist())

    law()
    assert patched


def numbered(ids: np.ndarray, value: str, *, diff: int = 1) -> pa.Table:
    """Rows with these keys, ascending."""
    schema = Schema.from_ddl("id BIGINT NOT NULL", "name STRING")
    key = pa.StructArray.from_arrays([pa.array(ids)], fields=list(schema.key_type))
    val = pa.StructArray.from_arrays([pa.array([value] * len(ids))], fields=list(schema.val_type))
    whole = [pa.array(np.full(len(ids), each)) for each in (3, diff)]
    return pa.table([key, val, *whole], schema=schema.updates_schema)


@pytest.fixture
def sorted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each sort had."""
    sizes: list[int] = []
    real = merging.order_and_equal
    monkeypatch.setattr(
        merging, "order_and_equal", lambda columns, rows, **how: sizes.append(rows) or real(columns, rows, **how)
    )
    return sizes


def test_an_upsert_of_a_few_rows_is_put_into_many_without_sorting_them(sorted_rows: list[int]) -> None:
    many, touched = numbered(np.arange(0, 40_000, 2), "old"), np.arange(0, 40_000, 400)
    odd, replaced = (
        numbered(np.arange(1, 40_000, 4000), "odd"),
        [numbered(touched, "old", diff=-1), numbered(touched, "new")],
    )
    few = updates.consolidate(pa.concat_tables([*replaced, odd]))
    found = consolidate_pieces([few, many])
    assert not sorted_rows
    assert found.num_rows == many.num_rows + 10
    assert found.equals(updates.consolidate(pa.concat_tables([many, few])))


@pytest.mark.parametrize("diff", [1, -2])
def test_rows_that_are_not_retracted_are_sorted_with_what_has_their_keys(sorted_rows: list[int], diff: int) -> None:
    many, few = numbered(np.arange(10_000), "a"), numbered(np.arange(0, 10_000, 100), "a", diff=diff)
    found = consolidate_pieces([few, many])
    assert sorted_rows == [200]
    assert found.equals(updates.consolidate(pa.concat_tables([many, few])))


def test_rows_whose_keys_begin_alike_are_sorted_only_where_others_begin_so_too(sorted_rows: list[int]) -> None:
    """A key of two fields, as (customer, order)."""
    schema = Schema.from_ddl("customer INT NOT NULL, number INT NOT NULL", "name STRING")
    customers, orders = (each.ravel() for each in np.meshgrid(np.arange(100), np.arange(100), indexing="ij"))

    def of(picked: Any, value: str, diff: int = 1) -> pa.Table:
        fields = [pa.array(each[picked].astype(np.int32)) for each in (customers, orders)]
        key = pa.StructArray.from_arrays(fields, fields=list(schema.key_type))
        val = pa.StructArray.from_arrays([pa.array([value] * len(key))], fields=list(schema.val_type))
        times, diffs = (pa.array(np.full(len(key), each)) for each in (3, diff))
        return pa.table([key, val, times, diffs], schema=schema.updates_schema)

    many = of(slice(None), "a")
    few = updates.consolidate(pa.concat_tables([of(slice(700, 710), "a", -1), of(slice(705, 710), "b")]))
    found = consolidate_pieces([many, few])
    assert sorted_rows == [100 + 15]
    assert found.equals(updates.consolidate(pa.concat_tables([many, few])))


@pytest.mark.parametrize("later", [[5], [5, 7]])
def test_a_row_that_is_retracted_at_a_later_time_stays_and_so_does_its_retraction(
    sorted_rows: list[int], later: list[int]
) -> None:
    """A compaction keeps what happened at each time."""
    many, few = numbered(np.arange(10_000), "a"), numbered(np.array(later), "a", diff=-1)
    few = few.set_column(2, few.schema.field("time"), pa.array(np.full(len(later), 4)))
    found = consolidate_pieces([few, many])
    assert sorted_rows == [2 * len(later)]
    assert found.num_rows == 10_000 + len(later)


def test_where_the_others_have_most_keys_without_a_chain_all_rows_are_sorted(sorted_rows: list[int]) -> None:
    many, few = numbered(np.arange(10_000), "a"), numbered(np.arange(0, 10_000, 2), "b")
    found = consolidate_pieces([many, few])
    assert sorted_rows == [15_000]
    assert found.num_rows == 15_000


def test_diffs_that_add_up_to_more_than_fits_are_refused_though_one_is_the_other_negated_as_int64() -> None:
    """-(-2**63) is -2**63 there."""
    many = updates.consolidate(pa.concat_tables([numbered(np.arange(10_000), "a"), one(20_000, "a", -(2**63))]))
    with pytest.raises(InvariantViolated, match="more than int64 holds"):
        consolidate_pieces([many, one(20_000, "a", -(2**63))])


def test_few_stretches_of_many_rows_are_not_copied() -> None:
    many, few = numbered(np.arange(0, 10_000, 2), "a"), numbered(np.array([5, 4001]), "b")
    found = consolidate_pieces([few, many])
    ours = many.column("key").chunk(0).field(0).buffers()[1].address
    chunks = found.column("key").chunks
    assert [chunk.field(0).buffers()[1].address == ours for chunk in chunks] == [True, False, True, False, True]
    assert found.num_rows == 5002


def one(key: int, value: str, diff: int = 1) -> pa.Table:
    """One row."""
    return numbered(np.array([key]), value, diff=diff)


@pytest.mark.parametrize(
    "others",
    [
        [[one(100, "b", -1)]],  # the row of another value
        [[one(100, "a", -1), one(100, "b", -1)]],
        [[one(100, "a", -1)], [one(100, "a", -1)]],  # twice
        [[one(100, "a", -2)]],
        [[one(200, "a", -1), one(200, "c")]],  # before or behind another row of the key
        [[one(1, "a"), one(9, "a")], [one(5, "a")]],  # between one another
        [[one(1, "a")], [one(1, "a", -1)]],
        [[one(1, "a")], [one(1, "a")]],
        [[one(1, "a", 3)], [one(1, "a", -1), one(1, "b")]],
        [[one(100, "a", -1), one(100, "b")], [one(100, "b", -1), one(100, "c")], [one(100, "c", -1)]],
        [[one(9_998, "a", -1), one(9_998, "z"), one(20_000, "z")], [one(-1, "z")]],
    ],
)
def test_rows_that_only_look_like_an_upsert(others: list[list[pa.Table]]) -> None:
    many = updates.consolidate(pa.concat_tables([numbered(np.arange(0, 10_000, 2), "a"), one(200, "b")]))
    pieces = [many, *(updates.consolidate(pa.concat_tables(rows)) for rows in others)]
    found = consolidate_pieces(pieces)
    assert found.to_pylist() == updates.consolidate(pa.concat_tables(pieces)).to_pylist()
