"""A Mirror: the corrections after which the shard holds the rows of the input and no others, and the digest of those rows.

A run commits the digest with its name, as the sink's source progress. The next run compares it with the digest of its own input, and leaves
out reading and correcting a shard that holds those rows already.

Two rows count as equal exactly where the engine's consolidation says so: null equals null, NaN equals NaN, -0.0 equals 0.0. The digest is
made of sums over rows, so neither their order nor their partitions matter, and of a hash of 64 bits: a row and what it changed into have
the same one by chance once in 2^64, and that change is then written with the next one. The digest protects from no adversary, which has no
more to gain than what it may write into the input anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from persist_engine import holds_errors
from persist_engine.rows.schema import Schema
from pyspark.errors import ArithmeticException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it
from pyspark.sql import types as T  # noqa: N812

from persist_spark.envelopes.collected import error_of
from persist_spark.frames import DESIRED, DIFF, HASH, fields_of, quoted

#: The version of what the digest means. A digest of another version equals none.
_VERSION = b"rows-2"
#: Of the sums. A bigint has room for it, and fewer than 2^31 rows do not reach it.
_MODULUS = 1 << 63


def corrections(desired: DataFrame, persisted: DataFrame, schema: Schema, tasks: int | None) -> DataFrame:
    """The desired (+) and persisted (negated) rows with HASH, partitioned and sorted by `h`, so that equal rows are adjacent. Plans only.

    A write task therefore reads all copies of a row within a bounded part of its stream, however large its partition is. Spark sorts one
    bigint (and spills), and the engine's consolidation decides which rows are equal (nulls, NaN, zeros). Because the hash covers values
    too, a hot key does not make a hot task. `persisted` has the flat columns and `diff`. `tasks`: as for `frames.by_key_range`.
    """
    columns = [f.column for f in fields_of(schema)]
    ours = desired.select(*columns, F.lit(1).cast("bigint").alias(DIFF), F.lit(True).alias(DESIRED))  # noqa: FBT003
    theirs = persisted.select(*columns, F.col(DIFF), F.lit(False).alias(DESIRED))  # noqa: FBT003
    both = hashed(ours.unionAll(theirs), schema)
    # SUBTLE: without a number Spark may merge partitions but never splits them; only a rebalancing shuffle would.
    parts = both.repartition(HASH) if tasks is None else both.repartition(tasks, HASH)
    return parts.sortWithinPartitions(HASH)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """A number of rows, and the sums of the lower and of the upper 32 bits of their hashes, modulo 2^63.

    One sum modulo 2^64 would be weak where rows have many copies: if 2^20 copies of a row change, only 44 bits of the hash matter.
    """

    rows: int
    low: int
    high: int
    errors: int = 0
    """How many of these rows are errors (collected.py). Not part of the digest, which has the rows themselves."""

    def digest(self, schema: Schema) -> bytes:
        """32 hexadecimal digits: equal for the same rows in the same schema."""
        text = repr((schema.key_ddl, schema.val_ddl, self.rows, self.low % _MODULUS, self.high % _MODULUS))
        return hashlib.blake2b(_VERSION + text.encode(), digest_size=16).hexdigest().encode()


def hashed(flat: DataFrame, schema: Schema, *, beside: Iterable[str] = ()) -> DataFrame:
    """`flat` and HASH, the hash of each row: of its fields, and of the columns `beside` them. Plans only."""
    every = [(field.column, field.type) for field in fields_of(schema)] + [(name, T.LongType()) for name in beside]
    leaves = ", ".join(leaf for column, kind in every for leaf in leaves_of(column, kind))
    return flat.selectExpr("*", f"xxhash64({leaves}) AS {HASH}")


def scanned(flat: DataFrame, schema: Schema) -> WantedRows | None:
    """The rows of `flat`, from one pass over them in Spark. None for more rows than the sums have room for (2^31)."""
    halves = (f"sum({HASH} & {0xFFFFFFFF})", f"sum(shiftrightunsigned({HASH}, 32))")
    errors = f"count({error_of(schema)})" if holds_errors(schema) else "0"
    try:
        rows, bad, low, high = hashed(flat, schema).selectExpr("count(1)", errors, *halves).collect()[0]
    except ArithmeticException:  # of the user's query too, and then its next job says so
        return None
    return WantedRows(rows, low or 0, high or 0, bad)


def leaves_of(path: str, kind: T.DataType, depth: int = 0) -> Iterator[str]:
    """What the hash of a row covers of the value at `path`, as SQL: Spark reads a text in one call, and builds columns with one for each
    operator. `depth`: of the lists and maps around it.

    SUBTLE: Spark's hash skips nulls, so that (null, 1) and (1, null) have the same one. Each field, also within a struct, therefore brings
    whether it is null.
    """
    yield f"{path} IS NULL"
    each = f"e{depth}"
    if isinstance(kind, T.ArrayType):
        yield f"size({path})"  # or nested lists of the same elements would be alike
        within = leaves_of(each, kind.elementType, depth + 1)
        yield f"transform({path}, {each} -> struct({', '.join(within)}))"
        return
    if isinstance(kind, T.MapType):
        yield f"size({path})"
        within = leaves_of(f"element_at({path}, {each})", kind.valueType, depth + 1)
        yield f"transform(array_sort(map_keys({path})), {each} -> struct({each}, {', '.join(within)}))"
        return
    if not isinstance(kind, T.StructType):
        yield path
        return
    for child in kind.fields:
        yield from leaves_of(f"{path}.{quoted(child.name)}", child.dataType, depth)
