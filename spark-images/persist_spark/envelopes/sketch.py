"""Finds the rows of a Mirror that may differ from the contents of the shard, by a linear sketch of both sides. Only they are exchanged.

Each row has a hash of 64 bits, and the low bits of the hash choose a bucket. A bucket adds up the lower and the upper halves of the hashes
of its rows, each times the diff of the row: 1 for a desired row, the negated diff for a persisted one. Equal rows cancel. The sums of
parts add up, so a task returns sums and no rows. A bucket whose sums are 0 holds the same rows on both sides; for different rows that
happens with a probability of 2^-64, as with the digest in `mirror`. This is the subtraction of buckets of D. Eppstein et al., "What's the
Difference? Efficient Set Reconciliation without Prior Context" (SIGCOMM 2011), without ids of rows, because the rows are read once more.

SUBTLE: the input is read twice and may change in between. The rows outside of the differing buckets are those of the first reading, so
the rows inside must be those of the first reading too. The net sums show it: they are 0 outside, so the rows inside must have the net sums
of the whole sketch. The persisted side does not change. If the net sums are equal, the corrections are those of the first reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from persist_engine import holds_errors
from persist_engine.base.settings import MIB
from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.columns import SUMS_MODULUS, halves
from persist_spark.envelopes.collected import is_error
from persist_spark.envelopes.mirror import hashed
from persist_spark.frames import DIFF, HASH, node_names, planned_bytes
from persist_spark.memory import give_back_freed_memory
from persist_spark.session import parallelism_of

#: The numbers of buckets, each a power of two. A task holds 16 bytes for each bucket, and returns as many.
BUCKETS_MIN, BUCKETS_MAX = 1 << 16, 1 << 21
#: The bytes of the input, by Spark's estimate, for one bucket. With 1 % of a million short rows changed, 7 % of the buckets differ.
_BUCKET_BYTES = 64
#: If one in so many buckets differs, or more, most rows would be exchanged anyway. Then all rows are compared.
_DIFFERING_SHARE = 4
#: A smaller input is compared without a sketch, because two more jobs would take longer.
SKETCHED_BYTES = 8 * MIB
#: Inputs that are cheap to read twice: columnar files, with filters and expressions that Spark itself evaluates.
_CHEAP_NODES = frozenset({"LogicalRelation", "Project", "Filter", "Union"})
_CHEAP_FORMATS = frozenset({"parquet", "orc"})
#: A task returns its sums in this number of pieces. Each task that adds them up takes some pieces.
_PIECES = 16
#: The greatest size of a diff that a sketch adds up. With greater ones, only few bits of a hash count, and the numbers of rows overflow.
_DIFF_MAX = 1 << 31

_BUCKET, _ERROR = "bucket", "error"
#: The counts of a task. For desired rows: their number, the errors among them, and the sums of the lower and the upper halves of their
#: hashes. For all rows, each times its diff: the number, and the same sums. The number of rows whose diffs are too large to be added up.
_DESIRED, _NET, _LARGE = ("rows", "errors", "low", "high"), ("net_rows", "net_low", "net_high"), "large_rows"
_COUNTS = (*_DESIRED, *_NET, _LARGE)
_COUNTS_DDL = ", ".join(f"{name} bigint" for name in _COUNTS)
_PIECE_DDL = f"piece bigint, net binary, {_COUNTS_DDL}"
_ADDED_DDL = f"differing binary, bucket_low bigint, bucket_high bigint, {_COUNTS_DDL}"
_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Differing:
    """The buckets in which both sides differ, and what the sketch counted."""

    buckets: pa.Table
    """One column, `bucket`."""
    of: int
    """The number of all buckets."""
    desired: dict[str, int]
    """What the sketch counted of all desired rows: `rows`, the `errors` among them, and the sums `low` and `high` of their hashes."""
    net: tuple[int, int, int]
    """The number of all desired and persisted rows, each times its diff, and the sums of the halves of their hashes, modulo 2^63. The rows
    in the differing buckets have the same sums.
    """


def buckets_of(desired: DataFrame) -> int | None:
    """The number of buckets for a sketch of `desired`. Returns None when a sketch is not worth a second reading, because the input is small
    or needs more than columnar files, filters and expressions.
    """
    plan = desired._jdf.queryExecution().optimizedPlan()
    size_bytes = planned_bytes(desired)
    if size_bytes is None or size_bytes < SKETCHED_BYTES or not node_names(plan) <= _CHEAP_NODES:
        return None
    leaves = plan.collectLeaves()
    if not all(str(leaves.apply(index).relation()) in _CHEAP_FORMATS for index in range(leaves.size())):
        return None
    return min(BUCKETS_MAX, max(BUCKETS_MIN, 1 << (size_bytes // _BUCKET_BYTES).bit_length()))


def differing(desired: DataFrame, persisted: DataFrame, schema: Schema, buckets: int) -> Differing | None:
    """Compares both sides by a sketch of `buckets`. Both are flat, and `persisted` has the negated DIFF. Runs one job. Returns None when a
    quarter of the buckets differ, or more, and when a persisted diff is too large (_DIFF_MAX).
    """
    error = is_error(schema) if holds_errors(schema) else F.lit(False)  # noqa: FBT003
    ours = hashed(desired, schema).select(HASH, F.lit(1).cast("bigint").alias(DIFF), error.alias(_ERROR))
    theirs = hashed(persisted, schema).select(HASH, DIFF)
    pieces = ours.mapInArrow(SumUp(buckets, is_desired=True), _PIECE_DDL)
    pieces = pieces.unionAll(theirs.mapInArrow(SumUp(buckets, is_desired=False), _PIECE_DDL))
    tasks = min(_PIECES, parallelism_of(desired.sparkSession))
    rows = pieces.repartition(tasks, "piece").mapInArrow(AddUp(buckets), _ADDED_DDL).collect()
    return _differing(rows, buckets)


def _differing(added: Sequence[Mapping[str, Any]], buckets: int) -> Differing | None:
    """The result of `differing`, from the rows of all AddUp. Returns None also when the pieces are not from one reading of the input."""
    total = {name: sum(row[name] for row in added) for name in (*_COUNTS, "bucket_low", "bucket_high")}
    net_low, net_high, low, high = (
        total[name] % SUMS_MODULUS for name in ("net_low", "net_high", "bucket_low", "bucket_high")
    )
    numbers = np.concatenate([np.frombuffer(row["differing"], np.int64) for row in added])
    # SUBTLE: Spark repeats a task whose executor is lost. Some pieces may then come from its first reading, and others from its second.
    if total[_LARGE] or (low, high) != (net_low, net_high) or len(numbers) * _DIFFERING_SHARE >= buckets:
        return None
    counted = {name: total[name] for name in _DESIRED}
    return Differing(pa.table({_BUCKET: numbers}), buckets, counted, (total["net_rows"], net_low, net_high))


def within(both: DataFrame, found: Differing) -> DataFrame:
    """The rows of `both` sides (`mirror.both_sides`) that are in the differing buckets. Plans only."""
    buckets = F.broadcast(both.sparkSession.createDataFrame(found.buckets))
    return both.join(buckets, F.col(HASH).bitwiseAND(found.of - 1) == F.col(_BUCKET), "left_semi")


# -- tasks ---------------------------------------------------------------------------------------------------------------


class SumUp:
    """The sums of a partition of one side. Columns: HASH, DIFF, and `error` of desired rows."""

    def __init__(self, buckets: int, *, is_desired: bool) -> None:
        self.buckets, self.is_desired = buckets, is_desired

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the pieces of the net sums of the buckets, with the sums of all rows beside the first. Uses 16 bytes a bucket."""
        give_back_freed_memory()
        net = np.zeros((2, self.buckets), np.int64)
        counts = dict.fromkeys(_COUNTS, 0)
        for batch in batches:
            hashes, diff = batch.column(HASH).to_numpy(), batch.column(DIFF).to_numpy()
            bucket, (low, high) = hashes & (self.buckets - 1), halves(hashes)
            if self.is_desired:
                errors = batch.column(_ERROR).true_count
                _add(counts, rows=batch.num_rows, errors=errors, low=int(low.sum()), high=int(high.sum()))
            large = np.abs(diff) > _DIFF_MAX
            _add(counts, large_rows=int(large.sum()))
            diff = np.where(large, 0, diff)
            low, high = low * diff, high * diff
            np.add.at(net[0], bucket, low)
            np.add.at(net[1], bucket, high)
            _add(counts, net_rows=int(diff.sum()), net_low=int(low.sum()), net_high=int(high.sum()))
        for number, piece in enumerate(np.split(net, _PIECES, axis=1)):
            yield _row(counts, piece=number, net=piece.tobytes())
            counts = dict.fromkeys(_COUNTS, 0)


