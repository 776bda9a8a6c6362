"""Since when retracted rows wait: what a compaction's output records, and what a trace says (spec 13.12)."""

from dataclasses import replace

import pytest
from persist_engine.model.batch import NOTHING_WAITS, HollowBatch, PartStats, RunMeta
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.owed import waits_after_merge_ms, waits_from_ms, waits_of_output
from persist_engine.model.spine.trace import Trace
from persist_kit.states import batch, description, inline_batch, part

CLOCK = 1_790_000_000_000
PID = "n0000100/p01a21188-adeb-4243-facd-e5802f6d26e1"
PID_MS = 0x01A21188ADEB


def waiting(lower: int, upper: int, waits_ms: int, *, since: int = 0) -> HollowBatch:
    """A batch with one run in which a retraction waits."""
    return replace(batch(lower, upper, 4, since=since), run_metas=(RunMeta(waits_from_ms=waits_ms),))


def parts(diff_min: int | None):
    """One part with a least diff."""
    return (replace(part("w/p"), stats=PartStats(diff_min=diff_min)),)


A, B, PLAIN = waiting(0, 10, 100), waiting(10, 20, 200), batch(20, 30, 4)


@pytest.mark.parametrize(
    ("replaced", "desc", "diff_min", "all_runs", "want"),
    [
        ((A, B), (0, 20, 0), 1, True, NOTHING_WAITS),  # whatever waited has cancelled
        ((A, B), (0, 20, 19), 1, True, NOTHING_WAITS),
        ((A, B), (0, 20, 19), -1, True, 100),  # everything is at one time: a net negative row
        ((A, B), (0, 20, 19), None, True, NOTHING_WAITS),
        ((A, B), (0, 20, 18), -1, True, 200),  # A ended before since, and B did not
        ((A, B), (0, 20, 9), None, True, 200),
        ((A, B), (0, 20, 8), -1, True, 100),
        ((A, B), (0, 20, 9), -1, False, 100),  # only some runs of it
        ((B, PLAIN), (10, 30, 29), -1, True, 200),  # what B retracts can be in an older batch
        ((PLAIN,), (20, 30, 0), -1, True, NOTHING_WAITS),
    ],
)
def test_the_record_of_an_output(replaced, desc, diff_min, all_runs, want) -> None:
    lower, upper, since = desc
    found = waits_of_output(
        replaced, description(lower, upper, since), parts(diff_min), all_runs=all_runs, now_ms=CLOCK
    )
    assert found == want


@pytest.mark.parametrize(
    ("since", "now_ms", "want"),
    [
        (CLOCK + 5, CLOCK + 9, CLOCK + 5),  # what is left takes effect after since
        (CLOCK + 5, CLOCK + 4, 200),  # no time of this clock yet, so since says nothing
        (15, CLOCK, 200),  # a counter
    ],
)
def test_a_since_of_the_clock_bounds_what_a_whole_merge_leaves(since, now_ms, want) -> None:
    late = replace(B, desc=description(10, CLOCK + 20, 0))
    desc = description(0, CLOCK + 20, since)
    assert waits_of_output((A, late), desc, parts(-1), all_runs=True, now_ms=now_ms) == want


@pytest.mark.parametrize(
    ("meta", "held", "want"),
    [
        (RunMeta(waits_from_ms=7), part(PID), 7),
        (RunMeta(waits_from_ms=NOTHING_WAITS), part(PID), NOTHING_WAITS),
        (RunMeta(), part(PID), PID_MS),  # no record: from its staging
        (RunMeta(waits_from_ms=NOTHING_WAITS, truncated=True), part(PID), PID_MS),  # hidden rows
        (RunMeta(waits_from_ms=7, truncated=True), part(PID), 7),
        (RunMeta(), inline_batch(0, 1, b"x").parts[0], 0),  # nothing says when
    ],
)
def test_the_bound_of_a_run(meta, held, want) -> None:
    assert HollowBatch(description(0, 1), 1, (held,), (), (meta,)).waits_from_ms == want


def test_a_trace_answers_for_all_its_batches_and_for_a_merge_of_them() -> None:
    trace = Trace()
    assert (waits_from_ms(trace), waits_after_merge_ms(trace, now_ms=CLOCK)) == (None, None)
    for each in (PLAIN.with_desc(description(0, 5)), waiting(5, 10, 300), waiting(10, 20, 200)):
        trace = trace.push_without_requests(each)
    assert (waits_from_ms(trace), waits_after_merge_ms(trace, now_ms=CLOCK)) == (200, 200)
    for since, left in ((9, 200), (18, 200), (19, None)):
        moved = trace.downgrade_since(Antichain(since))
        assert (waits_from_ms(moved), waits_after_merge_ms(moved, now_ms=CLOCK)) == (200, left)


def test_an_exertion_merges_a_single_batch_whose_since_is_behind_and_then_nothing() -> None:
    """Spec 11.9. Otherwise the last retraction of an idle shard would never cancel."""
    trace = Trace().push_without_requests(waiting(0, 10, 100))
    assert not trace.exert(1000)[2]
    begun, _, worked = trace.downgrade_since(Antichain(9)).exert(1000)
    assert worked
    _, requests, worked = begun.exert(1000)
    assert worked
    assert [request.desc for request in requests] == [description(0, 10, 9)]
