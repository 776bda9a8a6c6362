"""Chooses the last row of each key, by an order. Vectorised over Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.columns import Bools, canonical_floats, flat_columns, is_whole, whole
from persist_engine.rows.sorting import order_and_equal
from persist_engine.rows.updates import rows_at

Positions = npt.NDArray[np.int64]

#: At least this many rows of a stream are collected before all but the last row of each key are dropped.
_CHUNK_ROWS = 1 << 17
#: Also, at least this many times the rows that were kept, so that each row is sorted about once.
_KEPT_FACTOR = 4


@dataclass(frozen=True, slots=True, eq=False)
class Undecided:
    """Some keys have no last row. `rows` has the position of one row of each such key, in the order of keys."""

    rows: Positions


def last_of_each_key(rows: pa.Table, order: pa.Array | None, deleted: Bools | None = None) -> Positions | Undecided:
    """The position of the row with the greatest `order` for each key, in the order of keys. A null order is less than all, also within a
    struct, and NaN is greater than all numbers. Without `order`, all rows of a key are equally great.

    If several rows of a key are equally great, any one is chosen if they are equal. Returns Undecided if those of some key differ in `val`
    or `deleted`. Rows are equal if the engine would consolidate them. `rows` has the structs `key` and `val`, without nulls at their top
    level. Raises ArrowNotImplementedError for a type of `order` whose values have no order.
    """
    last, tied, _ = _last_and_tied(rows, order, deleted)
    return Undecided(last[tied]) if len(tied) else last


class LastOfKeys:
    """Chooses the last row of each key, as `last_of_each_key` does, among rows that come table by table. The number of rows in memory is a
    small multiple of the number of keys, however many rows a key has.
    """

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._rows = self._kept = 0

    def add(self, rows: pa.Table) -> None:
        """Adds rows with the columns `key`, `val`, `order`, and `deleted`, which has no nulls."""
        self._tables.append(rows)
        self._rows += rows.num_rows
        if self._rows > max(_CHUNK_ROWS, _KEPT_FACTOR * self._kept):
            last, _, others = self._chosen()
            # Keep both of two rows that differ, because a later row may be greater than both.
            self._tables = [rows_at(self._tables[0], np.concatenate([last, others]))]
            self._rows = self._kept = len(last) + len(others)

    def result(self) -> tuple[pa.Table, Positions] | None:
        """The last rows, in the order of keys, and the positions of undecided ones: another row of their key is equally great and differs.
        None when no table was added. May be called once.
        """
        if not self._tables:
            return None
        last, tied, _ = self._chosen()
        rows = self._tables.pop()
        return rows_at(rows, last), tied

    def _chosen(self) -> tuple[Positions, Positions, Positions]:
        rows = pa.concat_tables(self._tables).combine_chunks()
        self._tables = [rows]
        order = rows.column("order")
        deleted: Bools = rows.column("deleted").to_numpy()
        return _last_and_tied(rows, None if order.null_count == len(order) else order, deleted)


def _last_and_tied(
    rows: pa.Table, order: pa.Array | pa.ChunkedArray | None, deleted: Bools | None
) -> tuple[Positions, Positions, Positions]:
    """Returns the position of a greatest row of each key, in the order of keys; the indices in it of keys without a last row; and for each
    of these the position of an equally great row that differs.
    """
    sorting, equal = order_and_equal(flat_columns(rows, ("key",)), rows.num_rows)
    none = np.zeros(0, np.int64)
    if not equal.any():
        return sorting, none, none
    keys = np.cumsum(np.append(0, ~equal))  # the number of the key at each position in `sorting`
    if order is not None:
        ranks = ranked(order)[sorting]
        starts = np.flatnonzero(np.append(True, ~equal))
        is_greatest = ranks == np.maximum.reduceat(ranks, starts)[keys]
        sorting, keys = sorting[is_greatest], keys[is_greatest]
    last: Positions = sorting[np.append(True, keys[1:] != keys[:-1])]
    if len(last) == len(sorting):
        return last, none, none
    greatest = rows_at(rows.select(["key", "val"]), sorting)
    tied, one, other = _differing(greatest, None if deleted is None else deleted[sorting], keys)
    last[tied] = sorting[one]
    return last, tied, sorting[other]


def ranked(order: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.signedinteger]:
    """Numbers that compare as the values do. Null is the least, also within structs, and NaN the greatest. There must be at least one
    value. Raises ArrowNotImplementedError for a type whose values have no order.
    """
    column = order if isinstance(order, pa.ChunkedArray) else pa.chunked_array([order])
    if is_whole(column.type) and not column.null_count:
        return whole(column)
    sorting, equal = order_and_equal(_nulls_first(column), len(column))
    ranks = np.empty(len(column), np.int64)
    ranks[sorting] = np.cumsum(np.append(0, ~equal))
    return ranks


def _nulls_first(column: pa.ChunkedArray) -> Iterator[pa.ChunkedArray]:
    """The columns by which `column` is ordered, most significant first."""
    if column.null_count:
        yield column.is_valid()
    if pa.types.is_struct(column.type):
        for child in column.flatten():
            yield from _nulls_first(child)
    elif _is_sorted_here(column.type):
        yield canonical_floats(column)
    else:
        ranks = np.zeros(len(column), np.int64)
        ranks[column.is_valid().to_numpy()] = pc.rank(column.drop_null(), tiebreaker="dense").to_numpy()
        yield pa.chunked_array([pa.array(ranks)])


def _is_sorted_here(kind: pa.DataType) -> bool:
    """Whether the engine itself orders values of the type. Arrow ranks values of other types, which no shard holds."""
    return bool(
        is_whole(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_decimal128(kind)
    )


def _differing(rows: pa.Table, deleted: Bools | None, keys: Positions) -> tuple[Positions, Positions, Positions]:
    """The numbers in `keys` whose rows differ in `val` or `deleted`, in order, and two differing rows for each."""
    numbered = [pa.chunked_array([pa.array(of)]) for of in (keys, deleted) if of is not None]
    sorting, equal = order_and_equal([*numbered, *flat_columns(rows, ("val",))], rows.num_rows)
    sorted_keys = keys[sorting]
    places = np.flatnonzero((sorted_keys[1:] == sorted_keys[:-1]) & ~equal)
    tied, first = np.unique(sorted_keys[places], return_index=True)
    return tied, sorting[places[first]], sorting[places[first] + 1]
