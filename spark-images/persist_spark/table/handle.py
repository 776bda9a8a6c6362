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

        Raises InvalidUsage when stores are missing or several shards have the name; ShardNotFound, which lists similar names; errors of the
        stores.
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
        """The table of the shard with this id. Otherwise like `forName`."""
        return cls(TableShard.named(spark, str(shard), blob=blob, consensus=consensus))

    @property
    def shard(self) -> str:
        """The id of the shard. It stays the same if the name later means another shard."""
        return str(self._shard.id)

    def toDF(self, as_of: int | str | datetime | None = None) -> DataFrame:  # noqa: N802
        """The contents at `as_of`, or at the latest readable time, as `spark.read.format("persist")` loads them. `as_of`: a number, a
        datetime with its zone, ISO 8601 text with its zone, or a relative time such as `-1h`.
        """
        return self._shard.frame(as_of)

    def history(self, limit: int | None = None) -> DataFrame:
        """The live versions of the shard's metadata, newest first, at most `limit`: `version BIGINT, timestamp TIMESTAMP,
        changed MAP<STRING, BIGINT>` (how many entries of each collection of the state changed), `bytes BIGINT`. Versions are deleted after
        a rollup has replaced them and no reader needs them.
        """
        return history(self._shard, limit)

    def detail(self) -> DataFrame:
        """One row about the shard: its name, stores without credentials, version, since, upper, files, sizes, schema and retention."""
        return detail(self._shard)

    def delete(self, where: str | Column | None = None) -> int:
        """Removes the rows that satisfy `where`, an SQL condition or a Column, in one step. Returns their number, counted with their
        copies. `delete("true")` removes all rows.

        It removes no other row, even if other writers add rows meanwhile. Rows that satisfy `where` and that other writers add meanwhile
        may stay.

        Raises InvalidUsage without a condition; AnalysisException for a condition that Spark does not understand; Unavailable when other
        writers were faster for too long, and then nothing was deleted. After another error of the stores, read the table before you delete
        again.
        """
        if where is None:
            raise InvalidUsage(f'shard {self.shard}: delete needs a condition; delete("true") removes all rows')
        return delete(self._shard, where)

    def upsert(self, df: DataFrame, *, order_by: str | None = None, delete_when: str | Column | None = None) -> int:
        """Makes each row of `df` the only value of its key, in one step. Keys that `df` does not name keep their values. Returns the number
        of written updates: two for a key whose value changed, none for a key that already had the value.

        `df` has the columns of the shard. `order_by`: if a key has several rows, the row with the greatest value in this column wins; if it
        is a field of the shard's value, a greater value in the shard wins too. `delete_when`: an SQL condition or a Column; rows that
        satisfy it remove their key. It may read more columns than the shard has. Without it, a row whose values are all null removes its
        key.

        Raises InvalidUsage, and writes nothing, when columns do not fit, when a key has several different rows and none of them is the
        last, or when the shard holds several values of a key; the last two name the key. Errors of the stores: see `delete`.
        """
        return upsert(self._shard, df, order_by=order_by, delete_when=delete_when)

    def optimize(self, *, full: bool = False, on_executors: bool = False) -> DataFrame:
        """Merges small batches now; with `full`, all data into one batch. The contents stay the same at every readable time. Returns one
        row for each merge; none when there was nothing to merge.

        `on_executors`: executors read, merge and write instead of the caller's process, and each task has a range of keys. This helps if
        one process would take too long. It may be killed at any point and called again, and finished pieces stay. Raises InvalidUsage when
        executors have less than 512 MiB for a task beside their heap.
        """
        return compacted(self._shard, full=full, on_executors=on_executors)

    def vacuum(self) -> DataFrame:
        """Deletes the versions and blobs that no reader can reach any more. Returns one row for each piece of work, and none when nothing
        can be deleted. Everything that readers still need stays; the metadata table `holds` names these readers. The shard's since stays
        the same.
        """
        return collected(self._shard)

    def __repr__(self) -> str:
        return f"PersistTable({self._shard.id} at {self._shard.location})"
