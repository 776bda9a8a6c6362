"""Spark DDL text <-> Arrow schema, for the types that a shard may hold. Spark and every Parquet reader can read these
types.

    id BIGINT NOT NULL, `a name` STRING, at TIMESTAMP, place STRUCT<x: DOUBLE, y: DOUBLE>, tags ARRAY<STRING>, n MAP<STRING, INT>

Types are case-insensitive, names are case-sensitive. TIMESTAMP is an instant (microseconds, UTC). TIMESTAMP_NTZ is a
wall clock (microseconds). `parse_ddl(print_ddl(schema)) == schema`.
"""

from __future__ import annotations

import re

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.nested.layout import is_any_list, list_of, map_of

_NAMED: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}
_ALIASES = {
    "BYTE": "TINYINT",
    "SHORT": "SMALLINT",
    "INTEGER": "INT",
    "LONG": "BIGINT",
    "REAL": "FLOAT",
    "TIMESTAMP_LTZ": "TIMESTAMP",
    "DEC": "DECIMAL",
    "NUMERIC": "DECIMAL",
}
#: The SQL names of types that a shard cannot hold, for messages.
_FOREIGN = {
    pa.large_string(): "STRING",
    pa.string_view(): "STRING",
    pa.large_binary(): "BINARY",
    pa.binary_view(): "BINARY",
    pa.date64(): "DATE",
    pa.null(): "VOID",
}
_NAMES = {data_type: name for name, data_type in _NAMED.items()}
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<word>\w+)|(?P<mark>[<>(),:]))")
#: The greatest nesting depth of structs, lists and maps. It bounds the recursion, and is far above that of any real table.
DEPTH_MAX = 32


def type_name(data_type: pa.DataType) -> str | None:
    """The DDL name of a type that is not a struct, list or map; None when a shard cannot hold the type."""
    if pa.types.is_decimal128(data_type) and 0 <= data_type.scale <= data_type.precision:
        return f"DECIMAL({data_type.precision},{data_type.scale})"
    return _NAMES.get(data_type)


def print_ddl(schema: pa.Schema) -> str:
    """The DDL of an allowed schema (rows.schema checks it). It is canonical: equal schemas print the same text."""
    return ", ".join(_print_field(field, " ") for field in schema)


def _print_field(field: pa.Field, separator: str) -> str:
    name = field.name if _PLAIN_NAME.fullmatch(field.name) else "`" + field.name.replace("`", "``") + "`"
    end = "" if field.nullable else " NOT NULL"
    return f"{name}{separator}{print_type(field.type)}{end}"


def print_type(data_type: pa.DataType) -> str:
    """The DDL of one type. For a type that a shard cannot hold, it is the SQL name of a type with the same values, or else the Arrow name;
    this is for messages.
    """
    if pa.types.is_struct(data_type):
        return "STRUCT<" + ", ".join(_print_field(child, ": ") for child in data_type) + ">"
    if pa.types.is_map(data_type):
        return f"MAP<{print_type(data_type.key_type)}, {print_type(data_type.item_type)}>"
    if is_any_list(data_type):
        return f"ARRAY<{print_type(data_type.value_type)}>"
    return type_name(data_type) or _foreign_name(data_type)


def _foreign_name(data_type: pa.DataType) -> str:
    if pa.types.is_dictionary(data_type):
        return print_type(data_type.value_type)
    if pa.types.is_timestamp(data_type):
        name = _NAMES[pa.timestamp("us", None if data_type.tz is None else "UTC")]
        zone = "" if data_type.tz in (None, "UTC") else f" in {data_type.tz}"
        return f"{name}{zone}" + (f" in {data_type.unit}" if data_type.unit != "us" else "")
    if pa.types.is_unsigned_integer(data_type):
        signed = {8: "TINYINT", 16: "SMALLINT", 32: "INT", 64: "BIGINT"}
        return f"{signed[data_type.bit_width]} UNSIGNED"
    if pa.types.is_decimal(data_type):
        return f"DECIMAL({data_type.precision},{data_type.scale})"
    if pa.types.is_fixed_size_binary(data_type):
        return f"BINARY({data_type.byte_width})"
    return _FOREIGN.get(data_type) or str(data_type)


def parse_ddl(text: str) -> pa.Schema:
    """The schema that `text` declares. Empty text declares no fields. Raises InvalidUsage, which names the position and the field."""
    return pa.schema(_Parser(text).fields_to_end())


