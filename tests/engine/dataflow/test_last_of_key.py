"""Of several rows of a key the last one, against a loop over the rows."""

import math

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine import last_of_each_key
from persist_kit.depth import draws

KEY = pa.struct([("a", pa.float64()), ("b", pa.string())])
VAL = pa.struct([("x", pa.float64())])
_floats = st.sampled_from([None, 0.0, -0.0, 1.0, math.nan])
_row = st.tuples(_floats, st.sampled_from([None, "", "k"]), _floats, st.none() | st.integers(0, 3), st.booleans())


@given(rows=st.lists(_row, max_size=12))
@settings(max_examples=draws(300))
def test_it_chooses_as_a_loop_does(rows):
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
        best.setdefault((_same(a), b), []).append((-1 if rank is None else rank, position))
    expected, is_tied = [], False
    for found in best.values():
        greatest = max(rank for rank, _ in found)
        last = [position for rank, position in found if rank == greatest]
        is_tied |= len({(rows[at][4], None if rows[at][4] else _same(rows[at][2])) for at in last}) > 1
        expected.append(last)
    chosen = last_of_each_key(table, order, deleted)
    if is_tied:
        assert chosen is None
        return
    assert list(chosen) == sorted(chosen)
    assert sorted(next(i for i, last in enumerate(expected) if at in last) for at in chosen) == list(
        range(len(expected))
    )


def _same(value):
    """A value that is equal in Python where the engine finds equality: one NaN, one zero."""
    return "NaN" if value is not None and math.isnan(value) else value
