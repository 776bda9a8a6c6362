"""Turns the user's DataFrame into the columns that write tasks read. It only plans and starts no Spark job.

Keys and values are flat columns, named by position (k0, k1, ..., v0, ...). So fields with equal names, values without fields and Spark's
case-insensitive resolution cannot cause mix-ups. `partitions.py` rebuilds the structs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from persist_engine.base.settings import MIB
from persist_engine.rows.schema import Schema
from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_type

from persist_spark.session import parallelism_of
from persist_spark.spec import ConfigurationError

TIME, DIFF, DESIRED, HASH = "time", "diff", "desired", "h"
#: The order of a command, whether it removes its key, and the reason why the run must not write a row.
ORDER, DELETED, FAULT = "o", "deleted", "fault"
#: A frame of fewer bytes is staged without a shuffle. For 50,000 rows (2 MB) this takes a third of the time that sampling and shuffling
#: take. For 1.5M rows (58 MB) it takes 0.55 of the processor time.
SMALL_BYTES = 256 * MIB
#: The least bytes of such a frame in one write task. Smaller tasks are hardly worth their start, and leave more runs to merge.
SMALL_TASK_BYTES = 8 * MIB
#: The most write tasks of such a frame, or one for each core if there are more cores. Each task leaves a run.
SMALL_TASKS_MAX = 8
#: Integer types by width, with the number of decimal digits that each needs.
_INTEGERS: tuple[tuple[type, int], ...] = ((T.ByteType, 3), (T.ShortType, 5), (T.IntegerType, 10), (T.LongType, 19))


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the shard's schema and the flat column that carries it."""

    side: str
    """The side of the schema in messages: key or value."""
    name: str
    column: str
    type: T.DataType


def fields_of(schema: Schema) -> list[Field]:
    """The key's fields, then the value's, each with its flat column."""
    sides = (("key", "k", schema.key), ("value", "v", schema.val))
    return [
        Field(side, field.name, f"{letter}{index}", spark_type(field.type))
        for side, letter, fields in sides
        for index, field in enumerate(fields)
    ]


def spark_type(arrow_type: pa.DataType) -> T.DataType:
    """The Spark type for an Arrow type that a shard may hold. The conversion is lossless in both directions."""
    return from_arrow_type(arrow_type)


def flat_type(schema: Schema) -> T.StructType:
    """The Spark type of the flat key and value columns."""
    return T.StructType([T.StructField(f.column, f.type) for f in fields_of(schema)])


def missing_fields(schema: Schema) -> Iterator[tuple[Field, str, Column]]:
    """Each NOT NULL field of `schema`, also within structs: the flat field that holds it, its name, and whether a flat row lacks it. A null
    struct lacks none of its fields.
    """
    for field, declared in zip(fields_of(schema), (*schema.key, *schema.val), strict=True):
        for name, is_missing in _missing(field.name, F.col(field.column), declared):
            yield field, name, is_missing


def _missing(name: str, column: Column, declared: pa.Field) -> Iterator[tuple[str, Column]]:
    if not declared.nullable:
        yield name, column.isNull()
    if pa.types.is_struct(declared.type):
        for child in declared.type:
            for inner, is_missing in _missing(f"{name}.{child.name}", column.getField(child.name), child):
                yield inner, column.isNotNull() & is_missing


