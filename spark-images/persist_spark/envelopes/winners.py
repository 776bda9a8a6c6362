"""Reduces the commands of a run to one for each key, the winner.

Owns the copy of the winners that the rest of the run works with. It knows nothing of what the shard holds.
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
from persist_spark.envelopes.commands import WEIGHT, key_text
from persist_spark.envelopes.mirror import leaves_of
from persist_spark.frames import DELETED, FAULT, ORDER, Field, fields_of
from persist_spark.spec import ConfigurationError

#: The types of key fields by whose least and greatest value parts of the shard are skipped. Others have no plain order.
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
#: Up to so many winners, readers get a list of their values.
LISTED_MAX = 256

Where = tuple[tuple[str, str, Any], ...]


@dataclass(frozen=True)
class Winners:
    """The winners of a run, one for each key: k*, v*, `o`, `deleted`."""

    frame: DataFrame
    schema: Schema
    rows: int
    """The rows of the input."""
    errors: int
    """How many of them are errors (collected.py)."""
    count: int
    """The winners."""
    bounds: Where | None
    """Bounds of the key's fields that all winners satisfy, as a condition that readers accept. None: nothing is known."""

    @cached_property
    def where(self) -> Where | None:
        """A condition on the key that all winners satisfy: a list of values where there are few, else bounds. None: nothing is known.

        Winners that lie far apart have wide bounds, and a reader would decode all rows between. A list of them decodes the row groups that
        can hold one. It is made in one more job, so for few winners alone.
        """
        if self.bounds is None or self.count > LISTED_MAX or holds_errors(self.schema):
            return self.bounds
        fields = dict(zip(self.schema.key.names, self.keys.flatten(), strict=True))
        terms = (_listed(term, fields[term[0].removeprefix("key.")]) for term in self.bounds)
        return tuple(dict.fromkeys(terms))  # a list is in the place of both bounds

    @cached_property
    def keys(self) -> pa.Array:
        """All keys, as structs, each once. Brings them to the driver."""
        columns = [f.column for f in fields_of(self.schema) if f.side == "key"]
        return struct_column(self.frame.select(*columns).toArrow(), "k", self.schema.key_type)


def decided(commands: DataFrame, schema: Schema) -> Winners:
    """The winners of `commands` (see commands.py): for each key the command with the greatest order.

    ConfigurationError names a key when commands of the greatest order differ, so that none is the last, and the first fault. Runs one Spark
    job over the input and one over the winners.
    """
    fields = fields_of(schema)
    keys = [f.column for f in fields if f.side == "key"]
    values = [f.column for f in fields if f.side == "value"]
    given = F.struct(DELETED, *values)
    # Of all fields one by one: Spark's own hash of a struct does not see which of its fields is null.
    digest = F.xxhash64(
        DELETED, *(F.expr(leaf) for f in fields if f.side == "value" for leaf in leaves_of(f.column, f.type))
    )
    # SUBTLE: of the commands of the greatest order, one maximum has the greatest digest and the other the least. They are equal when all
    # these commands are. A hot key is reduced before the exchange, which a window over the key would not do.
    greatest = F.max(F.struct(F.col(ORDER).alias("o"), digest.alias("d"), given.alias("c")))
    least = F.max(F.struct(F.col(ORDER).alias("o"), F.bitwise_not(digest).alias("d"), given.alias("c")))
    reduced = commands.groupBy(*keys).agg(
        greatest.alias("greatest"),
        least.alias("least"),
        F.sum(WEIGHT).alias(WEIGHT),
        F.min(FAULT).alias(FAULT),
    )
    # SUBTLE: a copy whose loss fails the job, instead of a cache: a second reading of the input might have other keys than those for which
    # the shard was read.
    copied = reduced.select(
        *keys,
        *(F.col("greatest.c").getField(value).alias(value) for value in values),
        F.col("greatest.o").alias(ORDER),
        F.col("greatest.c").getField(DELETED).alias(DELETED),
        F.when(~F.col("greatest.c").eqNullSafe(F.col("least.c")), key_text(fields)).alias("tie"),
        WEIGHT,
        FAULT,
    ).localCheckpoint(eager=True)
    bounded = [f for f in fields if f.side == "key" and isinstance(f.type, _BOUNDED) and "." not in f.name]
    counted = F.lit(False)  # noqa: FBT003
    if holds_errors(schema):
        # Readers do not skip parts that may hold errors, so errors need no bounds.
        counted, bounded = is_error(schema), [f for f in bounded if f.name != ERR]
    facts = _facts(copied, bounded, counted)
    if facts[FAULT] is not None:
        raise ConfigurationError(f"the input cannot be written: {facts[FAULT]}")
    if facts["tie"] is not None:
        raise ConfigurationError(
            f"the input has several different rows for key {facts['tie']} and none of them is the last: set "
            "envelope.orderColumn to a column that decides, or keep one row for each key with input.format.sql"
        )
    return Winners(
        frame=copied.select(*keys, *values, ORDER, DELETED),
        schema=schema,
        rows=facts["rows"] or 0,
        errors=facts["errors"] or 0,
        count=facts["count"],
        bounds=_range_of(facts, bounded),
    )


def _facts(copied: DataFrame, bounded: Sequence[Field], is_bad: Column) -> dict[str, Any]:
    """What the driver needs to know about the winners, in one job."""
    bounds = [
        column
        for f in bounded
        for column in (
            F.min(f.column).alias(f"least_{f.column}"),
            F.max(f.column).alias(f"greatest_{f.column}"),
            F.count_if(F.col(f.column).isNull() & ~is_bad).alias(f"nulls_{f.column}"),
        )
    ]
    facts = copied.agg(
        F.count(F.lit(1)).alias("count"),
        F.sum(WEIGHT).alias("rows"),
        F.sum(F.when(is_bad, F.col(WEIGHT))).alias("errors"),
        F.min(FAULT).alias(FAULT),
        F.min("tie").alias("tie"),
        *bounds,
    )
    found = facts.toArrow()
    return {name: _known(found.column(name)[0]) for name in found.column_names}


def _known(value: pa.Scalar) -> Any:
    """`value` in Python. None where Python has no such date: before the year 1, and after 9999."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return None


def _listed(term: tuple[str, str, Any], values: pa.Array) -> tuple[str, str, Any]:
    """`term`, or for a field whose values have one form in Python the list of its values."""
    kind = values.type
    is_plain = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_decimal(kind)
    return (term[0], "in", tuple(values.unique().to_pylist())) if is_plain else term


def _range_of(facts: dict[str, Any], bounded: Sequence[Field]) -> Where | None:
    terms = tuple(
        (f"key.{f.name}", op, facts[f"{end}_{f.column}"])
        for f in bounded
        for op, end in ((">=", "least"), ("<=", "greatest"))
        if facts[f"{end}_{f.column}"] is not None and not facts[f"nulls_{f.column}"]
    )
    return terms or None
