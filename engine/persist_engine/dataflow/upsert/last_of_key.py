"""Of several rows of a key the last one, by an order. Vectorised over Arrow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import Bools, flat_columns
from persist_engine.rows.sorting import order_and_equal

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Undecided:
    """Some keys have no last row. `rows` has the position of one row of each such key, in the order of keys."""

    rows: Positions


def last_of_each_key(rows: pa.Table, order: pa.Array | None, deleted: Bools | None = None) -> Positions | Undecided:
    """The position of the row with the greatest `order` of each key, in the order of keys. A null order is less than all, and NaN greater
    than all numbers. Without `order` all rows of a key are equally great.

    Of several such rows any one, if they are equal; Undecided if those of some key differ in `val` or `deleted`. Rows are equal as the
    engine consolidates them. `rows` has the structs `key` and `val`, which has no nulls at its top level. `order` is of a type whose
    values Arrow ranks; else ArrowNotImplementedError.
    """
    sorting, equal = order_and_equal(flat_columns(rows, ("key",)), rows.num_rows)
    if not equal.any():
        return sorting
    keys = np.cumsum(np.append(0, ~equal))  # numbers of the keys, for each position in `sorting`
    if order is not None:
        ranks = _ranks(order)[sorting]
        starts = np.flatnonzero(np.append(True, ~equal))
        is_greatest = ranks == np.maximum.reduceat(ranks, starts)[keys]
        sorting, keys = sorting[is_greatest], keys[is_greatest]
    first_of_key: Positions = sorting[np.append(True, keys[1:] != keys[:-1])]
    if len(first_of_key) < len(sorting):
        differing = _keys_that_differ(rows.take(pa.array(sorting)), None if deleted is None else deleted[sorting], keys)
        if len(differing):
            return Undecided(first_of_key[differing])
    return first_of_key


def _ranks(order: pa.Array) -> npt.NDArray[np.int64]:
    """The places of the values in their order, from 1, equal ones alike; 0 for null."""
    ranks = np.zeros(len(order), np.int64)
    is_there = order.is_valid().to_numpy(zero_copy_only=False)
    if is_there.any():
        ranks[is_there] = pc.rank(order.drop_null(), tiebreaker="dense").to_numpy()
    return ranks


def _keys_that_differ(rows: pa.Table, deleted: Bools | None, keys: Positions) -> Positions:
    """The numbers in `keys` under which some rows differ in `val` or `deleted`."""
    numbered = [pa.chunked_array([pa.array(of)]) for of in (keys, deleted) if of is not None]
    sorting, equal = order_and_equal([*numbered, *flat_columns(rows, ("val",))], rows.num_rows)
    sorted_keys = keys[sorting]
    return np.unique(sorted_keys[1:][(sorted_keys[1:] == sorted_keys[:-1]) & ~equal])
