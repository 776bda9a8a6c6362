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
from persist_engine.rows.nested.layout import has_required, holds_lists, is_any_list, list_of, map_of

#: The codec names of every shard that this code creates: typed structs, u64 times, i64 diffs.
CODECS = CodecNames(key="struct", val="struct")

#: For types that are not allowed, the allowed type that can hold all their values.
HELD_AS = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}


@dataclass(frozen=True)
class Schema:
    """The key and value schema of a shard. The value may have no fields; the key has at least one.

    Fields are bool, signed integers, float32/64, decimal128, string, binary, date32, timestamp(us) without zone or in UTC, and
    structs of these; the value may also have lists and maps. Raises InvalidUsage, which names the field, for any other type.
    `Schema.from_ddl(s.key_ddl, s.val_ddl) == s`.
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
        """The schema that two DDL texts declare (rows.ddl). Raises InvalidUsage, which names the side, the position and the field."""
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
        """The canonical Spark DDL of the key."""
        return print_ddl(self.key)

    @cached_property
    def val_ddl(self) -> str:
        """The canonical Spark DDL of the value; "" when it has no fields."""
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
        """(side, index) of each top-level NOT NULL field. None when a nested struct has NOT NULL fields, and when values hold lists or
        maps, whose form must be checked, too.
        """
        if self.holds_lists:
            return None
        sides = [(side, list(enumerate(fields))) for side, fields in (("key", self.key), ("val", self.val))]
        if any(has_required(field.type) for _, fields in sides for _, field in fields):
            return None
        return tuple((side, index) for side, fields in sides for index, field in fields if not field.nullable)

    @cached_property
    def holds_lists(self) -> bool:
        """Whether the value contains a list or a map."""
        return any(holds_lists(field.type) for field in self.val)

    def to_pair(self) -> SchemaPair:
        """The form registered in state: two serialized Arrow schemas."""
        return SchemaPair(self.key.serialize().to_pybytes(), self.val.serialize().to_pybytes())

    @classmethod
    def from_pair(cls, pair: SchemaPair) -> Schema:
        """Inverse of `to_pair`. Raises CorruptData when the bytes are not allowed schemas."""
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

    def has_two_meanings(self, name: str) -> bool:
        """Whether `name` can be read in two ways: as a field with its side, as in `key.a`, and as a field without its side. The second is a
        field of a struct `key`, or a field whose own name contains the dot.
        """
        side, _, rest = name.partition(".")
        fields = {"key": self.key, "val": self.val}.get(side)
        return fields is not None and _leads(fields, rest) and (_leads(self.key, name) or _leads(self.val, name))

    def column_problem(
        self,
        columns: Sequence[str],
        *,
        beside: Iterable[tuple[str, str]] = (),
        hint: str = "drop them with input.format.sql",
    ) -> str | None:
        """How the columns of a sink's input differ from the fields of key and value plus the columns `beside` them; None when each of these
        occurs once and there are no others. Names are compared exactly. `beside` holds (column, its role) pairs; such a column may also be
        a field of the shard. `hint` says how to remove a column.
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


def _leads(fields: Iterable[pa.Field], path: str) -> bool:
    """Whether `path` names one of `fields`, or a field within their structs. Names may contain dots."""
    return any(
        path == field.name
        or (
            path.startswith(f"{field.name}.")
            and pa.types.is_struct(field.type)
            and _leads(list(field.type), path.removeprefix(f"{field.name}."))
        )
        for field in fields
    )


def _allowed(path: str, fields: list[pa.Field], depth: int) -> list[pa.Field]:
    """The fields without metadata. Raises InvalidUsage, which names the first field that a shard cannot hold."""
    out: list[pa.Field] = []
    seen: set[str] = set()
    for field in fields:
        name = f"{path}.{field.name}"
        if not field.name:
            raise InvalidUsage(f"field {name}: a field name must not be empty")
        if field.name in seen:
            raise InvalidUsage(f"field {name}: declared twice", field=name)
        seen.add(field.name)
        out.append(pa.field(field.name, _allowed_type(name, field.type, depth + 1), nullable=field.nullable))
    return out


def _allowed_type(name: str, kind: pa.DataType, depth: int) -> pa.DataType:
    is_nested = pa.types.is_struct(kind) or is_any_list(kind)
    if is_nested and depth > DEPTH_MAX:
        raise InvalidUsage(f"field {name}: structs, lists and maps are nested more than {DEPTH_MAX} deep")
    if pa.types.is_struct(kind):
        if kind.num_fields == 0:
            raise InvalidUsage(f"field {name}: a nested struct needs at least one field", field=name)
        return pa.struct(_allowed(name, list(kind), depth))
    if is_any_list(kind):
        return _allowed_list(name, kind, depth)
    if type_name(kind) is None:
        raise InvalidUsage(f"field {name}: {_refusal(kind)}", field=name)
    return kind


def _allowed_list(name: str, kind: pa.DataType, depth: int) -> pa.DataType:
    if name.startswith("key."):
        what = "MAP" if pa.types.is_map(kind) else "ARRAY"
        raise InvalidUsage(f"field {name}: a key holds no {what}: put the column into the value", field=name)
    if pa.types.is_map(kind):
        if type_name(kind.key_type) is None:
            shown = print_type(kind.key_type)
            raise InvalidUsage(
                f"field {name}: the key of a MAP is a number, a text, a date or a time, not {shown}", field=name
            )
        if not kind.item_field.nullable:
            raise InvalidUsage(f"field {name}: a value of a MAP cannot be NOT NULL", field=name)
        return map_of(kind.key_type, _allowed_element(f"{name}.value", kind.item_type, depth))
    if not pa.types.is_list(kind):
        raise InvalidUsage(f"field {name}: type {kind} is not allowed, use pyarrow's list_", field=name)
    if not kind.value_field.nullable:
        raise InvalidUsage(f"field {name}: an element of an ARRAY cannot be NOT NULL", field=name)
    return list_of(_allowed_element(f"{name}.element", kind.value_type, depth))


def _allowed_element(name: str, kind: pa.DataType, depth: int) -> pa.DataType:
    if has_required(kind):
        raise InvalidUsage(f"field {name}: a field within an ARRAY or a MAP cannot be NOT NULL", field=name)
    return _allowed_type(name, kind, depth + 1)


def _refusal(kind: pa.DataType) -> str:
    instead = HELD_AS.get(kind)
    if pa.types.is_timestamp(kind):
        instead = pa.timestamp("us", None if kind.tz is None else "UTC")
    hint = "" if instead is None else f", use {print_type(instead)}, which is {instead} in pyarrow"
    return f"type {kind} is not allowed{hint}"


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
