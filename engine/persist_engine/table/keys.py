"""Selects rows by their keys: one row of each key, and the rows with one of some given keys. Vectorised.

Keys are equal as the engine defines it: -0.0 equals 0.0, NaN equals NaN, null equals null.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import counted
from persist_engine.client.read.key_condition import condition_of
from persist_engine.dataflow.upsert.last_of_key import Undecided, last_of_each_key
from persist_engine.flow.word_rows import UInt64s, Words, hash_rows
from persist_engine.rows.columns import flatten_columns
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.values import python_values
from persist_engine.rows.predicate import Predicate
from persist_engine.rows.schema import Schema
from persist_engine.rows.sorting import order_and_equal
from persist_engine.rows.updates import rows_at
from persist_engine.rows.words import RowCodec
from persist_engine.table.columns import decoded

#: An error names at most this many keys.
_KEYS_SHOWN = 3


def one_per_key(structs: pa.Table, order: pa.ChunkedArray | None, *, order_by: str | None) -> pa.Table:
    """The rows in the order of their keys, one for each key, as `last_of_each_key` chooses. Raises InvalidUsage, which names the keys, when
    some have no last row, and for a column `order_by` whose values have no order.
    """
    if order is not None and pa.types.is_nested(order.type):
        raise InvalidUsage(f"order_by: {order_by} is {print_type(order.type)}, which has no order")
    try:
        chosen = last_of_each_key(structs, None if order is None else _comparable(order).combine_chunks())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        kind = None if order is None else print_type(order.type)
        raise InvalidUsage(f"order_by: {order_by} is {kind}, which has no order") from error
    if isinstance(chosen, Undecided):
        raise _undecided(structs, chosen, order_by)
    is_as_it_was = len(chosen) == structs.num_rows and (chosen[1:] > chosen[:-1]).all()
    return structs if is_as_it_was else rows_at(structs, chosen)


def _comparable(order: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values in a form that Arrow compares."""
    plain = decoded(order) if pa.types.is_dictionary(order.type) else order
    if plain.type == pa.string_view():
        return plain.cast(pa.string())
    return plain.cast(pa.float32()) if plain.type == pa.float16() else plain


class KeySet:
    """The keys of some rows (at least one), to find the rows of a table that have them."""

    def __init__(self, structs: pa.Table, schema: Schema, seed: UInt64s) -> None:
        self._keys = structs.select(["key"]).combine_chunks()
        self._schema, self._seed = schema, seed
        self._codec = RowCodec(schema.key_type)

    @cached_property
    def _hashes(self) -> pa.Array:
        """The hashes of the keys. They are computed at first use."""
        return pa.array(self._hash(self._keys.column("key")))

    @property
    def predicate(self) -> Predicate | None:
        """A condition that every row with one of the keys fulfils, so that parts without these keys are not read. None if there is none."""
        return condition_of(self._keys.column("key"), self._schema)

    def candidates(self, updates: pa.Table) -> pa.Table:
        """The rows that may have one of the keys. All rows that do have one are among them."""
        found = pc.is_in(pa.array(self._hash(updates.column("key"))), value_set=self._hashes)
        return updates if pc.all(found).as_py() else updates.filter(found)

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


def _undecided(structs: pa.Table, found: Undecided, order_by: str | None) -> InvalidUsage:
    shown = python_values(structs.column("key").take(pa.array(found.rows[:_KEYS_SHOWN])))
    of = "" if order_by is None else f" of the greatest {order_by}"
    which = f"{counted(len(found.rows), 'key')} with different rows{of}, such as {', '.join(map(_text, shown))}"
    advice = "say order_by=COLUMN, or leave" if order_by is None else "leave"
    return InvalidUsage(f"no row is the last one of {which}: {advice} one row of each key")


def _text(key: dict[str, object]) -> str:
    values: Sequence[str] = [f"{name}={value!r}" for name, value in key.items()]
    return f"({', '.join(values)})"