class AddUp:
    """Adds up the pieces of a partition."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields one row: the numbers of the differing buckets, and the sums of all others."""
        shape = 2, self.buckets // _PIECES
        pieces: dict[int, _Integers] = {}
        counts = dict.fromkeys(_COUNTS, 0)
        for row in (row for batch in batches for row in batch.to_pylist()):
            piece = pieces.setdefault(row["piece"], np.zeros(shape, np.int64))
            piece += np.frombuffer(row["net"], np.int64).reshape(shape)
            _add(counts, **{name: row[name] for name in _COUNTS})
        differing = [np.flatnonzero(piece.any(axis=0)) + number * shape[1] for number, piece in pieces.items()]
        low, high = (sum(int(piece[half].sum()) for piece in pieces.values()) % SUMS_MODULUS for half in (0, 1))
        yield _row(counts, differing=b"".join(each.tobytes() for each in differing), bucket_low=low, bucket_high=high)


def _add(counts: dict[str, int], **more: int) -> None:
    """Adds `more` to `counts`. The sums of hashes stay below SUMS_MODULUS."""
    for name, value in more.items():
        counts[name] = (
            counts[name] + value if name.endswith(("rows", "errors")) else (counts[name] + value) % SUMS_MODULUS
        )


def _row(counts: dict[str, int], **more: int | bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([more | counts])
