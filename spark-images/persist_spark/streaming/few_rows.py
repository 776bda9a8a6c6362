"""The rows of a small batch, in the driver's memory. One look at a batch decides whether it has no, few, or many rows. A look is one Spark
job, without a shuffle and without Python workers. After a batch without rows, the driver first asks whether the next batch has any, which
costs less than half of a look.

SUBTLE: it makes a plan from Spark's own classes through py4j. `DataFrame.limit` first moves the rows of several partitions to one, in a
second stage. The code that Spark generates for a limit also has a new name in each plan, so Spark compiles it for each batch and it never
becomes fast. All looks of a query share one plan, made for the first batch. For each later batch only the RDD is new. Columns that are the
same in all rows stay in the JVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.serializers import FramedSerializer
from pyspark.sql import DataFrame
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.util import _load_from_socket

from persist_spark.frames import fields_of, texts_of
from persist_spark.source.native import java_class, scala_object
from persist_spark.spec import SinkSpec
from persist_spark.streaming.driver_upserts import commands_max, texts_max

#: The driver stages a batch of a stream with at most this number of rows, if the texts of each row have at most this many bytes together.
#: The texts of such a batch take at most 16 MiB.
FEW_ROWS, FEW_ROW_BYTES = 1000, 16 << 10
#: A look brings some rows of each partition, at most this many times the limit for few rows.
EXCESS_MAX = 4
#: The most partitions that Spark asks for a row. It asks one partition, then four more, then sixteen. With more partitions a look costs
#: less.
ASKED_MAX = 5
_LONG = "is_long"
_SQL = "org.apache.spark.sql"
#: The types whose values are the same in Spark, in Python and in Arrow.
_PLAIN = frozenset({"long", "boolean"})


@dataclass(kw_only=True)
class FewRows:
    """Decides which batches of a query the driver takes: batches with few rows, all of them short. The look at a larger batch is wasted, so
    the driver looks only if the batch before had few rows. For one thread.
    """

    rows_max: int
    row_bytes_max: int
    constants: Mapping[str, int | bool | None] = field(default_factory=dict)
    """The columns that are the same in all rows of all batches, by name."""
    _had: int = 0
    """The number of rows in the batch before."""
    _seen_max: int | None = None
    """The most rows for which the last look shows that it has seen all rows. None before the first look."""
    _look: _Look | None = None

    @classmethod
    def of(cls, spec: SinkSpec, rows: DataFrame) -> Self:
        """For the stream `rows`, with the limits for the envelope of `spec`. A driver keeps less of a row for an upsert than for
        staging.
        """
        fields = {each.column for each in fields_of(spec.schema)}
        constants = {name: value for name, value in constants_of(rows).items() if name not in fields}
        if spec.envelope.type.has_keys:
            return cls(rows_max=commands_max(spec.schema), row_bytes_max=texts_max(spec.schema), constants=constants)
        return cls(rows_max=FEW_ROWS, row_bytes_max=FEW_ROW_BYTES, constants=constants)

    def rows(self, batch: DataFrame) -> pa.Table | None:
        """All rows of the batch, or None when executors must take them. `batch`: a frame from `foreachBatch`."""
        if self._seen_max is not None and self._had > self._seen_max:
            return None
        if self._look is None:
            self._look = _Look.of(batch, self.row_bytes_max, self.constants)
        rdd = batch._jdf.queryExecution().logical().rdd()
        partitions = max(1, rdd.getNumPartitions())
        if self._seen_max is not None and self._had == 0 and partitions <= ASKED_MAX and self._look.is_empty(rdd):
            return self._look.schema.empty_table()
        limit = min(self.rows_max + 1, -(-EXCESS_MAX * (self.rows_max + 1) // partitions))
        self._seen_max = limit - 1  # with at most this many rows in total, every partition showed all of its rows
        found = self._look.at(rdd, limit)
        return None if found is None or found.num_rows > self._seen_max else found

    def had(self, rows: int) -> None:
        """Records the number of rows of the last batch."""
        self._had = rows


def constants_of(rows: DataFrame) -> dict[str, int | bool | None]:
    """The columns of `rows` that its outermost projections set to null or to a literal BIGINT or BOOLEAN, by name. Any other expression may
    differ from batch to batch, for example the time, or may raise an error that belongs to a batch.
    """
    plan = top = rows._jdf.queryExecution().analyzed()
    values = {}
    while plan.nodeName() == "Project":
        for column in _each(plan.projectList()):
            value, is_cast = column, False
            while value.nodeName() in {"Alias", "Cast"}:
                is_cast = is_cast or value.nodeName() == "Cast"
                value = value.child()
            if value.nodeName() == "Literal" and (
                value.value() is None or (not is_cast and value.dataType().typeName() in _PLAIN)
            ):
                values[column.exprId().id()] = value.value()
        plan = plan.child()
    found = {each.name(): each.exprId().id() for each in _each(top.output())}
    return {name: values[at] for name, at in found.items() if at in values}


def _each(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The parts that all looks at the batches of one query share. They are made once, because a call of the JVM takes as long as a
    hundred rows.
    """

    schema: pa.Schema
    """The schema of the rows."""
    constants: Mapping[str, int | bool | None]
    shown: pa.Schema
    """The schema of the columns that a look brings: those that are not constant, and _LONG if they have texts."""
    frame: Any
    """A frame without rows, with the columns of `shown`."""
    scan: Any
    """Makes the scan of an RDD of batches, as part of a plan."""
    project: Any
    columns: Any
    """The expressions of `shown` over a scan. A JVM sequence, like `no_columns`."""
    no_columns: Any
    local_limit: Any
    served: Any
    """Runs a job over an RDD of bytes, and serves the bytes on a socket."""

    @classmethod
    def of(cls, batch: DataFrame, row_bytes_max: int, constants: Mapping[str, int | bool | None]) -> Self:
        kept = [each for each in batch.schema.fields if each.name not in constants]
        texts = [text for each in kept for text in texts_of(f"`{each.name}`", each.dataType)]
        columns = [each.name for each in kept]
        if texts:
            length = " + ".join(f"coalesce(octet_length({text}), 0)" for text in texts)
            # The driver never holds a long row. It receives nulls instead.
            columns = [f"if({length} > {row_bytes_max}, null, {name}) AS {name}" for name in columns]
            columns.append(f"{length} > {row_bytes_max} AS {_LONG}")
            kept.append(T.StructField(_LONG, T.BooleanType()))
        jvm: Any = batch.sparkSession._jvm
        shown = batch._jdf.selectExpr(batch._jseq(columns))
        plan, rows = shown.queryExecution().optimizedPlan(), batch._jdf.queryExecution().logical()
        output, partitioning, ordering = rows.output(), rows.outputPartitioning(), rows.outputOrdering()
        scan, none = java_class(jvm, f"{_SQL}.execution.RDDScanExec"), scala_object(jvm, "scala.None")
        return cls(
            schema=to_arrow_schema(batch.schema, timezone="UTC"),
            constants=constants,
            shown=to_arrow_schema(T.StructType(kept), timezone="UTC"),
            # This frame replaces the Spark frame `shown`, which would keep the first batch alive.
            frame=batch.sparkSession._jsparkSession.createDataFrame(
                java_class(jvm, "java.util.ArrayList")(), shown.schema()
            ),
            scan=lambda rdd: scan(output, rdd, "batch", partitioning, ordering, none),
            project=java_class(jvm, f"{_SQL}.execution.ProjectExec"),
            columns=plan.projectList() if plan.nodeName() == "Project" else output,
            no_columns=batch._jseq([]),
            local_limit=java_class(jvm, f"{_SQL}.execution.LocalLimitExec"),
            served=java_class(jvm, "org.apache.spark.api.python.PythonRDD").collectAndServe,
        )

    def is_empty(self, rdd: Any) -> bool:
        """Whether the batch has no rows. The driver must not receive a long row, so if there are texts, it asks for a row without
        columns.
        """
        if _LONG in self.shown.names:
            rdd = self.project(self.no_columns, self.scan(rdd)).execute()
        return bool(rdd.isEmpty())

    def at(self, rdd: Any, limit: int) -> pa.Table | None:
        """The first `limit` rows of each partition. None when one of these rows is long."""
        plan = self.project(self.columns, self.local_limit(limit, self.scan(rdd)))
        found = pa.Table.from_batches(self._collected(self.frame.toArrowBatchRdd(plan)), self.shown)
        if _LONG in self.shown.names and pc.any(found.column(_LONG)).as_py():
            return None
        columns = [
            pa.repeat(pa.scalar(self.constants[each.name], each.type), found.num_rows)
            if each.name in self.constants
            else found.column(each.name)
            for each in self.schema
        ]
        return pa.table(columns, schema=self.schema)

    def _collected(self, records: Any) -> list[pa.RecordBatch]:
        """The records of an RDD of Arrow's bytes, in the order of its partitions."""
        port, secret, server = self.served(records)
        with _load_from_socket((port, secret), _Bytes()) as found:
            batches = [pa.ipc.read_record_batch(pa.py_buffer(each), self.shown) for each in found]
        server.getResult()  # raises an error that the JVM had while serving; on the socket it only looks like the end
        return batches


class _Bytes(FramedSerializer):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    def loads(self, obj: bytes) -> bytes:
        return obj
