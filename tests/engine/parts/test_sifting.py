"""Sifting a merge: both sides together are the rows that came, what cancelled adds up to nothing, and what is left says when it is distinct."""

import collections
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.parts import sifting
from persist_engine.parts.sifting import Sifting, age_ends, without_settled
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate, is_consolidated, times_at

SCHEMA = Schema.from_ddl("id BIGINT", "x DOUBLE, name STRING")

rows_ = st.lists(
    st.tuples(
        st.sampled_from([None, 1, 2]),
        st.sampled_from([None, 0.0, -0.0, math.nan, 1.5]),
        st.sampled_from([None, "", "b"]),
        st.integers(0, 6),
        st.sampled_from([-2, -1, 1, 2, 3, 2**62]),
    ),
    max_size=40,
)


def table_of(rows):
    return pa.table(
        [
            pa.array([{"id": row[0]} for row in rows], SCHEMA.key_type),
            pa.array([{"x": row[1], "name": row[2]} for row in rows], SCHEMA.val_type),
            pa.array([row[3] for row in rows], pa.int64()),
            pa.array([row[4] for row in rows], pa.int64()),
        ],
        schema=SCHEMA.updates_schema,
    )


def updates_in(table):
    return [
        ((row["key"]["id"], str(row["val"]["x"]), row["val"]["name"]), row["time"], row["diff"])
        for row in table.to_pylist()
    ]


def sifted_by_age(table, cuts, ends):
    sift = Sifting(ends)
    bounds = [0, *sorted(cut % (table.num_rows + 1) for cut in cuts), table.num_rows]
    pieces = [table.slice(start, end - start) for start, end in zip(bounds, bounds[1:], strict=False) if end > start]
    found = [[SCHEMA.updates_schema.empty_table()] for _ in range(len(ends) + 2)]
    for sides in sift.tables(iter(pieces)):
        for side, rows in zip(found, sides, strict=True):
            side.append(rows)
    left, *ages = map(pa.concat_tables, found)
    return left, ages, sift.is_distinct


def sifted(table, cuts):
    left, (cancelled,), is_distinct = sifted_by_age(table, cuts, ())
    return left, cancelled, is_distinct


