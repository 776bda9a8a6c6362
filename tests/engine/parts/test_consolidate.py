"""The streaming merge against a dictionary: however rows are cut into runs, tables and windows, the union is exact."""

import collections
import itertools
import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvariantViolated
from persist_engine.parts import consolidate
from persist_engine.parts.consolidate import consolidated, lower_bounds, merge_runs, row_key
from persist_engine.rows.columns import flatten_columns
from persist_kit.depth import draws

KEY = pa.struct([("id", pa.int64()), ("name", pa.string())])
VAL = pa.struct([("x", pa.float64())])
SCHEMA = pa.schema([("key", KEY), ("val", VAL), ("time", pa.int64()), ("diff", pa.int64())])


def table(rows):
    return pa.Table.from_arrays(
        [
            pa.array([{"id": r[0], "name": r[1]} for r in rows], KEY),
            pa.array([{"x": r[2]} for r in rows], VAL),
            pa.array([r[3] for r in rows], pa.int64()),
            pa.array([r[4] for r in rows], pa.int64()),
        ],
        schema=SCHEMA,
    )


def order(row):
    return tuple((2, 0) if v is None else (1, 0) if isinstance(v, float) and math.isnan(v) else (0, v) for v in row)


def rows_of(tables):
    return [
        (r["key"]["id"], r["key"]["name"], r["val"]["x"], r["time"], r["diff"]) for t in tables for r in t.to_pylist()
    ]


class Listed:
    """A run that knows its end."""

    def __init__(self, tables):
        self.left = list(tables)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)

    @property
    def is_at_end(self):
        return not self.left


def merged(runs, memory_bytes=0, kind=iter):
    return list(merge_runs([kind([consolidated(table(t)) for t in run]) for run in runs], memory_bytes=memory_bytes))


ROWS = st.tuples(
    st.sampled_from([0, 1, 2, 3, None]),
    st.sampled_from(["", "a", "é", None]),
    st.sampled_from([0.0, 1.5, math.nan, None]),
    st.integers(0, 3),
    st.sampled_from([1, -1, 2]),
)


@st.composite
def cut_runs(draw):
    """Sorted runs, each cut into tables at random places (empty tables among them)."""
    runs = []
    for rows in draw(st.lists(st.lists(ROWS, max_size=30), max_size=5)):
        rows.sort(key=lambda r: order(r[:4]))
        cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
        runs.append([rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)])
    return runs


@pytest.fixture
def window_rows(monkeypatch):
    return lambda rows: monkeypatch.setattr(consolidate, "WINDOW_ROWS_MIN", rows)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "memory_bytes"), [(1, 0), (2, 0), (5, 0), (1, 20_000)])
def test_merge_equals_a_dictionary_for_every_cut_and_window(window_rows, rows, memory_bytes):
    """With memory, windows hold several tables, and marks within them end rounds (spec 13.7)."""
    window_rows(rows)

    @given(cut_runs(), st.sampled_from([iter, Listed]))
    @settings(max_examples=draws(60), deadline=None)
    def law(runs, kind):
        expected = collections.Counter()
        identity = {}
        for row in (row for run in runs for part in run for row in part):
            expected[order(row[:4])] += row[4]
            identity[order(row[:4])] = row[:4]
        out = merged(runs, memory_bytes, kind)
        assert all(t.num_rows for t in out)
        got = rows_of(out)
        keys = [order(r[:4]) for r in got]
        assert keys == sorted(set(keys))
        assert dict(zip(keys, (r[4] for r in got), strict=True)) == {k: d for k, d in expected.items() if d}

    law()


def test_no_runs_and_runs_without_rows_yield_nothing():
    assert merged([]) == []
    assert merged([[], [[]], [[], []]]) == []


def test_rows_that_cancel_across_tables_and_windows_vanish(window_rows):
    window_rows(1)
    ones = [(7, "k", 1.0, 5, 1)] * 4
    minus = [(7, "k", 1.0, 5, -1)] * 4
    assert merged([[ones[:1], ones[1:]], [minus]]) == []


@pytest.mark.parametrize("others", [[], [[(9, "z", 0.0, 0, 1)]]])
def test_a_row_that_cancels_at_a_table_s_end_may_come_again(window_rows, others):
    """Seen at one time, a row that came and went and came again: its last -1 may be a table by itself."""
    window_rows(1)
    first, hot, last = (1, "a", 0.0, 9, 1), (2, "a", 0.0, 9, 1), (3, "a", 0.0, 9, 1)
    gone = (*hot[:4], -1)
    run = [[first, hot], [gone], [hot], [gone], [hot, last]]
    assert rows_of(merged([run, *([others] if others else [])])) == [first, hot, last, *(others[0] if others else [])]
    assert rows_of(merged([run[:2]])) == [first]


def test_one_hot_row_repeated_past_every_window_is_one_row(window_rows):
    window_rows(2)
    hot, cold = (1, "a", 0.0, 9, 1), (0, "a", 0.0, 9, 1)
    assert rows_of(merged([[[hot] * 7, [hot] * 6], [[cold, hot]]])) == [cold, (1, "a", 0.0, 9, 14)]


