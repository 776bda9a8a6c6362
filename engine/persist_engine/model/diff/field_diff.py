"""A change of one keyed value, and operations on lists of such changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_never

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.model.shared_map import SharedMap

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Insert(Generic[K, V]):
    """`key` was absent and is now `to`."""

    key: K
    to: V


@dataclass(frozen=True, slots=True)
class Update(Generic[K, V]):
    """`key` was `old` and is now `to`."""

    key: K
    old: V
    to: V


@dataclass(frozen=True, slots=True)
class Delete(Generic[K, V]):
    """`key` was `old` and is now absent."""

    key: K
    old: V


FieldDiff = Insert[K, V] | Update[K, V] | Delete[K, V]


def field_diff(key: K, old: V | None, to: V | None) -> tuple[FieldDiff[K, V], ...]:
    """Return the diff from `old` to `to`: one change, or none if they are equal. None means absent."""
    if old is None:
        return () if to is None else (Insert(key, to),)
    if to is None:
        return (Delete(key, old),)
    return () if old == to else (Update(key, old, to),)


def dict_diffs(before: dict[K, V], after: dict[K, V], *, order: Any = None) -> tuple[FieldDiff[K, V], ...]:
    """Return the diff from one dict to the other, sorted by key (or by `order` of the key)."""
    if not before and len(after) <= 1:  # true of most collections in a commit
        return tuple(Insert(key, to) for key, to in after.items())
    keys = sorted(before.keys() | after.keys(), key=order)
    return tuple(diff for key in keys for diff in field_diff(key, before.get(key), after.get(key)))


def map_diffs(before: SharedMap[K, V], after: SharedMap[K, V]) -> tuple[FieldDiff[K, V], ...]:
    """Return the diff from one map to the other, sorted by key. The cost is proportional to the number of edits."""
    if after is before:  # true of most maps in a commit
        return ()
    return tuple(diff for key, old, to in after.changes_since(before) for diff in field_diff(key, old, to))


def applied_to_dict(name: str, values: dict[K, V], diffs: Iterable[FieldDiff[K, V]]) -> None:
    """Apply the diffs in place. Strict: raises InvariantViolated if an old value differs from the current one."""
    # Format messages only on failure, here and below: keys may be whole batches.
    for diff in diffs:
        match diff:
            case Insert(key, to):
                if key in values:
                    raise InvariantViolated(f"{name}: insert over existing {key}")
                values[key] = to
            case Update(key, old, to):
                if key not in values or values[key] != old:
                    raise InvariantViolated(f"{name}: update of {key} from another value")
                values[key] = to
            case Delete(key, old):
                if key not in values or values[key] != old:
                    raise InvariantViolated(f"{name}: delete of {key} with another value")
                del values[key]
            case _:
                assert_never(diff)


def applied_to_map(name: str, values: SharedMap[K, V], diffs: Iterable[FieldDiff[K, V]]) -> SharedMap[K, V]:
    """Like `applied_to_dict`, but returns a new map; O(diffs)."""
    changes: dict[K, V | None] = {}
    for diff in diffs:
        key = diff.key
        found = changes[key] if key in changes else values.get(key)
        match diff:
            case Insert(_, to):
                if found is not None:
                    raise InvariantViolated(f"{name}: insert over existing {key}")
                changes[key] = to
            case Update(_, old, to):
                if found is None or found != old:
                    raise InvariantViolated(f"{name}: update of {key} from another value")
                changes[key] = to
            case Delete(_, old):
                if found is None or found != old:
                    raise InvariantViolated(f"{name}: delete of {key} with another value")
                changes[key] = None
            case _:
                assert_never(diff)
    return values.edited(changes)


def updated_value(name: str, value: V, diffs: Iterable[FieldDiff[None, V]]) -> V:
    """Like `applied_to_value`, for a field that always has a value and therefore only takes updates."""
    for diff in diffs:
        if not isinstance(diff, Update):
            raise InvariantViolated(f"{name}: {type(diff).__name__.lower()} of a field that can only be updated")
        check(value == diff.old, f"{name}: update from {diff.old}, but it is {value}")
        value = diff.to
    return value


def applied_to_value(name: str, value: V | None, diffs: Iterable[FieldDiff[None, V]]) -> V | None:
    """Like `applied_to_dict`, for the single value of a scalar field; None means absent."""
    for diff in diffs:
        match diff:
            case Insert(_, to):
                check(value is None, f"{name}: insert over {value}")
                value = to
            case Update(_, old, to):
                check(value == old, f"{name}: update from {old}, but it is {value}")
                value = to
            case Delete(_, old):
                check(value == old, f"{name}: delete of {old}, but it is {value}")
                value = None
            case _:
                assert_never(diff)
    return value
