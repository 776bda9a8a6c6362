"""The history of a table: its versions in the log that changed what a reader sees, newest first.

The log goes back to the oldest version that maintenance has kept. Which times are readable does not depend on that: `Table.describe` shows
the earliest one.
"""

from __future__ import annotations

import pyarrow as pa

from persist_engine.base.errors import Unavailable
from persist_engine.model.batch import HollowBatch
from persist_engine.model.diff.field_diff import Delete
from persist_engine.model.diff.state_diff import StateDiff
from persist_engine.model.frontier import Antichain
from persist_engine.model.state import COMMIT_INFO
from persist_engine.shard.machine import Machine
from persist_engine.table.notes import commit_info
from persist_engine.table.notes.transactions import SINK_PREFIX, version_of
from persist_engine.work.audit.walk import VersionWalk, WalkEnd

SCHEMA = pa.schema(
    [
        ("version", pa.int64()),
        ("committed", pa.timestamp("ms", tz="UTC")),
        ("operation", pa.string()),
        ("time", pa.int64()),
        ("updates", pa.int64()),
        ("bytes", pa.int64()),
        ("txn", pa.string()),
        ("commit_info", pa.string()),
    ]
)
#: The limit on attempts. Maintenance overtakes a walk when it truncates the log; each attempt begins at a later version.
_ATTEMPTS_MAX = 8

_Row = tuple[int, int, str, int | None, int | None, int | None, str | None, str | None]


def history_of(machine: Machine, limit: int | None) -> pa.Table:
    """At most `limit` versions, newest first, with the columns of SCHEMA. `operation` is append, upsert, delete or overwrite for writes of
    tables, write for those of other programs (sinks, handles), or compaction, schema or retention. A write of rows has its time, the number
    of updates that it added (an update of a row counts as two) and their bytes, its transaction, and its `commit_info` as JSON. Walks all
    live versions.
    """
    for _ in range(_ATTEMPTS_MAX):
        rows = _walked(machine)
        if rows is not None:
            chosen = list(reversed(rows))[:limit]
            columns = zip(*chosen, strict=True) if chosen else ((),) * len(SCHEMA)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
            return pa.Table.from_arrays(arrays, schema=SCHEMA)
    raise Unavailable(f"maintenance keeps truncating the log of shard {machine.shard_id}: call again")


def _walked(machine: Machine) -> list[_Row] | None:
    """The rows of the history; None when maintenance overtook the walk."""
    rows: list[_Row] = []
    walk = VersionWalk(machine)
    upper = walk.state.trace.upper
    while isinstance(diff := walk.advance(), StateDiff):
        row = _row(diff, upper, walk.state.trace.upper)
        upper = walk.state.trace.upper
        if row is not None:
            rows.append(row)
    return None if diff is WalkEnd.OVERTAKEN else rows


def _row(diff: StateDiff, before: Antichain, upper: Antichain) -> _Row | None:
    head = (int(diff.seqno_to), diff.walltime_ms)
    if before != upper:
        new = [batch for batch in _batches(diff) if before <= batch.desc.lower]
        updates, size = sum(batch.rows for batch in new), sum(batch.size_bytes + batch.inline_bytes for batch in new)
        time = None if upper.is_empty() else upper.newest_complete
        (operation, info), txn = _noted(diff), _transaction(diff)
        if upper.time == 1 and not updates and operation is None and info is None and txn is None:
            return None  # see model.queries.written_upper
        return (*head, operation or "write", time, updates, size, txn, info)
    if diff.schemas:
        return (*head, "schema", None, None, None, None, None)
    if diff.retain_ms:
        return (*head, "retention", None, None, None, None, None)
    if diff.hollow_batches or diff.legacy_batches:
        return (*head, "compaction", None, None, None, None, None)
    return None


def _batches(diff: StateDiff) -> list[HollowBatch]:
    found = [change.to for change in diff.hollow_batches if not isinstance(change, Delete)]
    return found + [change.key for change in diff.legacy_batches if not isinstance(change, Delete)]


def _transaction(diff: StateDiff) -> str | None:
    for change in diff.progress:
        if not isinstance(change, Delete) and change.key.startswith(SINK_PREFIX):
            return f"{change.key.removeprefix(SINK_PREFIX)} {version_of(change.key, change.to.token)}"
    return None


def _noted(diff: StateDiff) -> tuple[str | None, str | None]:
    found = (
        change.to.token for change in diff.progress if not isinstance(change, Delete) and change.key == COMMIT_INFO
    )
    return next(map(commit_info.read, found), (None, None))
