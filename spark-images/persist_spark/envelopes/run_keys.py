"""The keys of a run, by which the landing finds the changes of other writers that concern the run. Knows no Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from persist_engine import consolidate, empty_struct

#: The most keys that a driver compares with the changes of other writers. If a run has more, each change within the range of its keys
#: counts as a change of one of them.
KEYS_MAX = 1 << 19

Integers = npt.NDArray[np.int64]


@dataclass
class RunKeys:
    """The keys that a run names. For one thread."""

    count: int
    fetch: Callable[[], pa.Array]
    """Brings the keys to the driver, as structs, each once. Called at most once, when a change may concern the run."""
    where: tuple[tuple[str, str, Any], ...] | None
    """A condition on the key that all keys satisfy, as readers accept it."""
    is_contestable: bool
    """Whether a value of another writer wins if its order is greater. A landing cannot retract such a value."""
    _keys: pa.Array | None = field(default=None, init=False)

    @property
    def may_retract(self) -> bool:
        """Whether a landing may retract the rows that `among` returns. Otherwise the run must compare its rows with the shard again."""
        return not self.is_contestable and self.count <= KEYS_MAX

    def among(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows whose key the run names. If the run has more than KEYS_MAX keys, all rows. The engine decides which keys are equal."""
        if rows.num_rows == 0 or self.count > KEYS_MAX:
            return rows
        if self._keys is None:
            self._keys = self.fetch()
        mine, others = len(self._keys), rows.num_rows
        key = pa.chunked_array([self._keys, rows.column("key")])
        # SUBTLE: both tables are sorted by key. `by_row` has one row for each key of the run and for each row of the others. `by_key` has
        # one row for each key: its diff is odd if the run names the key, and half of it is the number of the others' rows. So the diff
        # gives the number of rows of `by_row` with this key.
        positions = np.concatenate([np.full(mine, -1), np.arange(others)])
        by_row = consolidate(_updates(key, positions, np.ones(mine + others, np.int64)))
        by_key = consolidate(_updates(key, np.zeros(mine + others, np.int64), np.repeat([1, 2], [mine, others])))
        sums = by_key.column("diff").to_numpy()
        is_mine = np.repeat(sums % 2 == 1, (sums + 1) // 2)
        found = by_row.column("time").to_numpy()[is_mine]
        return rows.take(pa.array(np.sort(found[found >= 0])))


def _updates(key: pa.ChunkedArray, times: Integers, diffs: Integers) -> pa.Table:
    columns = {"key": key, "val": empty_struct(len(key)), "time": pa.array(times), "diff": pa.array(diffs)}
    return pa.table(columns)
