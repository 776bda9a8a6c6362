"""A predicate bound to a schema. It says which rows pass and, from statistics, whether a part can hold rows that pass.

The logic is SQL's. A comparison with null is unknown, and a row passes when the whole predicate is true. Values compare in row order: -0.0
equals 0.0, NaN equals NaN and is greater than every number. Equal rows therefore pass together or not at all. So a filter before or after
consolidation, by row or by part, gives the same collection.

Every predicate reduces to a few tests of one column: below a value, within a set of values, like a pattern, null. `a > b` is the negation
of `a <= b`, also for floats, because the order is total.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.batch import HollowPart, InlinePart, Part
from persist_engine.rows.columns import canonical_floats
from persist_engine.rows.comparable import NAN, Comparable, comparable_bound, floor_of, lacks_zone, scalar_of
from persist_engine.rows.ddl import print_type
from persist_engine.rows.errors_column import ERR, holds_errors
from persist_engine.rows.part_stats import stats_name
from persist_engine.rows.predicate import And, Compare, In, IsNull, Like, Not, Or, Predicate, as_regex
from persist_engine.rows.schema import Schema

#: A null boolean. `pa.scalar(None, ...)` and `pa.array(...)` import pandas, which takes a second, so no module calls them at its import.
_NULL = pa.nulls(1, pa.bool_())[0]


#: The text before the first wildcard of a LIKE, and the rest.
_PATTERN = re.compile(r"(?P<prefix>(?:[^%_\\]|\\[%_\\])*)(?P<rest>(?:[%_](?:[^\\]|\\[%_\\])*)?)", re.DOTALL)
_ESCAPED, _BACKSLASH = re.compile(r"\\(.)", re.DOTALL), r"\\"


#: Says whether rows certainly lack a value in the field at a path.
Lacks = Callable[[tuple[str, ...], Comparable], bool]


def nothing_lacks(_path: tuple[str, ...], _value: Comparable) -> bool:
    """The `Lacks` of rows of which nothing is known."""
    return False


class Outcomes(NamedTuple):
    """The results that a predicate may have for rows of a part. May include results that no row has, but never misses one."""

    true: bool
    false: bool
    unknown: bool


_ANY = Outcomes(true=True, false=True, unknown=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A field of key or val. `path` leads to it from `key` or `val`."""

    path: tuple[str, ...]
    data_type: pa.DataType

    @property
    def top(self) -> str:
        """The name under which parts and statistics hold the field, or the outermost struct around it."""
        return f"{self.path[0]}.{self.path[1]}"

    @property
    def bounds_type(self) -> pa.DataType:
        """The type of this column's bounds in statistics. Parts of a newer schema may hold wider integers."""
        return pa.int64() if pa.types.is_signed_integer(self.data_type) else self.data_type

    @property
    def is_top(self) -> bool:
        """Whether the field is not within a struct."""
        return len(self.path) == 2

    def values(self, table: pa.Table) -> pa.ChunkedArray:
        """The column's values, null where a struct around it is null. Floats become float64 with one zero and one NaN."""
        values = pc.struct_field(table.column(self.path[0]), list(self.path[1:]))
        if pa.types.is_floating(self.data_type):
            return canonical_floats(values.cast(pa.float64()))
        return values if values.type == self.data_type else values.cast(self.data_type)

    def widened(self, literals: Sequence[object]) -> Column:
        """The column, with the type of its bounds if one of `literals` does not fit the column's own type. No visible row has such a
        value, but rows of newer parts may, and their statistics must be compared correctly. Raises InvalidUsage as `floor_of` does.
        """
        name = ".".join(self.path)
        if all(floor_of(literal, self.data_type, name).value is not None for literal in literals):
            return self
        return replace(self, data_type=self.bounds_type)


class _Known(NamedTuple):
    """The statistics of one column of one part. A bound is None when unknown. When `is_whole` is false, there may be more nulls."""

    rows: int
    null_count: int
    lower: Comparable | None
    upper: Comparable | None
    is_whole: bool = True

    @property
    def may_be_null(self) -> bool:
        """Whether some row may hold null."""
        return self.null_count > 0 or not self.is_whole


def _known(column: Column, part: HollowPart) -> _Known | None:
    """The statistics of a column, or None when nothing is known. If a field within a struct has no statistics of its own, it has at least
    the nulls of its outermost struct.
    """
    if part.stats is None:
        return None
    columns = dict(part.stats.columns)
    found = columns.get(stats_name(column.path))
    if found is None:
        outer = None if column.is_top else columns.get(column.top)
        return None if outer is None else _Known(part.rows, outer.null_count, None, None, is_whole=False)
    lower, upper = (
        comparable_bound(text, column.bounds_type) if text is not None else None for text in (found.lower, found.upper)
    )
    return _Known(part.rows, found.null_count, lower, upper)


