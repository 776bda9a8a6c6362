"""Converts conditions of a query to conditions of the engine, if the engine answers them exactly as Spark does. Pure.

A condition arrives as a tree of JSON, as the catalog writes Spark's predicates: `{"name": "=", "children": [...]}`, with
`{"column": [...]}` and `{"type": ..., "value": ...}` as leaves. It becomes the text of option `where`. Spark answers a condition that has
no exact text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from persist_engine import filter_of, predicate_of
from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.schema import Schema

#: Spark's names of comparisons, and the text of each.
_COMPARISONS = {"=": "=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
#: Spark's names for forms of LIKE and of functions, and the pattern of each.
_FORMS = {"STARTS_WITH": "{}%", "ENDS_WITH": "%{}", "CONTAINS": "%{}%"}
_JOINTS = {"AND": "AND", "OR": "OR"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WHOLE = frozenset({"byte", "short", "integer", "long"})
#: The quote of a column's name.
_QUOTE = "`"


class _Inexpressible(Exception):
    """The engine has no text for the condition."""


def answered(condition: Mapping[str, Any], schema: Schema, *, keys_only: bool = False) -> str | None:
    """The text of `condition` if the engine answers it for rows of `schema` exactly as Spark does. None: Spark must answer it. With
    `keys_only`, Spark must answer a condition that names a field of the value.

    In a collection that can contain errors, the engine lets errors pass a condition that does not name them. The result is then None.
    """
    try:
        text = _text(condition, schema)
        rule = filter_of(text, schema)
    except (_Inexpressible, InvalidUsage):
        return None
    if keys_only and not all(column.startswith("key.") for column in rule.columns):
        return None
    return None if rule.zoneless or rule.passes_errors else text


def conjunction(texts: Sequence[str]) -> str | None:
    """The condition that all of `texts` are true. None: every row satisfies it."""
    return " AND ".join(f"({text})" for text in texts) or None


def _text(node: Mapping[str, Any], schema: Schema, *, is_negated: bool = False) -> str:
    """The text of a node. `is_negated`: whether false and null differ. Outside of a negation neither selects a row."""
    name, children = node.get("name"), node.get("children", ())
    if name in _JOINTS and children:
        return f" {_JOINTS[name]} ".join(f"({_text(child, schema, is_negated=is_negated)})" for child in children)
    if name == "NOT" and len(children) == 1:
        return f"NOT ({_text(children[0], schema, is_negated=True)})"
    if node.get("type") == "boolean" and (node.get("value") is not None or not is_negated):
        return _constant(schema, is_true=bool(node.get("value")))
    if name in ("IS_NULL", "IS_NOT_NULL") and len(children) == 1:
        return f"{_column(children[0], schema)} IS {'NOT ' * (name == 'IS_NOT_NULL')}NULL"
    if name == "IN" and len(children) > 1:
        values = [each for each in children[1:] if is_negated or "type" not in each or each.get("value") is not None]
        texts = ", ".join(map(_literal, values))
        return f"{_column(children[0], schema)} IN ({texts})" if values else _constant(schema, is_true=False)
    if name in _FORMS and len(children) == 2 and children[1].get("type") == "string":
        return f"{_column(children[0], schema)} LIKE {_pattern(_FORMS[name], children[1].get('value'))}"
    if name == "<=>" and len(children) == 2:
        left, right = children if "column" in children[0] else reversed(children)
        column = _column(left, schema)
        if "type" in right and right.get("value") is None:
            return f"{column} IS NULL"
        return f"{column} IS NOT NULL AND {column} = {_literal(right)}"
    if name in _COMPARISONS and len(children) == 2:
        left, right = children
        if "column" in left:
            return f"{_column(left, schema)} {_COMPARISONS[name]} {_literal(right)}"
        return f"{_literal(left)} {_COMPARISONS[name]} {_column(right, schema)}"
    raise _Inexpressible


def _constant(schema: Schema, *, is_true: bool) -> str:
    """Text that every row satisfies, or that no row satisfies."""
    first = _column({"column": [schema.key.names[0]]}, schema)
    return f"{first} IS NULL {'OR' if is_true else 'AND'} {first} IS NOT NULL"


def _column(node: Mapping[str, Any], schema: Schema) -> str:
    """The text of a column. It has a side if its name could be read as a name with a side. No field name is on both sides of a table."""
    path = node.get("column")
    if not path or any(_QUOTE in name for name in path):
        raise _Inexpressible
    if path[0].split(".")[0] in ("key", "val"):
        path = ["key" if path[0] in schema.key.names else "val", *path]
    return ".".join(f"{_QUOTE}{name}{_QUOTE}" for name in path)


def _literal(node: Mapping[str, Any]) -> str:
    """The text of a literal, which reads back as the same value."""
    data_type, value = node.get("type"), node.get("value")
    if not isinstance(data_type, str) or value is None:
        raise _Inexpressible
    try:
        text, meant = _literal_text(data_type, value)
        read = predicate_of(f"x = {text}").value  # type: ignore[union-attr]  # a comparison
    except (InvalidUsage, ValueError, OverflowError, ArithmeticError) as error:
        raise _Inexpressible from error
    if type(read) is not type(meant) or (read != meant and str(read) != "nan"):
        raise _Inexpressible
    return text


def _pattern(form: str, value: str | None) -> str:
    """The text of a pattern in which `value` stands for itself."""
    if value is None:
        raise _Inexpressible
    pattern = form.format("".join(f"\\{char}" if char in "%_\\" else char for char in value))
    text, _ = _literal_text("string", pattern)
    try:
        read = predicate_of(f"x LIKE {text}").pattern  # type: ignore[union-attr]  # a LIKE
    except InvalidUsage as error:
        raise _Inexpressible from error
    if read != pattern:
        raise _Inexpressible
    return text


def _literal_text(data_type: str, value: Any) -> tuple[str, Any]:
    """The text of a literal, and the value that the engine must read from it. `value`: in the form of Conditions.java."""
    if data_type == "boolean":
        return ("TRUE" if value else "FALSE"), bool(value)
    if data_type in _WHOLE:
        return str(int(value)), Decimal(int(value))
    if data_type.startswith("decimal"):
        exact = Decimal(value)
        return format(exact, "f"), exact
    if data_type in ("float", "double"):
        number = float(value)
        if not math.isfinite(number):
            return f"CAST('{number}' AS DOUBLE)", number
        return repr(number), Decimal(repr(number))
    if data_type == "string":
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
        return f"'{escaped}'", value
    if data_type == "binary":
        return f"X'{value}'", bytes.fromhex(value)
    if data_type == "date":
        day = date.fromordinal(_EPOCH.toordinal() + int(value))
        return f"DATE '{day.isoformat()}'", day
    if data_type in ("timestamp", "timestamp_ntz"):
        at = _EPOCH + timedelta(microseconds=int(value))
        shown = (at if data_type == "timestamp" else at.replace(tzinfo=None)).isoformat(sep=" ")
        return f"TIMESTAMP '{shown}'", shown
    raise _Inexpressible
