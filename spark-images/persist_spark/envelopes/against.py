"""Compares the winners of a run with what the shard holds. Plans only; starts no Spark job.

Reads no order that the shard does not hold: an order column that is no field of the value decides within a run only.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.envelopes.commands import key_text
from persist_spark.envelopes.winners import Winners
from persist_spark.frames import DELETED, DIFF, FAULT, HASH, ORDER, fields_of

#: Up to so many winners, executors drop the persisted rows of other keys before they exchange them, by a set of hashes of 8 bytes each that
#: every executor holds. Beyond that, all persisted rows in the range of the keys are exchanged.
HASHED_KEYS_MAX = 1 << 20
#: What a shard must hold of each key.
_RULE = (
    "an Upsert needs at most one value of a key, with diff 1; remove the other rows first, for example with a Mirror"
)


def first_updates(winners: Winners) -> DataFrame:
    """The rows to add to an empty shard: k*, v*."""
    columns = [f.column for f in fields_of(winners.schema)]
    return winners.frame.where(~F.col(DELETED)).select(*columns)


def updates_against(persisted: DataFrame, winners: Winners, *, order_column: str | None) -> DataFrame:
    """The updates that make each winner the value of its key: k*, v*, `diff`, and `fault` where the shard holds something else than one
    value of a key. There are no updates where the value is the same already. Nor are there where the persisted value is greater in
    `order_column`, if that is a field of the value.

    `persisted` has k*, v* and the negated `diff`, at least for all rows of the winners' keys, and need not be consolidated.
    """
    fields = fields_of(winners.schema)
    keys = [f.column for f in fields if f.side == "key"]
    values = [f.column for f in fields if f.side == "value"]
    is_same_key = reduce(Column.__and__, (F.col(name).eqNullSafe(F.col(f"p_{name}")) for name in keys))
    joined = winners.frame.join(_held(persisted, winners, keys, values), is_same_key, "left")
    was, is_held, is_given = F.col("was"), F.col("was").isNotNull(), ~F.col(DELETED)
    is_wanted = ~(is_given & was.eqNullSafe(_value(values)))
    for newer in (was.getField(f.column) for f in fields if f.side == "value" and f.name == order_column):
        is_late = newer.isNotNull() & (F.col(ORDER).isNull() | (newer > F.col(ORDER)))
        is_wanted = is_wanted & ~F.coalesce(is_late, F.lit(False))  # noqa: FBT003
    several = F.concat(F.lit("the shard holds "), "held", F.lit(" values of key "), key_text(fields))
    several = F.concat(several, F.lit(" with a total diff of "), "total", F.lit(f": {_RULE}"))
    fault = F.when(is_held & ((F.col("held") != 1) | (F.col("total") != 1)), several)
    retraction = F.struct(*(was.getField(name).alias(name) for name in values), _diff(-1), is_held.alias("counts"))
    addition = F.struct(*values, _diff(1), is_given.alias("counts"))
    updates = F.filter(F.array(retraction, addition), lambda update: update.getField("counts"))
    # A fault needs a row that carries it.
    changes = F.when(F.col(FAULT).isNotNull(), F.array(retraction)).when(is_wanted, updates)
    return joined.withColumn(FAULT, fault).select(*keys, FAULT, F.inline(changes)).drop("counts")


def _value(values: list[str]) -> Column:
    """A value as a struct. One more field makes a value without fields differ from no value."""
    return F.struct(F.lit(0).alias("there"), *values)


def _diff(diff: int) -> Column:
    return F.lit(diff).cast("bigint").alias(DIFF)


def _held(persisted: DataFrame, winners: Winners, keys: list[str], values: list[str]) -> DataFrame:
    """What the shard holds of each key, at least of the winners' keys: p_k*, the value `was` as a struct, the number `held` of its values
    and their `total` diff. Keys without values are absent.
    """
    if winners.count <= HASHED_KEYS_MAX:
        hashes = winners.frame.select(F.xxhash64(*keys).alias(HASH))
        persisted = persisted.withColumn(HASH, F.xxhash64(*keys)).join(F.broadcast(hashes), HASH, "left_semi")
    # One exchange by the key serves both groupings, and the join.
    rows = persisted.repartition(*keys).groupBy(*keys, *values).agg(F.sum(DIFF).alias(DIFF)).where(F.col(DIFF) != 0)
    return rows.groupBy(*(F.col(name).alias(f"p_{name}") for name in keys)).agg(
        F.max(_value(values)).alias("was"),
        F.count(F.lit(1)).alias("held"),
        F.negative(F.sum(DIFF)).alias("total"),
    )
