"""A predicate bound to a schema: whether a part can hold rows that pass, by its statistics, and which rows do, exactly.

Logic is SQL's: comparing a null gives neither true nor false, and a row passes when the whole is true. Values compare as
rows are ordered: -0.0 equals 0.0, NaN equals NaN and lies past every number. So rows that are equal pass together or not at
all: filtering before or after consolidation, row by row or part by part, gives the same collection.

Everything comes down to three questions about one column: below a value, within some values, null. `a > b` is the opposite
of `a <= b`, for floats too: the order is total.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.batch import HollowPart, InlinePart, Part
from persist_engine.rows.columns import canonical_floats
from persist_engine.rows.comparable import NAN, Comparable, comparable_bound, floor_of, scalar_of
from persist_engine.rows.errors_column import ERR, holds_errors
from persist_engine.rows.part_stats import stats_name
from persist_engine.rows.predicate import And, Compare, In, IsNull, Not, Or, Predicate
from persist_engine.rows.schema import Schema

#: `pa.scalar(None, ...)` and `pa.array(...)` import pandas, which takes a second, so no module calls them when it is imported.
_NULL = pa.nulls(1, pa.bool_())[0]


class Outcomes(NamedTuple):
    """What a predicate may be for the rows of a part: never less than it is for some row."""

    true: bool
    false: bool
    unknown: bool


_ANY = Outcomes(true=True, false=True, unknown=True)


@dataclass(frozen=True, slots=True)
class Column:
    """A field of key or val; `path` leads to it, from the side down."""

    path: tuple[str, ...]
    data_type: pa.DataType

    @property
    def top(self) -> str:
        """What parts and statistics call the field, or the outermost struct that it lies in."""
        return f"{self.path[0]}.{self.path[1]}"

    @property
    def bounds_type(self) -> pa.DataType:
        """What bounds in statistics are values of: parts of a newer schema may hold wider whole numbers."""
        return pa.int64() if pa.types.is_signed_integer(self.data_type) else self.data_type

    @property
    def is_top(self) -> bool:
        """Whether it lies within no struct."""
        return len(self.path) == 2

    def values(self, table: pa.Table) -> pa.ChunkedArray:
        """Its values, null where a struct around it is; floats as float64 with one zero and one NaN."""
        values = pc.struct_field(table.column(self.path[0]), list(self.path[1:]))
        if pa.types.is_floating(self.data_type):
            return canonical_floats(values.cast(pa.float64()))
        return values if values.type == self.data_type else values.cast(self.data_type)

    def widened(self, literals: Sequence[object]) -> Column:
        """As wide as bounds are, where one of `literals` is past its own type: no row that shows is there, but those of newer
        parts may be, whose statistics must not be taken to say otherwise. InvalidUsage as of `floor_of`.
        """
        name = ".".join(self.path)
        if all(floor_of(literal, self.data_type, name).value is not None for literal in literals):
            return self
        return replace(self, data_type=self.bounds_type)


class _Known(NamedTuple):
    """The statistics of one column of one part. Bounds are None where unknown; `is_whole`: there are no more nulls."""

    rows: int
    null_count: int
    lower: Comparable | None
    upper: Comparable | None
    is_whole: bool = True

    @property
    def may_be_null(self) -> bool:
        """In some row."""
        return self.null_count > 0 or not self.is_whole


def _known(column: Column, part: HollowPart) -> _Known | None:
    """None: nothing is known. Where statistics say nothing of a field within a struct, it has the nulls of the outermost one
    at least.
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

    def outcomes(self, part: HollowPart) -> Outcomes:
        """What `mask` may give for rows of `part`."""


@dataclass(frozen=True, slots=True)
class _Below:
    """`column < value`, or with `or_equal` `column <= value`."""

    column: Column
    value: Comparable
    or_equal: bool

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        values = self.column.values(table)
        if self.value == NAN:  # past all numbers, which Arrow does not know
            return _where_valid(values, pa.scalar(True)) if self.or_equal else pc.invert(pc.is_nan(values))  # noqa: FBT003
        compare = pc.less_equal if self.or_equal else pc.less
        return compare(values, scalar_of(self.value, self.column.data_type))

    def outcomes(self, part: HollowPart) -> Outcomes:
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
    """`column` is one of `values`, which ascend; without any, it is false unless null."""

    column: Column
    values: tuple[Comparable, ...]

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        values = self.column.values(table)
        scalars = [scalar_of(value, self.column.data_type) for value in self.values]
        if len(scalars) == 1 and self.values[0] != NAN:
            return pc.equal(values, scalars[0])
        # Looked up by their bits, as the column's are.
        wanted = canonical_floats(pa.chunked_array([pa.array(scalars, values.type)])).combine_chunks()
        return _where_valid(values, pc.is_in(values, value_set=wanted))

    def outcomes(self, part: HollowPart) -> Outcomes:
        known = _known(self.column, part)
        if known is None:
            return _ANY
        if known.null_count == known.rows:
            return Outcomes(true=False, false=False, unknown=True)
        first = 0 if known.lower is None else bisect_left(self.values, known.lower)
        last = len(self.values) if known.upper is None else bisect_right(self.values, known.upper)
        is_one_value = known.lower is not None and known.lower == known.upper
        return Outcomes(
            true=first < last,
            false=not (is_one_value and first < last),
            unknown=known.may_be_null,
        )