class _Bound(Protocol):
    """A predicate whose columns and values fit the schema."""

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """For each row true, false, or null for unknown."""

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        """The results that `mask` may give for rows of `part`. `lacks` says which values these rows do not have."""


@dataclass(frozen=True, slots=True)
class _Below:
    """`column < value`, or with `or_equal` `column <= value`."""

    column: Column
    value: Comparable
    or_equal: bool

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        values = self.column.values(table)
        if self.value == NAN:  # Arrow does not order NaN past all numbers
            return _where_valid(values, pa.scalar(True)) if self.or_equal else pc.invert(pc.is_nan(values))  # noqa: FBT003
        compare = pc.less_equal if self.or_equal else pc.less
        return compare(values, scalar_of(self.value, self.column.data_type))

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        known = _known(self.column, part)
        if known is None:
            return _ANY
        if known.null_count == known.rows:
            return Outcomes(true=False, false=False, unknown=True)
        return Outcomes(
            true=known.lower is None or self._holds(known.lower),
            false=known.upper is None or not self._holds(known.upper),
            unknown=known.may_be_null,
        )

    def _holds(self, value: Comparable) -> bool:
        return bool(value <= self.value if self.or_equal else value < self.value)


@dataclass(frozen=True, slots=True)
class _Within:
    """`column` is one of `values`, which are ascending. Without values the result is false, and unknown for null."""

    column: Column
    values: tuple[Comparable, ...]

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        values = self.column.values(table)
        scalars = [scalar_of(value, self.column.data_type) for value in self.values]
        if len(scalars) == 1 and self.values[0] != NAN:
            return pc.equal(values, scalars[0])
        # `is_in` compares bits, so the values need the same canonical zero and NaN as the column.
        wanted = canonical_floats(pa.chunked_array([pa.array(scalars, values.type)])).combine_chunks()
        return _where_valid(values, pc.is_in(values, value_set=wanted))

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        known = _known(self.column, part)
        if known is None:
            return _ANY._replace(true=any(not lacks(self.column.path, value) for value in self.values))
        if known.null_count == known.rows:
            return Outcomes(true=False, false=False, unknown=True)
        first = 0 if known.lower is None else bisect_left(self.values, known.lower)
        last = len(self.values) if known.upper is None else bisect_right(self.values, known.upper)
        is_one_value = known.lower is not None and known.lower == known.upper
        return Outcomes(
            true=any(not lacks(self.column.path, value) for value in self.values[first:last]),
            false=not (is_one_value and first < last),
            unknown=known.may_be_null,
        )


@dataclass(frozen=True, slots=True)
class _Like:
    """`column` has the form of `pattern`, which begins with the text `prefix`. With `is_prefix`, all texts with this prefix do."""

    column: Column
    pattern: str
    prefix: str
    is_prefix: bool

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        values = self.column.values(table)
        if _BACKSLASH not in self.pattern:
            return pc.match_like(values, self.pattern)
        # SUBTLE: Arrow's own LIKE reads an escaped backslash as two backslashes in `text%`, `%text` and `%text%`.
        return pc.match_substring_regex(values, as_regex(self.pattern))

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        known = _known(self.column, part)
        if known is None:
            return _ANY
        if known.null_count == known.rows:
            return Outcomes(true=False, false=False, unknown=True)
        ends = [end for end in (known.lower, known.upper) if isinstance(end, str)]
        # Texts with the prefix are adjacent in the order: greater texts without it come after all of them.
        is_past = known.lower is not None and known.lower > self.prefix and not str(known.lower).startswith(self.prefix)
        is_before = known.upper is not None and known.upper < self.prefix
        return Outcomes(
            true=not is_past and not is_before,
            false=not (self.is_prefix and len(ends) == 2 and all(end.startswith(self.prefix) for end in ends)),
            unknown=known.may_be_null,
        )


@dataclass(frozen=True, slots=True)
class _Null:
    """`column` is null."""

    column: Column

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return pc.is_null(self.column.values(table))

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        known = _known(self.column, part)
        if known is None:
            return _ANY
        return Outcomes(
            true=known.may_be_null,
            false=known.null_count < known.rows,
            unknown=False,
        )


@dataclass(frozen=True, slots=True)
class _All:
    """Every term is true."""

    terms: tuple[_Bound, ...]

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return reduce(pc.and_kleene, [term.mask(table) for term in self.terms])

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        some = [term.outcomes(part, lacks) for term in self.terms]
        return Outcomes(
            true=all(each.true for each in some),
            false=any(each.false for each in some),
            unknown=any(each.unknown for each in some),
        )


