"""Makes the corrections of a Mirror, after which the shard holds exactly the rows of the input, and computes the digest of those rows.

A run commits the digest with its name, as the sink's source progress. The next run compares it with the digest of its own input. If they
are equal and the shard has not changed, the run neither reads nor corrects the shard.

Two rows are equal if the engine's consolidation treats them as equal: null equals null, NaN equals NaN, -0.0 equals 0.0. The digest
consists of sums over rows, so their order and their partitions do not matter. The sums add 64-bit hashes. A changed row has the same hash
as before with a probability of 2^-64. That change is then written together with the next one. The digest does not protect against an
adversary, because an adversary with access to the input gains nothing from a collision.
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

from persist_spark.columns import LOW_HALF, SUMS_MODULUS
from persist_spark.envelopes.collected import error_of
from persist_spark.frames import DESIRED, DIFF, HASH, fields_of, quoted

#: The version of the digest. Digests of different versions are never equal.
_VERSION = b"rows-3"
_IS_NULL = " IS NULL"


def both_sides(desired: DataFrame, persisted: DataFrame, schema: Schema) -> DataFrame:
    """The desired (+) and persisted (negated) rows: flat, with DIFF, DESIRED and HASH. `persisted` has the flat columns and DIFF. Plans
    only.
    """
    columns = [f.column for f in fields_of(schema)]
    ours = desired.select(*columns, F.lit(1).cast("bigint").alias(DIFF), F.lit(True).alias(DESIRED))  # noqa: FBT003
    theirs = persisted.select(*columns, F.col(DIFF), F.lit(False).alias(DESIRED))  # noqa: FBT003
    return hashed(ours.unionAll(theirs), schema)


def corrections(both: DataFrame, tasks: int | None) -> DataFrame:
    """The rows of `both_sides`, partitioned and sorted by HASH, so that equal rows are adjacent. `tasks`: see `frames.by_key_range`.
    Plans only.

    A write task therefore reads all copies of a row within a bounded part of its stream, however large its partition is. Spark sorts by one
    bigint (and spills), and the engine's consolidation decides which rows are equal (nulls, NaN, zeros). Because the hash covers values
    too, a hot key does not make a hot task.
    """
    # SUBTLE: without a number, Spark may merge partitions, but it never splits them. Only a rebalancing shuffle would split them.
    parts = both.repartition(HASH) if tasks is None else both.repartition(tasks, HASH)
    return parts.sortWithinPartitions(HASH)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """A number of rows, and the sums of the lower and of the upper 32 bits of their hashes, modulo 2^63.

    A single sum modulo 2^64 would be weak if rows have many copies: when 2^20 copies of a row change, only 44 bits of the hash count.
    """

    rows: int
    low: int
    high: int
    errors: int = 0
    """How many of these rows are errors (collected.py). Not part of the digest, because the digest covers the errors as rows."""

    def digest(self, schema: Schema) -> bytes:
        """The digest as 32 hexadecimal digits. It is equal for equal rows in the same schema."""
        text = repr((schema.key_ddl, schema.val_ddl, self.rows, self.low % SUMS_MODULUS, self.high % SUMS_MODULUS))
        return hashlib.blake2b(_VERSION + text.encode(), digest_size=16).hexdigest().encode()


def hashed(flat: DataFrame, schema: Schema, *, beside: Iterable[str] = ()) -> DataFrame:
    """Adds the column HASH to `flat`: the hash of the row's fields and of its columns `beside`. Plans only."""
    columns = [(field.column, field.type) for field in fields_of(schema)] + [(name, T.LongType()) for name in beside]
    leaves = [leaf for column, kind in columns for leaf in leaves_of(column, kind)]
    # First whether each field is null: while no field has nulls, these are the same for all rows (row_hash.py).
    leaves.sort(key=lambda leaf: not leaf.endswith(_IS_NULL))
    return flat.selectExpr("*", f"xxhash64({', '.join(leaves)}) AS {HASH}")


def scanned(flat: DataFrame, schema: Schema) -> WantedRows | None:
    """Counts and sums the rows of `flat` in one Spark job. None when the sums overflow, which takes at least 2^31 rows."""
    halves = (f"sum({HASH} & {LOW_HALF})", f"sum(shiftrightunsigned({HASH}, 32))")
    errors = f"count({error_of(schema)})" if holds_errors(schema) else "0"
    try:
        rows, bad, low, high = hashed(flat, schema).selectExpr("count(1)", errors, *halves).collect()[0]
    except ArithmeticException:  # if the user's query raised it, the next job over that query raises it again
        return None
    return WantedRows(rows, low or 0, high or 0, bad)


def leaves_of(path: str, kind: T.DataType, depth: int = 0) -> Iterator[str]:
    """The SQL expressions that the hash of a row covers for the value at `path`. They are SQL because Spark parses a text in one call of
    the JVM, but needs a call for each operator of a Column. `depth`: the number of lists and maps around the value.

    SUBTLE: Spark's hash skips nulls, so (null, 1) and (1, null) would have equal hashes. Each field, also within a struct, therefore adds
    whether it is null.
    """
    yield path + _IS_NULL
    each = f"e{depth}"
    if isinstance(kind, T.ArrayType):
        yield f"size({path})"  # otherwise nested lists with the same elements would have equal hashes
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
