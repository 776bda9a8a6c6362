"""Stages the corrections of a Mirror with the help of a sketch of both sides, in the driver or in tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from persist_engine.rows.schema import Schema
from pyspark.sql import DataFrame

from persist_spark.envelopes.corrected import staged_corrections, with_counts
from persist_spark.envelopes.mirror import WantedRows
from persist_spark.envelopes.persisted import Persisted
from persist_spark.envelopes.sketch import (
    Differing,
    Sums,
    buckets_of,
    desired_hashes,
    desired_sums,
    differing,
    persisted_sums,
    tasks_within,
    within,
)
from persist_spark.envelopes.small import SmallShard, collected_sums, is_small, partitions_of
from persist_spark.partitions import StageTask
from persist_spark.report import Log
from persist_spark.resume.earlier import added, sums_of


@dataclass(kw_only=True)
class SketchedMirror:
    """The sketch of one run of a Mirror. Its only state is the sums of the input."""

    schema: Schema
    parallelism: int | None
    """The number of tasks that the user wants."""
    delete: Callable[[Sequence[Any]], None]
    """Deletes the batches in rows of STAGED_SCHEMA."""
    log: Log
    _desired: Sums | None = None
    """From `wanted`, for the next `staged`."""

    def wanted(
        self, desired: DataFrame, held_rows: Callable[[], int], *, newer_than: int | None = None
    ) -> WantedRows | None:
        """Adds up the rows of the input. Returns None when a sketch is not worth its cost. `held_rows`: returns about the number of rows
        of the shard. `newer_than`: see `sketch.buckets_of`.
        """
        self._desired = self._sums(desired, held_rows, newer_than=newer_than)
        return None if self._desired is None else self._desired.wanted

    def staged(self, desired: DataFrame, contents: Persisted, task: StageTask) -> list[Any] | None:
        """Stages the corrections. Returns rows of STAGED_SCHEMA. Returns None, and stages nothing, when a sketch is not worth its cost or
        shows many differences, and when the input changed while it was read.
        """
        small = SmallShard.of(contents)
        found = self._differing(desired, contents, small)
        if found is None:
            return None
        tasks = self._corrected(found, desired, contents, small, task) if len(found.numbers) else []
        net = added(map(sums_of, tasks))
        if net != found.net:
            self.log.event("changed_input", sketched=found.net[0], compared=net[0])
            self.delete(tasks)
            return None
        ours = found.desired
        counts = {"rows": ours.rows, "errors": ours.errors, "low": ours.low, "high": ours.high}
        return with_counts(counts, tasks)

    def _differing(self, desired: DataFrame, contents: Persisted, small: SmallShard | None) -> Differing | None:
        ours, self._desired = self._desired, None
        ours = ours or self._sums(desired, lambda: contents.rows_estimate)
        if ours is None:
            return None
        buckets = len(ours.net)
        theirs = persisted_sums(contents, buckets) if small is None else small.sums(buckets)
        found = None if theirs is None else differing(ours, theirs)
        self.log.event("sketched", buckets=buckets, differing=None if found is None else len(found.numbers))
        return found

    def _sums(self, desired: DataFrame, held_rows: Callable[[], int], *, newer_than: int | None = None) -> Sums | None:
        buckets = buckets_of(desired, newer_than=newer_than)
        if buckets is None:
            return None
        hashes = desired_hashes(desired, self.schema)
        # Before asking for the rows of the shard, which may fetch listings of its parts.
        if is_small(desired, self.schema):
            collected = collected_sums(hashes, held_rows(), partitions_of(desired))
            if collected is not None:
                return collected
        return desired_sums(hashes, buckets)

    def _corrected(
        self, found: Differing, desired: DataFrame, contents: Persisted, small: SmallShard | None, task: StageTask
    ) -> list[Any]:
        count, wanted = tasks_within(desired, found), self.parallelism
        if small is not None and count == 1 and wanted in {None, 1}:
            staged = small.corrected(desired, found, task)
            if staged is not None:
                return staged
        return staged_corrections(within(desired, contents, found), task, count, wanted=wanted, is_net=True)
