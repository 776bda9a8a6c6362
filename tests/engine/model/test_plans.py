"""What is removable, what is worth compacting, and how to do it within memory (spec 13.1 to 13.4, 14)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowBatch, RunMeta, RunOrder
from persist_engine.model.flat_trace import SpineId
from persist_engine.model.plans import (
    CompactionChunk,
    compaction_chunks,
    compaction_worthwhile,
    removable_rollups,
    validate_request,
)
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine import MergeReq
from persist_engine.testing.states import batch, description, first_state, part, rollup

TARGET = 1024


def tight(memory_bytes_max: int) -> Settings:
    return Settings(
        batch=BatchSettings(target_part_bytes=TARGET),
        compaction=CompactionSettings(memory_bytes_max=memory_bytes_max),
    )


def request(*inputs: HollowBatch) -> MergeReq:
    ids = [(SpineId(index, index + 1), content) for index, content in enumerate(inputs)]
    desc = description(inputs[0].desc.lower.time or 0, inputs[-1].desc.upper.time)
    return MergeReq(SpineId(0, len(inputs)), desc, tuple(ids))


def runs(lower: int, *sizes: int, order: RunOrder = RunOrder.STRUCTURED) -> HollowBatch:
    """A batch of one-part runs of these sizes, named by their time and place."""
    parts = tuple(part(f"{lower}.{index}", size_bytes=size) for index, size in enumerate(sizes))
    metas = tuple(RunMeta(order=order) for _ in sizes)
    return HollowBatch(description(lower, lower + 1), len(sizes), parts, tuple(range(1, len(sizes))), metas)


def keys(chunks: tuple[CompactionChunk, ...]) -> list[list[str]]:
    return [[each.key for run in chunk.runs for each in run.parts] for chunk in chunks]


def test_all_but_the_newest_rollup_within_reach_are_removable() -> None:
    state = replace(first_state()[0], rollups=SharedMap({SeqNo(n): rollup(n) for n in (1, 4, 9)}), seqno=SeqNo(20))
    assert removable_rollups(state, SeqNo(0)) == ()
    assert removable_rollups(state, SeqNo(3)) == ()
    assert removable_rollups(state, SeqNo(4)) == ((SeqNo(1), rollup(1)),)
    assert [seqno for seqno, _ in removable_rollups(state, SeqNo(8))] == [1]
    assert [seqno for seqno, _ in removable_rollups(state, SeqNo(20))] == [1, 4]


def test_a_request_is_worth_it_by_inputs_parts_or_updates() -> None:
    settings = Settings()
    assert not compaction_worthwhile(request(*[batch(n, n + 1, 1) for n in range(7)]), settings)
    assert compaction_worthwhile(request(*[batch(n, n + 1, 1) for n in range(8)]), settings)
    assert compaction_worthwhile(request(batch(0, 1, 8, keys=tuple("abcdefg")), batch(1, 2, 1)), settings)
    assert not compaction_worthwhile(request(batch(0, 1, 512), batch(1, 2, 511)), settings)
    assert compaction_worthwhile(request(batch(0, 1, 512), batch(1, 2, 512)), settings)


def test_requests_tile_and_never_step_back_in_since() -> None:
    validate_request(request(batch(0, 1, 1), batch(1, 1), batch(1, 3, 1)))
    with pytest.raises(InvalidUsage, match="non-consecutive"):
        validate_request(request(batch(0, 1, 1), batch(2, 3, 1)))
    with pytest.raises(InvalidUsage, match="end at"):
        validate_request(replace(request(batch(0, 1, 1)), desc=description(0, 2)))
    with pytest.raises(InvalidUsage, match="advanced beyond"):
        validate_request(request(batch(0, 1, 1, since=5)))


def test_everything_fits_in_one_chunk_and_spare_memory_buys_uploads() -> None:
    chunks = compaction_chunks(request(runs(0, 100, 100), runs(1, 100)), tight(4 * TARGET + 300))
    assert keys(chunks) == [["0.0", "1.0", "0.1"]], "first runs first"
    assert chunks[0].outstanding_parts == 1 + 2
    assert not chunks[0].over_budget


def test_chunks_close_when_the_next_run_does_not_fit() -> None:
    chunks = compaction_chunks(request(*[runs(n, 100) for n in range(5)]), tight(2 * TARGET + 250))
    assert keys(chunks) == [["0.0", "1.0"], ["2.0", "3.0"], ["4.0"]]
    assert [chunk.over_budget for chunk in chunks] == [False, False, False]
    assert [chunk.outstanding_parts for chunk in chunks] == [1, 1, 1]


def test_a_chunk_never_holds_a_single_run_when_another_follows() -> None:
    chunks = compaction_chunks(request(*[runs(n, 500) for n in range(4)]), tight(2 * TARGET + 600))
    assert keys(chunks) == [["0.0", "1.0"], ["2.0", "3.0"]]
    assert [chunk.over_budget for chunk in chunks] == [True, True]


def test_regression_14_a_run_costs_its_largest_part_and_an_empty_input_nothing() -> None:
    """Bug 14: empty inputs were charged a whole part, and real data was chunked apart."""
    one = batch(0, 1, 3, keys=("a", "b", "c"))
    chunks = compaction_chunks(request(one, batch(1, 2), batch(2, 3), runs(3, 100)), tight(2 * TARGET + 200))
    assert keys(chunks) == [["a", "b", "c", "3.0"]]
    assert not chunks[0].over_budget
    assert compaction_chunks(request(batch(0, 1), batch(1, 2)), tight(4 * TARGET)) == ()


def test_runs_in_another_order_are_taken_part_by_part() -> None:
    unordered = replace(batch(0, 1, 2, keys=("a", "b")), run_metas=(RunMeta(order=RunOrder.UNORDERED),))
    chunks = compaction_chunks(request(unordered, runs(1, 100)), tight(8 * TARGET))
    assert [[part.key for part in run.parts] for run in chunks[0].runs] == [["a"], ["1.0"], ["b"]]
    assert [run.desc for run in chunks[0].runs] == [description(0, 1), description(1, 2), description(0, 1)]
