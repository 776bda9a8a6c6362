"""Refresh schedules: a sink that shows its input only at certain times (spec 17.7). Pure.

Every time and every frontier is rounded up to the next refresh. Invariants: rounding is monotone and never decreases, so
rounded frontiers still bound rounded times; a time that is a refresh does not change. After the last refresh the frontier is
empty: the collection is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import DATA_TIME_MAX, EMPTY, Antichain


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Refreshes at `aligned_to` and at every multiple of `every` before and after it (None: at neither), and at each time of `at`.
    Times are the collection's own: milliseconds, unless the sink defines otherwise.
    """

    every: int | None = None
    aligned_to: int = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.every is None and not self.at:
            raise InvalidUsage("a refresh schedule needs `every` or `at`")
        if self.every is not None and not 1 <= self.every <= DATA_TIME_MAX:
            raise InvalidUsage(f"refresh every {self.every}: expected a period in [1, {DATA_TIME_MAX}]")
        for time in (self.aligned_to, *self.at):
            if not 0 <= time <= DATA_TIME_MAX:
                raise InvalidUsage(f"refresh at {time}: expected a time in [0, {DATA_TIME_MAX}]")
        object.__setattr__(self, "at", tuple(sorted(set(self.at))))

    @property
    def last(self) -> int | None:
        """The last refresh; None if refreshes never end."""
        return self.at[-1] if self.every is None else None

    def round_up(self, time: int) -> int | None:
        """Return the first refresh at or past `time`; None if there is none at a time that data can have."""
        candidates = [at for at in self.at if at >= time]
        if self.every is not None:
            candidates.append(time + (self.aligned_to - time) % self.every)
        rounded = min(candidates, default=None)
        return None if rounded is None or rounded > DATA_TIME_MAX else rounded

    def last_before(self, time: int) -> int | None:
        """Return the last refresh before `time`; None if there is none."""
        candidates = [at for at in self.at if at < time]
        if self.every is not None and time > 0:
            candidates.append(time - 1 - (time - 1 - self.aligned_to) % self.every)
        found = max(candidates, default=-1)
        return found if found >= 0 else None

    def frontier(self, frontier: Antichain) -> Antichain:
        """Return a bound for rounded times: if no time is before `frontier`, no rounded time is before the result."""
        rounded = None if frontier.time is None else self.round_up(frontier.time)
        return EMPTY if rounded is None else Antichain.of(rounded)

    def apply(self, updates: pa.Table) -> pa.Table:
        """Return the updates at the refreshes that show them. Updates that no refresh will show are dropped."""
        if not updates.num_rows:
            return updates
        index = updates.schema.get_field_index("time")
        rounded = self._rounded(updates.column(index).to_numpy())
        shown = rounded >= 0
        out = updates.set_column(index, updates.schema.field(index), pa.chunked_array([pa.array(rounded)]))
        return out if shown.all() else out.filter(pa.array(shown))

    def _rounded(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Round up each time; -1 for a time past the last refresh."""
        never = np.int64(-1)
        rounded = np.full(len(times), never)
        if self.at:
            at = np.array([*self.at, never], dtype=np.int64)
            rounded = at[np.searchsorted(at[:-1], times, side="left")]
        if self.every is not None:
            step = (np.int64(self.aligned_to) - times) % np.int64(self.every)
            periodic = np.where(step <= DATA_TIME_MAX - times, times + step, never)
            both = (rounded >= 0) & ((periodic < 0) | (rounded < periodic))
            rounded = np.where(both, rounded, periodic)
        return rounded
