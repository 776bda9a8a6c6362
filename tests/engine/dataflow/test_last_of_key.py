"""Of several rows of a key the last one, against a loop over the rows."""

import math

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import Undecided, last_of_each_key
from persist_kit.depth import draws

KEY = pa.struct([("a", pa.float64()), ("b", pa.string())])
VAL = pa.struct([("x", pa.float64())])
_floats = st.sampled_from([None, 0.0, -0.0, 1.0, math.nan])
_row = st.tuples(_floats, st.sampled_from([None, "", "k"]), _floats, st.none() | st.integers(0, 3), st.booleans())


@given(rows=st.lists(_row, max_size=12), has_order=st.booleans())
@settings(max_examples=draws(300))
def test_it_chooses_as_a_loop_does(rows, has_order):
    table = pa.table(
        {
            "key": pa.array([{"a": a, "b": b} for a, b, *_ in rows], KEY),
            "val": pa.array([{"x": None if gone else x} for _, _, x, _, gone in rows], VAL),
        }
    )
    order = pa.array([order for *_, order, _ in rows], pa.int64())
    deleted = np.array([gone for *_, gone in rows], np.bool_)
    best = {}
    for position, (a, b, _, rank, _) in enumerate(rows):
        best.setdefault((_same(a), b), []).append((-1 if rank is None or not has_order else rank, position))
    expected, tied = [], []
    for key in sorted(best, key=_in_order):
        greatest = max(rank for rank, _ in best[key])
        last = {position for rank, position in best[key] if rank == greatest}
        is_tied = len({(rows[at][4], None if rows[at][4] else _same(rows[at][2])) for at in last}) > 1
        (tied if is_tied else expected).append(last)
    chosen = last_of_each_key(table, order if has_order else None, deleted)
    found = chosen.rows if isinstance(chosen, Undecided) else chosen
    assert isinstance(chosen, Undecided) == bool(tied)
    assert [at in last for at, last in zip(found, tied or expected, strict=True)] == [True] * len(found)


def _same(value):
    """A value that is equal in Python where the engine finds equality: one NaN, one zero."""
    return "NaN" if value is not None and math.isnan(value) else value


def _in_order(key):
    """A key as the engine orders it: nulls last, and NaN after all numbers."""
    a, b = key
    return a is None, a == "NaN", 0.0 if a in (None, "NaN") else a, b is None, b or ""
