"""Reads runs ahead of the merge: some threads fetch blobs from the store, and others decode rows.

This module owns the concurrency and the budget of bytes fetched ahead (spec 13.7). It does not know which rows readers
want.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from persist_engine.model.batch import HollowPart, Part
from persist_engine.model.frontier import Description
from persist_engine.parts.consolidate import Result, Submit, consolidated, later, run_bytes, window_bytes
from persist_engine.parts.source import Fetched, PartSource, PartToRead
from persist_engine.rows import updates

#: The number of blobs that one reader fetches at once. It is enough to hide an object store's latency behind a merge on one core.
FETCH_THREADS = 4
#: The maximum number of threads that decode and merge for one reader. There are never more than the machine has cores.
WORKER_THREADS_MAX = 8
#: The number of row groups of one run that are decoded at once when no other run is being read.
GROUPS_AHEAD = 4
#: The limit on the bytes of parts being opened ahead; one part may exceed it. Several small parts are opened and
#: decoded at once.
STARTING_BYTES_MAX = 4 << 20
#: The minimum size of decoded tables. Smaller tables cost more in calls than they save in memory.
TABLE_BYTES_MIN = 256 << 10


class RegisteredPart(NamedTuple):
    """A part and the description of its batch. `is_balanced` says whether it belongs to a balanced run."""

    desc: Description
    part: Part
    is_balanced: bool = False


@dataclass(frozen=True, slots=True)
class RunToRead:
    """Parts to read one after the other. With `is_sorted`, rows never go backwards over the run."""

    members: tuple[RegisteredPart, ...]
    is_sorted: bool

    @classmethod
    def of(cls, desc: Description, parts: Iterable[Part], *, is_sorted: bool, is_balanced: bool = False) -> RunToRead:
        """A run of parts of one batch."""
        return cls(tuple(RegisteredPart(desc, part, is_balanced) for part in parts), is_sorted)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in reading order."""
        return tuple(member.part for member in self.members)


@dataclass(frozen=True, slots=True)
class Shape:
    """How decoded rows are transformed before the merge."""

    filtered: Callable[[pa.Table], pa.Table]
    """Returns the rows that the reader wants, with their times as the reader sees them."""
    seen: Callable[[int], int]
    """Maps a time to its value after `filtered`. The time of an unwanted row maps to itself."""
    without_settled: Callable[[pa.Table], pa.Table] | None = None
    """Leaves out rows of a balanced run that add up to zero for the reader."""

    def of(self, member: RegisteredPart) -> Shape:
        """The shape for a part of a sorted run."""
        without_settled, filtered = self.without_settled, self.filtered
        if without_settled is None or not member.is_balanced:
            return self
        return Shape(lambda table: filtered(without_settled(table)), self.seen)

    def group(self, part: PartToRead, group: int, *, use_threads: bool = False) -> pa.Table:
        """One row group of a part of a sorted run."""
        return consolidated(self.filtered(part.read_group(group, seen=self.seen, use_threads=use_threads)))

    def tables(self, part: PartToRead, table_bytes: int) -> Iterator[pa.Table]:
        """A part of a sorted run, in order."""
        return (consolidated(self.filtered(table)) for table in part.stream(table_bytes, seen=self.seen))

    def whole(self, part: PartToRead) -> pa.Table:
        """The rows of a part whose order is not that of this code, sorted."""
        groups = [self.filtered(part.read_group(group, seen=self.seen)) for group in range(part.groups)]
        return updates.consolidate(pa.concat_tables(groups))


class Workers:
    """Threads that decode and merge. Without threads, each call runs when its result is requested."""

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
    """The output of a worker. `then` holds the calls that produce the following rows; they run before the calls of any
    other part.
    """

    table: pa.Table | None
    then: tuple[Callable[[], _Decoded], ...] = ()
    started_bytes: int = 0
    """The size of the part that this call opened."""


@dataclass(slots=True)
class _Task:
    """A call in the queue, and its result once a worker has it."""

    call: Callable[[], _Decoded]
    handed: Result | None = None

    def begin(self, submit: Submit) -> None:
        """Gives the call to a worker, once."""
        if self.handed is None:
            self.handed = submit(self.call)

    def result(self) -> _Decoded:
        """Waits for the worker. Requires `begin`; call it once."""
        assert self.handed is not None
        decoded: _Decoded = self.handed.result()
        return decoded


