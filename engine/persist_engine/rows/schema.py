"""A shard's schema: the fields of key and value. Names, order, types and nullability count; Arrow metadata does not.

In memory and on the way to readers, updates are tables of `Schema.updates_schema`: key struct, val struct, time int64,
diff int64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.model.state import CodecNames, SchemaPair
from persist_engine.rows.ddl import DEPTH_MAX, parse_ddl, print_ddl, print_type, type_name

#: The codec names of every shard that this code creates: typed structs, u64 times, i64 diffs.
CODECS = CodecNames(key="struct", val="struct")

_HINTS = {
    "large_string": "string",
    "string_view": "string",
    "large_binary": "binary",
    "binary_view": "binary",
    "uint8": "int16",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "decimal128(20, 0)",
    "halffloat": "float",
    "date64[ms]": "date32",
}


@dataclass(frozen=True)
class Schema:
    """Key and value schema of a shard. The value may have no fields; the key has at least one.

    Fields are bool, signed integers, float32/64, decimal128, string, binary, date32, timestamp(us) without zone or in
    UTC, and structs of these. InvalidUsage names a field of any other type. `Schema.from_ddl(s.key_ddl, s.val_ddl) ==
    s`.
    """

    key: pa.Schema
    val: pa.Schema

    def __post_init__(self) -> None:
        for side, given in (("key", self.key), ("val", self.val)):
            if not isinstance(given, Iterable) or not all(isinstance(field, pa.Field) for field in given):
                raise InvalidUsage(f"{side} must be a pyarrow schema, not a {type(given).__name__}")
            object.__setattr__(self, side, pa.schema(_allowed(side, list(given), 0)))
        if len(self.key) == 0:
            raise InvalidUsage("key schema has no fields: a key needs at least one")

    @classmethod
    def from_ddl(cls, key: str, value: str = "") -> Schema:
        """The schema that two DDL texts declare (rows.ddl). InvalidUsage names the side, the position and the field."""
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidUsage("key and value must be DDL texts")
        try:
            side = "key"
            key_schema = parse_ddl(key)
            side = "value"
            return cls(key_schema, parse_ddl(value))
        except InvalidUsage as error:
            if "position" not in error.detail:
                raise
            raise InvalidUsage(f"{side} {error}", **error.detail) from error

    @cached_property
    def key_ddl(self) -> str:
        """Canonical Spark DDL of the key."""
        return print_ddl(self.key)

    @cached_property
    def val_ddl(self) -> str:
        """Canonical Spark DDL of the value; "" when it has no fields."""
        return print_ddl(self.val)

    @cached_property
    def key_type(self) -> pa.DataType:
        """The struct type of the column `key`."""
        return pa.struct(list(self.key))

    @cached_property
    def val_type(self) -> pa.DataType:
        """The struct type of the column `val`. It may have no fields."""
        return pa.struct(list(self.val))

    @cached_property
    def updates_schema(self) -> pa.Schema:
        """The schema of a table of updates. None of the four columns holds a null: `normalise` and the parts check
        that. The fields are nevertheless declared nullable, which is Arrow's default, so that tables from other sources
        match.
        """
        return pa.schema([("key", self.key_type), ("val", self.val_type), ("time", pa.int64()), ("diff", pa.int64())])

    @cached_property
    def required_fields(self) -> tuple[tuple[str, int], ...] | None:
        """(side, index) of each top-level NOT NULL field; None when a nested struct has NOT NULL fields."""
        sides = [(side, list(enumerate(fields))) for side, fields in (("key", self.key), ("val", self.val))]
        if any(_has_required(field.type) for _, fields in sides for _, field in fields):
            return None
        return tuple((side, index) for side, fields in sides for index, field in fields if not field.nullable)

    def to_pair(self) -> SchemaPair:
        """The form registered in state: two serialized Arrow schemas."""
        return SchemaPair(self.key.serialize().to_pybytes(), self.val.serialize().to_pybytes())

    @classmethod
    def from_pair(cls, pair: SchemaPair) -> Schema:
        """Inverse of `to_pair`. CorruptData when the bytes are not allowed schemas."""
        try:
            return cls(pa.ipc.read_schema(pa.py_buffer(pair.key)), pa.ipc.read_schema(pa.py_buffer(pair.val)))
        except (pa.ArrowException, InvalidUsage, ValueError, OSError) as error:
            raise CorruptData(f"registered schema does not decode: {error}", key="schema") from error

    def difference(self, other: Schema) -> str | None:
        """How `other` (the requested schema) differs from this schema, by column; None when both are equal."""
        found = [
            *_differences("key", self.key_type, other.key_type),
            *_differences("val", self.val_type, other.val_type),
        ]
        return "; ".join(found) or None

    def column_problem(
        self,
        columns: Sequence[str],
        *,
        beside: Iterable[tuple[str, str]] = (),
        hint: str = "drop them with input.format.sql",
    ) -> str | None:
        """How the columns of a sink's input differ from the fields of key and value and from the columns `beside` them; None when each is
        there once and no other is. Names are compared exactly. `beside`: (column, its role), where a column may also be a field of the
        shard. `hint` says how to remove a column.
        """
        wanted = [(name, "key field") for name in self.key.names] + [(name, "value field") for name in self.val.names]
        wanted += beside
        missing = [f"{name} ({role})" for name, role in wanted if name not in columns]
        surplus = sorted(set(columns) - {name for name, _ in wanted})
        doubled = sorted(name for name, count in Counter(columns).items() if count > 1)
        problems = []
        if missing:
            problems.append(f"missing: {', '.join(missing)}")
        if surplus:
            problems.append(f"not in the shard's schema: {', '.join(surplus)} ({hint})")
        if doubled:
            problems.append(f"more than once: {', '.join(doubled)}")
        if not problems:
            return None
        found = f"the input has: {', '.join(columns)}"
        return f"input columns do not match the shard's schema: {'; '.join(problems)}; {found}"

    def __repr__(self) -> str:
        return f"Schema(({self.key_ddl}) -> ({self.val_ddl}))"


def _has_required(data_type: pa.DataType) -> bool:
    if not pa.types.is_struct(data_type):
        return False
    return any(not child.nullable or _has_required(child.type) for child in data_type)


def _allowed(path: str, fields: list[pa.Field], depth: int) -> list[pa.Field]:
    """The fields without metadata. InvalidUsage names the first field that a shard cannot hold."""
    if depth > DEPTH_MAX:
        raise InvalidUsage(f"field {path}: structs nest deeper than {DEPTH_MAX}")
    out: list[pa.Field] = []
    seen: set[str] = set()
    for field in fields:
        name = f"{path}.{field.name}"
        if not field.name:
            raise InvalidUsage(f"field {name}: a field name must not be empty")
        if field.name in seen:
            raise InvalidUsage(f"field {name}: declared twice", field=name)
        seen.add(field.name)
        data_type = field.type
        if pa.types.is_struct(data_type):
            if data_type.num_fields == 0:
                raise InvalidUsage(f"field {name}: a nested struct needs at least one field", field=name)
            data_type = pa.struct(_allowed(name, list(data_type), depth + 1))
        elif type_name(data_type) is None:
            raise InvalidUsage(f"field {name}: {_refusal(data_type)}", field=name)
        out.append(pa.field(field.name, data_type, nullable=field.nullable))
    return out


def _refusal(data_type: pa.DataType) -> str:
    if pa.types.is_timestamp(data_type):
        return f"type {data_type} is not allowed, use timestamp[us] (wall clock) or timestamp[us, tz=UTC] (instant)"
    hint = _HINTS.get(str(data_type))
    return f"type {data_type} is not allowed" + (f", use {hint}" if hint else "")


def _differences(path: str, ours: pa.DataType, theirs: pa.DataType) -> list[str]:
    mine, other = {field.name: field for field in ours}, {field.name: field for field in theirs}
    found = [f"{path}.{name} is missing" for name in mine if name not in other]
    found += [f"{path}.{name} is not in the shard's schema" for name in other if name not in mine]
    for name, field in mine.items():
        if name in other:
            found += _field_differences(f"{path}.{name}", field, other[name])
    if not found and list(mine) != list(other):
        found.append(f"{path} has its fields in the order {', '.join(other)}, the shard's is {', '.join(mine)}")
    return found


def _field_differences(path: str, ours: pa.Field, theirs: pa.Field) -> list[str]:
    found: list[str] = []
    if pa.types.is_struct(ours.type) and pa.types.is_struct(theirs.type):
        found += _differences(path, ours.type, theirs.type)
    elif ours.type != theirs.type:
        found.append(f"{path} is {print_type(theirs.type)}, the shard's is {print_type(ours.type)}")
    if ours.nullable != theirs.nullable:
        words = {True: "nullable", False: "NOT NULL"}
        found.append(f"{path} is {words[theirs.nullable]}, the shard's is {words[ours.nullable]}")
    return found
