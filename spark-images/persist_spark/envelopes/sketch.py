"""Finds the rows of a Mirror that may differ from the contents of the shard, by a linear sketch of both sides. Only they are exchanged.

Each row has a hash of 64 bits, and the low bits of the hash choose a bucket. A bucket adds up the hashes of its rows, modulo 2^64, each
times the diff of the row: 1 for a desired row, the negated diff for a persisted one. Equal rows cancel. The sums of parts add up, so a task
returns sums and no rows. A bucket whose sum is 0 holds the same rows on both sides; for different rows that happens with a probability of
2^-64, and more often if they have many copies. The net sums below then show it. This is the subtraction of buckets of D. Eppstein et al.,
"What's the Difference? Efficient Set Reconciliation without Prior Context" (SIGCOMM 2011), without ids of rows, because the rows are read
once more.

SUBTLE: the input is read twice and may change in between. The rows outside of the differing buckets are those of the first reading, so
the rows inside must be those of the first reading too. The net sums of all rows show it, which add up both halves of the hashes apart, as
the digest does (`mirror`): they are 0 outside, so the rows inside must have the net sums of the whole sketch. The persisted side does not
change. If the net sums are equal, the corrections are those of the first reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from persist_engine import holds_errors
from persist_engine.base.settings import MIB
from persist_engine.rows.schema import Schema
from py4j.java_gateway import is_instance_of
from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.columns import SUMS_MODULUS, halves
from persist_spark.envelopes.collected import is_error
from persist_spark.envelopes.mirror import WantedRows, both_sides, hashed
from persist_spark.envelopes.persisted import Persisted
from persist_spark.envelopes.row_hash import can_hash, row_hashes
from persist_spark.frames import DIFF, HASH, SMALL_TASK_BYTES, SMALL_TASKS_MAX, node_names, planned_bytes
from persist_spark.memory import give_back_freed_memory
from persist_spark.partitions import ReadParts
from persist_spark.session import parallelism_of

#: The numbers of buckets, each a power of two. A task holds 8 bytes for each bucket, and returns as many.
BUCKETS_MIN, BUCKETS_MAX = 1 << 16, 1 << 22
#: The bytes of the input, by Spark's estimate, for one bucket. With 1 % of a million short rows changed, 4 % of the buckets differ. With
#: twice as many bytes, exchanging the rows takes longer than returning the sums of as many buckets again.
_BUCKET_BYTES = 64
#: If one in so many buckets differs, or more, most rows would be exchanged anyway. Then all rows are compared.
_DIFFERING_SHARE = 4
#: A smaller input is compared without a sketch, because two more jobs would take longer.
SKETCHED_BYTES = 8 * MIB
#: Inputs that are cheap to read twice: columnar files, with filters and expressions that Spark itself evaluates.
_CHEAP_NODES = frozenset({"LogicalRelation", "Project", "Filter", "Union"})
_CHEAP_FORMATS = frozenset({"parquet", "orc"})
#: The number of files whose times are looked at, and the class of Spark's lists of files that have these times.
_FILES_MAX = 256
_LISTED = "org.apache.spark.sql.execution.datasources.PartitioningAwareFileIndex"
#: The bytes of the sum of a bucket, and the most bytes of all tasks that the driver adds up itself.
_SUM_BYTES, _COLLECTED_BYTES_MAX = 8, 32 * MIB
#: A task returns its sums in this number of pieces. Each task that adds them up takes some pieces.
_PIECES = 16
#: The greatest size of a diff that a sketch adds up. With greater ones, only few bits of a hash count, and the numbers of rows overflow.
_DIFF_MAX = 1 << 31

_BUCKET, _ERROR = "bucket", "error"
#: What a task counts: the rows, each times its diff, the sums of the lower and the upper halves of their hashes, likewise, the errors, and
#: the rows whose diffs are too large to be added up.
_COUNTS = ("rows", "low", "high", "errors", "large_rows")
_PIECE_DDL = ", ".join(("piece bigint, net binary", *(f"{name} bigint" for name in _COUNTS)))
_Integers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one side. Each row counts as often as its diff says."""

    net: _Integers
    """For each bucket, the sum of the hashes of its rows, modulo 2^64."""
    rows: int
    low: int
    high: int
    """The sums of the lower and the upper halves of all hashes, modulo SUMS_MODULUS."""
    errors: int
    """How many rows are errors. 0 for the persisted side."""

    @property
    def wanted(self) -> WantedRows:
        """What the digest of desired rows is made of."""
        return WantedRows(self.rows, self.low, self.high, self.errors)