class RunReader(Iterator[pa.Table]):
    """The rows of one run, decoded ahead by workers. A run that is read alone decodes several groups or small parts at
    once; otherwise it decodes one table after the other. `memory_bytes` is the bound for the merge of all runs.
    """

    def __init__(self, ahead: FetchAhead, index: int, shape: Shape, submit: Submit, memory_bytes: int) -> None:
        self._ahead, self._run, self._index = ahead, ahead.runs[index], index
        self._shape, self._submit = shape, submit
        self._rows = sum(member.part.rows for member in self._run.members)
        self._run_bytes = run_bytes(memory_bytes, len(ahead.runs))
        self._table_bytes = max(TABLE_BYTES_MIN, window_bytes(memory_bytes, len(ahead.runs)))
        self._calls_max = max(1, GROUPS_AHEAD // len(ahead.runs)) if self._run.is_sorted else 1
        # The merge holds two more tables of each run.
        self._group_bytes_max = memory_bytes // (len(ahead.runs) * (self._calls_max + 2))
        self._starting_bytes = 0
        self._plan = self._starts()
        self._tasks: deque[_Task] = deque()

    def begin(self) -> None:
        """Starts to decode the first tables."""
        while len(self._tasks) < self._calls_max and (call := next(self._plan, None)) is not None:
            self._tasks.append(_Task(call))
        for task in itertools.islice(self._tasks, self._calls_max):
            task.begin(self._submit)

    def __next__(self) -> pa.Table:
        while True:
            self.begin()
            if not self._tasks:
                raise StopIteration
            decoded = self._tasks.popleft().result()
            self._starting_bytes -= decoded.started_bytes
            self._tasks.extendleft(_Task(call) for call in reversed(decoded.then))
            self.begin()
            if decoded.table is not None:
                return decoded.table

    @property
    def is_at_end(self) -> bool:
        """Whether the run is known to be exhausted. Does not wait."""
        self.begin()
        return not self._tasks

    def _starts(self) -> Iterator[Callable[[], _Decoded] | None]:
        """Calls that open the parts, in order. Yields None while enough parts are being opened."""
        for position, member in enumerate(self._run.members):
            size_bytes = member.part.hollow_bytes + member.part.inline_bytes
            while self._starting_bytes and self._starting_bytes + size_bytes > STARTING_BYTES_MAX:
                yield None
            data = self._ahead.take(self._index, position)
            self._starting_bytes += size_bytes
            yield partial(self._start, data, member, size_bytes)

    def _start(self, data: Fetched, member: RegisteredPart, size_bytes: int) -> _Decoded:
        opened = self._ahead.source.open(data, member.part, member.desc)
        first = self._first(opened, self._shape.of(member) if opened.is_whole else self._shape)
        return replace(first, started_bytes=size_bytes)

    def _first(self, opened: PartToRead, shape: Shape) -> _Decoded:
        if not self._run.is_sorted:
            return _Decoded(self._shape.whole(opened))
        groups = tuple(partial(self._group, opened, shape, group) for group in range(opened.groups))
        is_ahead = self._calls_max > 1 and opened.group_bytes <= self._group_bytes_max
        if is_ahead and len(groups) > 1:  # several workers can decode them
            return _Decoded(None, groups)
        if is_ahead or opened.row_bytes * self._rows <= self._run_bytes:
            # The whole run fits into memory, so decoding it in pieces would only take longer.
            return replace(groups[0](), then=groups[1:]) if groups else _Decoded(None)
        return self._streamed(shape.tables(opened, self._table_bytes))

    def _group(self, opened: PartToRead, shape: Shape, group: int) -> _Decoded:
        is_alone = opened.groups == 1 and len(self._run.members) == 1 and self._calls_max > 1
        return _Decoded(shape.group(opened, group, use_threads=is_alone))

    def _streamed(self, tables: Iterator[pa.Table]) -> _Decoded:
        table = next(tables, None)
        return _Decoded(table, () if table is None else (partial(self._streamed, tables),))


class FetchAhead:
    """Fetches blobs before they are needed: the first part of every run, then the second, and so on, within a budget of
    bytes.

    A requested blob that is not yet being fetched is fetched at once, even beyond the budget, because the merge cannot
    continue without it. Not thread-safe: it serves one reader.
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
        self._pending: dict[tuple[int, int], Future[Fetched]] = {}
        longest = max((len(run.members) for run in runs), default=0)
        rounds = ((index, at) for at in range(longest) for index, run in enumerate(runs) if at < len(run.members))
        self._queue = iter([slot for slot in rounds if isinstance(self._member(slot).part, HollowPart)])
        self._next = next(self._queue, None)
        self._taken: set[tuple[int, int]] = set()
        self._fill()
        if self._next is not None:
            source.metrics.count("prefetch_over_budget", path=source.path)

    def take(self, index: int, position: int) -> Fetched:
        """The bytes, or the row groups, of part `position` of run `index`. Each part may be taken once."""
        slot = (index, position)
        self._taken.add(slot)
        future = self._pending.pop(slot, None)
        desc, part, _ = self._member(slot)
        if future is None:
            if isinstance(part, HollowPart):
                self._count("skipped")
            data = self.source.get(part, desc)
        else:
            self._count("ready" if future.done() else "waited")
            data = future.result()
            self._held_bytes -= part.hollow_bytes
        self._fill()
        if self._on_fetched is not None:
            self._on_fetched(len(data))
        return data

    def close(self) -> None:
        """Stops fetching. Does not wait for fetches in progress, because that could take until the store recovers. They end in
        the background. Idempotent.
        """
        self._count("wasted", len(self._pending))
        self._pending.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, outcome: str, parts: int = 1) -> None:
        self.source.metrics.count("prefetch_parts", parts, path=self.source.path, outcome=outcome)

    def _member(self, slot: tuple[int, int]) -> RegisteredPart:
        return self.runs[slot[0]].members[slot[1]]

    def _fill(self) -> None:
        while self._next is not None:
            slot = self._next
            if slot not in self._taken:
                desc, part, _ = self._member(slot)
                if self._held_bytes + part.hollow_bytes > self._budget_bytes:
                    return
                self._held_bytes += part.hollow_bytes
                self._pending[slot] = self._pool.submit(self.source.get, part, desc)
            self._next = next(self._queue, None)
