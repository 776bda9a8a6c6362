"""Updates told as changes: a row was inserted or deleted, or one value of a key became another.

Owns the words. Pure, and vectorised over the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.rows.columns import compare_adjacent, flatten_columns
from persist_engine.rows.schema import Schema

INSERT, DELETE, UPDATE_BEFORE, UPDATE_AFTER = "insert", "delete", "update_before", "update_after"
#: By their codes, as the column `change` holds them: 2 x (part of an update) + (an addition).
_WORDS = (DELETE, INSERT, UPDATE_BEFORE, UPDATE_AFTER)
#: Rows that one table of updates may become: a row may be there any number of times.
ROWS_MAX = 1 << 31
CHANGE_TYPE = pa.dictionary(pa.int8(), pa.string())


def changes_schema(schema: Schema) -> pa.Schema:
    """Schema of the tables of `changes_of`."""
    return pa.schema(
        [("key", schema.key_type), ("val", schema.val_type), ("time", pa.int64()), ("change", CHANGE_TYPE)]
    )


def changes_of(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Consolidated updates, sorted by (key, val, time) over all `tables`, as tables of changes sorted by (key, time): key,
    val, time, change. A row whose diff is n or -n comes n times.

    Where one key loses and gains values at one time, they are `update_before` and `update_after`, the former first;
    otherwise rows are `delete` or `insert`. Holds, beside a table, the rows of one key.
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
            yield _told(pa.concat_tables([*held, table.slice(0, first)]))
        if last > first:
            yield _told(table.slice(first, last - first))
        held = [table.slice(last)]
    if held:
        yield _told(pa.concat_tables(held))


def _keys(table: pa.Table) -> list[pa.ChunkedArray]:
    return flatten_columns(table, ("key",))


def _same_key(before: pa.Table, after: pa.Table) -> bool:
    """Whether the last row of one and the first of the other have the same key."""
    pair = pa.concat_tables([before.slice(before.num_rows - 1), after.slice(0, 1)])
    return bool(compare_adjacent(_keys(pair), 2)[1][0])


def _last_key_start(table: pa.Table) -> int:
    """Where the rows of the last key begin."""
    _, same = compare_adjacent(_keys(table), table.num_rows)
    breaks = np.flatnonzero(~same)
    return int(breaks[-1]) + 1 if len(breaks) else 0


def _first_key_end(before: pa.Table, table: pa.Table) -> int:
    """How many rows at the beginning of `table` have the key of the last row of `before`."""
    if not _same_key(before, table):
        return 0
    _, same = compare_adjacent(_keys(table), table.num_rows)
    return int(np.argmin(same)) + 1  # there is a second key


def _told(table: pa.Table) -> pa.Table:
    rows = table.num_rows
    _, same = compare_adjacent(_keys(table), rows)
    key_numbers = np.concatenate([[0], np.cumsum(~same)])
    times = table.column("time").to_numpy()
    diffs = table.column("diff").to_numpy()
    added = diffs > 0
    order = np.lexsort((added, times, key_numbers))  # stable: values stay in order within
    key_numbers, times, added = key_numbers[order], times[order], added[order]
    is_first = np.ones(rows, dtype=np.bool_)
    is_first[1:] = (key_numbers[1:] != key_numbers[:-1]) | (times[1:] != times[:-1])
    starts = np.flatnonzero(is_first)
    # Deletions come first, so a group that begins with one and ends with an addition has both.
    ends = np.append(starts[1:], rows) - 1
    is_update = np.repeat(~added[starts] & added[ends], ends - starts + 1)
    codes = (2 * is_update + added).astype(np.int8)
    copies = np.abs(diffs[order])
    total = float(np.abs(diffs.astype(np.float64)).sum())  # of the least int64 `copies` is negative
    if total > ROWS_MAX:
        raise InvalidUsage(f"{rows} updates are {total:.0f} changes, told row by row: take them as updates")
    if (copies != 1).any():
        order, codes = np.repeat(order, copies), np.repeat(codes, copies)
    picked = table.select(["key", "val", "time"]).combine_chunks().take(pa.array(order))
    return picked.append_column("change", pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(_WORDS)))
