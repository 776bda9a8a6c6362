"""CorrectionBuffer: desired minus persisted, by time (spec 17.6). Pure; the shell supplies spilling and the laws of updates.

Updates lie in chains by the distance of their time from since: chain i holds the times whose highest bit that differs from
since is bit i - 1 (a radix heap).

    since = 0b0100    chain 0: since    chain 1: 5    chain 2: 6, 7    chain 4: 8 .. 15    chain 5: 16 .. 31   ...

There are at most 65 chains, however many distinct times there are. All times of one chain precede all times of the next. When
since advances, whole chains before it join chain 0 without touching their rows, one chain is redistributed, and the later
chains stay. A row is therefore redistributed at most once per bit of its time, far-future times cost nothing until they come
near, and no code loops over times.

Invariants: every time is at or beyond since; `updates_before` removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.flow.correction_chain import Chain, ChainPolicy
from persist_engine.flow.correction_chunks import Chunk, ChunkStore, Run, Spill, UpdateLaws, as_of
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain

_POWERS = (np.uint64(1) << np.arange(63, dtype=np.uint64)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPolicy:
    """The limits of a buffer. A buffer that can spill keeps about `memory_bytes` in memory."""

    memory_bytes: int = 256 << 20
    """The bound for the whole buffer."""
    rows_min: int = 65_536
    """See ChainPolicy."""
    dampener: int = 1
    """See ChainPolicy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSize:
    """The contents and the history of a buffer, as counts."""

    rows: int
    capacity_rows: int
    """The number of rows that fit before the buffer consolidates."""
    memory_bytes: int
    spilled_bytes: int
    inserted_rows: int
    """The number of rows ever inserted, including negated ones."""
    cancelled_rows: int
    """The number of inserted rows that are gone: they cancelled with others, or were inserted after since was closed."""


