"""Of several rows of a key the last one, by an order. Vectorised over Arrow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import Bools, flatten_columns
from persist_engine.rows.sorting import order_and_equal

Positions = npt.NDArray[np.int64]


def last_of_each_key(rows: pa.Table, order: pa.Array, deleted: Bools) -> Positions | None:
    """The positions of the rows with the greatest `order` of their key, one for each key, ascending. A null order is less than all.

    `rows` has the structs `key` and `val`, which has no nulls at its top level. None when some key has no last row: rows of its greatest
    order differ in `val` or `deleted`. Rows are equal as the engine consolidates them. `order` is of a type whose values Arrow ranks.
    """
    count = rows.num_rows
    if not count:
        return np.zeros(0, np.int64)
    sorting, equal = order_and_equal(flatten_columns(rows, ("key",)), count)
    starts = np.flatnonzero(np.append(True, ~equal))
    if len(starts) == count:
        return np.arange(count)
    numbers = np.cumsum(np.append(0, ~equal))
    ranks = np.zeros(count, np.int64)  # Arrow's begin at 1
    there = order.is_valid().to_numpy(zero_copy_only=False)
    ranks[there] = pc.rank(order.drop_null(), tiebreaker="dense").to_numpy()
    ranked = ranks[sorting]
    is_greatest = ranked == np.maximum.reduceat(ranked, starts)[numbers]
    greatest, of = sorting[is_greatest], numbers[is_greatest]
    if len(greatest) > len(starts) and _differ(rows.take(pa.array(greatest)), deleted[greatest], of):
        return None
    return np.sort(greatest[np.append(True, of[1:] != of[:-1])])


def _differ(rows: pa.Table, deleted: Bools, of: Positions) -> bool:
    """Whether some rows with the same number in `of` differ in `val` or `deleted`."""
    numbered = [pa.chunked_array([pa.array(of)]), pa.chunked_array([pa.array(deleted)])]
    sorting, equal = order_and_equal([*numbered, *flatten_columns(rows, ("val",))], rows.num_rows)
    return bool(((of[sorting][1:] == of[sorting][:-1]) & ~equal).any())
