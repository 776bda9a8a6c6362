"""Computes the updates that give each of many keys the value of its command, from what the shard holds of these keys. This is a merge of
two sorted sides, vectorised over Arrow. It keeps no state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated
from persist_engine.dataflow.upsert.last_of_key import Positions, ranked
from persist_engine.rows.columns import Bools, flat_columns, same_rows
from persist_engine.rows.order import key_bytes
from persist_engine.rows.sorting import order_and_equal
from persist_engine.rows.updates import rows_at


class NotOneValue(InvariantViolated):
    """The shard does not hold exactly one value of a key. `key` is an array of this key alone, `held` the number of its values, and `total`
    the sum of their diffs.
    """

    def __init__(self, key: pa.Array, held: int, total: int) -> None:
        super().__init__(f"the shard holds {held} values of key {str(key[0])[:200]} with a total diff of {total}")
        self.key, self.held, self.total = key, held, total


def updates_against(
    commands: pa.Table, held: Iterable[pa.RecordBatch], *, keeps_greater: str | None = None
) -> Iterator[pa.Table]:
    """The updates `key`, `val`, `diff`, after which each key of `commands` holds its value and no other. There are none for a key that
    holds its value already. Tables may have no rows, and are not consolidated.

    `commands` has the columns `key` (each key once, in order), `val`, `deleted` (remove the key, whatever `val` is), and `order`. `held`
    yields the rows `key`, `val`, `diff` of the shard at one time, consolidated and in order, at least for the commands' keys.
    `keeps_greater` names a field of the value, of the type of `order`: a key keeps its value if this field is greater than the command's
    order. Null is less than all.

    Raises NotOneValue for a key unless the shard holds one value of it with diff 1, or none. Reads `held` table by table, and no further
    than the last command. Holds one table of it, and the updates for the commands within its keys.
    """
    done, left = 0, None
    for batch in held:
        rows = (
            pa.Table.from_batches([batch]) if left is None else pa.concat_tables([left, pa.Table.from_batches([batch])])
        )
        # The last key of the table may have more rows in the next one.
        last = key_bytes(rows, rows.num_rows - 1)
        end, whole = _rows_before(commands, last, done), _rows_before(rows, last, 0)
        if end > done:
            yield _decided(commands.slice(done, end - done), rows.slice(0, whole), keeps_greater)
        done, left = end, rows.slice(whole)
        if done == commands.num_rows:
            return
    yield _decided(commands.slice(done), _no_rows(commands) if left is None else left, keeps_greater)


def _rows_before(rows: pa.Table, key: bytes, start: int) -> int:
    """The number of rows of the ordered table with lesser keys. It is at least `start`."""
    return bisect_left(range(rows.num_rows), key, lo=start, key=lambda row: key_bytes(rows, row))


def _no_rows(commands: pa.Table) -> pa.Table:
    empty = commands.select(["key", "val"]).slice(0, 0)
    return empty.append_column("diff", pa.chunked_array([pa.array([], pa.int64())]))


def _decided(commands: pa.Table, held: pa.Table, keeps_greater: str | None) -> pa.Table:
    """The updates of `commands`. `held` must have all rows of their keys."""
    command_of = _commands_of(commands, held)
    mine = np.flatnonzero(command_of >= 0)
    command_of, diffs = command_of[mine], held.column("diff").to_numpy()[mine]
    _check_values(commands, command_of, diffs)
    deleted: Bools = commands.column("deleted").to_numpy()
    is_wanted = np.ones(commands.num_rows, np.bool_)
    if len(mine):
        theirs, ours = rows_at(held, mine), rows_at(commands, command_of)
        is_kept = same_rows(ours, theirs, ("val",)) & ~deleted[command_of]
        if keeps_greater is not None:
            is_kept |= _surpasses(theirs, ours, keeps_greater)
        is_wanted[command_of[is_kept]] = False
        retracted = theirs.filter(pa.array(~is_kept)).select(["key", "val"])
    else:
        retracted = held.slice(0, 0).select(["key", "val"])
    given = is_wanted & ~deleted
    added = commands.select(["key", "val"])
    added = added if given.all() else rows_at(added, np.flatnonzero(given))
    signs = np.repeat(np.array([-1, 1]), [retracted.num_rows, added.num_rows])
    return pa.concat_tables([retracted, added]).append_column("diff", pa.array(signs))


def _commands_of(commands: pa.Table, held: pa.Table) -> Positions:
    """For each row of `held`, the position of the command of its key; -1 if there is none."""
    count = commands.num_rows
    if not held.num_rows:
        return np.zeros(0, np.int64)
    kind = commands.schema.field("key").type
    keys = pa.chunked_array([*commands.column("key").chunks, *held.column("key").chunks], kind)
    rows = count + held.num_rows
    sorting, equal = order_and_equal(flat_columns(pa.table({"key": keys}), ("key",)), rows, is_in_runs=True)
    group = np.empty(rows, np.int64)
    group[sorting] = np.cumsum(np.append(0, ~equal))
    command_of = np.full(rows, -1, np.int64)
    command_of[group[:count]] = np.arange(count)
    return command_of[group[count:]]


def _check_values(commands: pa.Table, command_of: Positions, diffs: Positions) -> None:
    """Raises NotOneValue for the first command whose key has rows, but not exactly one value with diff 1."""
    if (diffs == 1).all() and (command_of[1:] != command_of[:-1]).all():
        return
    held = np.bincount(command_of, minlength=commands.num_rows)
    totals = np.zeros(commands.num_rows, np.int64)
    np.add.at(totals, command_of, diffs)
    bad = int(np.flatnonzero((held > 1) | ((held == 1) & (totals != 1)))[0])
    raise NotOneValue(commands.column("key").slice(bad, 1).combine_chunks(), int(held[bad]), int(totals[bad]))


def _surpasses(theirs: pa.Table, ours: pa.Table, field: str) -> Bools:
    """Whether `field` of each of the shard's values is greater than the order of the command at the same place."""
    held, orders = pc.struct_field(theirs.column("val"), [field]), ours.column("order")
    ranks = ranked(pa.chunked_array([*held.chunks, *orders.chunks], held.type))
    greater: Bools = ranks[: len(held)] > ranks[len(held) :]
    return greater
