"""Rows by their keys: one row of each key, and the rows whose keys are among others. Vectorised.

Keys are equal as the engine says: -0.0 is 0.0, NaN is NaN, null is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage
from persist_engine.flow.word_rows import UInt64s, Words, hash_rows
from persist_engine.rows.columns import flatten_columns
from persist_engine.rows.ddl import print_type
from persist_engine.rows.predicate import And, Compare, In, Predicate
from persist_engine.rows.schema import Schema
from persist_engine.rows.sorting import order_and_equal
from persist_engine.rows.words import RowCodec
from persist_engine.table.columns import decoded

#: An error names at most this many keys, and a condition lists at most this many values.
_KEYS_SHOWN, _VALUES_MAX = 3, 256


def one_per_key(structs: pa.Table, order: pa.ChunkedArray | None, *, order_by: str | None) -> pa.Table:
    """The rows in the order of their keys, one of each key: the one with the greatest `order`, of several such the last. A null order is
    less than all, and NaN, as in Spark, greater than all numbers.

    Without `order` no key may come twice: InvalidUsage names some that do, and how many there are.
    """
    rows = structs.num_rows
    sorting, equal = order_and_equal(flatten_columns(structs, ("key",)), rows)
    if not equal.any():
        return structs if (sorting[1:] > sorting[:-1]).all() else structs.take(pa.array(sorting))
    if order is None:
        raise _twice(structs, sorting, equal)
    rank = np.empty(rows, np.int64)
    rank[_ranked(order, order_by)] = np.arange(rows)
    groups = np.empty(rows, np.int64)
    groups[sorting] = np.concatenate([[0], np.cumsum(~equal)])
    by_rank = np.lexsort((rank, groups))  # groups are numbered in the order of their keys
    is_last = np.append(groups[by_rank][1:] != groups[by_rank][:-1], True)
    return structs.take(pa.array(by_rank[is_last]))


def _ranked(order: pa.ChunkedArray, order_by: str | None) -> npt.NDArray[np.int64]:
    """The places of the values, ascending; equal ones as they stand."""
    if pa.types.is_floating(order.type):
        numbers = order.cast(pa.float64()).to_numpy()
        is_nan = np.isnan(numbers)
        return np.lexsort((np.where(is_nan, 0.0, numbers), is_nan, order.is_valid().to_numpy()))
    try:
        plain = decoded(order) if pa.types.is_dictionary(order.type) else order
        plain = plain.cast(pa.string()) if plain.type == pa.string_view() else plain
        ranked: npt.NDArray[np.int64] = pc.array_sort_indices(
            plain.combine_chunks(), null_placement="at_start"
        ).to_numpy()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise InvalidUsage(f"order_by: {order_by} is {print_type(order.type)}, which has no order") from error
    return ranked


class KeySet:
    """The keys of some rows, to find the rows of a table that have them. At least one row."""

    def __init__(self, structs: pa.Table, schema: Schema, seed: UInt64s) -> None:
        self._keys = structs.select(["key"]).combine_chunks()
        self._schema, self._seed = schema, seed
        self._codec = RowCodec(schema.key_type)

    @cached_property
    def _hashes(self) -> npt.NDArray[np.uint64]:
        """Those of the keys, ascending. Made when there is something to look for."""
        return np.sort(self._hash(self._keys.column("key")))

    @property
    def predicate(self) -> Predicate | None:
        """A condition that every row with one of the keys fulfils, so that parts without them are not read; None when there is none."""
        field = self._schema.key[0]
        values = pc.struct_field(self._keys.column("key"), [0])
        if values.null_count or not _compares(field.type):
            return None
        name = f"key.{field.name}"
        distinct = values.unique() if self._keys.num_rows <= _VALUES_MAX else None
        if distinct is not None:
            return In(name, tuple(distinct.to_pylist()))
        bounds = pc.min_max(values).as_py()
        return And((Compare(name, ">=", bounds["min"]), Compare(name, "<=", bounds["max"])))

    def candidates(self, updates: pa.Table) -> pa.Table:
        """Rows of which some may have one of the keys; all that have one are among them."""
        hashes = self._hash(updates.column("key"))
        at = np.searchsorted(self._hashes, hashes)
        found = self._hashes[np.minimum(at, len(self._hashes) - 1)] == hashes
        return updates if found.all() else updates.filter(pa.array(found))

    def among(self, candidates: pa.Table) -> pa.Table:
        """The rows that have one of the keys."""
        if not candidates.num_rows:
            return candidates
        ours = self._keys.num_rows
        both = pa.concat_tables([self._keys, candidates.select(["key"])])
        sorting, equal = order_and_equal(flatten_columns(both, ("key",)), both.num_rows)
        groups = np.concatenate([[0], np.cumsum(~equal)])
        is_asked = np.zeros(groups[-1] + 1, np.bool_)
        is_asked[groups[sorting < ours]] = True
        found = np.empty(both.num_rows, np.bool_)
        found[sorting] = is_asked[groups]
        return candidates.filter(pa.array(found[ours:]))

    def _hash(self, key: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
        words = Words.from_arrow(self._codec.encode(key))
        hashes: npt.NDArray[np.uint64] = np.ascontiguousarray(hash_rows(words, self._seed))[:, 0]
        return hashes


def _compares(kind: pa.DataType) -> bool:
    """Whether the bounds of such values are values of a condition. Zeros and NaN of floats are left out, and structs have none."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind) or pa.types.is_decimal(kind)
    )


def _twice(structs: pa.Table, sorting: npt.NDArray[np.int64], equal: npt.NDArray[np.bool_]) -> InvalidUsage:
    again = sorting[1:][equal]
    shown = structs.column("key").take(pa.array(again[:_KEYS_SHOWN])).to_pylist()
    text = ", ".join(_text(key) for key in shown)
    return InvalidUsage(
        f"{len(again):,} rows repeat a key, such as {text}: which value is the last one? Say order_by=COLUMN, or leave one row of each key"
    )


def _text(key: dict[str, object]) -> str:
    values: Sequence[str] = [f"{name}={value!r}" for name, value in key.items()]
    return f"({', '.join(values)})"
