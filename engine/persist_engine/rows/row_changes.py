"""Updates as row changes: a row was inserted or deleted, or one value of a key was replaced by another.

This module owns the names of the changes. Pure, vectorised over the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.columns import compare_adjacent, flatten_columns
from persist_engine.rows.schema import Schema

INSERT, DELETE, UPDATE_BEFORE, UPDATE_AFTER = "insert", "delete", "update_before", "update_after"
#: The names by their codes. A code is 2 for a part of an update (else 0), plus 1 for an addition.
_WORDS = (DELETE, INSERT, UPDATE_BEFORE, UPDATE_AFTER)
#: The limit on the changes to which one table of updates may expand. Otherwise a row with a great multiplicity would expand without bound.
ROWS_MAX = 1 << 31
CHANGE_TYPE = pa.dictionary(pa.int8(), pa.string())


def changes_schema(schema: Schema) -> pa.Schema:
    """The schema of the tables that `changes_of` yields."""
    return pa.schema(
        [("key", schema.key_type), ("val", schema.val_type), ("time", pa.int64()), ("change", CHANGE_TYPE)]
    )


def changes_of(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Turns consolidated updates, sorted by (key, val, time) across all `tables`, into tables of changes sorted by (key, time), with the
    columns key, val, time, change. A row with diff n or -n appears n times.

    When a key loses and gains values at one time, the changes are `update_before` and `update_after`, in this order. Other changes are
    `delete` or `insert`. Holds one table and the rows of one key in memory.
    """
    held: list[pa.Table] = []
    for table in tables:
        last = _last_key_start(table)
        if last == 0 and held and _same_key(held[-1], table):
            held.append(table)
            continue
        first = 0
        if held:
            first = 0 if last == 0 else _first_key_end(held[-1], table)
            yield _row_changes(pa.concat_tables([*held, table.slice(0, first)]))
        if last > first:
            yield _row_changes(table.slice(first, last - first))
        held = [table.slice(last)]
    if held:
        yield _row_changes(pa.concat_tables(held))


def _keys(table: pa.Table) -> list[pa.ChunkedArray]:
    return flatten_columns(table, ("key",))


def _same_key(before: pa.Table, after: pa.Table) -> bool:
    """Whether the last row of `before` and the first row of `after` have the same key."""
    pair = pa.concat_tables([before.slice(before.num_rows - 1), after.slice(0, 1)])
    return bool(compare_adjacent(_keys(pair), 2)[1][0])


def _last_key_start(table: pa.Table) -> int:
    """The index at which the rows of the last key begin."""
    _, same = compare_adjacent(_keys(table), table.num_rows)
    breaks = np.flatnonzero(~same)
    return int(breaks[-1]) + 1 if len(breaks) else 0


def _first_key_end(before: pa.Table, table: pa.Table) -> int:
    """The number of rows at the start of `table` that have the key of the last row of `before`."""
    if not _same_key(before, table):
        return 0
    _, same = compare_adjacent(_keys(table), table.num_rows)
    return int(np.argmin(same)) + 1  # the caller has checked that there is a second key


def _row_changes(table: pa.Table) -> pa.Table:
    rows = table.num_rows
    _, same = compare_adjacent(_keys(table), rows)
    key_numbers = np.concatenate([[0], np.cumsum(~same)])
    times = table.column("time").to_numpy()
    diffs = table.column("diff").to_numpy()
    added = diffs > 0
    order = np.lexsort((added, times, key_numbers))  # lexsort is stable: values keep their order within a group
    key_numbers, times, added = key_numbers[order], times[order], added[order]
    is_first = np.ones(rows, dtype=np.bool_)
    is_first[1:] = (key_numbers[1:] != key_numbers[:-1]) | (times[1:] != times[:-1])
    starts = np.flatnonzero(is_first)
    # Deletions come first: a group that starts with a deletion and ends with an addition has both.
    ends = np.append(starts[1:], rows) - 1
    is_update = np.repeat(~added[starts] & added[ends], ends - starts + 1)
    codes = (2 * is_update + added).astype(np.int8)
    copies = np.abs(diffs[order])
    total = float(np.abs(diffs.astype(np.float64)).sum())  # in float64, because abs of the least int64 is negative
    if total > ROWS_MAX:
        raise InvalidUsage(f"{rows} updates are {total:.0f} row changes, more than {ROWS_MAX}: read them as updates")
    if (copies != 1).any():
        order, codes = np.repeat(order, copies), np.repeat(codes, copies)
    picked = table.select(["key", "val", "time"]).combine_chunks().take(pa.array(order))
    return picked.append_column("change", pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(_WORDS)))
