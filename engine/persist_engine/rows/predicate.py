"""Predicates over fields of key and val, as values that callers build, send to other processes and write as text.

    And((Compare("val.delay", ">", 30), Or((In("key.carrier", ("AA", "UA")), IsNull("val.tail")))))

This module owns the tree and its serialized forms. rows.filter owns its meaning and its binding to a schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, get_args

from persist_engine.base.errors import InvalidUsage

Op = Literal["=", "!=", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True)
class Compare:
    """`column op value`. Numbers compare by value, whatever their types. Dates and times may be ISO 8601 text."""

    column: str
    op: Op
    value: Any


@dataclass(frozen=True, slots=True)
class In:
    """`column` is one of `values`. No value is null."""

    column: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """`column`, a text, has the form of `pattern`, in which `%` stands for any text, `_` for one character, and a backslash before `%`, `_`
    or a backslash for that character itself.
    """

    column: str
    pattern: str


@dataclass(frozen=True, slots=True)
class IsNull:
    """`column` is null."""

    column: str


@dataclass(frozen=True, slots=True)
class And:
    """Every term is true. An empty conjunction is true."""

    terms: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """At least one term is true."""

    terms: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The term is false. If the term is unknown because of nulls, so is this."""

    term: Predicate


Predicate = Compare | In | Like | IsNull | And | Or | Not

_ALIASES: dict[str, Op] = {**{op: op for op in get_args(Op)}, "==": "=", "<>": "!="}


def from_tuples(terms: Sequence[Any]) -> Predicate:
    """The predicate of `[(column, op, value), ...]`, which is a conjunction, or of a list of these lists, which is a disjunction of
    conjunctions. Operators are those of Compare, `in`, `like`, `not in` and `not like`. A value may be numpy's. Raises InvalidUsage, which
    names what has another shape.
    """
    if not isinstance(terms, list | tuple) or not terms:
        raise InvalidUsage("a filter is a list of (column, operator, value), or a list of such lists; it is not empty")
    if all(isinstance(term, list) for term in terms):
        return Or(tuple(And(tuple(map(_from_tuple, each))) for each in terms))
    return And(tuple(map(_from_tuple, terms)))


def _from_tuple(term: Any) -> Predicate:
    if not isinstance(term, tuple) or len(term) != 3 or not all(isinstance(text, str) for text in term[:2]):
        raise InvalidUsage(f"a term of a filter is (column, operator, value), not {term!r}")
    column, op, value = term
    if op in ("in", "not in"):
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise InvalidUsage(f"filter on {column}: {op} takes a list of values, not {value!r}", column=column)
        within = In(column, tuple(map(_plain, value)))
        return within if op == "in" else Not(within)
    if op in ("like", "not like"):
        if not isinstance(value, str):
            raise InvalidUsage(f"filter on {column}: {op} takes a text, not {value!r}", column=column)
        like = Like(column, value)
        return like if op == "like" else Not(like)
    if op not in _ALIASES:
        known = ", ".join((*_ALIASES, "in", "not in", "like", "not like"))
        raise InvalidUsage(f"filter on {column}: {op!r} is none of {known}", column=column)
    return Compare(column, _ALIASES[op], _plain(value))


def _plain(value: Any) -> Any:
    """A number or a truth value of numpy, such as `df["id"].max()`, as Python's; anything else as it is."""
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return value.item() if kind in {"b", "i", "u", "f"} and value.shape == () else value


def to_json(predicate: Predicate) -> dict[str, Any]:
    """The predicate as plain JSON values; inverse of `from_json`. Raises InvalidUsage for a literal of a type that no column has."""
    match predicate:
        case Compare(column, op, value):
            return {"column": column, "op": op, "value": _value_to_json(column, value)}
        case In(column, values):
            return {"column": column, "in": [_value_to_json(column, value) for value in values]}
        case Like(column, pattern):
            return {"column": column, "like": pattern}
        case IsNull(column):
            return {"column": column, "is": "null"}
        case And(terms):
            return {"and": [to_json(term) for term in terms]}
        case Or(terms):
            return {"or": [to_json(term) for term in terms]}
        case Not(term):
            return {"not": to_json(term)}


def from_json(value: dict[str, Any]) -> Predicate:
    """Inverse of `to_json`. Raises ValueError, KeyError or TypeError for any other value."""
    match value:
        case {"column": str(column), "op": str(op), "value": literal}:
            return Compare(column, _ALIASES[op], _value_from_json(literal))
        case {"column": str(column), "in": list(values)}:
            return In(column, tuple(map(_value_from_json, values)))
        case {"column": str(column), "like": str(pattern)}:
            return Like(column, pattern)
        case {"column": str(column), "is": "null"}:
            return IsNull(column)
        case {"and": list(terms)}:
            return And(tuple(map(from_json, terms)))
        case {"or": list(terms)}:
            return Or(tuple(map(from_json, terms)))
        case {"not": dict(term)}:
            return Not(from_json(term))
    raise ValueError(f"no predicate: {value!r}")


def _value_to_json(column: str, value: Any) -> Any:
    match value:
        case bool() | int() | str():
            return value
        case float():
            return {"float": float.__repr__(value)}  # numpy floats are floats, too, but their own repr differs
        case Decimal():
            return {"decimal": str(value)}
        case bytes():
            return {"binary": value.hex()}
        case datetime():  # must come before date, because a datetime is a date
            return {"datetime": value.isoformat()}
        case date():
            return {"date": value.isoformat()}
    raise InvalidUsage(f"filter on {column}: {value!r} is not a value of any column type", column=column)


_READERS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "decimal": Decimal,
    "binary": bytes.fromhex,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
}


def _value_from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return _READERS[kind](text)


def as_regex(pattern: str) -> str:
    """The regular expression, in Arrow's syntax, for the pattern of a Like."""
    wildcards = {"%": ".*", "_": "."}
    tokens = re.findall(r"\\.|.", pattern, re.DOTALL)
    return f"(?s)^{''.join(wildcards.get(token) or re.escape(token[-1]) for token in tokens)}$"
