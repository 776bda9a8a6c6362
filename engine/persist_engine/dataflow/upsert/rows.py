"""Converts commands and updates of one schema to the columns of the upsert machine, and back.

This module owns the form of a command. It knows nothing of state, frontiers or stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.flow.upsert import hashes_of
from persist_engine.flow.upsert_store import KEY_WORDS
from persist_engine.flow.word_rows import UInt64s, Words, hash_rows
from persist_engine.rows.ingest import normalise
from persist_engine.rows.schema import Schema
from persist_engine.rows.words import RowCodec

HASH_TYPE = pa.binary(8 * KEY_WORDS)
_COLUMNS = {"key", "val", "order", "time"}


class UpsertRows:
    """Converts rows of `schema`. `seed` is the secret of the hashes. Hashes with different seeds cannot be compared."""

    def __init__(self, schema: Schema, seed: UInt64s) -> None:
        self._schema = schema
        self._keys_only = Schema(schema.key, pa.schema([]))
        self.seed = seed
        self._key_codec, self._val_codec = RowCodec(schema.key_type), RowCodec(schema.val_type)

    def commands(self, given: Any, *, has_time: bool, first_row: int = 0) -> pa.Table:
        """The columns hash, key, value, order (and time) of a table or record batch of commands. It must have the columns `key`; `val`,
        which is null to delete the key; optionally `order`, of integers or instants (the default is the row number counted from
        `first_row`); and `time` if `has_time`.

        Raises SchemaMismatch, which names every column that differs from the schema or holds a forbidden null. Raises InvalidUsage for an
        order or time that does not fit.
        """
        table = pa.Table.from_batches([given]) if isinstance(given, pa.RecordBatch) else given
        if not isinstance(table, pa.Table):
            raise InvalidUsage(f"upsert commands are a {type(given).__name__}; expected an Arrow table or record batch")
        wanted = _COLUMNS if has_time else _COLUMNS - {"time"}
        unknown = [name for name in table.column_names if name not in wanted]
        missing = [name for name in wanted - {"order"} if name not in table.column_names]
        if unknown or missing or len(set(table.column_names)) != table.num_columns:
            raise SchemaMismatch(
                f"upsert commands have the columns {', '.join(table.column_names) or 'none'}; "
                f"expected key, val{', time' if has_time else ''} and, if need be, order",
                requested=tuple(table.column_names),
                actual=tuple(sorted(wanted)),
            )
        order = _whole(table.column("order"), "order") if "order" in wanted & set(table.column_names) else None
        if order is None:
            order = pa.chunked_array([pa.array(np.arange(first_row, first_row + table.num_rows))])
        columns = self._sides(table)
        if has_time:
            if pa.types.is_temporal(table.column("time").type):
                raise InvalidUsage(f"time is {table.column('time').type}, expected int64")
            time = _whole(table.column("time"), "time")
            if time.null_count or (len(time) and pc.min(time).as_py() < 0):
                raise InvalidUsage("the time of a command is null or negative")
            columns = columns.append_column("time", time)
        return columns.append_column("order", order)

    @staticmethod
    def order_kind(commands: pa.Table | pa.RecordBatch) -> str | None:
        """The kind of the commands' order, as text. Orders compare only within one kind. None when all orders are null."""
        if "order" not in commands.schema.names:
            return "the number of the row"
        kind = commands.schema.field("order").type
        return None if pa.types.is_null(kind) else _kind(kind)

    def updates(self, table: pa.Table) -> pa.Table:
        """The columns hash, key, value and diff of rows from a reader."""
        return self._updates(table, self._words_of(table.column("key")))

    @staticmethod
    def hashes_to_find(commands: pa.Table) -> pa.Array:
        """The part of the hash of each key for which `updates_among` looks."""
        return pa.array(hashes_of(commands)[:, 0])

    def updates_among(self, table: pa.Table, wanted: pa.Array) -> pa.Table:
        """Like `updates`, for the rows whose keys have the hashes `wanted`, and hardly any others. Does not encode the values of the
        rest.
        """
        words = self._words_of(table.column("key"))
        found = pc.is_in(pa.array(words[:, 0]), value_set=wanted).to_numpy(zero_copy_only=False)
        return self._updates(table.filter(pa.array(found)), words[found])

    def no_commands(self) -> pa.Table:
        """An empty table of the columns of `commands`."""
        return self.commands(
            pa.table({"key": pa.array([], self._schema.key_type), "val": pa.array([], self._schema.val_type)}),
            has_time=False,
        )

    def to_updates(self, emitted: pa.Table) -> pa.Table:
        """Converts the machine's output to the form that a writer takes."""
        if not emitted.num_rows:
            return self._schema.updates_schema.empty_table()
        val = self._val_codec.decode(emitted.column("value").combine_chunks())
        columns = [emitted.column("key"), val, emitted.column("time"), emitted.column("diff")]
        return pa.table(columns, schema=self._schema.updates_schema)

    def rank_field(self, name: str, commands: pa.Table | pa.RecordBatch) -> int:
        """The position of the field `name` of the value. Raises InvalidUsage unless it can be compared with the orders of `commands`."""
        position: int = self._schema.val.get_field_index(name)
        if position < 0:
            raise InvalidUsage(f"the value has no field {name}")
        kind = self._schema.val.field(position).type
        _whole(pa.chunked_array([], kind), f"the field {name}")
        given = self.order_kind(commands)
        if given not in {None, _kind(kind)}:
            raise InvalidUsage(
                f"orders do not compare with the field {name}: {given} in the commands, {_kind(kind)} in the field"
            )
        return position

    def not_surpassed(self, commands: pa.Table, held: pa.LargeBinaryArray, field: int) -> pa.Table:
        """The commands, without those whose order is less than the `field` of the value that their key holds (null: none). A null order is
        less than all. A null field surpasses nothing.
        """
        there = held.is_valid()
        if held.null_count == len(held):
            return commands
        values = self._val_codec.decode(held.drop_null())
        ranks = _whole(pa.chunked_array([pc.struct_field(values, [field])]), "the field")
        orders = commands.column("order").filter(there)
        is_surpassed = pc.and_(ranks.is_valid(), pc.or_kleene(orders.is_null(), pc.greater(ranks, orders)))
        surpassed = np.zeros(commands.num_rows, np.bool_)
        surpassed[there.to_numpy(zero_copy_only=False)] = is_surpassed.to_numpy()
        return commands.filter(pa.array(~surpassed)) if surpassed.any() else commands

    def _sides(self, table: pa.Table) -> pa.Table:
        """The columns hash, key and value."""
        val = table.column("val")
        deleted = val.is_null() if val.null_count else None
        if deleted is None:
            key, val = self._conforming(table, self._schema)
            value: Any = self._val_codec.encode(val)
        else:
            key, _ = self._conforming(table.drop_columns(["val"]), self._keys_only)
            value = self._nullable(table, deleted)
        return pa.table({"hash": _hashes(self._words_of(key)), "key": key, "value": value})

    def _nullable(self, table: pa.Table, deleted: pa.ChunkedArray) -> pa.Array:
        """The column `val` encoded, null where it is null."""
        if pa.types.is_null(table.column("val").type):
            return pa.nulls(table.num_rows, pa.large_binary())
        there = pc.invert(deleted).to_numpy()
        _, kept = self._conforming(table.filter(pa.array(there)), self._schema)
        return self._val_codec.encode(kept).take(pa.array(np.cumsum(there) - 1, mask=~there))

    def _conforming(self, table: pa.Table, schema: Schema) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """Key and val converted to the schema by `normalise`."""
        ones = pa.array(np.ones(table.num_rows, np.int64))
        columns = {name: table.column(name) for name in ("key", "val") if name in table.column_names}
        tables = list(normalise(pa.table({**columns, "time": ones, "diff": ones}), schema))
        rows = pa.concat_tables(tables) if tables else schema.updates_schema.empty_table()
        return rows.column("key"), rows.column("val")

    def _updates(self, table: pa.Table, words: UInt64s) -> pa.Table:
        key, value = table.column("key"), self._val_codec.encode(table.column("val"))
        return pa.table({"hash": _hashes(words), "key": key, "value": value, "diff": table.column("diff")})

    def _words_of(self, key: pa.ChunkedArray) -> UInt64s:
        return np.ascontiguousarray(hash_rows(Words.from_arrow(self._key_codec.encode(key)), self.seed))


def _hashes(words: UInt64s) -> pa.Array:
    return pa.Array.from_buffers(HASH_TYPE, len(words), [None, pa.py_buffer(words)])


def _kind(order: pa.DataType) -> str:
    """The kind of an order. Orders of one kind can be compared by their numbers."""
    return "whole numbers" if pa.types.is_integer(order) else str(order)


def _whole(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Integers, dates and instants as int64, in their order; nulls stay."""
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.int64())
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return column.cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()).cast(pa.int64())
    if not pa.types.is_integer(kind):
        raise InvalidUsage(f"{name} is {kind}, expected whole numbers, dates or instants")
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise InvalidUsage(f"{name} does not fit int64: {error}") from error
