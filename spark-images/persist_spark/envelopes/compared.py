"""Compares the shard with the contents that a run would give it. A sink with `writeMode: ReadOnly` and a stream on standby use it. Writes
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
    """The number of rows in the input, of rows that a run would add to the shard (`missing`), and of rows that it would remove
    (`extra`).
    """

    rows: int
    errors: int
    """How many rows of the input are errors (collected.py)."""
    missing: int
    extra: int


def difference_of_rows(desired: DataFrame, persisted: DataFrame | None, schema: Schema) -> Difference:
    """Compares the flat rows `desired` with the contents of the shard. `persisted` has the columns k*, v* and the negated `diff`, and need
    not be consolidated. None: the shard is empty. Runs one Spark job.

    Raises ConfigurationError for a null in a NOT NULL field, also within a struct, because a run could not write it.

    Spark's grouping agrees with the engine's consolidation: null equals null, NaN equals NaN, -0.0 equals 0.0.
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
    """Compares commands on keys with the contents of the shard. `updates`: the updates that the commands would write
    (`against.shown_updates`). Runs one Spark job. Raises ConfigurationError when a key has no last command or the shard holds several
    values for a key.
    """
    tie, fault, *counts = updates.agg(F.min(TIE), F.min(FAULT), *_missing_and_extra()).collect()[0]
    _refuse(tie, fault, "the shard cannot be compared")
    missing, extra = (count or 0 for count in counts)
    return Difference(rows=commands.rows, errors=commands.errors, missing=missing, extra=extra)


def difference_of_updates(wanted: DataFrame, written: DataFrame | None, columns: Sequence[str]) -> Difference:
    """Compares the updates that a run would write with the updates in `written` (None: none). Both frames have `columns` and a `diff`,
    which is negated in `written`. Runs one Spark job. Raises ConfigurationError for the first TIE or FAULT in `wanted`, if it has these
    columns.
    """
    texts = (TIE, FAULT)
    none = F.lit(None).cast("string")
    given = (F.col(name) if name in wanted.columns else none for name in texts)
    both = wanted.select(
        *columns, DIFF, *(text.alias(name) for text, name in zip(given, texts, strict=True)), F.lit(1).alias("given")
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
