"""How each column of a part is encoded, by what a sample of its values shows (see codec.part for what was measured)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.rows.nested.layout import ListColumn, is_list

_SAMPLE_ROWS = 1024


def column_encodings(table: pa.Table) -> tuple[list[str], list[str]]:
    """Paths of columns whose values repeat, and of columns of whole numbers without repeats. Decided by a sample that is
    the same for equal tables.
    """
    repeating: list[str] = []
    deltas: list[str] = []
    leaves = list(_leaves(table))
    for path, picked in leaves:
        if 2 * pc.count_distinct(picked, mode="all").as_py() <= len(picked):
            repeating.append(path)
        elif pa.types.is_integer(picked.type) and picked.type.bit_width >= 32:
            deltas.append(path)
    paths = [path for path, _ in leaves]  # a dot in a name may give two columns one path: take neither
    return repeating, [path for path in deltas if paths.count(path) == 1]


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
    """The columns below a column of lists, maps or structs, by path, up to so many values as a sample has."""
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
