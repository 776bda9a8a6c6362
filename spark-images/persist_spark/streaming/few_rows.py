"""The rows of a small batch, in the driver's memory. One look at a batch decides whether it has none, few, or many: one Spark job, without
a shuffle and without Python workers. After a batch without rows the driver asks first whether this one has any, which costs less than half
of a look.

SUBTLE: it makes a plan of Spark's own classes through py4j. `DataFrame.limit` moves the rows of several partitions to one first, in a
second stage. And the code that Spark generates for a limit has a new name in each plan, so that it is compiled for each batch and never
gets fast: the limit here takes rows from the code of the batch, which Spark has already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.serializers import FramedSerializer
from pyspark.sql import DataFrame
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.util import _load_from_socket

from persist_spark.frames import texts_of
from persist_spark.source.native import java_class
from persist_spark.spec import SinkSpec
from persist_spark.streaming.driver_upserts import commands_max, texts_max

#: So many rows, none of them with longer texts than that together, are staged by the driver when a stream brings no more: at most 16 MiB.
FEW_ROWS, FEW_ROW_BYTES = 1000, 16 << 10
#: A look brings at most so many times the rows that are few: some of each partition.
EXCESS_MAX = 4
#: Spark asks one partition for a row, then four more, then sixteen. With more partitions a look costs less than these jobs.
ASKED_MAX = 5
_LONG = "is_long"
_SQL = "org.apache.spark.sql"


@dataclass(kw_only=True)
class FewRows:
    """Which batches of a query the driver takes to itself: those with few enough rows, all of them short. The look at a batch with more is
    in vain, so the driver looks only if the batch before had few. For one thread.
    """

    rows_max: int
    row_bytes_max: int
    _had: int = 0
    """The rows of the batch before."""
    _seen_max: int | None = None
    """The most rows that the last look could see all of. None before the first look."""
    _look: _Look | None = None

    @classmethod
    def of(cls, spec: SinkSpec) -> Self:
        """The limits for the envelope of `spec`: an upsert keeps less of a row than a driver that stages it."""
        if spec.envelope.type.has_keys:
            return cls(rows_max=commands_max(spec.schema), row_bytes_max=texts_max(spec.schema))
        return cls(rows_max=FEW_ROWS, row_bytes_max=FEW_ROW_BYTES)

    def rows(self, batch: DataFrame) -> pa.Table | None:
        """All rows of the batch, a frame as Spark gives it to `foreachBatch`. None when they are for executors."""
        if self._seen_max is not None and self._had > self._seen_max:
            return None
        if self._look is None:
            self._look = _Look.of(batch, self.row_bytes_max)
        plan = batch._jdf.queryExecution().logical()
        rdd = plan.rdd()
        partitions = max(1, rdd.getNumPartitions())
        if self._seen_max is not None and self._had == 0 and partitions <= ASKED_MAX:
            # Without a plan where the one row that this brings cannot be long. A plan brings a row without columns.
            is_empty = rdd.isEmpty() if self._look.shown is None else batch._jdf.isEmpty()
            if is_empty:
                return self._look.schema.empty_table()
        limit = min(self.rows_max + 1, -(-EXCESS_MAX * (self.rows_max + 1) // partitions))
        self._seen_max = limit - 1  # with so many rows no partition had more than it showed
        found = self._look.at(batch, limit)
        return None if found is None or found.num_rows > self._seen_max else found

    def had(self, rows: int) -> None:
        """Takes the number of rows of the last batch."""
        self._had = rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What the looks at the batches of one query have in common. Each call of the JVM takes as long as a hundred rows."""

    schema: pa.Schema
    """Of the rows, with _LONG if they have texts."""
    shown: Any
    """The columns to show, as a sequence of the JVM. None: all, as they are."""
    local_limit: Any
    served: Any
    """Runs a job over an RDD of bytes, and serves them on a socket."""

    @classmethod
    def of(cls, batch: DataFrame, row_bytes_max: int) -> Self:
        texts = [text for each in batch.schema.fields for text in texts_of(f"`{each.name}`", each.dataType)]
        shape, shown = batch.schema, None
        if texts:
            length = " + ".join(f"coalesce(octet_length({text}), 0)" for text in texts)
            # The driver never holds a long row: it receives nulls in its place. As text, an expression is one call of the JVM.
            columns = [f"if({length} > {row_bytes_max}, null, {name}) AS {name}" for name in batch.columns]
            shown = batch._jseq([*columns, f"{length} > {row_bytes_max} AS {_LONG}"])
            shape = T.StructType(
                [*(T.StructField(each.name, each.dataType) for each in shape), T.StructField(_LONG, T.BooleanType())]
            )
        jvm: Any = batch.sparkSession._jvm
        return cls(
            schema=to_arrow_schema(shape, timezone="UTC"),
            shown=shown,
            local_limit=java_class(jvm, f"{_SQL}.execution.LocalLimitExec"),
            served=java_class(jvm, "org.apache.spark.api.python.PythonRDD").collectAndServe,
        )

    def at(self, batch: DataFrame, limit: int) -> pa.Table | None:
        """The first `limit` rows of each partition. None when one of them is long."""
        shown = batch._jdf if self.shown is None else batch._jdf.selectExpr(self.shown)
        limited = self.local_limit(limit, shown.queryExecution().executedPlan())
        found = pa.Table.from_batches(self._collected(shown.toArrowBatchRdd(limited)), self.schema)
        if self.shown is None:
            return found
        return None if pc.any(found.column(_LONG)).as_py() else found.drop_columns([_LONG])

    def _collected(self, records: Any) -> list[pa.RecordBatch]:
        """The records of an RDD of Arrow's bytes, in the order of its partitions."""
        port, secret, server = self.served(records)
        with _load_from_socket((port, secret), _Bytes()) as found:
            batches = [pa.ipc.read_record_batch(pa.py_buffer(each), self.schema) for each in found]
        server.getResult()  # an error of the JVM while it served: the socket shows only its end
        return batches


class _Bytes(FramedSerializer):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    def loads(self, obj: bytes) -> bytes:
        return obj
