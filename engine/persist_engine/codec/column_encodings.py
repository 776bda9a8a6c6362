"""Decides how each column of a part is encoded, from a sample of its values (codec.part has the measurements)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.nested.layout import ListColumn, is_list

_SAMPLE_ROWS = 1024
_CODEC, _LEVEL = "zstd", 1
_PACKER = pa.Codec(_CODEC, _LEVEL)
#: If compression leaves more than this share of a column, it costs each read more time than the saved bytes are worth.
_DENSE_RATIO = 0.9


class Encodings(NamedTuple):
    """The encodings of the columns of a part, by path."""

    repeating: list[str]
    """The columns with repeating values, which get a dictionary."""
    deltas: list[str]
    """The columns of whole numbers without repeats, which are stored as deltas."""
    compression: str | dict[str, str]
    """The compression codec of all columns, or of each."""
    level: int | dict[str, int]
    """The level of zstd, for all columns or for each column that uses it."""


def column_encodings(table: pa.Table) -> Encodings:
    """Chooses the encodings for the columns of `table`. The sample that decides is the same for equal tables."""
    repeating: list[str] = []
    deltas: list[str] = []
    dense: set[str] = set()
    leaves = list(_leaves(table))
    paths = [path for path, _ in leaves]
    for path, picked in leaves:
        if 2 * pc.count_distinct(picked, mode="all").as_py() <= len(picked):
            repeating.append(path)
        elif pa.types.is_integer(picked.type) and picked.type.bit_width >= 32:
            deltas.append(path)
        elif _is_dense(picked):
            dense.add(path)
    # Dots in names may give two columns the same path. Then use deltas for neither.
    deltas = [path for path in deltas if paths.count(path) == 1]
    if not dense or len(set(paths)) < len(paths):
        return Encodings(repeating, deltas, _CODEC, _LEVEL)
    codecs = {path: "none" if path in dense else _CODEC for path in paths}
    return Encodings(repeating, deltas, codecs, {path: _LEVEL for path in paths if path not in dense})


def _is_dense(picked: pa.ChunkedArray | pa.Array) -> bool:
    """Whether compression would hardly make values of one width smaller. False for few values, whose sample does not show enough."""
    if not isinstance(picked, pa.ChunkedArray) or len(picked) < _SAMPLE_ROWS or not _has_width(picked.type):
        return False
    values = picked.combine_chunks().buffers()[1]
    return bool(_PACKER.compress(values).size > _DENSE_RATIO * values.size)


def _has_width(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_timestamp(kind))


def _leaves(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """A sample of each column that Parquet stores, by path."""
    sample = pa.array(np.linspace(0, table.num_rows - 1, min(table.num_rows, _SAMPLE_ROWS)).astype(np.int64))
    left = [(name, table.column(name)) for name in table.column_names]
    while left:
        path, column = left.pop()
        if pa.types.is_struct(column.type):
            left += [(f"{path}.{f.name}", child) for f, child in zip(column.type, column.flatten(), strict=True)]
        elif is_list(column.type):
            yield from _values_within(path, column.take(sample).combine_chunks())
        else:
            yield path, column.take(sample)


def _values_within(path: str, array: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """The columns below a column of lists, maps or structs, by path, with at most as many values as a sample has."""
    array = array.slice(0, _SAMPLE_ROWS)
    if is_list(array.type):
        is_map = pa.types.is_map(array.type)
        yield from _values_within(
            f"{path}.key_value" if is_map else f"{path}.list.element", ListColumn.of(array).values
        )
    elif pa.types.is_struct(array.type):
        for field, child in zip(array.type, array.flatten(), strict=True):
            yield from _values_within(f"{path}.{field.name}", child)
    else:
        yield path, array