@dataclass(frozen=True, slots=True)
class _Opposite:
    """The term is false."""

    term: _Bound

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return pc.invert(self.term.mask(table))

    def outcomes(self, part: HollowPart, lacks: Lacks) -> Outcomes:
        term = self.term.outcomes(part, lacks)
        return Outcomes(true=term.false, false=term.true, unknown=term.unknown)


def _where_valid(values: pa.ChunkedArray, outcome: pa.ChunkedArray | pa.Scalar) -> pa.ChunkedArray:
    return pc.if_else(pc.is_valid(values), outcome, _NULL)


# -- the public filter ---------------------------------------------------------------------------------------------------


class Filter:
    """A predicate over collections of one schema. Immutable and cheap to keep; not comparable.

    When a collection may hold errors (rows.errors_column), the errors pass, unless the predicate itself names `key.err`. If they did not, a
    collection in error would look like one without matching rows.
    """

    def __init__(self, predicate: Predicate, schema: Schema) -> None:
        """Raises InvalidUsage for a column that the schema lacks (the message lists the columns), for an ambiguous column name, and for
        values that cannot be compared with their column.
        """
        self.predicate = predicate
        self.schema = schema
        self._columns: dict[tuple[str, ...], Column] = {}
        self._zoneless: dict[str, str] = {}
        self._looked_up: set[str] = set()
        try:
            self._bound = self._bind(predicate)
            self.passes_errors = holds_errors(schema) and ("key", ERR) not in self._columns
            """Whether errors pass even if they do not satisfy the predicate."""
            if self.passes_errors:
                self._bound = self._bind(Or((Not(IsNull(f"key.{ERR}")), predicate)))
        except RecursionError:
            raise InvalidUsage("the filter is nested too deeply: write it with fewer levels") from None

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level fields that the predicate reads, as `key.<field>` and `val.<field>`."""
        return tuple(dict.fromkeys(column.top for column in self._columns.values()))

    @property
    def zoneless(self) -> dict[str, str]:
        """By column of instants, a value without a time zone that the predicate compares with it. The filter reads the value as UTC."""
        return dict(self._zoneless)

    @property
    def looked_up(self) -> frozenset[str]:
        """The `columns` that the predicate compares with single values."""
        return frozenset(self._looked_up)

    def may_pass(self, part: Part, lacks: Lacks = nothing_lacks) -> bool:
        """Whether some row of `part` may pass, by its statistics and by `lacks`. True without statistics, and for inline parts."""
        return isinstance(part, InlinePart) or self._bound.outcomes(part, lacks).true

    def must_pass(self, part: Part) -> bool:
        """Whether every row of `part` passes, by its statistics. False without statistics."""
        if isinstance(part, InlinePart):
            return False
        outcomes = self._bound.outcomes(part, nothing_lacks)
        return not outcomes.false and not outcomes.unknown

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """Whether each row of a table of updates passes; without nulls. The table must have at least `columns`."""
        return pc.fill_null(self._bound.mask(table), pa.scalar(False))  # noqa: FBT003 - Arrow's own signature

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, in their order. Returns the table itself when all rows pass."""
        if table.num_rows == 0:
            return table
        mask = self.mask(table)
        return table if pc.all(mask).as_py() else table.filter(mask)

    def outside(self, table: pa.Table, part: HollowPart) -> list[str]:
        """The `columns` with values outside the statistics of `part` in its rows `table`. Empty if the statistics are correct."""
        return [".".join(column.path) for column in self._columns.values() if _denied(column, table, part)]

    def __repr__(self) -> str:
        return f"Filter({self.predicate})"

    def _bind(self, predicate: Predicate) -> _Bound:
        match predicate:
            case Compare(column, op, value):
                return self._comparison(self._compared(column, (value,)), op, value)
            case In(column, values):
                return self._within(self._compared(column, values), values)
            case Like(column, pattern):
                return self._like(self._column(column), pattern)
            case IsNull(column):
                return _Null(self._column(column))
            case And(terms):
                return _All(self._terms(terms))
            case Or(terms):
                return _Opposite(_All(tuple(_Opposite(term) for term in self._terms(terms))))
            case Not(term):
                return _Opposite(self._bind(term))
        raise InvalidUsage(f"a filter is made of the values of rows.predicate, not {predicate!r}")

    def _terms(self, terms: Sequence[Predicate]) -> tuple[_Bound, ...]:
        if not terms:
            raise InvalidUsage("a filter joins at least one term")
        return tuple(map(self._bind, terms))

    def _comparison(self, column: Column, op: str, value: object) -> _Bound:
        if op in ("=", "!="):
            equal = self._within(column, (value,))
            return equal if op == "=" else _Opposite(equal)
        column = column.widened((value,))
        floor = floor_of(value, column.data_type, ".".join(column.path))
        if floor.value is None:
            # The literal is less or greater than all values, so the result is the same for every row that is not null.
            never = _Within(column, ())
            below: _Bound = _Opposite(never) if floor.past else never
        else:
            # When v lies between two values of the type, x < v and x <= v both mean x <= floor(v).
            below = _Below(column, floor.value, or_equal=op in ("<=", ">") or not floor.exact)
        return below if op in ("<", "<=") else _Opposite(below)

    def _like(self, column: Column, pattern: str) -> _Bound:
        name = ".".join(column.path)
        if not pa.types.is_string(column.data_type):
            raise InvalidUsage(
                f"filter on {name}: LIKE compares texts, and the column is {print_type(column.data_type)}", column=name
            )
        found = _PATTERN.fullmatch(pattern)
        if found is None:
            raise InvalidUsage(
                f"filter on {name}: in the pattern {pattern!r} a backslash precedes something other than %, _ or a backslash",
                column=name,
            )
        prefix = _ESCAPED.sub(r"\1", found["prefix"])
        if not found["rest"]:
            return self._within(column, (prefix,))
        return _Like(column, pattern, prefix, is_prefix=set(found["rest"]) == {"%"})

    def _within(self, column: Column, values: Sequence[object]) -> _Within:
        if pa.types.is_nested(column.data_type) and not values:
            floor_of(values, column.data_type, ".".join(column.path))  # raises, as for any other value
        if column.is_top:
            self._looked_up.add(column.top)
        column = column.widened(values)
        floors = [floor_of(value, column.data_type, ".".join(column.path)) for value in values]
        return _Within(column, tuple(sorted({floor.value for floor in floors if floor.exact})))

    def _compared(self, text: str, values: Sequence[object]) -> Column:
        column = self._column(text)
        if pa.types.is_timestamp(column.data_type) and column.data_type.tz is not None:
            self._zoneless.update({".".join(column.path): str(value) for value in values if lacks_zone(value)})
        return column

    def _column(self, text: str) -> Column:
        column = column_named(text, self.schema)
        return self._columns.setdefault(column.path, column)


