"""Checks that the parts of a run hold what their descriptors say: bytes, rows, sums, order, and bounds that hide no row.

It decodes parts as all readers do, so a part that passes can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import CorruptData, Incompatible, InvariantViolated, MissingBlob, SchemaMismatch
from persist_engine.codec.bloom import wrong_filters
from persist_engine.codec.row_groups import check_row_groups
from persist_engine.model.batch import ColumnStats, Footing, HollowPart, Part, PartStats, RunKind
from persist_engine.model.frontier import Description
from persist_engine.parts.consolidate import RowKey, row_key
from persist_engine.parts.fetch import PartSource
from persist_engine.rows.columns import compare_adjacent, flat_columns, flatten_columns
from persist_engine.rows.evolution import adapted
from persist_engine.rows.order import key_lower
from persist_engine.rows.part_stats import bound, stats_path
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import sort, wrapped_diffs_sum
from persist_engine.work.audit.finding import Finding, FindingKind, Severity


@dataclass(frozen=True, slots=True)
class RunToCheck:
    """Parts under one description. With `is_sorted`, rows must be in order across the parts."""

    desc: Description
    parts: tuple[Part, ...]
    is_sorted: bool
    kind: RunKind = RunKind.ANY
    is_alone: bool = False
    """Whether the run has only one part. The parts here may be a sample of the run."""


@dataclass(slots=True)
class RunChecked:
    """The result of a check. `missing` holds keys whose blobs do not exist; a collector may have deleted them."""

    findings: list[Finding]
    missing: list[str]
    parts: int = 0
    rows: int = 0
    bytes_read: int = 0


def check_run(source: PartSource, run: RunToCheck, schemas: Mapping[int, Schema]) -> RunChecked:
    """Fetches and checks every part. `source` retries storage errors; they surface when it gives up. `schemas` holds all schemas of the
    shard by id; `source` has the newest.
    """
    checked = RunChecked([], [])
    last: RowKey | None = None
    for index, part in enumerate(run.parts):
        name = part.key if isinstance(part, HollowPart) else f"inline part {index} of {run.desc}"
        try:
            data = source.get(part, run.desc)
            checked.bytes_read += len(data)
            tables = list(source.decode(data, part, run.desc))
            if isinstance(part, HollowPart) and part.footer is not None and isinstance(data, bytes):
                checked.findings += _check_row_groups(data, part.footer, name)
        except MissingBlob:
            checked.missing.append(name)
            last = None
            continue
        except (CorruptData, SchemaMismatch, InvariantViolated) as error:
            checked.findings.append(_error(FindingKind.CORRUPT, name, str(error)))
            last = None
            continue
        except Incompatible as error:
            checked.findings.append(_error(FindingKind.INCOMPATIBLE, name, str(error)))
            last = None
            continue
        table = pa.concat_tables(tables) if tables else source.schema.updates_schema.empty_table()
        checked.parts += 1
        checked.rows += table.num_rows
        own = source.schema if part.schema_id is None else schemas.get(part.schema_id, source.schema)
        checked.findings += _check_rows(table, part, name, Schema(own.key, source.schema.val))
        if run.is_sorted and _is_denied(run.kind, table, is_alone=run.is_alone):
            text = f"rows with the same key and value are not {run.kind.value}, as their run says: reads may show wrong rows"
            checked.findings.append(_error(FindingKind.STATS_NOT_CONSERVATIVE, name, text))
        if run.is_sorted and table.num_rows:
            columns = flatten_columns(table)
            if sort(table) is not table or (last is not None and row_key(columns, 0) < last):
                checked.findings.append(_error(FindingKind.OUT_OF_ORDER, name, "rows go back within their run"))
            last = row_key(columns, table.num_rows - 1)
    return checked


def _is_denied(kind: RunKind, table: pa.Table, *, is_alone: bool) -> bool:
    """Whether the rows of a part, which are in order, contradict the kind of their run. `is_alone` means that no other part has more rows
    with the first or the last key and value.
    """
    if kind is RunKind.ANY or not table.num_rows:
        return False
    _, equal = compare_adjacent(flat_columns(table, ("key", "val")), table.num_rows)
    if kind is RunKind.DISTINCT:
        return bool(equal.any())
    sums = np.add.reduceat(table.column("diff").to_numpy(), np.flatnonzero(np.insert(~equal, 0, True)))
    return bool((sums if is_alone else sums[1:-1]).any())


def _error(kind: FindingKind, key: str, message: str) -> Finding:
    return Finding(Severity.ERROR, kind, key, message)


def _check_rows(table: pa.Table, part: Part, name: str, with_own_keys: Schema) -> Iterator[Finding]:
    """Compares the rows that readers see with the descriptor. The keys in the descriptor have the schema under which the part was written.
    Checks sums and counts only when none of the part's rows is cut off (spec 20, bug 20).
    """
    is_whole = table.num_rows == part.rows
    if is_whole and part.diffs_sum is not None and wrapped_diffs_sum(table) != part.diffs_sum:
        text = f"diffs add up to {wrapped_diffs_sum(table)}, the descriptor says {part.diffs_sum}"
        yield _error(FindingKind.WRONG_SUM, name, text)
    if not isinstance(part, HollowPart) or not table.num_rows:
        return
    if key_lower(adapted(table, asked=with_own_keys, key=name)) < part.key_lower:
        yield _error(FindingKind.STATS_NOT_CONSERVATIVE, name, "a key lies before the descriptor's lower bound")
    if part.stats is not None:
        for text in _beyond_stats(table, part.stats, is_whole=is_whole, is_rewritten=part.ts_rewrite is not None):
            yield _error(FindingKind.STATS_NOT_CONSERVATIVE, name, text)


def _check_row_groups(data: bytes, footer: Footing, name: str) -> Iterator[Finding]:
    """Compares the bounds of row groups with the rows as they are stored. Readers of a range of keys skip row groups by these bounds."""
    for number, (group, values) in enumerate(check_row_groups(data, footer, key=name)):
        for text in _beyond_bounds(values, group.stats, f"the key in row group {number}", is_whole=True):
            yield _error(FindingKind.STATS_NOT_CONSERVATIVE, name, text)
    for text in wrong_filters(data, footer, key=name) if footer.filtered else ():
        yield _error(FindingKind.STATS_NOT_CONSERVATIVE, name, text)


def _beyond_stats(table: pa.Table, stats: PartStats, *, is_whole: bool, is_rewritten: bool) -> Iterator[str]:
    times = pc.min_max(table.column("time")).as_py()
    if not is_rewritten:
        if stats.time_min is not None and times["min"] < stats.time_min:
            yield f"time {times['min']} lies before the bound {stats.time_min}"
        if stats.time_max is not None and times["max"] > stats.time_max:
            yield f"time {times['max']} lies after the bound {stats.time_max}"
    if stats.diff_min is not None and (least := pc.min(table.column("diff")).as_py()) < stats.diff_min:
        yield f"diff {least} lies before the bound {stats.diff_min}"
    for name, column_stats in stats.columns:
        try:
            side, *below = stats_path(name)
            values = pc.struct_field(table.column(side), below if below else [""])  # no field has an empty name
        except (CorruptData, KeyError, pa.ArrowInvalid):
            yield f"statistics of {name}, which the schema does not have"
            continue
        yield from _beyond_bounds(values, column_stats, ".".join((side, *below)), is_whole=is_whole)


def _beyond_bounds(values: pa.ChunkedArray, stats: ColumnStats, path: str, *, is_whole: bool) -> Iterator[str]:
    nulls = values.null_count
    if nulls > stats.null_count or (is_whole and nulls != stats.null_count):
        yield f"{nulls} nulls in {path}, statistics say {stats.null_count}"
    for text, beyond, name in ((stats.lower, pc.less, "lower"), (stats.upper, pc.greater, "upper")):
        if text is None:
            continue
        try:
            limit = bound(text, values.type)
        except CorruptData as error:
            yield f"{name} bound of {path}: {error}"
            continue
        outside = beyond(values, limit)
        if name == "upper" and pa.types.is_floating(values.type):
            outside = pc.or_(outside, pc.is_nan(values))  # NaN is past every bound, and compares with none
        if pc.any(outside).as_py():
            yield f"a value of {path} lies beyond its {name} bound {text}"
