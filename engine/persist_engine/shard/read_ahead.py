"""Reading runs ahead of the merge: blobs in threads that wait for the store, rows in threads that decode them.

Owns what is under way at once, and the budget of bytes fetched before they are asked for (spec 13.7). Knows nothing of
which rows readers want.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from persist_engine.codec import updates
from persist_engine.model.batch import HollowPart, Part
from persist_engine.model.frontier import Description
from persist_engine.shard.consolidate import Result, Submit, consolidated, later, run_bytes, window_bytes
from persist_engine.shard.part_source import PartSource, PartToRead

#: Blobs being fetched at once by one reader: enough to hide an object store's latency behind a merge on one core.
FETCH_THREADS = 4
#: Threads that decode and merge for one reader, where the machine has as many cores.
WORKER_THREADS_MAX = 8
#: Row groups of one run decoded at once when there is no other run to decode meanwhile.
GROUPS_AHEAD = 4
#: Rows are decoded in tables of no less: smaller ones cost more in calls than they save in memory.
TABLE_BYTES_MIN = 256 << 10


@dataclass(frozen=True, slots=True)
class RunToRead:
    """Parts to be read one after the other, under their batch's description. `is_sorted`: rows never go back over the
    run.
    """

    desc: Description
    parts: tuple[Part, ...]
    is_sorted: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """What becomes of decoded rows before they are merged."""

    filtered: Callable[[pa.Table], pa.Table]
    """The rows that the reader asked for, with their times as it sees them."""

    def group(self, part: PartToRead, group: int, *, use_threads: bool = False) -> pa.Table:
        """One group of a sorted run's part."""
        return consolidated(self.filtered(part.read_group(group, use_threads=use_threads)))

    def tables(self, part: PartToRead, table_bytes: int) -> Iterator[pa.Table]:
        """A sorted run's part in order."""
        return (consolidated(self.filtered(table)) for table in part.stream(table_bytes))

    def whole(self, part: PartToRead) -> pa.Table:
        """A part in an order that is not ours, sorted."""
        groups = [self.filtered(part.read_group(group)) for group in range(part.groups)]
        return updates.consolidate(pa.concat_tables(groups))


class Workers:
    """Threads that decode and merge; without them everything is done when its result is asked for."""

    def __init__(self, *, is_worthwhile: bool) -> None:
        threads = min(WORKER_THREADS_MAX, pa.cpu_count())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="persist-merge") if is_worthwhile else None

    @property
    def are_there(self) -> bool:
        return self._pool is not None

    def submit(self, call: Callable[..., Any], *args: Any) -> Result:
        """See consolidate.Submit."""
        return later(call, *args) if self._pool is None else self._pool.submit(call, *args)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Decoded:
    """What a worker made. `may_go_on`: there may be more where it came from."""

    table: pa.Table | None
    may_go_on: bool


