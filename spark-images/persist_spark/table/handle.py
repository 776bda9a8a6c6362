"""PersistTable: a shard with the calls that users of other table formats know from their table objects.

Every call is done when it returns. Frames come from the format `persist` of the session. Changes and maintenance run in the process of
the caller, which must reach both stores; over Spark Connect this is the client.
"""

from __future__ import annotations

from datetime import datetime

from persist_engine.base.errors import InvalidUsage
from pyspark.sql import Column, DataFrame, SparkSession

from persist_spark.table.description import detail, history
from persist_spark.table.removal import delete
from persist_spark.table.shard import TableShard
from persist_spark.table.upkeep import collected, compacted
from persist_spark.table.upsert import upsert


class PersistTable:
    """One shard as a table of a Spark session.

        table = PersistTable.forName(spark, "flights")
        table.delete("carrier = 'UA' AND dep_delay > 300")

    It holds no connection and no lease between calls. Make one with `forName` or `forShard`.
    """

    def __init__(self, shard: TableShard) -> None:
        self._shard = shard

    @classmethod
    def forName(  # noqa: N802 - here and below: the names that Spark's users know
        cls,
        spark: SparkSession,
        name: str,
        *,
        blob: str | None = None,
        consensus: str | None = None,
    ) -> PersistTable:
        """The table of a resource: `NAME`, `NAMESPACE/NAME` or `NAMESPACE.NAME`; a shard's id is accepted too. `blob` and `consensus` are
        the addresses of its stores; by default those that `register` gave to the session.

        InvalidUsage when stores are missing or several shards have the name; ShardNotFound lists near names; errors of the stores.
        """
        return cls(TableShard.named(spark, name, blob=blob, consensus=consensus))

    @classmethod
    def forShard(  # noqa: N802
        cls,
        spark: SparkSession,
        shard: str,
        *,
        blob: str | None = None,
        consensus: str | None = None,
    ) -> PersistTable:
        """The table of the shard with this id, as `forName`."""
        return cls(TableShard.named(spark, str(shard), blob=blob, consensus=consensus))

    @property
    def shard(self) -> str:
        """The id of the shard. It stays the same if the name later leads to another shard."""
        return str(self._shard.id)

    def toDF(self, as_of: int | str | datetime | None = None) -> DataFrame:  # noqa: N802
        """The contents, as `spark.read.format("persist")` loads them: at `as_of` (a number, a datetime with its zone, ISO 8601 text with
        its zone, or a time ago such as `-1h`), or at the latest readable time.
        """
        return self._shard.frame(as_of)

    def history(self, limit: int | None = None) -> DataFrame:
        """The live versions of the shard's metadata, newest first, at most `limit`: `version BIGINT, timestamp TIMESTAMP,
        changed MAP<STRING, BIGINT>` (how many entries of each collection of the state changed), `bytes BIGINT`. Versions go once a rollup
        replaces them and no reader needs them.
        """
        return history(self._shard, limit)

    def detail(self) -> DataFrame:
        """One row about the shard: its name, stores without credentials, version, since, upper, files, sizes, schema and retention."""
        return detail(self._shard)

    def delete(self, where: str | Column | None = None) -> int:
        """Removes the rows that satisfy `where`, an SQL condition or a Column, in one step, and returns how many, counted with their
        copies. `delete("true")` removes all rows.

        No other row is removed, also not of those that other writers add meanwhile. Of the rows that satisfy `where`, those that others
        add meanwhile may stay.

        InvalidUsage without a condition; AnalysisException for one that Spark does not understand; Unavailable when other writers were
        faster for too long, and then nothing was deleted. After another error of the stores, read the table before you delete again.
        """
        if where is None:
            raise InvalidUsage(f'shard {self.shard}: delete needs a condition; delete("true") removes all rows')
        return delete(self._shard, where)

    def upsert(self, df: DataFrame, *, order_by: str | None = None, delete_when: str | Column | None = None) -> int:
        """Makes each row of `df` the one value of its key, in one step; keys that `df` does not name keep theirs. Returns the number of
        updates that were written: two for a key that changed its value, none for a key that had it already.

        `df` has the columns of the shard. `order_by`: the column by which the last of several rows of a key wins; if it is a field of the
        value, a greater value that the shard holds wins too. `delete_when`: an SQL condition or a Column that holds for rows which remove
        their key; columns that only it reads may be there beside the shard's. Without it, a row whose values are all null removes its key.

        InvalidUsage, and nothing is written, when columns do not fit, or a key has several different rows and none of them is the last. A
        shard that holds several values of such a key is an error that names the key. Errors of the stores as of `delete`.
        """
        return upsert(self._shard, df, order_by=order_by, delete_when=delete_when)

    def optimize(self, *, full: bool = False, on_executors: bool = False) -> DataFrame:
        """Merges small batches now; with `full`, all data into one batch. The contents stay the same at every readable time. Returns one
        row for each merge; none when there was nothing to merge.

        `on_executors`: executors read, merge and write, each task a range of keys, instead of the caller's process. It pays for more data
        than one process merges in time. May be killed at any point and called again: finished pieces stay. InvalidUsage when executors
        have less than 512 MiB for a task beside their heap.
        """
        return compacted(self._shard, full=full, on_executors=on_executors)

    def vacuum(self) -> DataFrame:
        """Deletes now the versions and blobs that no reader can reach any more. Returns one row for each piece of work; none when nothing
        can go. What readers keep stays: the metadata table `holds` names them. Times before the shard's since are not affected by it.
        """
        return collected(self._shard)

    def __repr__(self) -> str:
        return f"PersistTable({self._shard.id} at {self._shard.location})"
