"""What earlier drivers of a run staged, compared with the rows of the input.

The input is read once and compared range by range: a staged batch stays if the rows that now have keys of its range have its number and its
sums of hashes. Whatever else changed since, the batch then has exactly the rows of the input in this range (but for a hash that is equal by
chance, 2^-64), and the rows without such a range are the rest. Nothing else makes an input the same one: no list of files, no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from persist_engine import Batch, StagingNote, WriteHandle
from persist_engine.base.errors import BatchNotFromThisShard, CorruptData, Incompatible, SchemaMismatch
from persist_engine.model.frontier import Antichain
from persist_engine.rows.schema import Schema
from pyspark.errors import ArithmeticException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - what every Spark user calls it

from persist_spark.frames import FAULT, HASH
from persist_spark.report import Log
from persist_spark.resume.key_ranges import RANGES_MAX, Key, range_number

_LEFT = "left to the next driver of its run, or to the orphan scan"
#: The sums of hashes are modulo this number, and so is everything compared with them.
MODULUS = 1 << 63

Sums = tuple[int, int, int]
"""A number of rows and the two sums of their hashes, modulo MODULUS."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Notes of batches that fit one append, so that they can be appended together."""

    lower: Antichain
    upper: Antichain
    notes: tuple[StagingNote, ...]
    updates: tuple[int, ...]
    """Of each batch."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The batches that stay, and the rest of the rows."""

    tasks: tuple[dict[str, Any], ...]
    """As the tasks that staged them returned them: rows of STAGED_SCHEMA."""
    rest: DataFrame
    rest_sums: Sums


def earlier_batches(
    notes: Iterable[StagingNote],
    writer: WriteHandle,
    *,
    committed: Antichain,
    lower: Antichain,
    upper: Antichain | None,
    may_move: bool,
) -> Earlier | None:
    """Those of the notes whose batches can be appended at `lower`: of several bounds, the ones with most rows. None when there are none.

    `upper`: the only upper of a batch that will do; None: any. `may_move`: a batch with a lesser lower will do, because its updates may be
    moved. Leaves out batches that the shard would refuse: with a schema that it does not know, or staged before its staging floor.

    SUBTLE: leaves out, too, those below `committed`, the upper of the sink's progress that the append will expect. An append of a batch
    moves that progress past the batch's lower. So the others were never appended, and are linked as if there were no copies.
    """
    groups: dict[tuple[Antichain, Antichain], list[tuple[StagingNote, int]]] = {}
    for note in notes:
        batch = _batch_of(note, writer)
        if batch is None:
            continue
        was_appended = not committed <= batch.lower
        fits = batch.lower == lower or (may_move and batch.lower <= lower)
        is_fenced = batch.hollow.staged_before(writer.machine.staging_floor_ms) is not None
        if fits and upper in (None, batch.upper) and not (was_appended or is_fenced):
            groups.setdefault((batch.lower, batch.upper), []).append((note, batch.rows))
        batch.mark_spent(_LEFT)
    if not groups:
        return None
    bounds = max(groups, key=lambda each: sum(note.rows for note, _ in groups[each]))
    chosen = groups[bounds]
    return Earlier(*bounds, tuple(note for note, _ in chosen), tuple(updates for _, updates in chosen))


def kept_of(earlier: Earlier, rows: DataFrame, schema: Schema, log: Log) -> Kept | None:
    """Compares the batches with `rows`, flat and with HASH, in one pass over them. None when none stays, or when the rows cannot be
    compared: one has a fault, or there are more than the sums have room for.
    """
    layers = _layers(earlier.notes)
    try:
        numbers = [range_number(layer, schema) for layer in layers]
    except pa.ArrowException:  # what it says has the key
        log.event("resume_failed", reason="a noted key is no value of the shard's key")
        return None
    numbered = rows.withColumn("range", F.coalesce(*numbers))
    faults = F.count(F.col(FAULT)) if FAULT in rows.columns else F.lit(0)
    halves = (F.col(HASH).bitwiseAND(0xFFFFFFFF), F.shiftrightunsigned(F.col(HASH), 32))
    try:
        found = numbered.groupBy("range").agg(F.count(F.lit(1)), *map(F.sum, halves), faults).collect()
    except ArithmeticException:  # of the user's query too, and then its next job says so
        return None
    if any(faulty for *_, faulty in found):
        return None
    sums = {number: (count, low % MODULUS, high % MODULUS) for number, count, low, high, _ in found}
    right = [number for layer in layers for number in layer if sums.get(number) == sums_of(earlier.notes[number])]
    if not right:
        return None
    rest = numbered.where(F.col("range").isNull() | ~F.col("range").isin(right)).drop("range")
    left = added(one for number, one in sums.items() if number not in set(right))
    log.event("resumed", batches=len(right), rows=sum(earlier.notes[number].rows for number in right), rest=left[0])
    tasks = tuple(_task(earlier.notes[number], earlier.updates[number]) for number in right)
    return Kept(tasks, rest, left)


def sums_of(task: StagingNote | Any) -> Sums:
    """The sums of a note, or of what a task returned."""
    if isinstance(task, StagingNote):
        return task.rows, task.low % MODULUS, task.high % MODULUS
    return task["rows"], task["low"] % MODULUS, task["high"] % MODULUS


def added(every: Iterable[Sums]) -> Sums:
    """The sums of all these rows."""
    rows, low, high = (sum(each) for each in zip(*every, (0, 0, 0), strict=True))
    return rows, low % MODULUS, high % MODULUS


def _layers(notes: Sequence[StagingNote]) -> list[dict[int, tuple[Key, Key]]]:
    """The ranges of the notes by their indices, those of each job by themselves, in the order of the jobs.

    SUBTLE: the ranges of one job are disjoint. A later job had the rows that were left, so its ranges may span those of an earlier one, and
    must be asked after them.
    """
    most = sorted(range(len(notes)), key=lambda each: -notes[each].rows)[:RANGES_MAX]
    layers: dict[bytes, dict[tuple[Key, Key], int]] = {}
    for index in sorted(most):
        # Two attempts of one task have the same range, and one of the two batches will do.
        layers.setdefault(notes[index].job, {}).setdefault((notes[index].least, notes[index].greatest), index)
    return [{index: bounds for bounds, index in layer.items()} for layer in layers.values()]


def _batch_of(note: StagingNote, writer: WriteHandle) -> Batch | None:
    try:
        # To look at it: it is marked as spent at once.
        return writer.batch_from_transmittable(note.batch, is_only_copy=True)
    except (BatchNotFromThisShard, CorruptData, Incompatible, SchemaMismatch):
        return None


def _task(note: StagingNote, updates: int) -> dict[str, Any]:
    return {
        "batch": note.batch,
        "rows": note.rows,
        "errors": note.errors,
        "updates": updates,
        "least_time": note.least_time,
        "low": note.low,
        "high": note.high,
    }
