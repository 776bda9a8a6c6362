"""Frames that Spark's own Parquet reader reads. This needs no Python, reads only the columns and row groups that a query needs, and takes
counts from footers.

It is correct under three conditions: the parts of a snapshot hold exactly its rows, each with diff 1 (`Snapshot.plain_blobs`); the JVM can
open them as files; and Spark can express the frame's condition (`plain_conditions`). All other frames go through Python. Parts have a
checksum for each page, which the reader verifies.

SUBTLE: `_relation` uses Spark's classes through py4j. `spark.read.parquet` would lose NOT NULL, sample the schema, and give no object whose
lifetime shows when the frame can no longer be read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persist_engine import Filter
from persist_engine.rows.schema import Schema
from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.frames import spark_type
from persist_spark.source.plain_conditions import as_column

#: Reader options that the user's session must not change. A missing or damaged file is an error, and dates are not rebased.
_OPTIONS = {
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "datetimeRebaseMode": "CORRECTED",
    "parquet.page.verify-checksum.enabled": "true",
}
#: Spark lists at least this number of files in a job. The driver lists local files faster.
_LISTED_BY_JOBS = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_NEVER = 1 << 30
#: Held while a setting of a session is replaced.
_listing = threading.Lock()
_SQL = "org.apache.spark.sql"
COLLECTIONS = "scala.jdk.javaapi.CollectionConverters"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFiles:
    """Files that hold the contents of a loaded frame."""

    files: Sequence[Path]
    schema: Schema
    row_type: T.StructType
    """The columns to show, by name."""
    where: Filter | None = None
    """The condition that the rows of the frame satisfy. None: all rows of the files."""

    @property
    def is_readable(self) -> bool:
        """Whether Spark finds the columns by their names. It does not if two names differ only in case, or if a NOT NULL field is within a
        struct.
        """
        names = [field.name.lower() for side in (self.schema.key, self.schema.val) for field in side]
        return len(names) == len(set(names)) and self.schema.required_fields is not None

    @property
    def file_type(self) -> T.StructType:
        """The columns of the files, without time and diff."""
        sides = [("key", self.schema.key_type), ("val", self.schema.val_type)]
        return T.StructType([T.StructField(name, spark_type(side), False) for name, side in sides if len(side)])  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class NativeFrame:
    """A frame, and a JVM object. Everything that can read the frame's files refers to this object, and nothing else does: plans, cached
    plans, views and RDDs.
    """

    frame: DataFrame
    held_by: Any


def native_frame(spark: SparkSession, plain: PlainFiles) -> NativeFrame | None:
    """The frame over `plain`. None when it would differ from the frame that Python reads. Starts no job."""
    condition = None if plain.where is None else as_column(plain.where)
    if not plain.is_readable or (condition is None) != (plain.where is None):
        return None
    try:
        found = _relation(spark, plain)
    except Py4JError:  # for example, the file may not be opened, or this Spark has other classes
        found = None
    if found is None:  # a file is missing; the reader in Python then raises an error that names the blob
        return None
    rows, held_by = found
    columns = {
        field.name: _unpushed(F.col(side).getField(field.name), spark_type(field.type), nullable=field.nullable)
        for side, fields in (("key", plain.schema.key), ("val", plain.schema.val))
        for field in fields
    }
    wanted = rows if condition is None else rows.where(condition)
    frame = wanted.select(*(columns[name].alias(name) for name in plain.row_type.names))
    return NativeFrame(frame, held_by) if frame.schema == plain.row_type else None


def _unpushed(column: Column, kind: T.DataType, *, nullable: bool) -> Column:
    """`column` of type `kind`, in a form that Spark pushes no filter through if a pushed filter would lose rows.

    SUBTLE: for Spark NaN equals NaN and is greater than any number. The least and the greatest value of a row group ignore NaN, so a
    pushed `x > 5` would skip rows with NaN. Spark passes the days and instants of a filter to the reader as `java.sql.Date` and
    `java.sql.Timestamp`. This conversion uses the Julian calendar and the time zones of two JVMs, which lack days and change their offsets.
    So days and instants are converted to numbers and back, which costs nothing and stops pushed filters.
    """
    match kind:
        case T.FloatType() | T.DoubleType():
            return F.nanvl(column, column)
        case T.DateType():
            return F.date_from_unix_date(F.unix_date(column))
        case T.TimestampType():
            return F.timestamp_micros(F.unix_micros(column))
    if not isinstance(kind, T.StructType) or not _is_lossy(kind):
        return column
    children = [_unpushed(column.getField(f.name), f.dataType, nullable=f.nullable).alias(f.name) for f in kind.fields]
    return F.when(column.isNotNull(), F.struct(*children)) if nullable else F.struct(*children)


def _is_lossy(kind: T.DataType) -> bool:
    """Whether a filter may lose values of this type, at some depth of a struct."""
    if isinstance(kind, T.StructType):
        return any(_is_lossy(field.dataType) for field in kind.fields)
    return isinstance(kind, T.FloatType | T.DoubleType | T.DateType | T.TimestampType)


def _relation(spark: SparkSession, plain: PlainFiles) -> tuple[DataFrame, Any] | None:
    """The columns of the files, and the JVM object of NativeFrame. None when a file is missing."""
    jvm: Any = spark._jvm
    session = spark._jsparkSession
    sources = f"{_SQL}.execution.datasources"
    paths, path = java_class(jvm, "java.util.ArrayList")(), java_class(jvm, "org.apache.hadoop.fs.Path")
    for file in plain.files:
        paths.add(path("file", None, str(file)))
    options = java_class(jvm, "org.apache.spark.api.python.PythonUtils").toScalaMap(_java_map(jvm, _OPTIONS))
    data_type = java_class(jvm, f"{_SQL}.types.DataType")
    columns = data_type.fromJson(plain.file_type.json())
    no_columns = data_type.fromJson(T.StructType().json())
    none = scala_object(jvm, "scala.None")
    uncached = scala_object(jvm, f"{sources}.NoopCache")
    paths = java_class(jvm, COLLECTIONS).asScala(paths).toSeq()
    some = java_class(jvm, "scala.Some")(columns)
    with _listed_here(spark):
        index = java_class(jvm, f"{sources}.InMemoryFileIndex")(session, paths, options, some, uncached, none, none)
    if index.allFiles().size() != len(plain.files):
        return None
    parquet = java_class(jvm, f"{sources}.parquet.ParquetFileFormat")()
    relation = java_class(jvm, f"{sources}.HadoopFsRelation")(
        index, no_columns, columns, none, parquet, options, session
    )
    return DataFrame(session.baseRelationToDataFrame(relation), spark), parquet


@contextmanager
def _listed_here(spark: SparkSession) -> Iterator[None]:
    """Within the block, Spark lists files on the driver. Afterwards the session has its own setting again, even if several threads load
    frames.
    """
    with _listing:
        before = spark.conf.get(_LISTED_BY_JOBS)
        spark.conf.set(_LISTED_BY_JOBS, str(_NEVER))
        try:
            yield
        finally:
            spark.conf.set(_LISTED_BY_JOBS, before)


def java_class(jvm: Any, name: str) -> Any:
    """The class with this full name, in one call. For `jvm.a.b.C`, the JVM would first look for classes `a` and `a.b` in all jars."""
    return getattr(jvm, name)


def _java_map(jvm: Any, values: Mapping[str, str]) -> Any:
    made = java_class(jvm, "java.util.HashMap")()
    for name, value in values.items():
        made.put(name, value)
    return made


def scala_object(jvm: Any, name: str) -> Any:
    """The Scala object `name`."""
    return java_class(jvm, "java.lang.Class").forName(f"{name}$").getField("MODULE$").get(None)
