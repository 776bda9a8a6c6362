"""What is worth compacting, and how to do it within memory (spec 13.1 to 13.4, 13.9, 13.10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.model.batch import HollowBatch, RunKind, RunMeta, RunOrder
from persist_engine.model.ids import RunId
from persist_engine.model.spine.compaction_plan import (
    CompactionChunk,
    compaction_chunks,
    compaction_timeout_ms,
    compaction_worthwhile,
    newest_schema_id,
    runs_budget_bytes,
    validate_request,
)
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeReq
from persist_kit.depth import draws
from persist_kit.states import batch, description, part

TARGET = 1024


def tight(budget: int) -> Settings:
    """So little memory that `budget` is left for runs."""
    bound = 2 * TARGET + budget
    while (missing := budget - runs_budget_bytes(bounded(bound))) > 0:
        bound += missing  # never too much: what is left grows no faster than the bound
    return bounded(bound)


def bounded(bound: int, target: int = TARGET) -> Settings:
    return Settings(
        batch=BatchSettings(target_part_bytes=target), compaction=CompactionSettings(memory_bytes_max=bound)
    )


@pytest.mark.parametrize("bound_mib", [512, 1024, 4096])
def test_what_runs_may_take_leaves_room_for_the_process_merging_and_writing(bound_mib: int) -> None:
    """What the process was measured to hold with all its libraries, an eighth for merging, two parts being written."""
    bound, target = bound_mib << 20, 32 << 20
    assert runs_budget_bytes(bounded(bound, target)) == bound - (152 << 20) - bound // 8 - 2 * target


def test_a_small_bound_leaves_something_for_runs_and_none_is_below_nothing() -> None:
    assert runs_budget_bytes(bounded(64 << 20)) == (64 << 20) * 3 // 8 - 2 * TARGET
    assert runs_budget_bytes(bounded(TARGET)) == 0


def request(*inputs: HollowBatch, since: int = 0) -> MergeReq:
    ids = [(SpineId(index, index + 1), content) for index, content in enumerate(inputs)]
    desc = description(inputs[0].desc.lower.time or 0, inputs[-1].desc.upper.time, since)
    return MergeReq(SpineId(0, len(inputs)), desc, tuple(ids))


def runs(lower: int, *sizes: int, order: RunOrder = RunOrder.STRUCTURED, named: bool = True) -> HollowBatch:
    """A batch of one-part runs, each of which costs its size, named by their time and place."""
    parts = tuple(part(f"{lower}.{index}", size_bytes=size // 5) for index, size in enumerate(sizes))
    metas = tuple(RunMeta(order=order, run_id=run_id(lower, index) if named else None) for index in range(len(sizes)))
    return HollowBatch(description(lower, lower + 1), len(sizes), parts, tuple(range(1, len(sizes))), metas)


def sifted(lower: int, *sizes: int) -> HollowBatch:
    """As `runs`, but the last run is balanced."""
    content = runs(lower, *sizes)
    *others, last = content.run_metas
    return replace(content, run_metas=(*others, replace(last, kind=RunKind.BALANCED)))


def run_id(lower: int, index: int) -> RunId:
    return RunId.from_bytes(bytes([lower, index] + [0] * 14))


def keys(chunks: tuple[CompactionChunk, ...]) -> list[list[str]]:
    return [[each.key for run in chunk.runs for each in run.parts] for chunk in chunks]


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


def test_everything_fits_in_one_chunk_and_spare_memory_buys_writers() -> None:
    asked = request(runs(0, 100, 100), runs(1, 100), since=1)
    (chunk,) = compaction_chunks(asked, tight(6 * TARGET + 300))
    assert keys((chunk,)) == [["0.0", "0.1", "1.0"]]
    assert (chunk.input, chunk.desc, chunk.run_ids) == (asked.id, asked.desc, None)
    assert chunk.outstanding_parts == 1 + 2
    assert not chunk.over_budget


def test_chunks_of_whole_inputs_close_when_the_next_does_not_fit() -> None:
    chunks = compaction_chunks(request(*[runs(n, 100) for n in range(5)], since=7), tight(250))
    assert keys(chunks) == [["0.0", "1.0"], ["2.0", "3.0"]], "the last has no neighbour yet"
    assert [chunk.input for chunk in chunks] == [SpineId(0, 2), SpineId(2, 4)]
    assert [chunk.desc for chunk in chunks] == [description(0, 2, 7), description(2, 4, 7)]
    assert [(chunk.over_budget, chunk.outstanding_parts) for chunk in chunks] == [(False, 1)] * 2


def test_a_chunk_never_holds_a_single_run_when_another_follows() -> None:
    chunks = compaction_chunks(request(*[runs(n, 500) for n in range(4)]), tight(600))
    assert keys(chunks) == [["0.0", "1.0"], ["2.0", "3.0"]]
    assert [chunk.over_budget for chunk in chunks] == [True, True]


def test_a_balanced_run_keeps_its_input_from_no_neighbour() -> None:
    """A compaction makes two runs of a sifted input again: it can only shrink by a merge with what follows."""
    chunks = compaction_chunks(request(sifted(0, 500, 500), runs(1, 500)), tight(600))
    assert keys(chunks) == [["0.0", "0.1", "1.0"]]
    chunks = compaction_chunks(request(*[sifted(n, 500, 500) for n in range(4)]), tight(600))
    assert keys(chunks) == [["0.0", "0.1", "1.0", "1.1"], ["2.0", "2.1", "3.0", "3.1"]]
    assert [chunk.over_budget for chunk in chunks] == [True, True]
    chunks = compaction_chunks(request(*[sifted(n, 500) for n in range(3)]), tight(600))
    assert keys(chunks) == [["0.0", "1.0"]], "inputs of a balanced run alone count too"
    assert compaction_chunks(request(sifted(0, 500, 500)), tight(600)) == ()


def test_an_input_that_does_not_fit_is_merged_run_by_run_under_its_own_description() -> None:
    asked = request(runs(0, 100), runs(1, *[100] * 5), runs(2, 100), since=9)
    chunks = compaction_chunks(asked, tight(200))
    assert keys(chunks) == [["1.0", "1.1"], ["1.2", "1.3"]]
    assert [chunk.input for chunk in chunks] == [SpineId(1, 2)] * 2
    assert chunks[0].desc == description(1, 2), "the runs that stay were not advanced"
    assert chunks[0].run_ids == (run_id(1, 0), run_id(1, 1))
    (replaced,) = chunks[0].replaced(asked)
    assert ([part.key for part in replaced.parts], replaced.desc) == (["1.0", "1.1"], description(1, 2))


def test_runs_without_names_can_only_go_all_at_once() -> None:
    chunks = compaction_chunks(request(runs(0, *[100] * 5, named=False), runs(1, 100)), tight(200))
    assert keys(chunks) == [[f"0.{index}" for index in range(5)]]
    assert chunks[0].over_budget
    assert chunks[0].run_ids is None


def test_regression_14_a_run_costs_its_largest_part_and_an_empty_input_nothing() -> None:
    """Bug 14: empty inputs were charged a whole part, and real data was chunked apart."""
    one = batch(0, 1, 3, keys=("a", "b", "c"))
    chunks = compaction_chunks(request(one, batch(1, 2), batch(2, 3), runs(3, 100)), tight(600))
    assert keys(chunks) == [["a", "b", "c", "3.0"]]
    assert not chunks[0].over_budget
    # Two runs go together whatever they cost; the third shows what the empty input was charged.
    assert keys(compaction_chunks(request(runs(0, 100), batch(1, 2), runs(2, 100), runs(3, 100)), tight(600))) == [
        ["0.0", "2.0", "3.0"]
    ]


def test_empty_inputs_become_one_and_a_run_with_empty_neighbours_is_written_anew() -> None:
    """Never reused under another description (bug 15)."""
    (empty,) = compaction_chunks(request(batch(0, 1), batch(1, 2)), tight(0))
    assert (empty.runs, empty.desc) == ((), description(0, 2))
    (one,) = compaction_chunks(request(batch(0, 1), runs(1, 100), batch(2, 3)), tight(0))
    assert keys((one,)) == [["1.0"]]


def test_a_single_run_is_nothing_to_do() -> None:
    assert compaction_chunks(request(runs(0, 100)), tight(1000)) == ()


def test_a_large_part_costs_no_more_decoded_than_a_few_tables() -> None:
    large = replace(batch(0, 1, 1), parts=(part("a", size_bytes=100 << 20),))
    budget = 2 * ((100 << 20) + (6 << 20))
    assert not compaction_chunks(request(large, replace(large, desc=description(1, 2))), tight(budget))[0].over_budget


def test_unordered_runs_are_held_whole() -> None:
    unordered = replace(batch(0, 1, 2, keys=("a", "b")), run_metas=(RunMeta(order=RunOrder.UNORDERED),))
    (chunk,) = compaction_chunks(request(unordered, runs(1, 100)), tight(10_000))
    assert [(run.is_sorted, run.memory_bytes) for run in chunk.runs] == [(False, 2 * 100 * 5), (True, 100)]


def test_more_time_for_more_bytes() -> None:
    least = CompactionSettings(timeout_ms_min=90_000, timeout_ms_per_mib=1000)
    assert compaction_timeout_ms(request(runs(0, 100)), least) == 90_000
    large = replace(batch(0, 1, 1), parts=(part("a", size_bytes=100 << 20),))
    assert compaction_timeout_ms(request(large, runs(1, 100)), least) == 100_000


def test_the_newest_schema_among_the_inputs_when_all_say() -> None:
    def written(lower: int, schema_id: int | None) -> HollowBatch:
        return replace(batch(lower, lower + 1, 1), run_metas=(RunMeta(schema_id=schema_id),))

    assert newest_schema_id(request(written(0, 1), written(1, 2), batch(2, 3))) == 2
    assert newest_schema_id(request(written(0, 1), written(1, None))) is None
    assert newest_schema_id(request(batch(0, 1), batch(1, 2))) is None


SIZES = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 100, 400, 5000]), max_size=5), st.booleans()), min_size=1, max_size=6
)


@pytest.mark.slow
@given(SIZES, st.integers(0, 1500))
@settings(max_examples=draws(200), deadline=None)
def test_chunks_are_disjoint_and_repeating_them_ends_with_one_run(
    sizes: list[tuple[list[int], bool]], budget: int
) -> None:
    """Progress: whatever the budget, each pass leaves fewer runs or inputs, until one run that is not balanced under one description."""
    inputs = [
        sifted(lower, *each) if each and is_sifted else runs(lower, *each)
        for lower, (each, is_sifted) in enumerate(sizes)
    ]
    asked = request(*inputs)
    for _ in range(40):
        chunks = compaction_chunks(asked, tight(budget))
        if not chunks:
            break
        seen = [run for chunk in chunks for run in chunk.runs]
        assert len({id(part) for run in seen for part in run.parts}) == sum(len(run.parts) for run in seen)
        for chunk in chunks:
            assert len(chunk.runs) >= 2 or len(chunk.replaced(asked)) >= 2
            cost = sum(run.memory_bytes for run in chunk.runs)
            assert chunk.over_budget == (cost > budget)
            unbalanced = sum(not run.meta.is_balanced for run in chunk.runs)
            assert not chunk.over_budget or unbalanced <= 2, "only ever two that do not fit"
        asked = _done(asked, chunks)
    assert sum(content.mergeable_runs for _, content in asked.inputs) <= 1
    assert len(asked.inputs) == 1


def _done(asked: MergeReq, chunks: tuple[CompactionChunk, ...]) -> MergeReq:
    """The request after every chunk became one run as large as its largest."""
    left = list(asked.inputs)
    for number, chunk in enumerate(chunks):
        sizes = [each.size_bytes for run in chunk.runs for each in run.parts if hasattr(each, "size_bytes")]
        name = RunId.from_bytes(bytes([255, number] + [1] * 14))
        made = [(RunMeta(run_id=name), (part(f"new {number}", size_bytes=max(sizes)),))] if sizes else []
        covered = [item for item in left if chunk.input.covers(item[0])]
        if chunk.run_ids is not None:
            made = [run for run in covered[0][1].runs() if run[0].run_id not in chunk.run_ids] + made
        parts = tuple(each for _, run in made for each in run)
        content = HollowBatch(
            chunk.desc, len(parts), parts, tuple(range(1, len(parts))), tuple(meta for meta, _ in made)
        )
        at = left.index(covered[0])
        left[at : at + len(covered)] = [(chunk.input, content)]
    return replace(asked, inputs=tuple(left))
