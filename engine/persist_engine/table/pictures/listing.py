"""Listing: a small table about a table, such as its history or its holds, for people and programs.

Owns how it looks as text and in a notebook. Must not know what its rows mean, except which columns are times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import counted, dated
from persist_engine.table.pictures.html import preview_html

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

#: The number of rows that a prompt or a notebook shows.
_ROWS_MAX = 20
_CELL_CHARS_MAX = 60


class Listing:
    """Rows with all that a pyarrow Table has: `num_rows`, `column(name)`, `filter`, `select`, `to_pandas`, `to_pylist` and the rest;
    `to_arrow` is that Table. Exports Arrow (`__arrow_c_stream__`). A prompt and a notebook show the times of `times` with their date; the
    values stay numbers.

    >>> history = orders.history()
    >>> history.num_rows, history.column("updates").to_pylist()
    (1, [2])
    """

    def __init__(self, title: str, rows: pa.Table, *, times: tuple[str, ...] = ()) -> None:
        self._title, self._rows, self._times = title, rows, times

    def to_arrow(self) -> pa.Table:
        """The rows as a pyarrow Table.

        >>> orders.history().to_arrow().num_rows
        1
        """
        return self._rows

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """The rows as a pandas DataFrame. `options` are those of `pyarrow.Table.to_pandas`. Raises InvalidUsage without pandas.

        >>> orders.history().to_pandas()["operation"].tolist()
        ['append']
        """
        try:
            return self._rows.to_pandas(**options)
        except ModuleNotFoundError as error:
            raise InvalidUsage("to_pandas needs the package pandas, which is not installed") from error

    def to_polars(self) -> pl.DataFrame:
        """The rows as a polars DataFrame. Raises InvalidUsage without polars.

        >>> orders.history().to_polars()["operation"].to_list()
        ['append']
        """
        try:
            import polars as pl
        except ModuleNotFoundError as error:
            raise InvalidUsage("to_polars needs the package polars, which is not installed") from error
        frame = pl.from_arrow(self._rows)
        assert isinstance(frame, pl.DataFrame), "a table becomes a DataFrame"
        return frame

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._rows.__arrow_c_stream__(requested_schema)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._rows, name)

    def __getitem__(self, key: Any) -> Any:
        return self._rows[key]

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __eq__(self, other: object) -> bool:
        return bool(self._rows.equals(other.to_arrow() if isinstance(other, Listing) else other))

    __hash__ = None  # type: ignore[assignment]  # like a pyarrow Table

    def __repr__(self) -> str:
        shown = self._shown(_ROWS_MAX)
        cells = [shown.column_names, *(list(map(_text, row.values())) for row in shown.to_pylist())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        more = ["..."] if len(self) > shown.num_rows else []
        return "\n".join([f"{self._title}: {counted(len(self), 'row')}", *lines, *more])

    def _repr_html_(self) -> str:
        return preview_html(self._title, self._shown(_ROWS_MAX + 1), rows_max=_ROWS_MAX)

    def _shown(self, count: int) -> pa.Table:
        """The first rows, with times as text."""
        rows = self._rows.slice(0, count)
        for name in self._times:
            texts = [None if time is None else dated(time) for time in rows.column(name).to_pylist()]
            rows = rows.set_column(rows.column_names.index(name), name, pa.array(texts, pa.string()))
        return rows


def _text(value: object) -> str:
    text = "" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= _CELL_CHARS_MAX else f"{text[: _CELL_CHARS_MAX - 3]}..."