def to_flat(
    frame: DataFrame,
    schema: Schema,
    *,
    timestamp_column: str | None = None,
    diff_column: str | None = None,
    order_column: str | None = None,
    delete_column: str | None = None,
    error_column: str | None = None,
) -> DataFrame:
    """Converts `frame` to columns k*, v* in the shard's types, and one more for each given column, all nullable: `time` (bigint ms), `diff`
    (bigint), `o` (the order of rows with one key), `deleted` (boolean) and `fault` (the reason why a row cannot be written).

    Raises ConfigurationError, which names every missing, surplus, duplicate or unfit column. Names are compared exactly.
    """
    fields = fields_of(schema)
    found = {field.name: (index, field.dataType) for index, field in enumerate(frame.schema.fields)}
    given = {
        TIME: ("timestampColumn", timestamp_column),
        DIFF: ("diffColumn", diff_column),
        ORDER: ("orderColumn", order_column),
        DELETED: ("deleteColumn", delete_column),
        FAULT: ("the reason of an error", error_column),
    }
    beside = {flat: (name, role) for flat, (role, name) in given.items() if name is not None}
    mismatch = schema.column_problem(frame.columns, beside=beside.values())
    if mismatch is not None:
        raise ConfigurationError(mismatch)
    # SUBTLE: columns are selected by position, because Spark would resolve `id` to `ID`.
    positions = frame.toDF(*(f"c{index}" for index in range(len(frame.columns))))
    problems: list[str] = []
    columns: list[Column] = []
    for field in fields:
        index, source = found[field.name]
        problem = unfit(field.name, source, field.type)
        if problem is None:
            columns.append(converted(F.col(f"c{index}"), source, field.type).alias(field.column))
        else:
            problems.append(problem)
    sides = {field.name: field.side for field in fields}
    for flat, (name, _) in beside.items():
        index, source = found[name]
        column = _beside(flat, F.col(f"c{index}"), source, name, side=sides.get(name), spark=frame.sparkSession)
        columns.append(column.alias(flat))
    if problems:
        raise ConfigurationError(
            f"input does not fit the shard's schema: {'; '.join(problems)}; convert with input.format.sql"
        )
    return positions.select(*columns)


def _beside(
    flat: str, column: Column, source: T.DataType, name: str, *, side: str | None, spark: SparkSession
) -> Column:
    """The column `flat`, made from the input's column `name`. `side`: the side of the shard's schema that has a field of this name."""
    match flat:
        case "time":
            return _millis(column, source, name, spark)
        case "diff":
            _check_beside("diffColumn", name, side, is_fit=_is_whole(source), source=source, wanted="a whole number")
            return column.cast("bigint")
        case "deleted":
            is_boolean = isinstance(source, T.BooleanType)
            _check_beside("deleteColumn", name, side, is_fit=is_boolean, source=source, wanted="boolean")
            return column
        case "fault":
            if not isinstance(source, T.StringType | T.NullType):
                raise ConfigurationError(
                    f"the input's column {name} is {source.simpleString()}, must be string: the reason why a row cannot be written, or null"
                )
            return column.cast("string")
    if side == "key":
        raise ConfigurationError(
            f"envelope.orderColumn: {name} is a field of the key, so it is equal in all rows of a key; choose another column"
        )
    return ordering(column, source, name)


def _check_beside(role: str, name: str, side: str | None, *, is_fit: bool, source: T.DataType, wanted: str) -> None:
    if side is not None:
        raise ConfigurationError(
            f"envelope.{role}: {name} is a field of the shard's {side}, must be a column of the input alone"
        )
    if not is_fit:
        raise ConfigurationError(
            f"envelope.{role}: {name} is {source.simpleString()}, must be {wanted}; convert it with input.format.sql"
        )


def _is_whole(source: T.DataType) -> bool:
    return any(isinstance(source, kind) for kind, _ in _INTEGERS)


def ordering(column: Column, source: T.DataType, name: str) -> Column:
    """`column` as the order of rows. Raises ConfigurationError when its type has no order."""
    if not isinstance(source, T.AtomicType) or isinstance(source, T.VariantType):
        raise ConfigurationError(
            f"envelope.orderColumn: {name} is {source.simpleString()}, which has no order; choose a number, a time or a text"
        )
    if isinstance(source, T.YearMonthIntervalType):  # Arrow in Python lacks this type
        return F.extract(F.lit("YEAR"), column) * 12 + F.extract(F.lit("MONTH"), column)
    return column


