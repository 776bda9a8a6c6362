"""Writes rows that do not fit the shard as errors beside the rows: `onError: Collect`. Plans only; starts no Spark job.

An error is a row of the shard whose field `err` has the reason. Its other fields are null (persist_engine.rows.errors_column). So each
envelope writes errors as it writes rows. An Append adds one error for each bad row. A Diff adds as many as the diff of the row says. A
Mirror removes an error when the input no longer has the bad row. For an Upsert the reason is a key, so two bad rows with the same reason
are one error.
"""

from __future__ import annotations

from functools import reduce

from persist_engine import ERR, without_errors
from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.frames import DELETED, DIFF, FAULT, ORDER, fields_of
from persist_spark.spec import ConfigurationError, Envelope, OnError

#: The length at which a reason is cut.
REASON_CHARS_MAX = 1000


def rows_schema(schema: Schema, envelope: Envelope) -> Schema:
    """The schema of the input's rows. Raises ConfigurationError when the envelope collects errors and the shard cannot hold them."""
    if envelope.on_error is OnError.FAIL:
        return schema
    if ERR in schema.val.names:  # the input's column `err` would be ambiguous
        raise ConfigurationError(
            f"envelope.onError: the shard's value has a column {ERR}, which is the name of the reasons of errors; rename it"
        )
    try:
        return without_errors(schema)
    except InvalidUsage as error:
        raise ConfigurationError(f"envelope.onError: {error}") from error


def error_column(frame: DataFrame, envelope: Envelope) -> str | None:
    """The input's column with the reason why a row cannot be written. None when the input has no such column or errors are not
    collected.
    """
    return ERR if envelope.on_error is OnError.COLLECT and ERR in frame.columns else None


def collected(flat: DataFrame, schema: Schema, envelope: Envelope) -> DataFrame:
    """Converts `flat` rows or commands from `rows_schema` to `schema`. Rows with a `fault` become errors, and all others stay the same. The
    result has no faults. An error has the diff of its row, or 1 if the row has none. If rows have their own times, the time of an error
    has no meaning.
    """
    fields = fields_of(schema)
    *keys, err = [f for f in fields if f.side == "key"]
    fault = F.col(FAULT) if FAULT in flat.columns else F.lit(None).cast("string")
    if envelope.type.has_keys:
        is_keyless = reduce(Column.__and__, (F.col(f.column).isNull() for f in keys))
        fault = F.coalesce(fault, F.when(is_keyless, F.lit("the row has no key: every field of the key is null")))
    # SUBTLE: a reason may quote a record that is not valid text. Spark passes its bytes on, but a shard holds only valid text.
    marked = flat.withColumn(FAULT, F.substring(F.make_valid_utf8(fault), 1, REASON_CHARS_MAX))
    is_row = F.col(FAULT).isNull()
    shown = {f.column: F.when(is_row, F.col(f.column)) for f in fields if f is not err}
    shown[err.column] = F.col(FAULT)
    beside = {
        DIFF: F.when(is_row, F.col(DIFF)).otherwise(F.coalesce(F.col(DIFF), F.lit(1))),
        ORDER: F.when(is_row, F.col(ORDER)),
        DELETED: is_row & F.col(DELETED),
        FAULT: F.lit(None).cast("string"),
    }
    kept = [name for name in flat.columns if name not in shown and (name != FAULT or envelope.type.has_keys)]
    return marked.select(
        *(column.alias(name) for name, column in shown.items()),
        *(beside.get(name, F.col(name)).alias(name) for name in kept),
    )


def is_error(schema: Schema) -> Column:
    """Whether a flat row of `schema` is an error. `schema` can hold errors."""
    return F.col(error_of(schema)).isNotNull()


def error_of(schema: Schema) -> str:
    """The flat column of `schema` that holds the reason of an error."""
    return [f.column for f in fields_of(schema) if f.side == "key"][-1]
