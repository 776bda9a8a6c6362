"""Scan: the rows of a table at one time, which are read when a caller requests them.

This module owns the forms in which rows leave a table. It knows nothing of how they are stored, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.refusal import Bound
from persist_engine.base.wording import dated
from persist_engine.rows.nested.values import python_rows
from persist_engine.table.columns import Columns
from persist_engine.table.filters import Condition, Where
from persist_engine.table.names import of_table

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

    from persist_engine.client.read.handle import ReadHandle
    from persist_engine.client.read.snapshot import SinceAhead, Snapshot

#: The number of rows that a notebook shows.
PREVIEW_ROWS = 10
#: The memory of a read of the first rows, and the memory for each of them. It bounds what is fetched beyond the last one.
FIRST_BYTES, FIRST_ROW_BYTES = 4 << 20, 256

Lend: TypeAlias = "Callable[[], AbstractContextManager[ReadHandle]]"


class Scan(
    Bound, elsewhere="send its rows (to_arrow), or connect again and scan at the same time: db[name].at(scan.time)"
):
    """Rows of one table at one time, chosen when the scan was made, with the columns of that moment. Reading may be repeated and gives the
    same rows. A scan reads and holds nothing before one of the methods below is called. These raise InvalidUsage once the time can no
    longer be read.

    Exports Arrow (`__arrow_c_stream__`), so that DuckDB, polars, pandas and pyarrow read a scan directly.

    >>> scan = orders.scan("id > 1")
    >>> orders.delete("id = 2").deleted, scan.to_pylist()
    (1, [{'id': 2, 'name': 'lin'}])
    """

    def __init__(
        self,
        name: str,
        lend: Lend,
        columns: Columns,
        *,
        time: int | None,
        condition: Condition,
        shown: tuple[str, ...] | None = None,
        limit: int | None = None,
        nested: bool = False,
    ) -> None:
        self._name, self._lend, self._columns = name, lend, columns
        self._condition, self._shown, self._limit, self._nested = condition, shown, limit, nested
        self.time = time
        """The time whose rows these are; None if nothing was written to the table."""

    @property
    def schema(self) -> pa.Schema:
        """The columns, in their order; `key` and `val` for a nested scan.

        >>> orders.scan(columns=["name"]).schema.names
        ['name']
        """
        return self._columns.nested(self._flat_schema) if self._nested else self._flat_schema

    @property
    def _flat_schema(self) -> pa.Schema:
        whole = self._columns.arrow
        return whole if self._shown is None else pa.schema([whole.field(name) for name in self._shown])

    def scan(
        self, where: Where | None = None, columns: Sequence[str] | None = None, *, nested: bool | None = None
    ) -> Scan:
        """A scan of fewer rows and columns at the same time. Only for a scan that has all of them. `nested` None: as in this scan.

        >>> orders.at(orders.last_time).scan("id = 2", ["name"]).to_pylist()
        [{'name': 'lin'}]
        """
        if self._shown is not None or not self._condition.is_empty or self._limit is not None:
            raise InvalidUsage(
                f"table {self._name}: this scan has its condition, columns or limit; scan the table, or the table `at` a time"
            )
        with of_table(self._name):
            condition, shown = Condition.of(where, self._columns), self._columns.chosen(columns)
        return Scan(
            self._name,
            self._lend,
            self._columns,
            time=self.time,
            condition=condition,
            shown=shown,
            nested=self._nested if nested is None else nested,
        )

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as a stream of record batches, within about 256 MiB however many rows there are. Read it to its end or drop it: until
        then, the rows are protected from collection.

        >>> sum(batch.num_rows for batch in orders.scan().to_reader())
        2
        """
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def to_arrow(self) -> pa.Table:
        """The rows as a pyarrow Table.

        >>> orders.scan("id = 1").to_arrow().column("name").to_pylist()
        ['ada']
        """
        if self.time is None:
            return self.schema.empty_table()
        if self._limit is not None:
            return pa.Table.from_batches(self._batches(), schema=self.schema)
        with of_table(self._name), self._lend() as reader, self._snapshot(reader) as snapshot:
            rows = snapshot.to_table()
            return pa.Table.from_batches(map(self._flat, rows.to_batches()), schema=self.schema)

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """The rows as a pandas DataFrame. `options` are those of `pyarrow.Table.to_pandas`. Raises InvalidUsage without pandas.

        >>> orders.scan(columns=["id"]).to_pandas()["id"].tolist()
        [1, 2]
        """
        try:
            return self.to_arrow().to_pandas(**{"maps_as_pydicts": "strict", **options})
        except ModuleNotFoundError as error:
            raise InvalidUsage("to_pandas needs the package pandas, which is not installed") from error

    def to_polars(self) -> pl.DataFrame:
        """The rows as a polars DataFrame. Raises InvalidUsage without polars.

        >>> orders.scan(columns=["id"]).to_polars()["id"].to_list()
        [1, 2]
        """
        try:
            import polars as pl
        except ModuleNotFoundError as error:
            raise InvalidUsage("to_polars needs the package polars, which is not installed") from error
        frame = pl.from_arrow(self.to_arrow())
        assert isinstance(frame, pl.DataFrame), "a table becomes a DataFrame"
        return frame

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """The rows as a relation of DuckDB, of its default connection or of `connection`: `scan.to_duckdb().aggregate("sum(price)")`. They
        are read into memory once, so the relation can be used many times. Raises InvalidUsage without duckdb.

        To read once and in bounded memory, name the scan in SQL instead: `duckdb.sql("select sum(price) from scan")`.

        >>> orders.scan().to_duckdb().aggregate("max(name)").fetchall()
        [('lin',)]
        """
        try:
            import duckdb
        except ModuleNotFoundError as error:
            raise InvalidUsage("to_duckdb needs the package duckdb, which is not installed") from error
        return (duckdb if connection is None else connection).from_arrow(self.to_arrow())

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dicts, with maps as dicts, too. This is for few rows. Raises InvalidUsage for dates and instants in years that Python
        does not have.

        >>> orders.scan("id = 1").to_pylist()
        [{'id': 1, 'name': 'ada'}]
        """
        with of_table(self._name):
            return python_rows(self.to_arrow())

    def count(self) -> int:
        """The number of rows. Reads only the parts for which statistics do not suffice.

        >>> orders.scan([("id", ">", 1)]).count()
        1
        """
        if self.time is None:
            return 0
        if self._condition.expression is not None:
            return sum(batch.num_rows for batch in self._batches())
        with of_table(self._name), self._lend() as reader, self._snapshot(reader) as snapshot:
            found = snapshot.count()
            return found if self._limit is None else min(found, self._limit)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        what = "" if self._condition.is_empty else f" where {self._condition.shown}"
        what += "" if self._limit is None else f" limit {self._limit}"
        return f"Scan({self._name} at {'no time' if self.time is None else dated(self.time)}{what}: {', '.join(self.schema.names)})"

    def _repr_html_(self) -> str:
        from persist_engine.table.pictures.html import preview_html

        rows = self.head(PREVIEW_ROWS + 1)
        at = "nothing was written yet" if self.time is None else f"at {dated(self.time)}"
        return preview_html(f"{self._name} {at}", rows, rows_max=PREVIEW_ROWS)

    def head(self, rows: int = 5) -> pa.Table:
        """The first rows, in the order of their keys. Reads only the parts that they need, and what is fetched ahead.

        >>> orders.scan().head(1).to_pylist()
        [{'id': 1, 'name': 'ada'}]
        """
        limit = checked_limit(self._name, rows)
        return pa.Table.from_batches(
            self._first(limit if self._limit is None else min(limit, self._limit)), schema=self.schema
        )

    def _batches(self) -> Iterator[pa.RecordBatch]:
        return self._first(self._limit)

    def _first(self, limit: int | None) -> Iterator[pa.RecordBatch]:
        """The first rows; None: all."""
        if self.time is None or limit == 0:
            return
        from persist_engine.client.read.pieces import READ_MEMORY_BYTES

        few = READ_MEMORY_BYTES if limit is None else FIRST_BYTES + limit * FIRST_ROW_BYTES
        with of_table(self._name), self._lend() as reader, self._snapshot(reader) as snapshot:
            for batch in snapshot.to_batches(memory_bytes=min(few, READ_MEMORY_BYTES)):
                rows = self._flat(batch)
                if limit is not None:
                    rows = rows.slice(0, limit)
                    limit -= rows.num_rows
                if rows.num_rows:
                    yield rows
                if limit == 0:
                    return

    def _flat(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = self._condition.applied(self._columns.flat(batch))
        if self._shown is not None:
            rows = rows.select(list(self._shown))
        if self._nested:
            return self._columns.folded(rows, self.schema)
        return pa.RecordBatch.from_arrays(rows.columns, schema=self.schema)

    def _snapshot(self, reader: ReadHandle) -> Snapshot:
        from persist_engine.client.read.snapshot import SinceAhead

        assert self.time is not None
        # An expression does not show which columns it needs, so read all.
        needed = None if self._shown is None or self._condition.expression is not None else self._shown
        answer = reader.snapshot(
            self.time,
            where=self._condition.predicate,
            columns=None if needed is None else [self._columns.places[name] for name in needed],
        )
        if isinstance(answer, SinceAhead):
            raise InvalidUsage(gone(self.time, answer))
        return answer


def checked_limit(name: str, limit: int) -> int:
    """Returns `limit`. Raises InvalidUsage if it is not a number of rows."""
    if type(limit) is not int or limit < 0:
        raise InvalidUsage(f"table {name}: a limit is a whole number of rows from 0 on, not {limit!r}")
    return limit


def gone(time: int, answer: SinceAhead) -> str:
    """The message that says why `time` can no longer be read, and which times can."""
    if answer.since.is_empty():
        return answer.refused("its rows are gone")
    since = dated(answer.since.time)
    return f"the rows at {dated(time)} can no longer be read; the earliest time is {since}. `retain` says how long times stay readable"
