"""The columns of a frame over a shard, as Spark and Arrow types, and the rule for when other columns fit them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import pyarrow as pa
from persist_engine import Filter, Projection, filter_of
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.frames import spark_type


def shown_schema(schema: Schema, columns: Sequence[str] | None) -> pa.Schema:
    """The Arrow schema of updates of `schema`, with only the fields `columns` (None: all) of key and val."""
    return schema.updates_schema if columns is None else Projection.of(columns, schema).updates_schema


def row_type(schema: Schema, *, updates: bool, columns: Sequence[str] | None = None) -> T.StructType:
    """The columns of a frame: the key's fields and then the value's; with `updates`: key, val, time, diff. Without `updates`, raises
    InvalidUsage when key and value share a field name.
    """
    shown = shown_schema(schema, columns)
    if updates:
        return spark_fields(shown)
    key, val = (side.type for side in _sides(shown))
    doubled = sorted({field.name for field in key} & {field.name for field in val})
    if doubled:
        raise InvalidUsage(
            f"key and value both have {', '.join(doubled)}: read with option updates=true (changes: rows=updates), which "
            f"keeps key and value separate, or select one of them with option columns"
        )
    return spark_fields([*key, *val])


#: The columns before the fields of a row change: its time and its kind (persist_engine.rows.row_changes).
CHANGE_COLUMNS = T.StructType([T.StructField("_time", T.LongType()), T.StructField("_change", T.StringType())])


def changes_row_type(schema: Schema, *, shape: str, columns: Sequence[str] | None = None) -> T.StructType:
    """The columns of a frame over changes: key, val, time, diff; with `shape` rows: _time, _change, then the key's and the value's fields.
    Raises InvalidUsage when two columns have the same name.
    """
    if shape == "updates":
        return row_type(schema, updates=True, columns=columns)
    shown = row_type(schema, updates=False, columns=columns)
    if taken := sorted(set(shown.names) & set(CHANGE_COLUMNS.names)):
        raise InvalidUsage(
            f"the shard has columns {', '.join(taken)}, as option rows=changes has: read with rows=updates, or select "
            "others with option columns"
        )
    return T.StructType([*CHANGE_COLUMNS, *shown])


def check_columns(asked: T.StructType, shown: T.StructType, shard: ShardId) -> None:
    """Checks that a frame made for the columns `asked` can show rows with the columns `shown`. Spark matches columns by position, so it
    would accept other columns, and it does not notice a null in a NOT NULL column. `asked` may be nullable where `shown` is NOT NULL.

    Raises InvalidUsage, which names the first column that differs. The cause is a schema that evolved after the load, or a user's schema.
    """
    for theirs, ours in zip_longest(asked, shown):
        if theirs is None or ours is None or not _is_shown_as(theirs, ours):
            raise InvalidUsage(
                f"shard {shard} has {_column_text(ours)} where the frame was made for {_column_text(theirs)}: "
                "load the frame again, without a schema of your own"
            )


def condition(text: str, schema: Schema, option: str) -> Filter:
    """The SQL condition of an option, for rows of `schema`. Raises InvalidUsage when it does not fit the schema, or names an instant
    without a zone. Spark would read such an instant in the zone of the session. The workers do not know that zone, so they would show or
    replace other rows.
    """
    rule = filter_of(text, schema)
    for column, value in rule.zoneless.items():
        raise InvalidUsage(
            f"option {option}: {column} holds instants, and {value} has no time zone, so its instant is unknown: add one, as in "
            "TIMESTAMP '2013-01-01 00:00:00Z' or TIMESTAMP '2013-01-01 00:00:00+02:00'"
        )
    return rule


def _is_shown_as(asked: T.StructField, shown: T.StructField) -> bool:
    if asked.name != shown.name or (shown.nullable and not asked.nullable):
        return False
    theirs, ours = asked.dataType, shown.dataType
    if isinstance(theirs, T.StructType) and isinstance(ours, T.StructType):
        return len(theirs) == len(ours) and all(map(_is_shown_as, theirs, ours))
    return bool(theirs == ours)


def _column_text(field: T.StructField | None) -> str:
    if field is None:
        return "no column"
    return f"column {field.name} {field.dataType.simpleString()}{'' if field.nullable else ' NOT NULL'}"


def _sides(shown: pa.Schema) -> tuple[pa.Field, pa.Field]:
    return shown.field("key"), shown.field("val")


def spark_fields(fields: Iterable[pa.Field]) -> T.StructType:
    """The Spark columns of Arrow fields."""
    return T.StructType([T.StructField(field.name, spark_type(field.type), field.nullable) for field in fields])


def arrow_schema(row: T.StructType) -> pa.Schema:
    """The Arrow schema of flat rows that Spark expects for `row`."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(row, timezone="UTC")