@given(rows_, st.lists(st.integers(0, 100), max_size=5), st.sampled_from([1, 3, 65_536]))
def test_both_sides_are_the_rows_that_came(rows, cuts, held_rows_max):
    few = [row for row in rows if row[4] < 2**62 or rows.count(row) == 1]
    whole = consolidate(table_of({row[:4]: row for row in few}.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sifting, "HELD_ROWS_MAX", held_rows_max)
        left, cancelled, is_distinct = sifted(whole, cuts)
    assert sorted(updates_in(left) + updates_in(cancelled), key=repr) == sorted(updates_in(whole), key=repr)
    assert is_consolidated(left)
    assert is_consolidated(cancelled)
    sums = collections.Counter()
    for what, _, diff in updates_in(cancelled):
        sums[what] += diff
    assert not any(sums.values())
    if is_distinct:
        names = [what for what, _, _ in updates_in(left)]
        assert len(set(names)) == len(names)


@given(rows_, st.lists(st.integers(0, 100), max_size=5), st.sets(st.integers(0, 6), max_size=3))
def test_an_age_holds_what_cancelled_by_its_end(rows, cuts, ends):
    ends = tuple(sorted(ends))
    few = [row for row in rows if row[4] < 2**62]
    whole = consolidate(table_of([*few, *((*row[:3], (row[3] + 3) % 9, -row[4]) for row in few)]))
    left, ages, _ = sifted_by_age(whole, cuts, ends)
    left_of_one, (cancelled,), _ = sifted_by_age(whole, cuts, ())
    assert updates_in(left) == updates_in(left_of_one)
    found = collections.defaultdict(list)
    for age, table in enumerate(ages):
        assert is_consolidated(table)
        for update in updates_in(table):
            found[update[0]].append((age, *update[1:]))
    apart = [(what, *each[1:]) for what, some in found.items() for each in some]
    assert sorted(apart, key=repr) == sorted(updates_in(cancelled), key=repr)
    for some in found.values():
        ((age, last),) = {(age, max(time for _, time, _ in some)) for age, _, _ in some}
        assert age == sum(end < last for end in ends)


@pytest.mark.parametrize(
    ("runs", "since", "ends"),
    [
        ([], -1, ()),
        ([(7, 100)], -1, ()),
        ([(7, 100), (7, 100)], -1, ()),  # all end together
        ([(7, 90), (9, 10)], -1, (7,)),
        ([(9, 4), (7, 90), (8, 6)], -1, (7, 8)),
        ([(7, 90), (9, 31)], -1, ()),  # more than a quarter is new
        ([(7, 90), (9, 10)], 7, ()),  # what cancelled by since is gone
        ([(7, 80), (8, 20), (2**63 - 2, 0)], -1, (7,)),
    ],
)
def test_history_is_cut_where_runs_with_few_rows_begin(runs, since, ends):
    assert age_ends(runs, since) == ends


@pytest.mark.parametrize(
    ("diffs", "left", "is_distinct"),
    [
        ([1], [1], True),
        ([1, -1], [], True),
        ([1, -1, 1], [1], True),
        ([-1, 1, -1], [-1], True),
        ([1, -1, 3], [3], True),
        ([1, 1], [1, 1], False),
        ([2, -1], [2, -1], False),
        ([2**62] * 4, [2**62] * 4, False),  # these add up to zero in 64 bits
    ],
)
@pytest.mark.parametrize("cut", [0, 1])
def test_a_key_and_value_leave_their_last_row_where_the_others_cancel(diffs, left, is_distinct, cut):
    rows = table_of([(1, 1.5, "b", time, diff) for time, diff in enumerate(diffs)])
    found, cancelled, found_distinct = sifted(rows, [cut])
    assert (found.column("diff").to_pylist(), found_distinct) == (left, is_distinct)
    assert cancelled.num_rows == len(diffs) - len(left)


def test_many_times_of_one_row_are_not_held_together(monkeypatch):
    monkeypatch.setattr(sifting, "HELD_ROWS_MAX", 2)
    rows = table_of([(1, 1.5, "b", time, 1 - 2 * (time % 2)) for time in range(9)])
    left, cancelled, is_distinct = sifted(rows, [3, 4, 8])
    assert (left.num_rows + cancelled.num_rows, is_distinct) == (9, False)


@given(rows_, st.lists(st.integers(0, 100), max_size=3), st.integers(0, 7))
def test_without_settled_keys_a_balanced_run_adds_up_to_the_same_at_that_time(rows, cuts, as_of):
    """However the run is cut into tables."""
    few = [row for row in rows if row[4] < 2**62]
    whole = consolidate(table_of([*few, *((*row[:3], (row[3] + 3) % 9, -row[4]) for row in few)]))
    bounds = [0, *sorted(cut % (whole.num_rows + 1) for cut in cuts), whole.num_rows]
    pieces = [whole.slice(start, end - start) for start, end in zip(bounds, bounds[1:], strict=False)]
    left = pa.concat_tables([without_settled(piece, as_of) for piece in pieces])
    assert contents(left, as_of) == contents(whole, as_of)
    assert is_consolidated(left)


def test_keys_whose_rows_are_all_there_are_left_out():
    rows = table_of([(key, 1.5, "b", time, diff) for key in range(5) for time, diff in ((0, 1), (key, -1))])
    rows = consolidate(rows)
    at = [(row["key"]["id"], row["time"]) for row in without_settled(rows, 2).to_pylist()]
    assert at == [(1, 0), (1, 1), (3, 0), (3, 3), (4, 0), (4, 4)]  # the first and the last key may have more rows


def contents(table, as_of):
    sums = collections.Counter()
    for what, _, diff in updates_in(times_at(table, as_of)):
        sums[what] += diff
    return {what: total for what, total in sums.items() if total}
