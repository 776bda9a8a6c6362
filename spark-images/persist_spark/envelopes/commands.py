"""The rows of an Upsert as commands on keys. Plans only; starts no Spark job.

A frame of commands has the flat columns k* and v* in the types of the shard, and these columns:

- `o`: the order. If a key has several commands, the command with the greatest order wins. Null is the least order.
- `deleted`: whether the command removes its key; not null. The v* of a removal are null.
- `weight`: how many rows of the input the command stands for.
- `fault`: the reason why the command cannot be carried out. Null if it can.
"""

from __future__ import annotations

from functools import reduce

from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.envelopes.collected import error_column
from persist_spark.frames import DELETED, FAULT, ORDER, Field, fields_of, has_maps, missing_fields, to_flat
from persist_spark.spec import ConfigurationError, Envelope

#: How many rows of the input a command stands for.
WEIGHT = "weight"
#: The length at which messages cut a key.
_SHOWN_CHARS = 200


def upsert_commands(frame: DataFrame, schema: Schema, envelope: Envelope) -> DataFrame:
    """Converts each row to one command. With a `deleteColumn`, a row removes its key when this column is true. Without it, a row removes
    its key when all columns of the value except `orderColumn` are null, and there is at least one such column.

    Raises ConfigurationError, which names every column that does not fit.
    """
    order, delete, error = envelope.order_column, envelope.delete_column, error_column(frame, envelope)
    flat = to_flat(frame, schema, order_column=order, delete_column=delete, error_column=error)
    if delete is None:
        others = [F.col(f.column).isNull() for f in fields_of(schema) if f.side == "value" and f.name != order]
        deleted = reduce(Column.__and__, others) if others else F.lit(False)  # noqa: FBT003
    else:
        deleted = F.coalesce(F.col(DELETED), F.lit(False))  # noqa: FBT003
    ordered = F.lit(None).cast("bigint") if order is None else F.col(ORDER)
    marked = flat.withColumns({DELETED: deleted, ORDER: ordered, WEIGHT: F.expr("1L")})
    return completed(marked if error else marked.withColumn(FAULT, F.lit(None).cast("string")), schema)


def completed(commands: DataFrame, schema: Schema) -> DataFrame:
    """Clears the values of removals in `commands`, and marks a null in a NOT NULL field as a fault.

    Raises ConfigurationError for values with maps. A driver could decide between maps, but executors cannot, and a sink needs both.
    """
    fields = fields_of(schema)
    if maps := [f.name for f in fields if has_maps(f.type)]:
        raise ConfigurationError(
            f"envelope.type: Spark cannot compare the values of {', '.join(maps)}, which are MAPs: use Mirror or Append, or an "
            "ARRAY<STRUCT<key, value>> in the shard's schema"
        )
    is_given = ~F.col(DELETED)
    faults = null_faults(schema, is_given=is_given)
    return commands.select(
        *(f.column for f in fields if f.side == "key"),
        *(F.when(is_given, F.col(f.column)).alias(f.column) for f in fields if f.side == "value"),
        ORDER,
        DELETED,
        WEIGHT,
        F.coalesce(F.col(FAULT), *faults).alias(FAULT) if faults else FAULT,
    )


def null_faults(schema: Schema, *, is_given: Column) -> list[Column]:
    """One column for each NOT NULL field of the shard, also within structs. It has the reason why the row cannot be written if the field is
    null, else null. `is_given`: whether the row has a value. Without a value only the key is checked.
    """
    fields = fields_of(schema)
    return [
        F.when(
            is_missing if field.side == "key" else is_missing & is_given,
            F.concat(F.lit(f"{field.side} field {name} is NOT NULL and null in a row with key "), key_text(fields)),
        )
        for field, name, is_missing in missing_fields(schema)
    ]


def key_text(fields: list[Field], columns: dict[str, Column] | None = None) -> Column:
    """The key as JSON, for messages. `columns` maps k* to the columns of the key, if they have other names."""
    keys = [(columns or {}).get(f.column, F.col(f.column)).alias(f.name) for f in fields if f.side == "key"]
    return F.substring(F.to_json(F.struct(*keys), {"ignoreNullFields": "false"}), 1, _SHOWN_CHARS)
