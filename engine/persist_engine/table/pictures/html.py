"""Tables of rows and of properties as HTML, for notebooks. No dependency, no script; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import pyarrow as pa

from persist_engine.rows.ddl import print_type
from persist_engine.rows.nested.values import python_values

#: A cell shows at most this much of a value.
_CELL_CHARS_MAX = 80


def preview_html(title: str, rows: pa.Table, *, rows_max: int) -> str:
    """The first `rows_max` of `rows`, with the types of the columns, and a line that says when there are more."""
    head = [f"{escape(field.name)}<br><small>{escape(print_type(field.type))}</small>" for field in rows.schema]
    shown = rows.slice(0, rows_max)
    cells = zip(*(map(_cell, python_values(column)) for column in shown.columns), strict=True)
    end = f"<small>the first {rows_max} rows</small>" if rows.num_rows > rows_max else ""
    return f"<div><b>{escape(title)}</b>{_table(head, cells)}{end}</div>"


def pairs_html(title: str, pairs: Mapping[str, object]) -> str:
    """Names and values, one pair on each line."""
    cells = ((f"<b>{escape(name)}</b>", _cell(value)) for name, value in pairs.items())
    return f"<div><b>{escape(title)}</b>{_table([], cells)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    return f"<table>{top}<tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    text = "" if value is None else value.hex() if isinstance(value, bytes) else str(value)
    return escape(text if len(text) <= _CELL_CHARS_MAX else f"{text[: _CELL_CHARS_MAX - 3]}...")
