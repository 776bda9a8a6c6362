"""Copies the commands of a run on the executors, and collects the facts about them that the driver needs. The rest of the run uses only
the copy.

It does not know the contents of the shard, and does not choose between commands of a key: `against.py` does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from persist_engine import ERR, holds_errors
from persist_engine.rows.schema import Schema
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.columns import struct_column
from persist_spark.envelopes.collected import is_error
from persist_spark.envelopes.commands import WEIGHT
from persist_spark.frames import DELETED, FAULT, ORDER, Field, fields_of
from persist_spark.spec import ConfigurationError

#: The types of key fields whose least and greatest values let readers skip parts of the shard. Other types have no plain order.
_BOUNDED = (
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.DecimalType,
    T.StringType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)

Where = tuple[tuple[str, str, Any], ...]


@dataclass(frozen=True)
class Copied:
    """The commands of a run: k*, v*, `o`, `deleted`. A key may have several."""

    frame: DataFrame
    schema: Schema
    order: str | None
    """The field of the shard's value that `o` holds. With it, a value of the shard may win over a command. None: the input always wins."""
    count: int
    """The number of commands."""
    rows: int
    """The number of rows in the input."""
    errors: int
    """How many of these rows are errors (collected.py)."""
    where: Where | None
    """Bounds of the key's fields that all commands satisfy, as a condition that readers accept. None: no bounds are known."""

    @cached_property
    def keys(self) -> pa.Array:
        """All keys as structs, each once. The first access runs a Spark job and brings them to the driver."""
        columns = [f.column for f in fields_of(self.schema) if f.side == "key"]
        return struct_column(self.frame.select(*columns).distinct().toArrow(), "k", self.schema.key_type)


def copied(commands: DataFrame, schema: Schema, order: str | None) -> Copied:
    """Copies `commands` (see commands.py). `order`: see Copied. Runs one Spark job over the input and one over the copy. Raises
    ConfigurationError for the first fault.
    """
    fields = fields_of(schema)
    # The cast to the type of the shard's field is lossless, because `to_flat` has checked that the input's column fits the field.
    order_type = next((f.type for f in fields if f.side == "value" and f.name == order), None)
    typed = commands if order_type is None else commands.withColumn(ORDER, F.col(ORDER).cast(order_type))
    # SUBTLE: this is a copy, not a cache. Losing a copy fails the job. Losing a cache would read the input again, and the second reading
    # might have keys that were not read from the shard.
    copy = typed.localCheckpoint(eager=True)
    bounded = [f for f in fields if f.side == "key" and isinstance(f.type, _BOUNDED) and "." not in f.name]
    counted = F.lit(False)  # noqa: FBT003
    if holds_errors(schema):
        # Readers do not skip parts that may hold errors, so errors need no bounds.
        counted, bounded = is_error(schema), [f for f in bounded if f.name != ERR]
    facts = _facts(copy, bounded, counted)
    if facts[FAULT] is not None:
        raise ConfigurationError(f"the input cannot be written: {facts[FAULT]}")
    return Copied(
        frame=copy.select(*(f.column for f in fields), ORDER, DELETED),
        schema=schema,
        order=order,
        count=facts["count"],
        rows=facts["rows"] or 0,
        errors=facts["errors"] or 0,
        where=_range_of(facts, bounded),
    )


def _facts(copy: DataFrame, bounded: Sequence[Field], is_bad: Column) -> dict[str, Any]:
    """The facts about the commands that the driver needs, from one Spark job."""
    bounds = [
        column
        for f in bounded
        for column in (
            F.min(f.column).alias(f"least_{f.column}"),
            F.max(f.column).alias(f"greatest_{f.column}"),
            F.count_if(F.col(f.column).isNull() & ~is_bad).alias(f"nulls_{f.column}"),
        )
    ]
    facts = copy.agg(
        F.count(F.lit(1)).alias("count"),
        F.sum(WEIGHT).alias("rows"),
        F.sum(F.when(is_bad, F.col(WEIGHT))).alias("errors"),
        F.min(FAULT).alias(FAULT),
        *bounds,
    )
    found = facts.toArrow()
    return {name: _known(found.column(name)[0]) for name in found.column_names}


def _known(value: pa.Scalar) -> Any:
    """`value` as a Python value. None for a date before the year 1 or after 9999, which Python does not have."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return None


def _range_of(facts: dict[str, Any], bounded: Sequence[Field]) -> Where | None:
    terms = tuple(
        (f"key.{f.name}", op, facts[f"{end}_{f.column}"])
        for f in bounded
        for op, end in ((">=", "least"), ("<=", "greatest"))
        if facts[f"{end}_{f.column}"] is not None and not facts[f"nulls_{f.column}"]
    )
    return terms or None