def _denied(column: Column, table: pa.Table, part: HollowPart) -> bool:
    known = _known(column, part)
    if known is None:
        return False
    values, bounded = column.values(table), replace(column, data_type=column.bounds_type)
    wrong: list[pa.ChunkedArray] = [] if known.may_be_null else [pc.is_null(values)]
    if known.null_count == known.rows:
        wrong.append(pc.is_valid(values))
    if known.lower is not None:
        wrong.append(_Below(bounded, known.lower, or_equal=False).mask(table))
    if known.upper is not None:
        wrong.append(pc.invert(_Below(bounded, known.upper, or_equal=True).mask(table)))
    return any(bool(pc.any(mask).as_py()) for mask in wrong)


def column_named(text: str, schema: Schema) -> Column:
    """The field that `text` names: `key.a`, `val.a`, or `val.a.b` for a field of a struct. The side may be omitted when only one side has
    the field. Raises InvalidUsage, which lists all columns when none matches, and the candidates when several match.
    """
    if not isinstance(text, str):
        raise InvalidUsage(f"a column is named by a text, not by {text!r}")
    sides = {"key": list(schema.key), "val": list(schema.val)}
    found: list[Column] = []
    for side, fields in sides.items():
        if text.startswith(f"{side}."):
            found += _descend((side,), fields, text.removeprefix(f"{side}."))
    if not found:
        found = [column for side, fields in sides.items() for column in _descend((side,), fields, text)]
    if len(found) == 1:
        return found[0]
    both = {field.name for field in schema.key} & {field.name for field in schema.val}
    has_side = text.startswith(("key.", "val."))
    known = ", ".join(
        f"{side}.{field.name}" if has_side or field.name in both else field.name
        for side, fields in sides.items()
        for field in fields
    )
    if found:
        raise InvalidUsage(
            f"column {text} may be any of {', '.join('.'.join(each.path) for each in found)}", column=text
        )
    raise InvalidUsage(f"no column {text}; there are {known}", column=text)


def _descend(path: tuple[str, ...], fields: Sequence[pa.Field], text: str) -> list[Column]:
    """All ways to read `text` as a path below `path`. Field names may themselves contain dots."""
    found: list[Column] = []
    for field in fields:
        here = (*path, field.name)
        if text == field.name:
            found.append(Column(here, field.type))
        elif text.startswith(f"{field.name}.") and pa.types.is_struct(field.type):
            found += _descend(here, list(field.type), text.removeprefix(f"{field.name}."))
    return found