@dataclass(frozen=True, slots=True)
class _Null:
    """`column` is null."""

    column: Column

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return pc.is_null(self.column.values(table))

    def outcomes(self, part: HollowPart) -> Outcomes:
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

    def outcomes(self, part: HollowPart) -> Outcomes:
        some = [term.outcomes(part) for term in self.terms]
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

    def outcomes(self, part: HollowPart) -> Outcomes:
        term = self.term.outcomes(part)
        return Outcomes(true=term.false, false=term.true, unknown=term.unknown)


def _where_valid(values: pa.ChunkedArray, outcome: pa.ChunkedArray | pa.Scalar) -> pa.ChunkedArray:
    return pc.if_else(pc.is_valid(values), outcome, _NULL)


# -- what readers hold ---------------------------------------------------------------------------------------------------


class Filter:
    """A predicate over the collections of one schema. A value; cheap to keep, not to compare.

    Where a collection may be in error (codec.tagged) its errors pass, unless the predicate itself says something of
    `key.err`: else a collection that nobody could compute would read as one without such rows.
    """

    def __init__(self, predicate: Predicate, schema: Schema) -> None:
        """InvalidUsage for a column that the schema does not have (it lists those it has) or that the text leaves open, and
        for values that a column is not compared with.
        """
        self.predicate = predicate
        self.schema = schema
        self._columns: dict[tuple[str, ...], Column] = {}
        try:
            self._bound = self._bind(predicate)
            if holds_errors(schema) and ("key", ERR) not in self._columns:
                self._bound = self._bind(Or((Not(IsNull(f"key.{ERR}")), predicate)))
        except RecursionError:
            raise InvalidUsage("the filter nests too deep") from None

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields it looks at, as `key.<field>` and `val.<field>` of top level."""
        return tuple(dict.fromkeys(column.top for column in self._columns.values()))

    def may_pass(self, part: Part) -> bool:
        """Whether some row of `part` may pass, by its statistics; true when they do not say, and for inline parts."""
        return isinstance(part, InlinePart) or self._bound.outcomes(part).true

    def must_pass(self, part: Part) -> bool:
        """Whether every row of `part` passes, by its statistics; false when they do not say."""
        if isinstance(part, InlinePart):
            return False
        outcomes = self._bound.outcomes(part)
        return not outcomes.false and not outcomes.unknown

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """For each row of a table of updates (that has at least `columns`) whether it passes; no nulls."""
        return pc.fill_null(self._bound.mask(table), pa.scalar(False))  # noqa: FBT003 - Arrow's own signature

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that pass, in their order; the table itself when all do."""
        if table.num_rows == 0:
            return table
        mask = self.mask(table)
        return table if pc.all(mask).as_py() else table.filter(mask)

    def outside(self, table: pa.Table, part: HollowPart) -> list[str]:
        """Which of `columns` have values in `table`, rows of `part`, that its statistics deny: none, unless they lie."""
        return [".".join(column.path) for column in self._columns.values() if _denied(column, table, part)]

    def __repr__(self) -> str:
        return f"Filter({self.predicate})"

    def _bind(self, predicate: Predicate) -> _Bound:
        match predicate:
            case Compare(column, op, value):
                return self._comparison(self._column(column), op, value)
            case In(column, values):
                return self._within(self._column(column), values)
            case IsNull(column):
                return _Null(self._column(column))
            case And(terms):
                return _All(self._terms(terms))
            case Or(terms):
                return _Opposite(_All(tuple(_Opposite(term) for term in self._terms(terms))))
            case Not(term):
                return _Opposite(self._bind(term))
        raise InvalidUsage(f"a filter is made of codec.predicate's values, not {predicate!r}")

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
            # Before or past all values: `below` is the same for every row that is not null.
            never = _Within(column, ())
            below: _Bound = _Opposite(never) if floor.past else never
        else:
            # With v between two values of the type, x < v and x <= v both are x <= floor(v).
            below = _Below(column, floor.value, or_equal=op in ("<=", ">") or not floor.exact)
        return below if op in ("<", "<=") else _Opposite(below)

    def _within(self, column: Column, values: Sequence[object]) -> _Within:
        column = column.widened(values)
        floors = [floor_of(value, column.data_type, ".".join(column.path)) for value in values]
        return _Within(column, tuple(sorted({floor.value for floor in floors if floor.exact})))

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
    """The field that `text` names: `key.a`, `val.a`, `val.a.b` for a field of a struct, or without the side where only one
    side has it. InvalidUsage lists the columns when there is none, and the candidates when there are several.
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
    known = ", ".join(f"{side}.{field.name}" for side, fields in sides.items() for field in fields)
    if found:
        raise InvalidUsage(
            f"column {text} may be any of {', '.join('.'.join(each.path) for each in found)}", column=text
        )
    raise InvalidUsage(f"no column {text}; there are {known}", column=text)


def _descend(path: tuple[str, ...], fields: Sequence[pa.Field], text: str) -> list[Column]:
    """Every way to read `text` as a path below `path`: names may hold dots themselves."""
    found: list[Column] = []
    for field in fields:
        here = (*path, field.name)
        if text == field.name:
            found.append(Column(here, field.type))
        elif text.startswith(f"{field.name}.") and pa.types.is_struct(field.type):
            found += _descend(here, list(field.type), text.removeprefix(f"{field.name}."))
    return found
