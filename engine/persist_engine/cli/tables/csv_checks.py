"""Finds what Arrow silently accepts in a CSV file and a table must not: the rest of a file as one value, and a number as infinity.

Reads the text once more when a value makes that necessary. Knows no tables.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.ddl import print_type


def infinite(table: pa.Table) -> dict[str, pa.DataType]:
    """The columns of floats that hold an infinity, with their types."""
    return {
        field.name: field.type
        for field, column in zip(table.schema, table.columns, strict=True)
        if pa.types.is_floating(field.type) and pc.any(pc.is_inf(column)).as_py()
    }


def refuse_overflow(
    source: Any, read: pyarrow.csv.ReadOptions, parse: pyarrow.csv.ParseOptions, kinds: dict[str, pa.DataType]
) -> None:
    """Raises InvalidUsage when a number of the columns `kinds` is larger than any of its type. These columns hold infinities. The text of a
    real infinity has no digits.
    """
    options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(kinds, pa.string()), include_columns=list(kinds))
    with closing(pyarrow.csv.open_csv(source, read, parse, options)) as reader:
        for batch in reader:
            for name, kind in kinds.items():
                texts = batch.column(name)
                numbers = pc.utf8_trim_whitespace(texts.filter(pc.match_substring_regex(texts, "[0-9]")))
                wrong = numbers.filter(pc.is_inf(numbers.cast(kind)))
                if len(wrong):
                    raise InvalidUsage(
                        f"is not csv that the table accepts: {name} is {print_type(kind)}: {wrong[0].as_py()[:40]} is larger than any "
                        "number of that type"
                    )


def ends_in_quotes(source: pa.NativeFile, last: pa.RecordBatch) -> bool:
    """Whether the file ends within quotes. Arrow then reads the whole rest, including rows, as one value: the file ends with a separator,
    one quote, and the last value as the file writes it. `last`: the last rows as read. Only values of text can hold rows.
    """
    values = last.column(last.num_columns - 1)
    value = values[-1].as_py() if last.num_rows and pa.types.is_string(values.type) else None
    if not isinstance(value, str):
        return False
    unclosed = b'"' + value.encode().replace(b'"', b'""')
    size = source.size()
    source.seek(max(0, size - len(unclosed) - 1))
    end: bytes = source.read()
    if last.num_columns > 1:
        return end == b"," + unclosed
    # A closed value that consists of one line end looks like an unclosed one that begins on a line of its own.
    return end.endswith(unclosed) and end[:1] in (b"\n", b"\r") and not end.rstrip(b"\r\n").endswith(b'"')
