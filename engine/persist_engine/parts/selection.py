"""Which parts a read needs: those that may hold rows that it wants, by their statistics (spec 15.7, 15.9).

Skipping is only an optimisation, so it is audited: a sample of what is skipped is fetched anyway, and a row in it that the
read wanted is a broken rule, told loudly. Knows nothing of merging.
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
    """The times a read wants, both ends included."""

    first: int = 0
    last: int = DATA_TIME_MAX

    def may_hold(self, part: Part) -> bool:
        """Whether `part` may have rows at these times, by its statistics; true when they do not say."""
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
    """A part that a read does without, to be audited; `desc` is its batch's."""

    desc: Description
    part: HollowPart


@dataclass(frozen=True, slots=True)
class Selection:
    """`batches` without the parts that a read does not need, and those of them that it is to fetch all the same."""

    batches: tuple[HollowBatch, ...]
    audits: tuple[Skipped, ...] = ()
    skipped_parts: int = field(default=0, compare=False)


def select(
    batches: Iterable[HollowBatch], *, where: Filter | None, times: Times, audited: Callable[[], bool]
) -> Selection:
    """What of `batches` (expanded: shard.runs) may hold rows at `times` that pass `where`. `audited` is drawn for every
    part that is skipped.
    """
    kept: list[HollowBatch] = []
    audits: list[Skipped] = []
    skipped_parts = 0
    for batch in batches:
        runs = []
        for meta, parts in batch.part_runs():
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


def sampled(env: Env, percent: int) -> Callable[[], bool]:
    """True for about `percent` of a hundred calls, drawn from `env`; 0 draws nothing."""
    if percent <= 0:
        return lambda: False
    return lambda: env.uniform(0, 100) < percent


def audit(source: PartSource, skipped: Skipped, row_filter: RowFilter, where: Filter | None) -> None:
    """Fetch a part that was skipped. InvariantViolated, naming the part and the columns whose statistics lie, when a row
    of it passes `row_filter`, of which `where` is a part.
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
            f"are wanted: those of {', '.join(columns)} do not hold",
            key=part.key,
            columns=columns,
        )


def _denied(table: pa.Table, part: HollowPart, where: Filter | None) -> list[str]:
    """Columns, times among them, that hold what the statistics of `part` deny."""
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
