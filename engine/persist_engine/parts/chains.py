"""Joins runs with disjoint key ranges into chains, so that they need no merge.

    run 0  [--------]                   chain 0  [--------][-------]
    run 1     [---------]          ->   chain 1     [---------]  [-----]
    run 2             [-------]
    run 3                   [-----]

This module derives the key range of a run from statistics. It uses the first key column, whose bounds are trimmed last. The number of
chains is the greatest number of runs that overlap at one key, so data written in key order becomes one chain. Wrong statistics do no harm:
the merge raises an error when the rows of a chain go backwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from persist_engine.model.batch import HollowPart, Part
from persist_engine.parts.read_ahead import RunToRead
from persist_engine.rows.comparable import Comparable, comparable_bound
from persist_engine.rows.part_stats import stats_name
from persist_engine.rows.schema import Schema


class _Extent(NamedTuple):
    """The least and greatest value of the column among a run's rows, and the index of the run."""

    lower: Comparable
    upper: Comparable
    run: int


def chained(runs: Iterable[RunToRead], schema: Schema) -> list[RunToRead]:
    """The same rows in as few runs as possible: concatenates disjoint runs and keeps all others. Deterministic for given statistics."""
    runs = list(runs)
    if len(runs) < 2 or not len(schema.key) or pa.types.is_struct(schema.key.field(0).type):
        return runs
    extents: list[_Extent] = []
    alone: list[RunToRead] = []
    for index, run in enumerate(runs):
        extent = _extent_of(run, index, schema.key.field(0))
        if extent is None:
            alone.append(run)
        else:
            extents.append(extent)
    extents.sort()
    chains: list[list[int]] = []
    ends: list[tuple[Comparable, int]] = []  # the greatest value and the index of every chain
    for lower, upper, index in extents:
        if ends and ends[0][0] < lower:
            at = ends[0][1]
            chains[at].append(index)
            heapq.heapreplace(ends, (upper, at))
        else:
            heapq.heappush(ends, (upper, len(chains)))
            chains.append([index])
    return [_joined([runs[index] for index in chain]) for chain in chains] + alone


def _joined(runs: list[RunToRead]) -> RunToRead:
    if len(runs) == 1:
        return runs[0]
    return RunToRead(tuple(member for run in runs for member in run.members), is_sorted=True)


def _extent_of(run: RunToRead, index: int, field: pa.Field) -> _Extent | None:
    """The extent of a run. None when statistics are missing, and when the run is not sorted."""
    if not run.is_sorted or not run.members:
        return None
    bounds: list[Comparable] = []
    for part in run.parts:
        of_part = _bounds_of(part, field)
        if of_part is None:
            return None
        bounds += of_part
    return _Extent(min(bounds), max(bounds), index)


def _bounds_of(part: Part, field: pa.Field) -> tuple[Comparable, Comparable] | None:
    if not isinstance(part, HollowPart) or part.stats is None:
        return None
    stats = dict(part.stats.columns).get(stats_name(("key", field.name)))
    # Nulls and NaN sort past all values. An upper bound does not cover NaN, and a column with NaN has no upper bound.
    if stats is None or stats.null_count or stats.lower is None or stats.upper is None:
        return None
    return comparable_bound(stats.lower, field.type), comparable_bound(stats.upper, field.type)
