"""Readable: the forms in which all rows of a table can be read. Each method calls that of a scan, because only a scan knows how rows are
read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from persist_engine.base.refusal import Bound
from persist_engine.table.times import Time

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

    from persist_engine.table.scan import Scan


class Readable(Bound, ABC):
    """A base of classes with a method `scan`, for the rows as they are now or as they were."""

    @abstractmethod
    def scan(self, *, at: Time | None = None) -> Scan:
        """The rows as they are now, or as they were at a time."""

    def head(self, rows: int = 5) -> pa.Table:
        """The first rows in the order of their keys, as a pyarrow Table. Reads little more than these rows.

        >>> orders.head(1).to_pylist()
        [{'id': 1, 'name': 'ada'}]
        """
        return self.scan().head(rows)

    def at(self, time: Time) -> Scan:
        """The rows as they were at a time: ISO 8601 with its zone, a datetime, `-1h`, or a number as `Scan.time` shows it. At a time after
        the last write, they are the rows of the last write. Raises InvalidUsage for a time in the future.

        >>> before = orders.last_time
        >>> orders.delete("id = 1").deleted, orders.at(before).count()
        (1, 2)
        """
        return self.scan(at=time)

    def to_arrow(self) -> pa.Table:
        """All rows as a pyarrow Table.

        >>> orders.to_arrow().column("name").to_pylist()
        ['ada', 'lin']
        """
        return self.scan().to_arrow()

    def to_reader(self) -> pa.RecordBatchReader:
        """All rows as a stream of record batches, in bounded memory.

        >>> sum(batch.num_rows for batch in orders.to_reader())
        2
        """
        return self.scan().to_reader()

    def to_pandas(self, **options: Any) -> pd.DataFrame:
        """All rows as a pandas DataFrame. `options` are those of `pyarrow.Table.to_pandas`.

        >>> orders.to_pandas()["id"].tolist()
        [1, 2]
        """
        return self.scan().to_pandas(**options)

    def to_polars(self) -> pl.DataFrame:
        """All rows as a polars DataFrame. Raises InvalidUsage without polars.

        >>> orders.to_polars()["id"].to_list()
        [1, 2]
        """
        return self.scan().to_polars()

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """All rows as a relation of DuckDB, like `Scan.to_duckdb`.

        >>> orders.to_duckdb().aggregate("max(name)").fetchall()
        [('lin',)]
        """
        return self.scan().to_duckdb(connection)

    def to_pylist(self) -> list[dict[str, Any]]:
        """All rows as dicts. This is for few rows.

        >>> orders.to_pylist()
        [{'id': 1, 'name': 'ada'}, {'id': 2, 'name': 'lin'}]
        """
        return self.scan().to_pylist()

    def count(self) -> int:
        """The number of rows.

        >>> orders.count()
        2
        """
        return self.scan().count()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.scan().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return self.scan()._repr_html_()
