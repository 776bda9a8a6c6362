"""The correction buffer against a dict of updates: any inserts, any times, any memory."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvariantViolated
from persist_engine.dataflow.sink.spill import ArrowLaws, SpillFiles
from persist_engine.flow.correction import BufferPolicy, CorrectionBuffer
from persist_engine.model.frontier import EMPTY, Antichain
from persist_kit.depth import draws
from persist_kit.world import SCHEMA

A = Antichain.of
TIME_MAX = 2**63 - 1


class Kept:
    """Spill in a dict."""

    def __init__(self) -> None:
        self.tables: dict[int, pa.Table] = {}
        self.writes = 0

    def write(self, table: pa.Table) -> int:
        self.writes += 1
        self.tables[self.writes] = table
        return self.writes

    def read(self, number: int) -> pa.Table:
        return self.tables[number]

    def delete(self, number: int) -> None:
        del self.tables[number]


def updates(keys, times, diffs) -> pa.Table:
    keys = pa.array(keys, pa.int64())
    return pa.table(
        [
            pa.StructArray.from_arrays([keys], names=["id"]),
            pa.StructArray.from_arrays([keys.cast(pa.string())], names=["name"]),
            pa.array(times, pa.int64()),
            pa.array(diffs, pa.int64()),
        ],
        schema=SCHEMA.updates_schema,
    )


times = st.one_of(st.integers(0, 40), st.integers(0, TIME_MAX))
rows = st.lists(st.tuples(st.integers(0, 4), times, st.sampled_from([-2, -1, 1, 2])), max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), rows),
        st.tuples(st.just("negated"), rows),
        st.tuples(st.just("advance"), st.one_of(st.integers(0, 20), st.integers(0, TIME_MAX))),
        st.tuples(st.just("consolidate"), st.none()),
        st.tuples(st.just("before"), st.one_of(st.none(), times, st.just(2**64 - 1))),
    ),
    max_size=30,
)


@pytest.mark.slow
@given(steps, st.sampled_from([100, 2000, 1 << 20]), st.sampled_from([1, 5, 1000]), st.integers(0, 3))
@settings(max_examples=draws(80), deadline=None)
def test_the_correction_buffer_holds_what_was_inserted(script, memory_bytes, rows_min, dampener):
    """Spec 17.6."""
    spill = Kept()
    policy = BufferPolicy(memory_bytes=memory_bytes, rows_min=rows_min, dampener=dampener)
    buffer = CorrectionBuffer(ArrowLaws(), policy=policy, spill=spill)
    since, model = 0, []
    for what, argument in script:
        if what in ("insert", "negated"):
            sign = 1 if what == "insert" else -1
            columns = list(zip(*argument, strict=True)) or [(), (), ()]
            (buffer.insert if sign == 1 else buffer.insert_negated)(updates(*columns))
            model += [(key, max(time, since), sign * diff) for key, time, diff in argument]
        elif what == "advance":
            since = min(TIME_MAX, since + argument)
            buffer.advance_since(A(since))
            model = [(key, max(time, since), diff) for key, time, diff in model]
        elif what == "consolidate":
            buffer.consolidate_at_since()
        else:
            found = [row for table in buffer.updates_before(Antichain(argument)) for row in table.to_pylist()]
            sums: Counter = Counter()
            for key, time, diff in model:
                if argument is None or time < argument:
                    sums[key, time] += diff
            assert {(r["key"]["id"], r["time"]): r["diff"] for r in found} == {k: d for k, d in sums.items() if d}
            assert len(found) == len({(r["key"]["id"], r["time"]) for r in found})
        size = buffer.size()
        assert size.inserted_rows - size.cancelled_rows == size.rows >= 0
        assert size.spilled_bytes == sum(table.nbytes for table in spill.tables.values())
    buffer.advance_since(EMPTY)
    size = buffer.size()
    assert (size.rows, size.memory_bytes, size.spilled_bytes, len(spill.tables)) == (0, 0, 0, 0)


@pytest.mark.slow
def test_many_times_cost_calls_only_for_their_bits():
    """As many distinct times as rows: what is counted is tables, not seconds."""
    laws = Counted()
    buffer = CorrectionBuffer(laws, policy=BufferPolicy(rows_min=1000))
    at = np.random.default_rng(3).permutation(100_000)
    buffer.insert(updates(at % 100, at, np.ones(len(at))))
    for since in range(0, 100_000, 1000):
        buffer.advance_since(A(since))
        buffer.consolidate_at_since()
        assert sum(table.num_rows for table in buffer.updates_before(A(since + 1))) <= 100
    assert laws.calls < 4000


class Counted(ArrowLaws):
    def __init__(self) -> None:
        self.calls = 0

    def consolidate(self, table: pa.Table) -> pa.Table:
        self.calls += 1
        return super().consolidate(table)


def test_hydration_never_holds_two_snapshots():
    """Desired, then persisted, in pieces: the peak is 1.5 snapshots and one piece, not two."""
    total, piece = 40_000, 1000
    buffer = CorrectionBuffer(ArrowLaws(), policy=BufferPolicy(rows_min=1000))
    keys = np.random.default_rng(5).permutation(total)
    peak = 0
    for insert in (buffer.insert, buffer.insert_negated):
        for start in range(0, total, piece):
            insert(updates(keys[start : start + piece], np.zeros(piece), np.ones(piece)))
            peak = max(peak, buffer.size().rows)
    assert total <= peak <= 1.5 * total + piece
    buffer.consolidate_at_since()
    assert buffer.size().rows == 0


@pytest.mark.slow
def test_memory_stays_within_its_bound_when_there_is_somewhere_to_spill_to():
    limit, piece = 2 << 20, 5000
    spill = Kept()
    buffer = CorrectionBuffer(ArrowLaws(), policy=BufferPolicy(memory_bytes=limit, rows_min=1000), spill=spill)
    rng = np.random.default_rng(7)
    for index in range(40):
        buffer.insert(updates(rng.integers(0, 1 << 40, piece), rng.integers(0, 1 << 20, piece), np.ones(piece)))
        assert buffer.size().memory_bytes <= limit
        if index % 8 == 0:
            buffer.advance_since(A(index << 12))
            buffer.consolidate_at_since()
            assert buffer.size().memory_bytes <= limit
    assert buffer.size().spilled_bytes > 3 * limit
    assert sum(table.num_rows for table in buffer.updates_before(EMPTY)) == 40 * piece
    assert buffer.size().memory_bytes <= limit


@pytest.mark.slow
def test_all_of_arrow_stays_within_the_bound_while_sorting_and_merging():
    """Not only what the buffer counts: copies while sorting, windows while merging, chunks being read."""
    limit, pieces, rows = 4 << 20, 24, 10_000
    default = pa.default_memory_pool()
    measured = pa.proxy_memory_pool(default)
    with tempfile.TemporaryDirectory() as directory:
        spill = SpillFiles(lambda: Path(directory))
        pa.set_memory_pool(measured)
        try:
            buffer = CorrectionBuffer(ArrowLaws(), policy=BufferPolicy(memory_bytes=limit, rows_min=1000), spill=spill)
            for insert, left in ((buffer.insert, pieces * rows), (buffer.insert_negated, 0)):
                for seed in range(pieces):
                    keys = np.random.default_rng(seed).integers(0, 1 << 50, rows)
                    insert(updates(keys, np.zeros(rows), np.ones(rows)))
                assert sum(table.num_rows for table in buffer.updates_before(EMPTY)) == left
        finally:
            pa.set_memory_pool(default)
    assert measured.max_memory() <= 1.25 * limit + 2 * rows * 64  # and the piece that is handed over


def test_a_diff_without_a_negation_is_refused():
    buffer = CorrectionBuffer(ArrowLaws())
    with pytest.raises(InvariantViolated, match="no negation"):
        buffer.insert_negated(updates([1], [0], [-(2**63)]))


def test_a_spilled_chunk_that_comes_back_short_is_noticed():
    spill = Kept()
    buffer = CorrectionBuffer(ArrowLaws(), policy=BufferPolicy(memory_bytes=100), spill=spill)
    buffer.insert(updates(range(100), [0] * 100, [1] * 100))
    (number,) = spill.tables
    spill.tables[number] = spill.tables[number].slice(1)
    with pytest.raises(InvariantViolated, match="came back with 99"):
        list(buffer.updates_before(EMPTY))


@pytest.mark.parametrize("since", [5, 8])
def test_what_becomes_equal_as_since_passes_cancels_also_in_a_merge_of_what_is_large(since):
    """Rows that differed in time only lie side by side in one sorted chunk. A run that is merged as a stream came out as it
    went in: nothing cancelled, however often it was consolidated, and all of it was staged.
    """
    spill, keys = Kept(), np.arange(10_000)
    buffer = CorrectionBuffer(ArrowLaws(), policy=BufferPolicy(memory_bytes=1 << 20, rows_min=16), spill=spill)
    for time, diff in ((4, 1), (5, -1), (7, 1)):
        buffer.insert(updates(keys, np.full(len(keys), time), np.full(len(keys), diff)))
    assert sum(table.num_rows for table in buffer.updates_before(EMPTY)) == 3 * len(keys), "it is one run now"
    buffer.advance_since(A(since))
    buffer.consolidate_at_since()
    assert buffer.size().rows == len(keys)
    assert not list(buffer.updates_before(A(since)))
    found = pa.concat_tables(buffer.updates_before(EMPTY)).to_pylist()
    assert [(r["key"]["id"], r["time"], r["diff"]) for r in found] == [(key, max(7, since), 1) for key in range(10_000)]