def unfit(name: str, source: T.DataType, target: T.DataType) -> str | None:
    """The reason why column `name` of type `source` cannot be stored as `target` without loss. None when it can be."""
    if isinstance(source, T.NullType):  # a column of nulls fits any type
        return None
    if isinstance(target, T.StructType):
        if not isinstance(source, T.StructType):
            return f"{name} is {source.simpleString()}, must be {target.simpleString()}"
        ours, theirs = {f.name: f.dataType for f in source.fields}, {f.name: f.dataType for f in target.fields}
        if set(ours) != set(theirs) or len(source.fields) != len(ours):
            return f"{name} has the fields {', '.join(source.fieldNames())}, must have {', '.join(target.fieldNames())}"
        return next(filter(None, (unfit(f"{name}.{child}", ours[child], theirs[child]) for child in theirs)), None)
    if isinstance(target, T.ArrayType) and isinstance(source, T.ArrayType):
        return unfit(f"{name}[]", source.elementType, target.elementType)
    if isinstance(target, T.MapType) and isinstance(source, T.MapType):
        within = unfit(f"{name}[]", source.valueType, target.valueType)
        return (
            within
            if source.keyType == target.keyType
            else f"{name} is {source.simpleString()}, must be {target.simpleString()}"
        )
    if _lossless(source, target):
        return None
    return f"{name} is {source.simpleString()}, which does not fit {target.simpleString()} without loss"


def _lossless(source: T.DataType, target: T.DataType) -> bool:
    """Whether every value of `source` is exactly one value of `target`. Time zones are never guessed: timestamps with and without a zone do
    not convert into each other.
    """
    if type(source) is type(target) and not isinstance(source, T.DecimalType):
        return True
    if isinstance(source, T.ArrayType | T.MapType):
        return False
    digits = next((width for kind, width in _INTEGERS if isinstance(source, kind)), None)
    match target:
        case T.StringType():
            return isinstance(source, T.StringType | T.CharType | T.VarcharType)
        case T.DecimalType():
            if isinstance(source, T.DecimalType):
                return bool(
                    source.scale <= target.scale and source.precision - source.scale <= target.precision - target.scale
                )
            return digits is not None and digits <= target.precision - target.scale
        case T.DoubleType():
            return isinstance(source, T.FloatType) or (digits is not None and digits <= 10)
        case T.FloatType():
            return digits is not None and digits <= 5
        case T.ShortType() | T.IntegerType() | T.LongType():
            own = next(width for kind, width in _INTEGERS if isinstance(target, kind))
            return digits is not None and digits <= own
        case T.TimestampNTZType():
            return isinstance(source, T.DateType)
    return False


def converted(column: Column, source: T.DataType, target: T.DataType) -> Column:
    """`column` of type `source` in the type `target`, which it must fit (see `unfit`)."""
    if isinstance(target, T.ArrayType) and isinstance(source, T.ArrayType):
        return F.transform(column, lambda each: converted(each, source.elementType, target.elementType)).cast(target)
    if isinstance(target, T.MapType) and isinstance(source, T.MapType):
        return F.transform_values(column, lambda _, each: converted(each, source.valueType, target.valueType)).cast(
            target
        )
    if not isinstance(target, T.StructType) or isinstance(source, T.NullType):
        return column if source == target else column.cast(target)  # a cast takes six calls of the JVM
    ours = {f.name: f.dataType for f in source.fields}
    children = [converted(column.getField(f.name), ours[f.name], f.dataType).alias(f.name) for f in target.fields]
    return F.when(column.isNotNull(), F.struct(*children))


