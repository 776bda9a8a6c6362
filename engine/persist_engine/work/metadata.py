"""The metadata of one shard as tables: what `persist inspect` and `persist admin` print and what Spark shows.

Owns the names of the tables and of their columns. A new column goes to the end. A column is never renamed or given another type. This
module reads metadata, and no rows of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.batch import HollowBatch, HollowRun, InlinePart, RunMeta, RunPart
from persist_engine.model.frontier import Antichain
from persist_engine.parts.listings import listed
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.usage import referenced_usage
from persist_engine.work.holds import holds_of

Row = tuple[object, ...]

_BATCH = [("spine", pa.string()), ("level", pa.int64()), ("batch", pa.string())]
_SIZES = [("rows", pa.int64()), ("bytes", pa.int64())]
_FRONTIERS = [("lower", pa.int64()), ("upper", pa.int64()), ("since", pa.int64())]
#: The columns of each table. A frontier appears as a time: null when it is closed, TIME_MAX when it is later than that.
SCHEMAS = {
    "batches": pa.schema([*_BATCH, *_FRONTIERS, ("runs", pa.int64()), ("parts", pa.int64()), *_SIZES]),
    "runs": pa.schema(
        [*_BATCH, ("run", pa.int64()), ("order", pa.string()), ("schema", pa.int64()), ("parts", pa.int64()), *_SIZES]
    ),
    "parts": pa.schema(
        [
            *_BATCH,
            ("run", pa.int64()),
            ("order", pa.string()),
            *_SIZES,
            ("diffs_sum", pa.int64()),
            ("part", pa.string()),
        ]
    ),
    "versions": pa.schema(
        [
            ("seqno", pa.int64()),
            ("walltime_ms", pa.int64()),
            ("bytes", pa.int64()),
            ("latest_rollup", pa.string()),
            ("changed", pa.map_(pa.string(), pa.int64())),
        ]
    ),
    "holds": pa.schema(
        [
            ("id", pa.string()),
            ("kind", pa.string()),
            ("purpose", pa.string()),
            ("hostname", pa.string()),
            ("since", pa.int64()),
            ("upper", pa.int64()),
            ("seqno", pa.int64()),
            ("blocks_since", pa.bool_()),
            ("blocks_collection", pa.bool_()),
            ("held_from_ms", pa.int64()),
            ("is_older", pa.bool_()),
            ("last_heartbeat_ms", pa.int64()),
            ("lease_ends_ms", pa.int64()),
            ("has_lapsed", pa.bool_()),
        ]
    ),
    "usage": pa.schema(
        [
            ("shard_id", pa.string()),
            *((name, pa.int64()) for name in ("parts_bytes", "rollups_bytes", "inline_bytes", "consensus_bytes")),
        ]
    ),
}
#: The names of the tables.
METADATA_TABLES = tuple(SCHEMAS)
#: The latest time that a column can hold. Frontiers are unsigned, but Spark has no unsigned columns.
TIME_MAX = (1 << 63) - 1
#: The collections of a state diff whose changes a version counts.
_DIFF_FIELDS = (
    "hostname",
    "last_gc_req",
    "active_rollup",
    "active_gc",
    "rollups",
    "leased_readers",
    "critical_readers",
    "writers",
    "schemas",
    "progress",
    "since",
    "legacy_batches",
    "hollow_batches",
    "spine_batches",
    "merges",
    "staging_floor_ms",
    "retain_ms",
)


def metadata_of(machine: Machine, table: str) -> pa.Table:
    """One of the tables of SCHEMAS. Linearized. Raises InvalidUsage, which lists the tables, when there is none of that name.

    `batches` has one row for each batch, oldest first. `runs` has one row for each run. `parts` has one row for each part; one row for a
    listing comes before its parts. `versions` has one row for each live version, and counts the entries of each field that it changed.
    `holds` is `holds_of`. `usage` is one row, `referenced_usage`. `versions` and `holds` read the log, `parts` reads listings, and the
    others read the newest state alone.
    """
    if table not in SCHEMAS:
        raise InvalidUsage(f"there is no metadata table {table!r}; there are {', '.join(METADATA_TABLES)}")
    schema = SCHEMAS[table]
    columns = zip(*_ROWS[table](machine), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.Table.from_arrays(arrays, schema=schema) if arrays else schema.empty_table()


def _batch_rows(machine: Machine) -> Iterator[Row]:
    for where, batch in _batches(machine):
        desc = batch.desc
        frontiers = (_time(each) for each in (desc.lower, desc.upper, desc.since))
        runs = [members for _, members in batch.runs() if members]
        parts = sum(part.part_count for members in runs for part in members)
        yield (*where, *frontiers, len(runs), parts, batch.rows, batch.size_bytes + batch.inline_bytes)


def _run_rows(machine: Machine) -> Iterator[Row]:
    for where, batch in _batches(machine):
        for index, (meta, members) in _runs(batch):
            parts, rows = sum(part.part_count for part in members), sum(part.rows for part in members)
            yield (*where, index, meta.order.value, meta.schema_id, parts, rows, sum(map(_bytes_of, members)))


def _part_rows(machine: Machine) -> Iterator[Row]:
    for where, batch in _batches(machine):
        if not batch.parts:
            yield (*where, None, None, batch.rows, 0, None, None)
        for index, (meta, members) in _runs(batch):
            for part in _with_listed(machine, members):
                yield (*where, index, meta.order.value, part.rows, _bytes_of(part), part.diffs_sum, _place(part))


def _batches(machine: Machine) -> Iterator[tuple[tuple[str, int, str], HollowBatch]]:
    for spine_batch in machine.refresh().trace.spine_batches():
        for batch_id, batch in spine_batch.parts:
            yield (str(spine_batch.id), spine_batch.level, f"{batch_id} {batch.desc}"), batch


def _runs(batch: HollowBatch) -> Iterable[tuple[int, tuple[RunMeta, tuple[RunPart, ...]]]]:
    return enumerate(batch.runs()) if batch.parts else ()


def _with_listed(machine: Machine, members: Iterable[RunPart]) -> Iterator[RunPart]:
    """The members of a run. After each hollow run come the parts that it lists."""
    for member in members:
        yield member
        if isinstance(member, HollowRun):
            yield from _with_listed(machine, listed(machine, member))


def _place(part: RunPart) -> str:
    if isinstance(part, InlinePart):
        return "inline"
    return f"{part.key} lists {part.part_count} parts" if isinstance(part, HollowRun) else part.key


def _bytes_of(part: RunPart) -> int:
    return part.hollow_bytes + part.inline_bytes


def _version_rows(machine: Machine) -> Iterator[Row]:
    for entry in machine.versions.fetch_all_live_diffs(machine.shard_id):
        diff = decode_state_diff(entry.data, key=f"{machine.shard_id} {entry.seqno}")
        changed = {name: len(getattr(diff, name)) for name in _DIFF_FIELDS if getattr(diff, name)}
        yield int(entry.seqno), diff.walltime_ms, len(entry.data), diff.latest_rollup_key, list(changed.items())


def _hold_rows(machine: Machine) -> Iterator[Row]:
    schema = SCHEMAS["holds"]
    for hold in holds_of(machine).holds:
        values = hold.to_json()
        for name in ("since", "upper"):
            values[name] = _time(Antichain(values[name]))
        yield tuple(values[name] for name in schema.names)


def _usage_rows(machine: Machine) -> Iterator[Row]:
    yield astuple(referenced_usage(machine))


def _time(frontier: Antichain) -> int | None:
    return None if frontier.time is None else min(frontier.time, TIME_MAX)


_ROWS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "batches": _batch_rows,
    "runs": _run_rows,
    "parts": _part_rows,
    "versions": _version_rows,
    "holds": _hold_rows,
    "usage": _usage_rows,
}
