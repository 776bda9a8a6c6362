"""Frames of other libraries as Arrow tables and streams.

Accepts objects that export Arrow, pandas DataFrames, lists of dicts and dicts of lists. Imports no library for this: it recognizes each by
the methods of its objects. columns.py decides which columns a table takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from itertools import chain
from math import isfinite
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage, SchemaMismatch
from persist_engine.base.wording import sized
from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.entries import holds_maps
from persist_engine.rows.nested.layout import is_any_list, values_type
from persist_engine.rows.nested.values import array_of
from persist_engine.table.columns import Coerce, Columns, converted, holds

Frame = Any
"""A pandas or polars DataFrame, a pyarrow Table, RecordBatch or RecordBatchReader, a DuckDB relation or anything else with
`__arrow_c_stream__`, an iterator of Tables or RecordBatches, a list of dicts, or a dict of lists."""

W = TypeVar("W")

#: The limit on the rows of an upsert, which compares its rows with each other in memory. A longer stream is refused before it fills the
#: memory.
UPSERT_BYTES_MAX = 1 << 30
#: The streams of callers that a call began to read, by their ids.
_BEGUN: WeakValueDictionary[int, Iterable[Any]] = WeakValueDictionary()
_WANTED = (
    "a DataFrame of pandas or polars, a pyarrow Table, RecordBatch or RecordBatchReader, anything with __arrow_c_stream__, "
    "an iterator of pyarrow Tables, a list of dicts, or a dict of lists"
)


def tables_of(frame: Frame, wanted: pa.Schema) -> Iterator[pa.Table]:
    """The rows of `frame` as Arrow tables; of a stream, one batch at a time. Yields at least one table, possibly without rows, which shows
    the columns.

    Python values get the type of the column of the same name in `wanted`. Raises InvalidUsage if `frame` is not a frame, and for a
    stream that an earlier call began to read: it gives its rows once. Raises SchemaMismatch, which names the columns, if their values have
    no common type, or not the wanted one. Passes errors of a stream through.
    """
    stream = streamed(frame)
    if stream is None:
        yield table_of(frame, wanted)
        return
    if isinstance(stream, pa.RecordBatchReader):
        yield stream.schema.empty_table()
    _begin(stream)
    for piece in stream:
        if not isinstance(piece, pa.Table | pa.RecordBatch):
            raise InvalidUsage(
                f"an iterator of rows gave a {type(piece).__name__}; it must give pyarrow Tables or RecordBatches"
            )
        yield table_of(piece)


def fitted(
    frame: Frame,
    current: tuple[W, Columns],
    newer: Callable[[Columns], tuple[W, Columns] | None],
    coerce: Coerce | None,
) -> tuple[W, Columns, Iterator[pa.Table]]:
    """The rows of `frame`, fitted to the columns of `current`; a stream is fitted one batch at a time. Only the newest schema may refuse
    them: if the first rows do not fit, they are fitted to the schema that `newer` finds, and that is returned. Raises SchemaMismatch if
    they do not fit, and if the schema evolves in the middle of a stream, whose first rows cannot be read again.
    """
    stream = streamed(frame)
    pieces = iter(()) if stream is None else tables_of(stream, pa.schema([]))
    head = next(pieces, None)

    def begun(columns: Columns) -> list[pa.Table]:
        first = table_of(frame, columns.arrow) if stream is None else head
        return [] if first is None else [columns.fitted(first, coerce=coerce)]

    writer, columns = current
    try:
        first = begun(columns)
    except SchemaMismatch:
        found = newer(columns)
        if found is None:
            raise
        writer, columns = found
        first = begun(columns)

    def rest() -> Iterator[pa.Table]:
        for piece in pieces:
            try:
                yield columns.fitted(piece, coerce=coerce)
            except SchemaMismatch as error:
                if newer(columns) is None:
                    raise
                raise evolved() from error

    return writer, columns, chain(first, rest())


def evolved() -> SchemaMismatch:
    """The error of a call whose rows were fitted to a schema that is no longer the newest."""
    return SchemaMismatch("the schema has evolved during the call; nothing was written, call again")


def held(frame: Frame, wanted: pa.Schema) -> pa.Table:
    """All rows of a stream. Raises InvalidUsage for more than an upsert holds."""
    pieces: list[pa.Table] = []
    size = 0
    for piece in tables_of(frame, wanted):
        size += piece.nbytes
        if size > UPSERT_BYTES_MAX:
            raise InvalidUsage(
                f"upsert holds its rows in memory, and the stream has more than {sized(UPSERT_BYTES_MAX)}: upsert it in "
                "pieces, one call for each, or use overwrite or append, which hold one batch"
            )
        pieces.append(piece)
    try:
        return pa.concat_tables(pieces, promote_options="default") if pieces else wanted.empty_table()
    except pa.ArrowTypeError as error:
        raise SchemaMismatch(f"the tables of the iterator differ: {_first_line(error)}") from error


def table_of(frame: Frame, wanted: pa.Schema | None = None) -> pa.Table:
    """All rows of `frame` in memory. Raises the errors of `tables_of`."""
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    if _is_pandas(frame):
        return _from_pandas(frame, wanted)
    if isinstance(frame, Mapping):
        return _from_lists(frame, wanted)
    if (
        isinstance(frame, Sequence)
        and not isinstance(frame, str | bytes)
        and all(isinstance(row, Mapping) for row in frame)
    ):
        return _from_dicts(frame, wanted)
    if hasattr(frame, "__arrow_c_stream__"):
        return _stream_of(frame).read_all()
    if hasattr(frame, "__arrow_c_array__"):
        return pa.Table.from_batches([pa.record_batch(frame)])
    raise InvalidUsage(f"the rows are a {type(frame).__name__}; they must be {_WANTED}{_hint(frame)}")


def streamed(frame: Frame) -> pa.RecordBatchReader | Iterator[pa.Table] | None:
    """`frame` as a stream, if it is one. None if its rows are in memory anyway, so that other ways are shorter."""
    if isinstance(frame, pa.RecordBatchReader | Iterator):
        return frame
    is_held = isinstance(frame, pa.Table | pa.RecordBatch) or _is_pandas(frame) or hasattr(frame, "__len__")
    if is_held or not hasattr(frame, "__arrow_c_stream__"):
        return None
    return _stream_of(frame)


def _begin(stream: Iterable[Any]) -> None:
    """Notes that a call reads `stream`. Raises InvalidUsage if an earlier call began to: the rows that it read would be missing."""
    if _BEGUN.get(id(stream)) is stream:
        raise InvalidUsage(
            f"the rows are a {type(stream).__name__} that an earlier call has read, and it gives its rows once: make it anew"
        )
    with suppress(TypeError):  # iterators of lists, and a few others, have no weak references
        _BEGUN[id(stream)] = stream


def _stream_of(frame: Any) -> pa.RecordBatchReader:
    """The stream that an object exports. Raises InvalidUsage for one that is not a stream of rows of types that Arrow has."""
    # polars exports objects as the addresses that they have in memory, and Arrow cannot tell these from bytes.
    kinds = getattr(frame, "schema", None) if type(frame).__module__.partition(".")[0] == "polars" else None
    objects = [name for name, kind in kinds.items() if str(kind) == "Object"] if isinstance(kinds, Mapping) else []
    if objects:
        raise SchemaMismatch(f"columns {', '.join(objects)} hold Python objects: cast them, or pass a list of dicts")
    try:
        return pa.RecordBatchReader.from_stream(frame)
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"the rows are a {type(frame).__name__} that Arrow cannot read: {_first_line(error)}"
        ) from error


def _is_pandas(frame: Frame) -> bool:
    """Whether it is a DataFrame of pandas, or of a class derived from it."""
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas" for kind in type(frame).mro()
    )


def _from_pandas(frame: Frame, wanted: pa.Schema | None) -> pa.Table:
    """Takes the columns, and the levels of the index that have a name. An index without a name only numbers the rows, and is left out. NaN
    becomes null. Only maps, which are dicts or pairs in pandas, need the wanted type.
    """
    maps = [] if wanted is None else [field.name for field in wanted if holds_maps(field.type)]
    if any(name is not None for name in frame.index.names):
        twice = [str(name) for name in frame.index.names if name is not None and name in frame.columns]
        if twice:
            raise SchemaMismatch(
                f"{', '.join(twice)} names a level of the index and a column: drop one, as in reset_index(drop=True)"
            )
        frame = frame.reset_index()
    bad = [str(name) for name in frame.columns if not isinstance(name, str)]
    if bad:
        raise SchemaMismatch(f"columns {', '.join(bad)} have names that are no text")
    if not frame.columns.is_unique:
        twice = sorted(set(frame.columns[frame.columns.duplicated()]))
        raise SchemaMismatch(f"columns {', '.join(twice)} are there more than once")
    problems = []
    arrays = []
    for name in frame.columns:
        try:
            kind = wanted.field(name).type if wanted is not None and name in maps else None
            found = pa.array(frame[name], kind, from_pandas=True)
            if _holds_objects(frame[name]):
                _check_times(frame[name].tolist(), found.type)
            # A column without a value holds NaN, whatever it would hold.
            is_unknown = wanted is not None and pa.types.is_floating(found.type) and found.null_count == len(found)
            arrays.append(pa.nulls(len(found)) if is_unknown else found)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            problems.append(f"{name}: {_why(error, frame[name].tolist())}")
    if problems:
        raise SchemaMismatch("; ".join(problems))
    return pa.table(arrays, names=list(frame.columns))


def _from_dicts(rows: Sequence[Mapping[str, Any]], wanted: pa.Schema | None) -> pa.Table:
    """Takes the keys of all rows as columns. A key that a row lacks is null there."""
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    if not rows:
        return (pa.schema([]) if wanted is None else wanted).empty_table()
    return _from_lists({name: [row.get(name) for row in rows] for name in names}, wanted)


def _from_lists(columns: Mapping[str, Any], wanted: pa.Schema | None) -> pa.Table:
    problems: list[str] = []
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            problems.append(f"{name!r} is no name of a column")
            continue
        kind = None if wanted is None or name not in wanted.names else wanted.field(name).type
        try:
            arrays[name] = _array(name, values, kind)
        except SchemaMismatch as error:
            problems.append(str(error))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            problems.append(f"{name}: {_why(error, values)}")
    lengths = {name: len(values) for name, values in arrays.items()}
    if not problems and len(set(lengths.values())) > 1:
        problems.append(
            "columns have different lengths: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
        )
    if problems:
        raise SchemaMismatch("; ".join(problems))
    return pa.table(arrays)


def _array(name: str, values: Any, kind: pa.DataType | None) -> pa.Array | pa.ChunkedArray:
    """The values in the type that Arrow infers, so that values which the table's type would truncate are detected. Decimals, structs,
    lists, maps, and values that are all null get the table's type, because Python's own types say less.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes | Mapping | AnySet) or not hasattr(values, "__len__"):
        raise TypeError(f"it is a {type(values).__name__}, not a list of values")
    objects = set(map(type, values)) - {type(None)} if isinstance(values, Sequence) else set()
    if kind is not None and pa.types.is_decimal(kind) and objects:
        has_floats = any(issubclass(each, float) for each in objects)
        if has_floats and len(objects) > 1:
            values, has_floats = [_exact(value) for value in values], False
        if not has_floats:
            return pa.array(values, kind)
    if kind is not None and pa.types.is_nested(kind):
        return array_of(name, list(values), kind, may_lack=True, leaf=_leaf)
    found = pa.array(values)
    if pa.types.is_date32(found.type) and kind is not None and pa.types.is_timestamp(kind):
        raise TypeError("dates are no times of day")
    if objects or _holds_objects(values):
        _check_times(values, found.type)
    return found