class CorrectionBuffer:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        laws: UpdateLaws,
        *,
        since: Antichain = MINIMUM,
        policy: BufferPolicy | None = None,
        spill: Spill | None = None,
    ) -> None:
        policy = policy or BufferPolicy()
        self._laws = laws
        # The memory is divided as follows: half for chunks, an eighth for unsorted rows (three times that while they are sorted), and a
        # quarter for merging.
        self._store = ChunkStore(spill, memory_bytes_max=policy.memory_bytes // 2)
        self._pending_bytes_max = policy.memory_bytes // 8
        self._chain_policy = ChainPolicy(
            rows_min=policy.rows_min,
            dampener=policy.dampener,
            chunk_bytes=max(64 << 10, min(4 << 20, policy.memory_bytes // 64)),
            merge_bytes=policy.memory_bytes // 4,
        )
        self._since = since
        self._chains: dict[int, Chain] = {}
        self._inserted_rows = 0

    @property
    def since(self) -> Antichain:
        """The since: no time in the buffer is before it."""
        return self._since

    def size(self) -> BufferSize:
        """Return the size, for metrics and bounds."""
        chains = self._chains.values()
        rows = sum(chain.rows for chain in chains)
        return BufferSize(
            rows=rows,
            capacity_rows=sum(chain.capacity_rows for chain in chains),
            memory_bytes=self._store.memory_bytes + sum(chain.pending_bytes for chain in chains),
            spilled_bytes=self._store.spilled_bytes,
            inserted_rows=self._inserted_rows,
            cancelled_rows=self._inserted_rows - rows,
        )

    def insert(self, updates: pa.Table) -> None:
        """Add updates. Times before since advance to since; with a closed since, nothing is kept."""
        self._inserted_rows += updates.num_rows
        for chain in self._deal(self._laws.advance_times(updates, self._since)):
            chain.settle(self._since)
        self._make_room()

    def insert_negated(self, updates: pa.Table) -> None:
        """Like `insert`, with negated diffs."""
        index = updates.schema.get_field_index("diff")
        try:
            negated = pc.negate_checked(updates.column(index))
        except pa.ArrowInvalid as error:
            raise InvariantViolated(f"a diff has no negation in int64: {error}") from error
        self.insert(updates.set_column(index, updates.schema.field(index), negated))

    def updates_before(self, upper: Antichain) -> Iterator[pa.Table]:
        """Yield all updates with a time before `upper`, consolidated, as non-empty tables. They stay in the buffer. The caller
        must insert nothing while it iterates.
        """
        last = _index(self._since, upper)
        for index in sorted(self._chains):
            if index > last:
                return
            chain = self._chains[index]
            chain.consolidate(self._since)
            for table in chain.tables(self._since):
                found = table if index < last else self._laws.time_filter(table, MINIMUM, upper)
                if found.num_rows:
                    yield found

    def advance_since(self, since: Antichain) -> None:
        """Advance times before `since` to `since`. A closed since clears the buffer. Raises InvariantViolated if since goes back.

        Whole chains move without touching their rows. Rows that now cancel stay until they are consolidated.
        """
        before = self._since
        check(before <= since, f"the since of a correction buffer goes back from {before} to {since}")
        self._since = since
        if before == since:
            return
        if since.is_empty():
            for chain in self._chains.values():
                chain.clear()
            self._chains.clear()
            return
        split = _index(before, since)
        # In ascending order, because the last chain is redistributed into the places of those before it.
        for index in sorted(index for index in self._chains if 0 < index <= split):
            runs, pending = self._chains.pop(index).take()
            if index == split:
                runs = [part for run in runs for part in self._dealt_run(run)]
                for table in pending:
                    self._deal(self._laws.advance_times(table, since))
            else:
                for table in pending:
                    self._chain(0).push(self._laws.advance_times(table, since))
            for run in runs:
                self._chain(self._chain_index(run[0].time_max)).push_run(run)

    def consolidate_at_since(self) -> None:
        """Cancel updates at since, and so bound their number (amortised: see `Chain.consolidate_soon`)."""
        due = self._chains.get(0)
        if due is not None:
            due.consolidate_soon(self._since)
        for index in list(self._chains):
            chain = self._chains[index]
            chain.settle(self._since)
            if not chain.rows:
                del self._chains[index]
        self._make_room()

    # -- distribution --------------------------------------------------------------------------------------------------

    def _chain(self, index: int) -> Chain:
        chain = self._chains.get(index)
        if chain is None:
            chain = self._chains[index] = Chain(self._store, self._laws, self._chain_policy)
        return chain

    def _chain_index(self, time: int) -> int:
        return _index(self._since, self._since.join(Antichain.of(time)))

    def _deal(self, updates: pa.Table) -> list[Chain]:
        """Push rows (none before since) to the chains of their times. Returns those chains."""
        if not updates.num_rows:
            return []
        bounds = pc.min_max(updates.column("time"))
        first, last = self._chain_index(bounds["min"].as_py()), self._chain_index(bounds["max"].as_py())
        if first == last:
            self._chain(first).push(updates)
            return [self._chain(first)]
        indices = self._indices(updates)
        touched = [self._chain(int(index)) for index in np.unique(indices)]
        for index, chain in zip(np.unique(indices), touched, strict=True):
            chain.push(updates.filter(pa.array(indices == index)))
        return touched

    def _dealt_run(self, run: Run) -> list[Run]:
        """Split the run into one run per chain. A chunk that belongs to one chain only is not read."""
        parts: dict[int, list[Chunk]] = {}
        for chunk in run:
            first, last = self._chain_index(chunk.time_min), self._chain_index(chunk.time_max)
            if first == last:
                parts.setdefault(first, []).append(chunk)
                continue
            table = as_of(self._laws, self._store.read(chunk), self._since)
            self._store.drop(chunk)
            indices = self._indices(table)
            for index in np.unique(indices):
                piece = table.filter(pa.array(indices == index))
                parts.setdefault(int(index), []).append(self._store.put(piece))
        return list(parts.values())

    def _indices(self, updates: pa.Table) -> npt.NDArray[np.intp]:
        """Return the chain of each row's time."""
        assert self._since.time is not None
        times = updates.column("time").to_numpy()
        differing = times ^ np.int64(min(self._since.time, DATA_TIME_MAX))
        indices: npt.NDArray[np.intp] = np.searchsorted(_POWERS, differing, side="right")
        return indices

    # -- memory --------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Sort pending rows if they take too much memory. If sorted chunks do, spill until half of their budget is free."""
        store = self._store
        while sum(chain.pending_bytes for chain in self._chains.values()) > self._pending_bytes_max:
            max(self._chains.values(), key=lambda chain: chain.pending_bytes).sort_pending(self._since)
        if store.memory_bytes <= store.memory_bytes_max:
            return
        for chain in sorted(self._chains.values(), key=lambda chain: -chain.memory_bytes):
            for chunk in [chunk for run in chain.runs for chunk in run]:
                if store.memory_bytes <= store.memory_bytes_max // 2:
                    return
                store.spill(chunk)


def _index(since: Antichain, frontier: Antichain) -> int:
    """Return the chain of `frontier` (at or beyond since); a number beyond all chains if it is closed."""
    if since.time is None or frontier.time is None:
        return 65
    return (since.time ^ frontier.time).bit_length() if since.time <= frontier.time else 0
