"""A choice of fields of key and val, and tables reduced to these fields.

This module knows nothing of reading. A projection says which fields of a row are shown, never which rows are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.columns import canonical_floats, empty_struct
from persist_engine.rows.filter import column_named
from persist_engine.rows.schema import Schema


@dataclass(frozen=True)
class Projection:
    """The fields `key.<field>` and `val.<field>` of `schema` to show, in the order of the schema. Tables keep the columns key, val, time
    and diff. A side without shown fields is a struct without fields.
    """

    schema: Schema
    names: tuple[str, ...]

    @classmethod
    def of(cls, columns: Iterable[str], schema: Schema) -> Projection:
        """The projection to `columns`. `key` and `val` stand for all their fields, unless a field has that name. Other names are as in
        filters, except that fields within structs are refused. Raises InvalidUsage, which lists the columns of the schema.
        """
        if isinstance(columns, str):
            raise InvalidUsage(f"columns is a list of names, not the text {columns!r}")
        if not isinstance(columns, Iterable):
            raise InvalidUsage(f"columns is a list of names, not a {type(columns).__name__}")
        every = {side: [f"{side}.{name}" for name in names] for side, names in _sides(schema).items()}
        wanted: set[str] = set()
        for text in columns:
            if text in every and not any(text in names for names in _sides(schema).values()):
                wanted.update(every[text])
                continue
            column = column_named(text, schema)
            if not column.is_top:
                raise InvalidUsage(f"column {text} lies within {column.top}: name {column.top} instead", column=text)
            wanted.add(column.top)
        return cls(schema, tuple(name for names in every.values() for name in names if name in wanted))

    @property
    def updates_schema(self) -> pa.Schema:
        """The schema of updates that show only these fields."""
        return self.shown(self.schema.updates_schema)

    def shown(self, whole: pa.Schema) -> pa.Schema:
        """`whole` with key and val reduced to the shown fields."""
        sides = {side: pa.struct(self._fields(side)) for side in ("key", "val")}
        return pa.schema([(field.name, sides.get(field.name, field.type)) for field in whole])

    def apply(self, table: pa.Table) -> pa.Table:
        """`table` with only the shown fields in key and val; other columns stay. The table must have at least the shown fields."""
        others = [field for field in table.schema if field.name not in ("key", "val")]
        sides = {side: _side(table, side, self._fields(side)) for side in ("key", "val")}
        columns = {**sides, **{field.name: table.column(field.name) for field in others}}
        return pa.table(columns)

    def _fields(self, side: str) -> list[pa.Field]:
        fields = self.schema.key if side == "key" else self.schema.val
        return [field for field in fields if f"{side}.{field.name}" in self.names]


def _sides(schema: Schema) -> dict[str, Sequence[str]]:
    return {"key": schema.key.names, "val": schema.val.names}


def _side(table: pa.Table, side: str, fields: list[pa.Field]) -> pa.ChunkedArray:
    if not fields:
        return pa.chunked_array([empty_struct(table.num_rows)])
    kind = pa.struct(fields)
    chunks = [
        pa.StructArray.from_arrays([chunk.field(field.name) for field in fields], fields=fields)
        for chunk in table.column(side).chunks
    ]
    return canonical_floats(pa.chunked_array(chunks, kind))
