"""CorrectionBuffer: desired minus persisted, by time (spec 17.6). Pure; spilling and the laws of updates are handed in.

Updates lie in chains by how far their time is from since: chain i holds the times whose highest bit that differs from
since is bit i - 1 (a radix heap).

    since = 0b0100    chain 0: since    chain 1: 5    chain 2: 6, 7    chain 4: 8 .. 15    chain 5: 16 .. 31   ...

There are at most 65, whatever the number of distinct times; all times of one are before all of the next. When since
advances, whole chains before it become part of chain 0 without a look at their rows, one is dealt out again, and those
behind it stay. So a row is dealt out at most once for each bit of its time, far futures cost nothing while they are
far, and nothing ever loops over times.

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
    """Numbers. A buffer holds about `memory_bytes` in memory when it has somewhere to spill to."""

    memory_bytes: int = 256 << 20
    """Of everything together."""
    rows_min: int = 65_536
    """See ChainPolicy."""
    dampener: int = 1
    """See ChainPolicy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSize:
    """What a buffer holds and has seen."""

    rows: int
    capacity_rows: int
    """Rows it may come to hold before it consolidates."""
    memory_bytes: int
    spilled_bytes: int
    inserted_rows: int
    """Ever, positive and negated."""
    cancelled_rows: int
    """Of these, gone: they added up with others, or lay beyond a closed since."""


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
        # Of the memory: half for chunks, an eighth for what is not sorted yet and as much again twice while it is, a
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
        """No time in the buffer is before it."""
        return self._since

    def size(self) -> BufferSize:
        """For metrics and bounds."""
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
        """Add updates; times before since are as of since, and nothing is kept beyond a closed one."""
        self._inserted_rows += updates.num_rows
        for chain in self._deal(self._laws.advance_times(updates, self._since)):
            chain.settle(self._since)
        self._make_room()

    def insert_negated(self, updates: pa.Table) -> None:
        """As `insert`, with the diffs negated."""
        index = updates.schema.get_field_index("diff")
        try:
            negated = pc.negate_checked(updates.column(index))
        except pa.ArrowInvalid as error:
            raise InvariantViolated(f"a diff has no negation in int64: {error}") from error
        self.insert(updates.set_column(index, updates.schema.field(index), negated))

    def updates_before(self, upper: Antichain) -> Iterator[pa.Table]:
        """All updates with a time before `upper`, consolidated, as non-empty tables. They stay where they are; insert
        nothing while iterating.
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
        """Times before `since` become `since`; a closed one clears the buffer. InvariantViolated when it goes back.

        Moves what lies before without touching it; what now adds up to nothing is still there until it is
        consolidated.
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
        # Ascending: the last one is dealt out into the places of those before it.
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
        """Let what lies at since cancel, and bound what lies behind (amortised: see `Chain.consolidate_soon`)."""
        due = self._chains.get(0)
        if due is not None:
            due.consolidate_soon(self._since)
        for index in list(self._chains):
            chain = self._chains[index]
            chain.settle(self._since)
            if not chain.rows:
                del self._chains[index]
        self._make_room()

    # -- dealing out ---------------------------------------------------------------------------------------------------

    def _chain(self, index: int) -> Chain:
        chain = self._chains.get(index)
        if chain is None:
            chain = self._chains[index] = Chain(self._store, self._laws, self._chain_policy)
        return chain

    def _chain_index(self, time: int) -> int:
        return _index(self._since, self._since.join(Antichain.of(time)))

    def _deal(self, updates: pa.Table) -> list[Chain]:
        """Push rows (none before since) to the chains of their times; those chains."""
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
        """The run as one for each chain that its times belong to; a chunk of one chain only is not read."""
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
        """For each row the chain of its time."""
        assert self._since.time is not None
        times = updates.column("time").to_numpy()
        differing = times ^ np.int64(min(self._since.time, DATA_TIME_MAX))
        indices: npt.NDArray[np.intp] = np.searchsorted(_POWERS, differing, side="right")
        return indices

    # -- memory --------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Sort what is pending when it takes too much, and spill down to half when sorted chunks do."""
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
    """The chain in which `frontier` (at or beyond since) lies; beyond all chains when it is closed."""
    if since.time is None or frontier.time is None:
        return 65
    return (since.time ^ frontier.time).bit_length() if since.time <= frontier.time else 0
