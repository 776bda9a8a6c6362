"""The sums of diffs that a compaction must keep (spec 12.5), and what may not replace what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import InvariantViolated
from persist_engine.model.batch import HollowBatch, RunMeta
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeOutcome, MergeRes
from persist_engine.model.spine.trace import Trace
from persist_kit.states import batch, description


def summed(lower: int, upper: int, rows: int, diffs_sum: int | None, *, truncated: bool = False) -> HollowBatch:
    """A batch of one part with that sum of diffs."""
    content = batch(lower, upper, rows)
    return replace(
        content,
        parts=tuple(replace(part, diffs_sum=diffs_sum) for part in content.parts),
        run_metas=(RunMeta(truncated=truncated),),
    )


def pair(first: int | None, second: int | None, *, truncated: bool = False) -> Trace:
    trace = Trace().push_without_requests(summed(0, 1, 100, first, truncated=truncated))
    trace = trace.push_without_requests(summed(1, 2, 100, second))
    return trace.push_without_requests(batch(2, 3, 100))


def apply(trace: Trace, output: HollowBatch) -> MergeOutcome:
    return trace.apply_merge_res(MergeRes(output, SpineId(0, 2)))[1]


def test_equal_sums_and_fewer_rows_are_applied() -> None:
    assert apply(pair(100, -40), summed(0, 2, 60, 60)) is MergeOutcome.APPLIED_EXACT


def test_a_merge_result_may_be_empty() -> None:
    """All rows gone: no parts, a sum of nothing."""
    assert apply(pair(100, -100), batch(0, 2)) is MergeOutcome.APPLIED_EXACT
    with pytest.raises(InvariantViolated, match="from 60 to 0"):
        apply(pair(100, -40), batch(0, 2))


def test_a_changed_sum_is_an_error_and_changes_nothing() -> None:
    trace = pair(100, -40)
    with pytest.raises(InvariantViolated, match="from 60 to 61"):
        apply(trace, summed(0, 2, 60, 61))
    assert trace.apply_merge_res(MergeRes(summed(0, 2, 60, 61), None), checked=False)[1].applied


def test_a_merge_of_unknown_sums_is_applied_unproved() -> None:
    assert apply(pair(None, 4), summed(0, 2, 60, 7)).applied
    assert apply(pair(None, 4), summed(0, 2, 60, None)).applied
    with pytest.raises(InvariantViolated, match="lost the known sum"):
        apply(pair(3, 4), summed(0, 2, 60, None))


def test_regression_20_sums_of_truncated_runs_prove_nothing() -> None:
    """Bug 20."""
    assert apply(pair(100, -40, truncated=True), summed(0, 2, 60, 1)).applied


def test_a_subset_is_checked_against_what_it_replaces() -> None:
    trace = pair(100, -40)
    res = MergeRes(summed(1, 2, 5, -39), SpineId(1, 2))
    with pytest.raises(InvariantViolated, match="from -40 to -39"):
        trace.apply_merge_res(res)
    after, outcome = trace.apply_merge_res(replace(res, output=summed(1, 2, 5, -40)))
    assert outcome is MergeOutcome.APPLIED_SUBSET
    assert [each.rows for each in after.batches()] == [100, 5, 100]


def test_a_merge_of_a_subset_with_more_rows_is_refused() -> None:
    """Spec 12.3."""
    res = MergeRes(summed(1, 2, 101, -40), SpineId(1, 2))
    assert pair(100, -40).apply_merge_res(res)[1] is MergeOutcome.NOT_APPLIED_TOO_MANY_UPDATES


def test_an_id_range_that_is_gone_matches_nothing() -> None:
    """A compaction that was overtaken: its inputs were merged away by a larger one (spec 12.1)."""
    trace, outcome = pair(100, -40).apply_merge_res(MergeRes(summed(0, 2, 60, 60), SpineId(0, 2)))
    assert outcome.applied
    late = MergeRes(summed(0, 1, 50, 100), SpineId(0, 1))
    assert trace.apply_merge_res(late) == (trace, MergeOutcome.NOT_APPLIED_NO_MATCH)


def test_regression_13_a_since_behind_is_fine_and_ahead_is_not() -> None:
    """Bug 13 (spec 12.2)."""
    trace = pair(1, 1)
    ahead = summed(0, 2, 60, 2).with_desc(description(0, 2, 1))
    assert trace.apply_merge_res(MergeRes(ahead, None)) == (trace, MergeOutcome.NOT_APPLIED_INVALID_SINCE)


def test_emptying_out_names_what_is_not_there() -> None:
    """Spec 12.7."""
    trace = pair(1, 1)
    assert [each.rows for each in trace.empty_out(description(1, 2)).batches()] == [100, 0, 100]
    with pytest.raises(InvariantViolated, match="no batch"):
        trace.empty_out(description(1, 3))