class RunReader(Iterator[pa.Table]):
    """The rows of one run, decoded ahead by workers: of a run that is read alone several groups at once, else one table
    after the other. `memory_bytes` is what the merge of all runs may hold.
    """

    def __init__(self, ahead: FetchAhead, index: int, shape: Shape, submit: Submit, memory_bytes: int) -> None:
        self._ahead, self._run, self._index = ahead, ahead.runs[index], index
        self._shape, self._submit = shape, submit
        self._rows = sum(part.rows for part in self._run.parts)
        self._run_bytes = run_bytes(memory_bytes, len(ahead.runs))
        self._table_bytes = max(TABLE_BYTES_MIN, window_bytes(memory_bytes, len(ahead.runs)))
        self._groups_ahead = max(1, GROUPS_AHEAD // len(ahead.runs))
        # Two more are with the merge.
        self._group_bytes_max = memory_bytes // (len(ahead.runs) * (self._groups_ahead + 2))
        self._calls_max = 1
        self._may_go_on = False
        self._calls = self._plan()
        self._decoding: deque[Result] = deque()

    def begin(self) -> None:
        """Have the first tables decoded."""
        while len(self._decoding) < self._calls_max:
            call = next(self._calls, None)
            if call is None:
                return
            self._decoding.append(self._submit(call))

    def __next__(self) -> pa.Table:
        while True:
            self.begin()
            if not self._decoding:
                raise StopIteration
            decoded: _Decoded = self._decoding.popleft().result()
            self._may_go_on = decoded.may_go_on
            self.begin()
            if decoded.table is not None:
                return decoded.table

    def _plan(self) -> Iterator[Callable[[], _Decoded]]:
        """What workers are to do, in order."""
        for position, part in enumerate(self._run.parts):
            data = self._ahead.take(self._index, position)
            if self._groups_ahead > 1 and self._run.is_sorted:
                opened = self._ahead.source.open(data, part, self._run.desc)
                if opened.group_bytes <= self._group_bytes_max:
                    self._calls_max = self._groups_ahead
                    yield from (partial(self._group, opened, group) for group in range(opened.groups))
                    continue
            # One after the other: the next is planned when the one before is known to have left something.
            self._calls_max = 1
            tables = self._tables(data, part)
            self._may_go_on = True
            while self._may_go_on:
                yield partial(next, tables, _Decoded(None, may_go_on=False))

    def _group(self, opened: PartToRead, group: int) -> _Decoded:
        return _Decoded(self._shape.group(opened, group, use_threads=opened.groups == 1), may_go_on=False)

    def _tables(self, data: bytes, part: Part) -> Iterator[_Decoded]:
        opened = self._ahead.source.open(data, part, self._run.desc)
        if not self._run.is_sorted:
            yield _Decoded(self._shape.whole(opened), may_go_on=False)
        elif opened.row_bytes * self._rows <= self._run_bytes:
            # All of the run may be in memory: to decode it piece by piece would only take longer.
            for group in range(opened.groups):
                yield _Decoded(self._shape.group(opened, group), may_go_on=group + 1 < opened.groups)
        else:
            for table in self._shape.tables(opened, self._table_bytes):
                yield _Decoded(table, may_go_on=True)


class FetchAhead:
    """Fetches blobs before they are asked for: the first part of every run, then the second, ... within a budget of
    bytes.

    What is asked for and not yet under way is fetched at once, budget or not: the merge cannot go on without it.
    Not thread-safe: one reader.
    """

    def __init__(
        self,
        source: PartSource,
        runs: Sequence[RunToRead],
        *,
        budget_bytes: int,
        on_fetched: Callable[[int], None] | None = None,
    ) -> None:
        self.source = source
        self.runs = runs
        self._budget_bytes = budget_bytes
        self._on_fetched = on_fetched
        self._held_bytes = 0
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="persist-fetch")
        self._pending: dict[tuple[int, int], Future[bytes]] = {}
        longest = max((len(run.parts) for run in runs), default=0)
        rounds = ((index, at) for at in range(longest) for index, run in enumerate(runs) if at < len(run.parts))
        self._queue = iter([slot for slot in rounds if isinstance(self._part(slot), HollowPart)])
        self._next = next(self._queue, None)
        self._taken: set[tuple[int, int]] = set()
        self._fill()
        if self._next is not None:
            source.metrics.count("prefetch_over_budget", path=source.path)

    def take(self, index: int, position: int) -> bytes:
        """The bytes of part `position` of run `index`; each may be taken once."""
        slot = (index, position)
        self._taken.add(slot)
        future = self._pending.pop(slot, None)
        if future is None:
            if isinstance(self._part(slot), HollowPart):
                self._count("skipped")
            data = self.source.get(self._part(slot), self.runs[index].desc)
        else:
            self._count("ready" if future.done() else "waited")
            data = future.result()
            self._held_bytes -= self._part(slot).hollow_bytes
        self._fill()
        if self._on_fetched is not None:
            self._on_fetched(len(data))
        return data

    def close(self) -> None:
        """Stop fetching. What is under way ends in the background (waiting could mean: until the store is back).
        Idempotent.
        """
        self._count("wasted", len(self._pending))
        self._pending.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, outcome: str, parts: int = 1) -> None:
        self.source.metrics.count("prefetch_parts", parts, path=self.source.path, outcome=outcome)

    def _part(self, slot: tuple[int, int]) -> Part:
        return self.runs[slot[0]].parts[slot[1]]

    def _fill(self) -> None:
        while self._next is not None:
            slot = self._next
            if slot not in self._taken:
                part = self._part(slot)
                if self._held_bytes + part.hollow_bytes > self._budget_bytes:
                    return
                self._held_bytes += part.hollow_bytes
                self._pending[slot] = self._pool.submit(self.source.get, part, self.runs[slot[0]].desc)
            self._next = next(self._queue, None)
