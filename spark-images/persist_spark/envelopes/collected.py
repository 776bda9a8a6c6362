"""Rows that cannot be written, as errors beside the rows: `onError: Collect`. Plans only; starts no Spark job.

An error is a row of the shard whose field `err` has the reason, and whose other fields are null (persist_engine.rows.errors_column). So
each envelope writes errors as it writes rows: an Append adds one for each bad row, a Diff as many as the diff of the row says, a Mirror
removes it when the input no longer has the bad row, and for an Upsert the reason is a key, so that two bad rows with the same reason are
one error.
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

#: Longer reasons are cut.
REASON_CHARS_MAX = 1000


def rows_schema(schema: Schema, envelope: Envelope) -> Schema:
    """The schema of the rows that the input brings. ConfigurationError when errors are to be collected and the shard cannot hold them."""
    if envelope.on_error is OnError.FAIL:
        return schema
    if ERR in schema.val.names:  # the input's column `err` could mean either
        raise ConfigurationError(
            f"envelope.onError: the shard's value has a column {ERR}, which is the name of the reasons of errors; rename it"
        )
    try:
        return without_errors(schema)
    except InvalidUsage as error:
        raise ConfigurationError(f"envelope.onError: {error}") from error


def error_column(frame: DataFrame, envelope: Envelope) -> str | None:
    """The input's column with the reason why a row cannot be written. None when the input has none, or errors are not collected."""
    return ERR if envelope.on_error is OnError.COLLECT and ERR in frame.columns else None


def collected(flat: DataFrame, schema: Schema, envelope: Envelope) -> DataFrame:
    """`flat` rows or commands of `rows_schema` as those of `schema`: rows with a `fault` as errors, all others unchanged. The result has
    no faults. An error has the diff of its row, and 1 where that is null, or where the envelope has none. Its time, if rows have times of
    their own, means nothing.
    """
    fields = fields_of(schema)
    *keys, err = [f for f in fields if f.side == "key"]
    fault = F.col(FAULT) if FAULT in flat.columns else F.lit(None).cast("string")
    if envelope.type.has_keys:
        is_keyless = reduce(Column.__and__, (F.col(f.column).isNull() for f in keys))
        fault = F.coalesce(fault, F.when(is_keyless, F.lit("the row has no key: every field of the key is null")))
    # SUBTLE: a reason may quote a record that is not text. Spark passes its bytes on, and a shard holds texts alone.
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
    """Whether a flat row of `schema`, which may hold errors, is one."""
    return F.col(error_of(schema)).isNotNull()


def error_of(schema: Schema) -> str:
    """The column of a flat row of `schema` that has the reason of an error."""
    return [f.column for f in fields_of(schema) if f.side == "key"][-1]