class _Parser:
    """A recursive descent parser over tokens. `_at` is the start of the current token, for messages."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._next = 0
        self._at = 0
        self._field = ""
        self._kind = ""
        self._token = ""
        self._advance()

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._next)
        if found is None:
            rest = self._text[self._next :]
            self._at = self._next + len(rest) - len(rest.lstrip())
            self._kind, self._token = ("end", "end of text") if not rest.strip() else ("other", rest.lstrip()[0])
            return
        self._kind = str(found.lastgroup)
        self._token = found[self._kind]
        self._at, self._next = found.start(self._kind), found.end()

    def _refuse(self, message: str) -> InvalidUsage:
        where = f"schema at position {self._at + 1}" + (f", field {self._field!r}" if self._field else "")
        return InvalidUsage(f"{where}: {message}", position=self._at + 1, field=self._field, ddl=self._text)

    def _take_mark(self, mark: str) -> bool:
        if self._kind == "mark" and self._token == mark:
            self._advance()
            return True
        return False

    def _need_mark(self, mark: str) -> None:
        if not self._take_mark(mark):
            raise self._refuse(f"expected {mark!r}, found {self._token!r}")

    def fields_to_end(self) -> list[pa.Field]:
        fields: list[pa.Field] = []
        if self._kind == "end":
            return fields
        while True:
            fields.append(self._one_field(0, colon=False))
            if self._kind == "end":
                return fields
            self._need_mark(",")

    def _one_field(self, depth: int, *, colon: bool) -> pa.Field:
        outer = self._field
        if self._kind == "quoted":
            name = self._token[1:-1].replace("``", "`")
        elif self._kind == "word":
            name = self._token
        else:
            raise self._refuse(f"expected a field name, found {self._token!r}")
        self._field = f"{outer}.{name}" if outer else name
        if not name:
            raise self._refuse("a field name must not be empty")
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise self._refuse("a field name must not hold a lone surrogate, which cannot be encoded")
        self._advance()
        if colon:
            self._take_mark(":")
        data_type = self._one_type(depth)
        nullable = not self._take_not_null()
        self._field = outer
        return pa.field(name, data_type, nullable=nullable)

    def _take_not_null(self) -> bool:
        if self._kind != "word" or self._token.upper() != "NOT":
            return False
        self._advance()
        if self._kind != "word" or self._token.upper() != "NULL":
            raise self._refuse(f"expected NULL after NOT, found {self._token!r}")
        self._advance()
        return True

    def _one_type(self, depth: int) -> pa.DataType:
        if self._kind != "word":
            raise self._refuse(f"expected a type, as in 'id BIGINT', found {self._token!r}")
        name = _ALIASES.get(self._token.upper(), self._token.upper())
        if name == "STRUCT":
            self._advance()
            return self._struct(depth + 1)
        if name == "DECIMAL":
            self._advance()
            return self._decimal()
        if name in ("ARRAY", "MAP"):
            self._advance()
            return self._list(depth + 1) if name == "ARRAY" else self._map(depth + 1)
        if name not in _NAMED:
            allowed = ", ".join([*_NAMED, "DECIMAL(p,s)", "STRUCT<...>", "ARRAY<...>", "MAP<k, v>"])
            raise self._refuse(f"type {self._token!r} is not one of {allowed}")
        self._advance()
        return _NAMED[name]

    def _list(self, depth: int) -> pa.DataType:
        self._open(depth)
        element = self._one_type(depth)
        self._refuse_not_null("an element of an ARRAY")
        self._need_mark(">")
        return list_of(element)

    def _map(self, depth: int) -> pa.DataType:
        self._open(depth)
        key = self._one_type(depth)
        self._need_mark(",")
        value = self._one_type(depth)
        self._refuse_not_null("a value of a MAP")
        self._need_mark(">")
        return map_of(key, value)

    def _refuse_not_null(self, what: str) -> None:
        if self._kind == "word" and self._token.upper() == "NOT":
            raise self._refuse(f"{what} cannot be NOT NULL")

    def _open(self, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise self._refuse(f"structs, lists and maps nest deeper than {DEPTH_MAX}")
        self._need_mark("<")

    def _struct(self, depth: int) -> pa.DataType:
        self._open(depth)
        children = [self._one_field(depth, colon=True)]
        while self._take_mark(","):
            children.append(self._one_field(depth, colon=True))
        self._need_mark(">")
        return pa.struct(children)

    def _decimal(self) -> pa.DataType:
        if not self._take_mark("("):
            return pa.decimal128(10, 0)
        at = self._at
        precision = self._number()
        scale = self._number() if self._take_mark(",") else 0
        if not (1 <= precision <= 38 and scale <= precision):
            self._at = at
            raise self._refuse(f"DECIMAL({precision},{scale}) needs 1 <= precision <= 38 and scale <= precision")
        self._need_mark(")")
        return pa.decimal128(precision, scale)

    def _number(self) -> int:
        if self._kind != "word" or not self._token.isascii() or not self._token.isdecimal() or len(self._token) > 3:
            raise self._refuse(f"expected a small number, found {self._token!r}")
        value = int(self._token)
        self._advance()
        return value