def _millis(column: Column, source: T.DataType, name: str, spark: SparkSession) -> Column:
    match source:
        case T.TimestampType():
            return F.unix_millis(column)
        case T.TimestampNTZType():
            if spark.conf.get("spark.sql.session.timeZone") not in ("UTC", "Etc/UTC", "GMT", "Z"):
                raise ConfigurationError(
                    f"envelope.timestampColumn: {name} has no time zone: "
                    "set spark.sql.session.timeZone to UTC, or convert with SQL"
                )
            return F.unix_millis(column.cast("timestamp"))
        case T.LongType() | T.IntegerType() | T.ShortType() | T.ByteType():
            return column.cast("bigint")
    raise ConfigurationError(
        f"envelope.timestampColumn: {name} is {source.simpleString()}, must be a timestamp or milliseconds as bigint"
    )


def to_stage(flat: DataFrame, schema: Schema, tasks: int | None) -> DataFrame:
    """Divides `flat` into the partitions that write tasks stage: `tasks` of them, or (None) as many as its bytes require.

    A small frame keeps its partitions, or gets fewer. So it needs no shuffle and no sample, and the input is read once. Each task sorts its
    own rows, and its batch is a separate run, so overlapping key ranges are correct. Readers merge a few more runs until a compaction has
    merged them.
    """
    size_bytes = planned_bytes(flat) if tasks is None else None
    if size_bytes is not None and size_bytes < SMALL_BYTES:
        most = max(SMALL_TASKS_MAX, parallelism_of(flat.sparkSession))
        return flat.coalesce(min(most, max(1, -(-size_bytes // SMALL_TASK_BYTES))))
    return by_key_range(flat, schema, tasks)


def texts_of(path: str, kind: T.DataType) -> Iterator[str]:
    """The SQL expressions for the texts and binaries in the column at `path`."""
    match kind:
        case T.StringType() | T.BinaryType():
            yield path
        case T.ArrayType() | T.MapType():
            yield f"to_json({path})"
        case T.StructType():
            for child in kind.fields:
                yield from texts_of(f"{path}.{quoted(child.name)}", child.dataType)


def quoted(name: str) -> str:
    """The name as a quoted SQL identifier."""
    return "`" + name.replace("`", "``") + "`"


def has_texts(kind: T.DataType) -> bool:
    """Whether values of this type have no fixed size."""
    return next(texts_of("", kind), None) is not None


def has_maps(kind: T.DataType) -> bool:
    """Whether the type contains a map."""
    match kind:
        case T.StructType():
            return any(has_maps(child.dataType) for child in kind.fields)
        case T.ArrayType():
            return has_maps(kind.elementType)
    return isinstance(kind, T.MapType)


def planned_bytes(frame: DataFrame) -> int | None:
    """Spark's estimate of the frame's size. For files it is their size, and for a source that does not know its size it is far too large.
    None if the estimate may be far too small, because a generator such as `explode` makes many rows from one.
    """
    plan = frame._jdf.queryExecution().optimizedPlan()
    return None if "Generate" in node_names(plan) else int(plan.stats().sizeInBytes())


def node_names(plan: Any) -> set[str]:
    """The names of all operators in a plan of the JVM."""
    children = plan.children()
    return {str(plan.nodeName())}.union(*(node_names(children.apply(index)) for index in range(children.size())))


def by_key_range(flat: DataFrame, schema: Schema, tasks: int | None) -> DataFrame:
    """Divides `flat` into `tasks` partitions (None: as many as its bytes require) with disjoint key ranges. The batches of the tasks then
    do not overlap either, and readers merge less. With fewer keys than `tasks` there are fewer partitions.

    Spark reads the input once more to sample it. Nulls come last, as in parts.
    """
    if tasks == 1:
        return flat.repartition(1)
    keys = [F.col(f.column).asc_nulls_last() for f in fields_of(schema) if f.side == "key"]
    return flat.repartitionByRange(*keys) if tasks is None else flat.repartitionByRange(tasks, *keys)


def first_line(error: Exception) -> str:
    """The first line of the message of a Spark error, without its stack."""
    text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else error
    return str(text).strip().split("\n", 1)[0]
