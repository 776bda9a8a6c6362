"""Compares the batches that earlier drivers of a run staged with the rows of the input.

The input is read once and compared range by range. A staged batch is kept if the input's rows with keys in its range have the same number
and the same sums of hashes. Then the batch has exactly the rows of the input in this range, whatever else has changed (except if hashes are
equal by chance, 2^-64). The rows outside all kept ranges are the rest. Nothing else is taken as proof that the input is the same: no list
of files and no plan.
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

from persist_spark.columns import LOW_HALF, SUMS_MODULUS
from persist_spark.frames import FAULT, HASH
from persist_spark.report import Log
from persist_spark.resume.key_ranges import RANGES_MAX, Key, range_number

_LEFT = "left to the next driver of its run, or to the orphan scan"

Sums = tuple[int, int, int]
"""A number of rows and the two sums of their hashes, modulo SUMS_MODULUS."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The notes of batches with the same bounds, which one append can link together."""

    lower: Antichain
    upper: Antichain
    notes: tuple[StagingNote, ...]
    updates: tuple[int, ...]
    """The number of updates of each batch."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The batches that are kept, and the rest of the rows."""

    tasks: tuple[dict[str, Any], ...]
    """The kept batches as rows of STAGED_SCHEMA, like those that their tasks returned."""
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
    """Chooses the notes whose batches can be appended at `lower`. If they have different bounds, it chooses the bounds with the most rows.
    None when there are no such notes.

    `upper`: the upper that a batch must have; None: any. `may_move`: a batch may have a lesser lower, because its updates may be moved.
    Leaves out batches that the shard would refuse: those with a schema that it does not know, and those staged before its staging floor.

    SUBTLE: also leaves out batches below `committed`, the upper of the sink's progress that the append will expect. An append of a batch
    moves that progress past the batch's lower. So the remaining batches were never appended, and it is safe to link them as only copies.
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
    """Compares the batches with `rows`, which are flat and have HASH, in one Spark job. None when no batch can be kept, when a row has a
    fault, when the sums overflow, or when the key of a note is not a value of the shard's key.
    """
    layers = _layers(earlier.notes)
    try:
        numbers = [range_number(layer, schema) for layer in layers]
    except pa.ArrowException:  # its message contains the key, so the log must not have it
        log.event("resume_failed", reason="a noted key is no value of the shard's key")
        return None
    numbered = rows.withColumn("range", F.coalesce(*numbers))
    faults = F.count(F.col(FAULT)) if FAULT in rows.columns else F.lit(0)
    halves = (F.col(HASH).bitwiseAND(LOW_HALF), F.shiftrightunsigned(F.col(HASH), 32))
    try:
        ranges = numbered.groupBy("range").agg(F.count(F.lit(1)), *map(F.sum, halves), faults).collect()
    except ArithmeticException:  # if the user's query raised it, the next job over that query raises it again
        return None
    if any(faulty for *_, faulty in ranges):
        return None
    sums = {number: (count, low % SUMS_MODULUS, high % SUMS_MODULUS) for number, count, low, high, _ in ranges}
    kept = [number for layer in layers for number in layer if sums.get(number) == sums_of(earlier.notes[number])]
    if not kept:
        return None
    rest = numbered.where(F.col("range").isNull() | ~F.col("range").isin(kept)).drop("range")
    rest_sums = added(one for number, one in sums.items() if number not in set(kept))
    rows_kept = sum(earlier.notes[number].rows for number in kept)
    log.event("resumed", batches=len(kept), rows=rows_kept, rest=rest_sums[0])
    tasks = tuple(_task(earlier.notes[number], earlier.updates[number]) for number in kept)
    return Kept(tasks, rest, rest_sums)


def sums_of(task: StagingNote | Any) -> Sums:
    """The sums of a note, or of the row that a task returned."""
    if isinstance(task, StagingNote):
        return task.rows, task.low % SUMS_MODULUS, task.high % SUMS_MODULUS
    return task["rows"], task["low"] % SUMS_MODULUS, task["high"] % SUMS_MODULUS


def added(every: Iterable[Sums]) -> Sums:
    """Adds up the sums `every`, modulo SUMS_MODULUS."""
    rows, low, high = (sum(each) for each in zip(*every, (0, 0, 0), strict=True))
    return rows, low % SUMS_MODULUS, high % SUMS_MODULUS


def _layers(notes: Sequence[StagingNote]) -> list[dict[int, tuple[Key, Key]]]:
    """The ranges of the RANGES_MAX largest notes by the index of the note, one mapping for each job, in the order of the jobs.

    SUBTLE: the ranges of one job are disjoint. A later job staged the rows that were left, so its ranges may span those of an earlier job.
    `kept_of` therefore looks a key up in the earlier job first.
    """
    largest = sorted(range(len(notes)), key=lambda index: -notes[index].rows)[:RANGES_MAX]
    layers: dict[bytes, dict[tuple[Key, Key], int]] = {}
    for index in sorted(largest):
        # Two attempts of one task have the same range. One of their batches is enough.
        layers.setdefault(notes[index].job, {}).setdefault((notes[index].least, notes[index].greatest), index)
    return [{index: bounds for bounds, index in layer.items()} for layer in layers.values()]


def _batch_of(note: StagingNote, writer: WriteHandle) -> Batch | None:
    try:
        # This handle only reads the bounds of the batch. The caller marks it as spent at once.
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