@pytest.mark.parametrize(
    "run",
    [
        [[(2, "a", 0.0, 0, 1)], [(1, "a", 0.0, 0, 1)]],
        [[(1, "a", 0.0, 0, 1), (3, "a", 0.0, 0, 1)], [(2, "a", 0.0, 0, 1)]],
        [[(1, "a", 0.0, 5, 1)], [(1, "a", 0.0, 4, 1)]],
        [[(9, "a", 0.0, 0, 1), (1, "a", 0.0, 0, 1), (2, "a", 0.0, 0, 1)], [(3, "a", 0.0, 0, 1)]],
    ],
)
def test_a_run_that_goes_backwards_is_refused(window_rows, run):
    window_rows(1)
    with pytest.raises(InvariantViolated, match="out of order"):
        merged([run, [[(5, "z", 0.0, 0, 1)]]])


def test_a_run_is_read_no_further_than_its_window_needs(window_rows):
    """Memory: with one long run and one short one far behind it, the long one is not read ahead."""
    window_rows(10)
    pulled = []

    def long_run():
        for i in range(100):
            pulled.append(i)
            yield table([(1000 + i * 10 + j, "a", 0.0, 0, 1) for j in range(10)])

    def low_run():
        for i in range(50):
            yield table([(i * 10 + j, "a", 0.0, 0, 1) for j in range(10)])

    stream = merge_runs([long_run(), low_run()], memory_bytes=0)
    for _ in range(40):
        next(stream)
    assert len(pulled) == 1


@pytest.mark.parametrize("apart", [True, False], ids=["one run behind another", "runs between one another"])
def test_rounds_are_of_one_size_however_large_the_tables_of_runs_are(window_rows, apart):
    window_rows(2)
    each, runs = 400, 5
    tables = [
        table([(at + index * each if apart else index + at * runs, "a", 0.0, 0, 1) for at in range(each)])
        for index in range(runs)
    ]
    row_bytes = tables[0].nbytes / each
    memory_bytes = int(2 * consolidate.COPIES * 200 * row_bytes)  # rounds of 100 to 200 rows
    sizes = [out.num_rows for out in merge_runs([Listed([t]) for t in tables], memory_bytes=memory_bytes)]
    assert sum(sizes) == runs * each
    assert max(sizes) <= 200
    assert min(sizes[:-1]) >= 90


SEARCHED = {
    "whole": (pa.int8(), [-128, -1, 0, 5, 127]),
    "text": (pa.string(), ["", "a", "ab", "é"]),
    "binary": (pa.binary(), [b"", b"\x00", b"a", b"\xff"]),
    "date": (pa.date32(), [-(10**6), 0, 7]),
    "instant": (pa.timestamp("us"), [-(2**62), 0, 2**62]),
    "float": (pa.float64(), [-math.inf, 0.0, 1.5, math.nan]),
    "decimal": (pa.decimal128(38, 2), [-7, 0, 10**30]),
    "bool": (pa.bool_(), [False, True]),
}


@pytest.mark.parametrize("kind", SEARCHED)
@pytest.mark.parametrize("with_nulls", [True, False])
def test_a_boundary_is_found_among_values_of_every_type(kind, with_nulls):
    data_type, values = SEARCHED[kind]
    some = [*values, None] if with_nulls else values
    columns = [
        pa.chunked_array([pa.array([v], data_type) for v in some for _ in range(3)]),
        pa.chunked_array([pa.array([0, 1, 2] * len(some))]),
    ]
    keys = [row_key(columns, index) for index in range(3 * len(some))]
    assert lower_bounds(columns, keys) == list(range(len(keys)))
    assert [lower_bounds(columns, [key])[0] for key in keys] == list(range(len(keys)))
    after = [(key[0], (0, 7)) for key in keys[::3]]  # between values of the first column
    assert lower_bounds(columns, after) == [3 * at for at in range(1, len(some) + 1)]
    nulls = ((2, 0), (0, 0))
    assert lower_bounds(columns, [nulls]) == [3 * len(values)]


def test_row_keys_compare_as_arrow_sorts():
    columns = flatten_columns(
        table(
            [
                (None, "a", 1.0, 0, 1),
                (1, None, 1.0, 0, 1),
                (1, "a", None, 0, 1),
                (1, "a", math.nan, 0, 1),
                (1, "a", -1.0, 0, 1),
            ]
        )
    )
    keys = [row_key(columns, i) for i in range(5)]
    assert sorted(range(5), key=keys.__getitem__) == [4, 3, 2, 1, 0]


def test_regression_bounds_are_found_where_nulls_lie_in_several_chunks():
    """Arrow's search counts the nulls of every chunk: rows went into wrong rounds, and came out of order or twice."""
    numbers, times = [1, 2, 3, None, None, None, None], [0, 0, 0, 0, 1, 2, 3]
    for cuts in ((4,), (4, 5), (2, 4, 6), ()):
        edges = list(itertools.pairwise([0, *cuts, len(numbers)]))
        columns = [
            pa.chunked_array([pa.array(values[low:high], pa.int64()) for low, high in edges])
            for values in (numbers, times)
        ]
        boundaries = [((0, 2), (0, 0)), ((0, 2), (0, 1)), ((0, 4), (0, 0))]
        assert lower_bounds(columns, boundaries) == [1, 2, 3]
