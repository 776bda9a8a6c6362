"""Blocks of a status: frozen values, and their JSON objects on the wire.

On the wire a field has its name in camelCase, or the name `wire` of its metadata. A field with its default value is absent on the wire.
Parsing drops fields that a block does not have; the resource definition admits none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One JSON object of a status. Every field of a subclass has a default."""

    def wire(self) -> dict[str, Any]:
        """The JSON object."""
        given = [(one, getattr(self, one.name)) for one in members(type(self))]
        return {one.wire: _written(value) for one, value in given if value != one.default}

    @classmethod
    def of(cls, wire: Mapping[str, Any]) -> Self:
        """The block of a JSON object that the resource definition admits. Inverse of `wire`."""
        given = [(one, wire.get(one.wire)) for one in members(cls)]
        return cls(**{one.name: one.read(value) for one, value in given if value is not None})


@dataclass(frozen=True, slots=True)
class Member:
    """One field of a block. `read` converts the JSON value."""

    name: str
    wire: str
    default: Any
    read: Callable[[Any], Any]


def members(block: type[Block]) -> tuple[Member, ...]:
    """The fields of a block, in the order of their definition."""
    key: Any = block  # mypy would use the hash of a block's instances for its class
    return _cached_members(key)


@functools.cache
def _cached_members(block: Any) -> tuple[Member, ...]:
    hints = get_type_hints(block)
    return tuple(
        Member(one.name, one.metadata.get("wire") or _camel(one.name), one.default, _reader(hints[one.name]))
        for one in fields(block)
    )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _reader(hint: Any) -> Callable[[Any], Any]:
    if get_origin(hint) in {Union, UnionType}:
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if isinstance(hint, type) and issubclass(hint, Block):
        return hint.of
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        item = _reader(arguments[0])
        return lambda values: tuple(map(item, values))
    if origin is Mapping:
        value = _reader(arguments[1])
        return lambda values: {name: value(one) for name, one in values.items()}
    return _same


def _same(value: Any) -> Any:
    return value


def _written(value: Any) -> Any:
    match value:
        case Block():
            return value.wire()
        case tuple():
            return [_written(one) for one in value]
        case Mapping():
            return {name: _written(one) for name, one in value.items()}
        case _:
            return value