@dataclass(frozen=True, slots=True)
class Differing:
    """The buckets in which both sides differ, and the sums of both."""

    numbers: _Integers
    """The numbers of the differing buckets, in order."""
    of: int
    """The number of all buckets."""
    desired: Sums
    net: tuple[int, int, int]
    """The number of all desired and persisted rows, each times its diff, and the sums of the halves of their hashes, modulo 2^63. The rows
    in the differing buckets have the same sums.
    """


def buckets_of(desired: DataFrame, *, newer_than: int | None = None) -> int | None:
    """The number of buckets for a sketch of `desired`. Returns None when a sketch is not worth a second reading, because the input is small
    or needs more than columnar files, filters and expressions without subqueries, or because no file was modified after `newer_than` (ms;
    None: whenever).
    """
    execution = desired._jdf.queryExecution()
    # Before Spark optimizes the plan, which takes longer than looking at the files.
    if newer_than is not None and _are_older(execution.analyzed().collectLeaves(), newer_than):
        return None
    plan = execution.optimizedPlan()
    size_bytes = planned_bytes(desired)
    if size_bytes is None or size_bytes < SKETCHED_BYTES or not node_names(plan) <= _CHEAP_NODES:
        return None
    if not plan.subqueriesAll().isEmpty():  # each reading would run them again
        return None
    leaves = plan.collectLeaves()
    relations = [leaves.apply(index).relation() for index in range(leaves.size())]
    if not all(str(relation) in _CHEAP_FORMATS for relation in relations):
        return None
    return min(BUCKETS_MAX, max(BUCKETS_MIN, 1 << (size_bytes // _BUCKET_BYTES).bit_length()))


def _are_older(leaves: Any, time_ms: int) -> bool:
    """Whether the JVM's `leaves` are all columnar files, none of which was modified after `time_ms`."""
    return all(
        str(leaf.nodeName()) in _CHEAP_NODES
        and str(leaf.relation()) in _CHEAP_FORMATS
        and not _is_newer(leaf.relation(), time_ms)
        for leaf in (leaves.apply(index) for index in range(leaves.size()))
    )


def _is_newer(relation: Any, time_ms: int) -> bool:
    """Whether a file of the JVM's `relation` was modified after `time_ms`. Of very many files it looks at some. A partitioned table of a
    catalog lists its files only while Spark optimizes a query, so this answers that one may be newer.
    """
    location = relation.location()
    if not is_instance_of(SparkContext._gateway, location, _LISTED):
        return True
    files = location.allFiles()
    count = min(files.size(), _FILES_MAX)
    return any(files.apply(index).getModificationTime() > time_ms for index in range(count))


def desired_hashes(desired: DataFrame, schema: Schema) -> DataFrame:
    """The HASH of the flat rows `desired`, and whether each is an `error`, if rows may be errors. Plans only."""
    error = [is_error(schema).alias(_ERROR)] if holds_errors(schema) else []
    return hashed(desired, schema).select(HASH, *error)


def desired_sums(hashes: DataFrame, buckets: int) -> Sums | None:
    """The sums of `hashes` (`desired_hashes`). Runs one job. Returns None when the pieces are not from one reading of the input."""
    return _sums(hashes.mapInArrow(SumUp(buckets), _PIECE_DDL), buckets)


def persisted_sums(contents: Persisted, buckets: int) -> Sums | None:
    """The sums of the contents of the shard, with negated diffs. Runs one job. Returns None when a diff is too large (_DIFF_MAX)."""
    if can_hash(contents.schema):
        return _sums(contents.read(SumUpParts(contents.parts, SumUp(buckets)), _PIECE_DDL), buckets)
    hashes = hashed(contents.rows(), contents.schema).select(HASH, DIFF)
    return _sums(hashes.mapInArrow(SumUp(buckets), _PIECE_DDL), buckets)


def _sums(pieces: DataFrame, buckets: int) -> Sums | None:
    """The sums of one side. Tasks add up the pieces first, if there are too many for the driver."""
    # Also plans the job of `collect`.
    tasks = pieces._jdf.queryExecution().toRdd().getNumPartitions()
    if tasks * buckets * _SUM_BYTES > _COLLECTED_BYTES_MAX:
        adding = min(_PIECES, parallelism_of(pieces.sparkSession))
        pieces = pieces.repartition(adding, "piece").mapInArrow(AddUp(), _PIECE_DDL)
    return total(pieces.collect(), buckets)


def total(pieces: Sequence[Mapping[str, Any]], buckets: int) -> Sums | None:
    """The sums of one side, from its `pieces`. Returns None when a diff is too large, and when the pieces are not from one reading."""
    net = np.zeros((_PIECES, buckets // _PIECES), np.int64)
    for piece in pieces:
        net[piece["piece"]] += np.frombuffer(piece["net"], np.int64)
    return _total(net.reshape(buckets), {name: sum(piece[name] for piece in pieces) for name in _COUNTS})


def _total(net: _Integers, counts: Mapping[str, int]) -> Sums | None:
    low, high = counts["low"] % SUMS_MODULUS, counts["high"] % SUMS_MODULUS
    # SUBTLE: Spark repeats a task whose executor is lost. Some pieces may then come from its first reading, and others from its second.
    is_whole = (int(net.sum()) - low - (high << 32)) % SUMS_MODULUS == 0
    if counts["large_rows"] or not is_whole:
        return None
    return Sums(net, counts["rows"], low, high, counts["errors"])


def differing(desired: Sums, persisted: Sums) -> Differing | None:
    """Compares the sums of both sides. Returns None when a quarter of the buckets differ, or more. Overwrites the sums of `persisted`."""
    net = np.add(desired.net, persisted.net, out=persisted.net)
    buckets, numbers = len(net), np.flatnonzero(net)
    if len(numbers) * _DIFFERING_SHARE >= buckets:
        return None
    low, high = (
        (ours + theirs) % SUMS_MODULUS
        for ours, theirs in ((desired.low, persisted.low), (desired.high, persisted.high))
    )
    return Differing(numbers, buckets, desired, (desired.rows + persisted.rows, low, high))


def tasks_within(desired: DataFrame, found: Differing) -> int | None:
    """The number of tasks for the rows in the differing buckets, by Spark's estimate of `desired`. None: so many that Spark decides.

    A shuffle into as many partitions as all rows need takes as long as reading both sides, even if it moves few rows.
    """
    size_bytes = planned_bytes(desired)
    if size_bytes is None:
        return None
    share_bytes = 2 * size_bytes * len(found.numbers) // found.of
    tasks = max(1, -(-share_bytes // SMALL_TASK_BYTES))
    return tasks if tasks <= SMALL_TASKS_MAX else None


def within(desired: DataFrame, contents: Persisted, found: Differing) -> DataFrame:
    """The rows of both sides (`mirror.both_sides`) that are in the differing buckets. Plans only."""
    schema, parts = contents.schema, contents.parts
    rows = contents.rows(PartsWithin(parts, found) if can_hash(schema) else None)
    return rows_within(both_sides(desired, rows, schema), found)


def rows_within(hashes: DataFrame, found: Differing) -> DataFrame:
    """The rows of `hashes`, which have HASH, that are in the differing buckets. Plans only."""
    buckets = F.broadcast(hashes.sparkSession.createDataFrame(pa.table({_BUCKET: found.numbers})))
    return hashes.join(buckets, F.col(HASH).bitwiseAND(found.of - 1) == F.col(_BUCKET), "left_semi")


# -- tasks ---------------------------------------------------------------------------------------------------------------


class SumUp:
    """The sums of a partition of one side. Columns: HASH, DIFF if not all diffs are 1, and `error` if rows may be errors."""

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the pieces of the sums of the buckets, with the counts beside the first. Uses 8 bytes a bucket."""
        give_back_freed_memory()
        net, counts = self._added(batches)
        for number, piece in enumerate(np.split(net, _PIECES)):
            yield _piece(number, piece, counts)
            counts = dict.fromkeys(_COUNTS, 0)

    def sums(self, batches: Iterable[pa.RecordBatch]) -> Sums | None:
        """The sums of `batches`, which are one side. Returns None when a diff is too large."""
        return _total(*self._added(batches))

    def _added(self, batches: Iterable[pa.RecordBatch]) -> tuple[_Integers, dict[str, int]]:
        net = np.zeros(self.buckets, np.int64)
        counts = dict.fromkeys(_COUNTS, 0)
        for batch in batches:
            hashes = batch.column(HASH).to_numpy()
            bucket, (low, high) = hashes & (self.buckets - 1), halves(hashes)
            rows, large = batch.num_rows, 0
            if DIFF in batch.schema.names:
                diff = batch.column(DIFF).to_numpy()
                if (large := int((np.abs(diff) > _DIFF_MAX).sum())) > 0:
                    diff = np.where(np.abs(diff) > _DIFF_MAX, 0, diff)
                rows, hashes, low, high = int(diff.sum()), hashes * diff, low * diff, high * diff
            errors = batch.column(_ERROR).true_count if _ERROR in batch.schema.names else 0
            np.add.at(net, bucket, hashes)
            _add(counts, rows=rows, low=int(low.sum()), high=int(high.sum()), errors=errors, large_rows=large)
        return net, counts


class SumUpParts:
    """The sums of groups of parts, without the JVM."""

    def __init__(self, parts: ReadParts, sum_up: SumUp) -> None:
        self.parts, self.sum_up = parts, sum_up

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the pieces of the sums of the groups with the given numbers."""
        return self.sum_up(hashes_of(rows) for rows in self.parts(batches))


class PartsWithin:
    """The rows of groups of parts that are in differing buckets."""

    def __init__(self, parts: ReadParts, found: Differing) -> None:
        self.parts = parts
        self.bits = np.packbits(is_differing(found)).tobytes()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields these rows of the groups with the given numbers. Uses a byte a bucket."""
        differs = np.unpackbits(np.frombuffer(self.bits, np.uint8)).astype(np.bool_)
        for rows in self.parts(batches):
            yield selected(rows, hashes_of(rows).column(HASH), differs)


class AddUp:
    """Adds up the pieces of a partition."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields one piece of each number in the partition."""
        pieces: dict[int, tuple[_Integers, dict[str, int]]] = {}
        for row in (row for batch in batches for row in batch.to_pylist()):
            added = np.frombuffer(row["net"], np.int64)
            net, counts = pieces.setdefault(row["piece"], (np.zeros_like(added), dict.fromkeys(_COUNTS, 0)))
            net += added
            _add(counts, **{name: row[name] for name in _COUNTS})
        for number, (net, counts) in pieces.items():
            yield _piece(number, net, counts)


def is_differing(found: Differing) -> _Flags:
    """Whether each bucket differs."""
    differs = np.zeros(found.of, np.bool_)
    differs[found.numbers] = True
    return differs


def selected(rows: pa.RecordBatch, hashes: pa.Array, differs: _Flags) -> pa.RecordBatch:
    """The rows, which have `hashes`, in differing buckets (`is_differing`)."""
    return rows.filter(pa.array(differs[hashes.to_numpy() & (len(differs) - 1)]))


def hashes_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The hash of each flat row (`mirror.hashed`), and its diff."""
    names = [name for name in rows.schema.names if name != DIFF]
    hashes = row_hashes([rows.column(name) for name in names])
    return pa.RecordBatch.from_pydict({HASH: hashes, DIFF: rows.column(DIFF)})


def _add(counts: dict[str, int], **more: int) -> None:
    """Adds `more` to `counts`. The sums of hashes stay below SUMS_MODULUS."""
    for name, value in more.items():
        counts[name] += value
        if name in ("low", "high"):
            counts[name] %= SUMS_MODULUS


def _piece(number: int, net: _Integers, counts: dict[str, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"piece": number, "net": net.tobytes(), **counts}])
