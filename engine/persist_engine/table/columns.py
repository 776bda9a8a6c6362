"""The columns of a table: converts the fields of key and value to columns side by side, and back.

This module owns the rules by which a caller's columns become rows of the table, and the conversions that lose nothing. It knows no frames
and no shards. Vectorised over the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvalidUsage, InvariantViolated, SchemaMismatch
from persist_engine.rows.columns import constant, empty_struct, field_of
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.entries import KeyProblem, sorted_entries
from persist_engine.rows.nested.layout import (
    OF_VIEWS,
    as_plain_list,
    holds_lists,
    is_any_list,
    is_list,
    list_of,
    mapped,
    values_type,
)
from persist_engine.rows.schema import Schema

_SIDES = ("key", "val")
#: A decimal type that holds every whole number of 64 bits.
_WHOLE = pa.decimal128(20, 0)
Coerce: TypeAlias = Literal["us", "truncate"]
"""How to convert nanoseconds, which no table holds, to microseconds: only where nothing is lost, or with the rest cut off, towards the
past.
"""
#: A message names at most this many columns.
_NAMED_MAX = 50
NANOSECONDS_HINT = (
    "coerce='us' takes it where no digit is lost, coerce='truncate' cuts digits off (in commands: --coerce)"
)


@dataclass(frozen=True)
class Columns:
    """The columns of a schema. If key and value share a name, the columns are `key.<name>` and `val.<name>`."""

    schema: Schema

    @cached_property
    def places(self) -> dict[str, str]:
        """The engine's name of each column, `key.<field>` or `val.<field>`, by its name in the table, in order."""
        schema = self.schema
        both = set(schema.key.names) & set(schema.val.names)
        return {
            (f"{side}.{name}" if name in both else name): f"{side}.{name}"
            for side, names in (("key", schema.key.names), ("val", schema.val.names))
            for name in names
        }

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all columns."""
        return tuple(self.places)

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The names of the columns of the key."""
        return self.names[: len(self.schema.key)]

    @cached_property
    def arrow(self) -> pa.Schema:
        """The columns as an Arrow schema."""
        fields = [*self.schema.key, *self.schema.val]
        return pa.schema([field.with_name(name) for name, field in zip(self.names, fields, strict=True)])

    def placed(self, columns: Sequence[str], name: str) -> tuple[str, ...]:
        """The engine's names of columns. Raises InvalidUsage, which names the columns that the table lacks. `name` is that of the
        argument.
        """
        if isinstance(columns, str) or not isinstance(columns, Sequence):
            raise InvalidUsage(f"{name} is a list of columns, not {type(columns).__name__} {columns!r}")
        unknown = [str(each) for each in columns if each not in self.places]
        if unknown:
            raise InvalidUsage(
                f"{name}: there is no column {', '.join(unknown)}; the columns are {', '.join(self.names)}"
            )
        return tuple(self.places[each] for each in columns)

    def chosen(self, columns: Sequence[str] | None) -> tuple[str, ...] | None:
        """The names to show, in the caller's order; None for all. Raises InvalidUsage, which names the columns that the table lacks."""
        if columns is None:
            return None
        if isinstance(columns, str) or not isinstance(columns, Sequence):
            raise InvalidUsage(f"columns is a list of names, not {type(columns).__name__} {columns!r}")
        unknown = [str(name) for name in columns if name not in self.places]
        if unknown or not columns or len(set(columns)) != len(columns):
            what = f"there is no column {', '.join(unknown)}" if unknown else "columns names none, or one twice"
            raise InvalidUsage(f"{what}; the columns are {', '.join(self.names)}")
        return tuple(columns)

    def flat(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Converts rows (key, val, ..., diff) to rows of the table, each as often as its diff says. With a projection, they have only the
        fields that are there.

        Raises InvariantViolated for a row with a negative diff.
        """
        flat = self.side_by_side(rows)
        diffs = rows.column("diff").to_numpy(zero_copy_only=False)
        if not len(diffs) or (diffs.min() == 1 and diffs.max() == 1):
            return flat
        if diffs.min() < 0:
            at = int(np.argmin(diffs))
            row = flat.slice(at, 1).to_pylist()[0]
            raise InvariantViolated(
                f"the table holds a row {int(diffs[at])} times, after updates that retract too much: {row}"
            )
        return flat.take(pa.array(np.repeat(np.arange(len(diffs)), diffs)))

    def side_by_side(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The fields of the columns key and val as columns, row by row."""
        names = {place: name for name, place in self.places.items()}
        fields: list[pa.Field] = []
        arrays: list[pa.Array] = []
        for side in _SIDES:
            column = rows.column(side)
            for field, values in zip(column.type, column.flatten(), strict=True):
                fields.append(field.with_name(names[f"{side}.{field.name}"]))
                arrays.append(values)
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def nested(self, schema: pa.Schema) -> pa.Schema:
        """The columns of `schema` that the table has, as the structs `key` and `val`. A side without columns is left out."""
        sides: dict[str, list[pa.Field]] = {}
        for field in schema:
            side, _, name = self.places[field.name].partition(".")
            sides.setdefault(side, []).append(field.with_name(name))
        return pa.schema([(side, pa.struct(sides[side])) for side in _SIDES if side in sides])

    def folded(self, rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """Converts rows of columns side by side to rows of `schema`, which must be `nested` of their schema."""
        names = {place: name for name, place in self.places.items()}
        arrays = [
            _struct([rows.column(names[f"{side.name}.{field.name}"]) for field in side.type], side.type, rows.num_rows)
            for side in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def fitted(self, table: pa.Table, *, besides: Sequence[str] = (), coerce: Coerce | None = None) -> pa.Table:
        """`table` with exactly the columns of this table, in its order and with its types. Columns are matched by name. Columns in
        `besides` are allowed, too, and are left out. `coerce` says how to convert nanoseconds.

        Raises SchemaMismatch, which names every column that is missing, unknown, there twice, of a type whose values do not fit, or null
        where it must not be.
        """
        given = Counter(table.column_names)
        wanted = {*self.names, *besides}
        problems = [f"{name} is missing" for name in self.names if name not in given]
        problems += [f"{name} is no column of the table" for name in given if name not in wanted]
        problems += [f"{name} is there {times} times" for name, times in given.items() if times > 1]
        columns: list[pa.ChunkedArray] = []
        for field in self.arrow:
            if given[field.name] != 1:
                continue
            values = table.column(field.name)
            try:
                if holds_nanoseconds(values.type) and holds(field.type, pa.types.is_timestamp):
                    values = _in_microseconds(values, coerce)
                values = converted(values, field.type)
            except KeyProblem as error:
                problems.append(f"{field.name}: {error}")
                continue
            except (TypeError, pa.ArrowException) as error:
                problems.append(
                    f"{field.name} is {print_type(values.type)}, the table's is {print_type(field.type)}: {_why(error)}"
                )
                continue
            if not field.nullable and values.null_count:
                problems.append(f"{field.name} is NOT NULL, and null in {values.null_count:,} rows")
            columns.append(values)
        if problems:
            text = f"{_some(problems, '; ')}. The table has {_some(self.names, ', ')}"
            raise SchemaMismatch(text, requested=str(table.schema), actual=str(self.arrow))
        return pa.table(columns, schema=self.arrow)

    def structs(self, table: pa.Table) -> pa.Table:
        """The columns key and val of a `fitted` table."""
        keys, vals = [], []
        of_key = len(self.key)
        for batch in table.to_batches():
            keys.append(_struct(batch.columns[:of_key], self.schema.key_type, batch.num_rows))
            vals.append(_struct(batch.columns[of_key:], self.schema.val_type, batch.num_rows))
        return pa.table(
            {"key": pa.chunked_array(keys, self.schema.key_type), "val": pa.chunked_array(vals, self.schema.val_type)}
        )

    def updates(self, structs: pa.Table, *, time: int, diff: int = 1) -> pa.Table:
        """The updates at `time` that add the rows of `structs` or, with `diff` -1, remove them."""
        rows = structs.num_rows
        times, diffs = (constant(value, rows) for value in (time, diff))
        return pa.table([structs.column("key"), structs.column("val"), times, diffs], schema=self.schema.updates_schema)


def converted(values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """`values` as `wanted`, if no value changes: numbers that fit, instants of any unit and zone, text and bytes of any layout,
    dictionaries, nulls, structs with the same fields in any order, lists of any layout, maps, and lists of the entries of maps. The entries
    of maps are sorted by key. A float becomes the shortest decimal that reads back as the same float.

    Raises TypeError for other types, and ArrowInvalid for values that would change.
    """
    given = values.type
    if pa.types.is_null(given):
        return values.cast(wanted)
    if given == wanted and not holds_lists(wanted):
        return values
    if pa.types.is_struct(wanted) or holds_lists(wanted):
        return pa.chunked_array([_nested(chunk, wanted) for chunk in values.chunks], wanted)
    if pa.types.is_dictionary(given):
        return converted(decoded(values), wanted)
    if pa.types.is_float16(given):
        return converted(values.cast(pa.float32()), wanted)
    if pa.types.is_decimal(wanted) and pa.types.is_integer(given):
        # Arrow casts a whole number to a decimal only if all numbers of its type would fit.
        return converted(values.cast(_WHOLE), wanted)
    if pa.types.is_decimal(wanted) and pa.types.is_decimal(given):
        return _rescaled(values, wanted)
    if _is_same_kind(given, wanted):
        return values.cast(wanted)
    if pa.types.is_floating(given) and pa.types.is_floating(wanted):
        return _reads_back(values, wanted)
    if pa.types.is_floating(given) and pa.types.is_decimal(wanted):
        return _decimals(values, wanted)
    if pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted):
        raise TypeError(_zone_hint(given))
    if pa.types.is_timestamp(given) and pa.types.is_date(wanted):
        raise TypeError("take the dates of its times, as in df['at'].dt.date")
    raise TypeError("convert it first")


def _nested(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Like `converted`, also within structs, whose fields are matched by name."""
    given = array.type
    if pa.types.is_null(given):
        return pa.nulls(len(array), wanted)
    if pa.types.is_struct(wanted):
        names = [field.name for field in given] if pa.types.is_struct(given) else []
        if sorted(names) != sorted(field.name for field in wanted):
            raise TypeError(f"it must be {print_type(wanted)}")
        children = [_nested(field_of(array, names.index(field.name), field.type), field.type) for field in wanted]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=mask)
    if not is_list(wanted):
        return converted(pa.chunked_array([array]), wanted).combine_chunks()
    is_map = pa.types.is_map(wanted)
    is_alike = is_any_list(given) and pa.types.is_map(given) == is_map
    is_entries = is_map and not is_alike and is_any_list(given) and pa.types.is_struct(given.value_type)
    if not is_alike and not is_entries:
        raise TypeError(f"it must be {print_type(wanted)}")
    out = mapped(as_plain_list(array), wanted, lambda values: _nested(values, values_type(wanted)))
    return sorted_entries(out) if is_map else out


def checked_coerce(coerce: Coerce | None) -> Coerce | None:
    """Returns `coerce`. Raises InvalidUsage if it is not a coercion."""
    if coerce is not None and coerce not in get_args(Coerce):
        raise InvalidUsage(f"coerce is {' or '.join(map(repr, get_args(Coerce)))}, or left out, not {coerce!r}")
    return coerce


def holds_nanoseconds(kind: pa.DataType) -> bool:
    """Whether the type contains instants in nanoseconds."""
    return holds(kind, lambda each: pa.types.is_timestamp(each) and each.unit == "ns")


def holds(kind: pa.DataType, wanted: Callable[[pa.DataType], bool]) -> bool:
    """Whether `wanted` is true of a type that is not nested, in `kind` at any depth."""
    if pa.types.is_dictionary(kind):
        return holds(kind.value_type, wanted)
    if is_any_list(kind):
        return holds(values_type(kind), wanted)
    if pa.types.is_struct(kind):
        return any(holds(field.type, wanted) for field in kind)
    return wanted(kind)


def _in_microseconds(values: pa.ChunkedArray, coerce: Coerce | None) -> pa.ChunkedArray:
    """Nanoseconds at any depth as microseconds. Raises TypeError without `coerce`, and ArrowInvalid where it does not allow a loss."""
    if coerce is None:
        raise TypeError(f"it has nanoseconds, and the table microseconds: {NANOSECONDS_HINT}")
    try:
        return pa.chunked_array([_coarse(chunk, coerce) for chunk in values.chunks or [pa.nulls(0, values.type)]])
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(f"{_why(error)}; coerce='truncate' cuts off the rest") from error


def _coarse(array: pa.Array, coerce: Coerce) -> pa.Array:
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        coarse = pa.timestamp("us", kind.tz)
        if coerce == "us":
            return array.cast(coarse)
        # SUBTLE: Arrow's unsafe cast cuts towards 1970, so that times before it would move to the future.
        return (
            pc.floor_temporal(array.view(pa.timestamp("ns")), unit="microsecond").cast(pa.timestamp("us")).view(coarse)
        )
    if not holds_nanoseconds(kind):
        return array
    if pa.types.is_dictionary(kind):
        return _coarse(array.dictionary_decode(), coerce)
    if pa.types.is_struct(kind):
        children = [_coarse(field_of(array, index, field.type), coerce) for index, field in enumerate(kind)]
        fields = [field.with_type(child.type) for field, child in zip(kind, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null() if array.null_count else None)
    plain = as_plain_list(array)
    inner = _coarse(pa.nulls(0, values_type(plain.type)), coerce).type
    wanted = pa.map_(inner[0].type, inner[1]) if pa.types.is_map(kind) else list_of(inner)
    return mapped(plain, wanted, lambda within: _coarse(within, coerce))


def decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of dictionaries. Arrow itself does not decode dictionaries of views, which polars uses for categories."""
    kind = values.type.value_type
    plain = OF_VIEWS.get(kind, kind)
    return pa.chunked_array([chunk.dictionary.cast(plain).take(chunk.indices) for chunk in values.chunks], plain)


def _is_same_kind(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a safe cast keeps every value, or fails."""
    is_number = pa.types.is_integer(given) or pa.types.is_decimal(given)
    if pa.types.is_integer(wanted):
        return bool(is_number or pa.types.is_floating(given))
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_integer(given))
    if pa.types.is_timestamp(wanted):
        return bool(pa.types.is_timestamp(given)) and (given.tz is None) == (wanted.tz is None)
    if pa.types.is_string(wanted):
        return bool(pa.types.is_large_string(given) or pa.types.is_string_view(given))
    if pa.types.is_binary(wanted):
        return bool(
            pa.types.is_large_binary(given) or pa.types.is_binary_view(given) or pa.types.is_fixed_size_binary(given)
        )
    return bool(pa.types.is_date32(wanted) and pa.types.is_date64(given))


def _reads_back(values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    out = values.cast(wanted, safe=False)
    back = out.cast(values.type)
    same = pc.or_kleene(pc.equal(back, values), pc.is_nan(values))
    if pc.all(same, skip_nulls=True).as_py() is False:
        first = values.filter(pc.invert(pc.fill_null(same, True)))[0].as_py()  # noqa: FBT003 - Arrow's own signature
        raise pa.ArrowInvalid(f"{first!r} would change")
    return out


def _decimals(values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Whole numbers and, for other floats, the shortest decimals that read back as the same float.

    SUBTLE: Arrow's own casts are not exact. They turn 0.1 into 0.100000000000000006, and the decimal 655405.19 into 655405.1900000001.
    """
    is_whole = pc.equal(pc.floor(values), values)
    try:
        fractions = pc.if_else(is_whole, None, values.cast(pa.string())).cast(wanted)
    except pa.ArrowInvalid:
        values.cast(wanted)  # raises a clear error for NaN and for large numbers
        if len(values) == 1:
            raise pa.ArrowInvalid(f"{values[0].as_py()!r} would change") from None
        half = len(values) // 2
        _decimals(values.slice(0, half), wanted)
        return _decimals(values.slice(half), wanted)  # raises for the first bad value
    return pc.coalesce(fractions, pc.if_else(is_whole, values, None).cast(wanted))


def _rescaled(values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Casts decimals. SUBTLE: where digits overflow 128 bits, Arrow's cast wraps around without an error. So check that the result reads
    back as the same values.
    """
    out = values.cast(wanted)
    try:
        is_same = pc.all(pc.equal(out.cast(values.type), values), skip_nulls=True).as_py()
    except pa.ArrowInvalid:
        is_same = False
    if is_same is False:
        raise pa.ArrowInvalid(f"some have more digits than {print_type(wanted)} holds")
    return out


def _zone_hint(given: pa.DataType) -> str:
    if given.tz is None:
        return "its times have no zone: give them one, as in df['at'].dt.tz_localize('UTC')"
    return "its times have a zone: remove it, as in df['at'].dt.tz_localize(None)"


def _some(texts: Sequence[str], between: str) -> str:
    """The first texts, and the number of the others."""
    more = [f"and {len(texts) - _NAMED_MAX:,} more"] if len(texts) > _NAMED_MAX else []
    return between.join([*texts[:_NAMED_MAX], *more])


def _why(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _struct(columns: Sequence[pa.Array], kind: pa.DataType, rows: int) -> pa.Array:
    if not kind.num_fields:
        return empty_struct(rows)
    if any(values.type != field.type for values, field in zip(columns, kind, strict=True)):  # structs of another layout
        return pa.StructArray.from_arrays(columns, names=[field.name for field in kind])
    return pa.StructArray.from_arrays(columns, fields=list(kind))