def _leaf(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values within structs, lists and maps, converted by the rules for columns."""
    found = _array("", values, kind)
    try:
        return converted(pa.chunked_array([found]), kind).combine_chunks()
    except TypeError as error:
        raise TypeError(f"the values are {print_type(found.type)}: {error}") from error


def _exact(value: Any) -> Any:
    """A float as the shortest decimal that reads back as the same float; anything else as it is."""
    return Decimal(float.__repr__(value)) if isinstance(value, float) and isfinite(value) else value


def _holds_objects(values: Any) -> bool:
    """Whether it is an array of numpy or pandas with Python objects."""
    return getattr(getattr(values, "dtype", None), "kind", None) == "O"


def _check_times(values: Iterable[Any], kind: pa.DataType) -> None:
    """Raises TypeError for values that Arrow misread as `kind`, at any depth. It takes the type from the first value. With times of both
    kinds, it takes those without a zone for UTC. It drops nanoseconds, and the time of day among dates.
    """
    if not holds(kind, pa.types.is_temporal):
        return
    if pa.types.is_struct(kind):
        rows = [value for value in values if isinstance(value, Mapping)]
        for field in kind:
            _check_times([row.get(field.name) for row in rows], field.type)
        return
    if is_any_list(kind):
        lists = [value for value in values if hasattr(value, "__len__")]
        if pa.types.is_map(kind):
            pairs = [pair for value in lists for pair in (value.items() if isinstance(value, Mapping) else value)]
            _check_times([key for key, _ in pairs], kind.key_type)
            _check_times([item for _, item in pairs], kind.item_type)
        else:
            _check_times(list(chain.from_iterable(lists)), values_type(kind))
        return
    times = [value for value in values if isinstance(value, datetime) and value.year > 0]  # NaT has no year
    if pa.types.is_date(kind) and times:
        raise TypeError("some of its values are dates, and some have a time of day: give all of them the same kind")
    if len({value.tzinfo is None for value in times}) > 1:
        raise TypeError("some of its times have a zone, and some have none: give all of them one")
    if any(getattr(value, "nanosecond", 0) for value in times):
        raise TypeError(
            "some of its times have nanoseconds that are no whole microseconds: round them, as in time.floor('us')"
        )


def _why(error: Exception, values: Any) -> str:
    """Arrow's error about `values` on one line. If the error only names types of C and Python, a plainer text."""
    text = _first_line(error)
    if isinstance(error, OverflowError) and "int too" in text:
        return "some numbers do not fit BIGINT"
    if text.startswith("Expected ") and isinstance(values, Sequence):
        kinds = sorted({each.__name__ for each in set(map(type, values)) - {type(None)}})
        return f"values of {' and '.join(kinds)} in one column: convert them to one type"
    return text


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _hint(frame: Frame) -> str:
    if hasattr(frame, "collect"):
        return "; collect() it first"
    if isinstance(frame, str) or hasattr(frame, "__fspath__"):
        return "; read the file first, as in pyarrow.parquet.read_table(path)"
    return ""
