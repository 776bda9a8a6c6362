"""Sorts the entries of maps by key. Shards hold maps in this order, so two maps are equal exactly when their lists of entries are.

Writers sort them once (spec 26.2), because a sort at every comparison would cost more than the comparison.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import canonical_floats
from persist_engine.rows.nested.layout import ListColumn, is_list, values_type
from persist_engine.rows.sorting import order_and_equal


def holds_maps(kind: pa.DataType) -> bool:
    """Whether the type is a map or contains one."""
    if pa.types.is_struct(kind):
        return any(holds_maps(field.type) for field in kind)
    return bool(pa.types.is_map(kind)) or (is_list(kind) and holds_maps(values_type(kind)))


class KeyProblem(ValueError):
    """A shard cannot hold a map, because one of its keys is null or occurs twice."""


def sorted_entries(array: pa.Array) -> pa.Array:
    """The maps with their entries in the row order of their keys. Returns the array itself when they all are already. Raises KeyProblem,
    which names the key.
    """
    pieces = ListColumn.of(array)
    keys = pieces.values.field(0)
    if keys.null_count:
        raise KeyProblem("a map has a key that is null")
    if not len(keys):
        return array
    rows = np.repeat(np.arange(len(array)), np.diff(pieces.offsets))
    columns = [pa.chunked_array([pa.array(rows)]), canonical_floats(pa.chunked_array([keys]))]
    order, equal = order_and_equal(columns, len(keys))
    if equal.any():
        twice = keys[int(order[1:][equal][0])].as_py()
        raise KeyProblem(f"a map has the key {twice!r} more than once")
    if (order[1:] > order[:-1]).all():
        return array
    return pieces.array(array.type, pc.take(pieces.values, pa.array(order)))
