"""How the shard differs from what a run would make of it: the run of a sink with `writeMode: ReadOnly`, and a stream on standby. Writes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from persist_engine import holds_errors
from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.envelopes.against import TIE, tied
from persist_spark.envelopes.collected import is_error
from persist_spark.envelopes.copied import Copied
from persist_spark.frames import DIFF, FAULT, fields_of, missing_fields
from persist_spark.spec import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The rows of the input, and how many rows a run would add to the shard and take from it."""

    rows: int
    errors: int
    """How many rows of the input are errors (collected.py)."""
    missing: int
    extra: int


def difference_of_rows(desired: DataFrame, persisted: DataFrame | None, schema: Schema) -> Difference:
    """Compares flat rows with all that the shard holds (None: nothing): columns k*, v* and the negated `diff`, not consolidated. One job.
    ConfigurationError for a null where the shard has NOT NULL, also within a struct, which a run could not write.

    Spark groups as the engine consolidates: null equals null, NaN equals NaN, -0.0 equals 0.0.
    """
    columns = [f.column for f in fields_of(schema)]
    both = desired.select(*columns, F.lit(1).cast("bigint").alias(DIFF), F.lit(1).alias("given"))
    if persisted is not None:
        both = both.unionAll(persisted.select(*columns, DIFF, F.lit(0).alias("given")))
    groups = both.groupBy(*columns).agg(F.sum(DIFF).alias(DIFF), F.sum("given").alias("given"))
    errors = F.when(is_error(schema), F.col("given")) if holds_errors(schema) else F.lit(0)
    nulls = [F.when(is_missing, F.lit(f"{f.side} field {name}")) for f, name, is_missing in missing_fields(schema)]
    null = F.min(F.when(F.col("given") > 0, F.coalesce(F.lit(None).cast("string"), *nulls)))
    name, *counts = groups.agg(null, F.sum("given"), F.sum(errors), *_missing_and_extra()).collect()[0]
    if name is not None:
        raise ConfigurationError(f"the input cannot be written: {name} is NOT NULL and null in a row")
    rows, bad, missing, extra = (count or 0 for count in counts)
    return Difference(rows=rows, errors=bad, missing=missing, extra=extra)


def difference_of_commands(commands: Copied, updates: DataFrame) -> Difference:
    """The same for commands on keys, by their `updates` (against.shown_updates). ConfigurationError when a key has no last command, or the
    shard holds several values of one of them.
    """
    tie, fault, *counts = updates.agg(F.min(TIE), F.min(FAULT), *_missing_and_extra()).collect()[0]
    _refuse(tie, fault, "the shard cannot be compared")
    missing, extra = (count or 0 for count in counts)
    return Difference(rows=commands.rows, errors=commands.errors, missing=missing, extra=extra)


def difference_of_updates(wanted: DataFrame, written: DataFrame | None, columns: Sequence[str]) -> Difference:
    """Compares the updates that a run would write with those that were written (None: none): both have `columns` and the `diff`, which is
    negated in `written`. One job. ConfigurationError for the first TIE or FAULT in `wanted`, if it has such columns.
    """
    texts = (TIE, FAULT)
    none = F.lit(None).cast("string")
    said = (F.col(name) if name in wanted.columns else none for name in texts)
    both = wanted.select(
        *columns, DIFF, *(text.alias(name) for text, name in zip(said, texts, strict=True)), F.lit(1).alias("given")
    )
    if written is not None:
        both = both.unionAll(written.select(*columns, DIFF, none, none, F.lit(0)))
    groups = both.groupBy(*columns).agg(
        F.sum(DIFF).alias(DIFF), *(F.min(name).alias(name) for name in texts), F.sum("given").alias("given")
    )
    tie, fault, *counts = groups.agg(F.min(TIE), F.min(FAULT), F.sum("given"), *_missing_and_extra()).collect()[0]
    _refuse(tie, fault, "the input cannot be written")
    rows, missing, extra = (count or 0 for count in counts)
    return Difference(rows=rows, errors=0, missing=missing, extra=extra)


def _refuse(tie: str | None, fault: str | None, what: str) -> None:
    if tie is not None:
        raise tied(tie)
    if fault is not None:
        raise ConfigurationError(f"{what}: {fault}")


def _missing_and_extra() -> tuple[Column, Column]:
    zero = F.lit(0).cast("bigint")
    return F.sum(F.greatest(F.col(DIFF), zero)), F.sum(F.greatest(F.negative(F.col(DIFF)), zero))
