"""Selects the parts that a read needs: those that may hold wanted rows, by their statistics (spec 15.7, 15.9).

Skipping is only an optimisation, so it is audited. A sample of the skipped parts is fetched anyway. A wanted row in one of them is an
invariant violation and raises. This module knows nothing of merging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.env import Env
from persist_engine.base.errors import InvariantViolated
from persist_engine.codec.keys import blob_key
from persist_engine.model.batch import HollowBatch, HollowPart, Part
from persist_engine.model.frontier import DATA_TIME_MAX, Description
from persist_engine.parts.fetch import PartSource, RowFilter
from persist_engine.rows.filter import Filter


@dataclass(frozen=True, slots=True)
class Times:
    """The times that a read wants, both ends included."""

    first: int = 0
    last: int = DATA_TIME_MAX

    def may_hold(self, part: Part) -> bool:
        """Whether `part` may have rows at these times, by its statistics. True without statistics."""
        if not isinstance(part, HollowPart) or part.stats is None:
            return True
        least, greatest = part.stats.time_min, part.stats.time_max
        if least is None or greatest is None:
            return True
        if part.ts_rewrite is not None:
            if part.ts_rewrite.time is None:
                return True
            least, greatest = max(least, part.ts_rewrite.time), max(greatest, part.ts_rewrite.time)
        return least <= self.last and self.first <= greatest


@dataclass(frozen=True, slots=True)
class Skipped:
    """A skipped part that is to be audited. `desc` is the description of its batch."""

    desc: Description
    part: HollowPart


@dataclass(frozen=True, slots=True)
class Selection:
    """`batches` without the parts that a read does not need, and the skipped parts to audit."""

    batches: tuple[HollowBatch, ...]
    audits: tuple[Skipped, ...] = ()
    skipped_parts: int = field(default=0, compare=False)


def select(
    batches: Iterable[HollowBatch],
    *,
    where: Filter | None,
    times: Times,
    audited: Callable[[], bool],
    is_of_contents: bool = False,
) -> Selection:
    """Reduces `batches`, which must be expanded (parts.listings), to the parts that may hold rows at `times` that pass `where`. Calls
    `audited` once for every part that is skipped by its statistics. `is_of_contents` means that the read adds up all rows through
    `times.last`, so it does not need a balanced run without later rows.
    """
    kept: list[HollowBatch] = []
    audits: list[Skipped] = []
    skipped_parts = 0
    for batch in batches:
        runs = []
        for meta, parts in batch.part_runs():
            if is_of_contents and meta.is_balanced and _ends_by(times.last, batch.desc, parts):
                skipped_parts += len(parts)
                continue
            wanted = [part for part in parts if times.may_hold(part) and (where is None or where.may_pass(part))]
            runs.append((meta, wanted))
            if len(wanted) == len(parts):
                continue
            skipped_parts += len(parts) - len(wanted)
            needed = set(map(id, wanted))
            left = [part for part in parts if id(part) not in needed and isinstance(part, HollowPart)]
            audits += [Skipped(batch.desc, part) for part in left if audited()]
        rows = sum(part.rows for _, parts in runs for part in parts)
        if rows == batch.rows or batch.is_empty():
            kept.append(batch)
        elif any(parts for _, parts in runs):
            kept.append(HollowBatch.of_runs(batch.desc, rows, runs))
    return Selection(tuple(kept), tuple(audits), skipped_parts)


def _ends_by(last: int, desc: Description, parts: Iterable[Part]) -> bool:
    """Whether no row of a compacted batch is later than `last`."""
    upper, since = desc.upper.time, desc.since.time
    if upper is not None and since is not None and max(upper - 1, since) <= last:
        return True
    ends = [part.stats.time_max if isinstance(part, HollowPart) and part.stats is not None else None for part in parts]
    return all(end is not None and end <= last for end in ends)


def sampled(env: Env, percent: int) -> Callable[[], bool]:
    """A function that returns True for about `percent` of a hundred calls, drawn from `env`. With 0 it draws nothing."""
    if percent <= 0:
        return lambda: False
    return lambda: env.uniform(0, 100) < percent


def audit(source: PartSource, skipped: Skipped, row_filter: RowFilter, where: Filter | None) -> None:
    """Fetches a skipped part. Raises InvariantViolated when one of its rows passes `row_filter`, which includes `where`. The error names
    the part and the columns with wrong statistics.
    """
    part = skipped.part
    source.metrics.count("stats_audits", shard=source.shard_id)
    for table in source.decode(source.get(part, skipped.desc), part, skipped.desc):
        passed = row_filter.apply(table)
        if passed.num_rows == 0:
            continue
        columns = _denied(table, part, where)
        raise InvariantViolated(
            f"part {blob_key(source.shard_id, part.key)} was skipped by its statistics, but {passed.num_rows} of its rows "
            f"are wanted: the statistics of {', '.join(columns)} are wrong",
            key=part.key,
            columns=columns,
        )


def _denied(table: pa.Table, part: HollowPart, where: Filter | None) -> list[str]:
    """The columns of `table`, time included, whose values lie outside the statistics of `part`."""
    columns = [] if where is None else where.outside(table, part)
    stats = part.stats
    if stats is not None and stats.time_min is not None and stats.time_max is not None:
        bounds = pc.min_max(table.column("time"))
        if (
            part.ts_rewrite is None
            and not stats.time_min <= bounds["min"].as_py() <= bounds["max"].as_py() <= stats.time_max
        ):
            columns.append("time")
    return columns or ["no single column"]
