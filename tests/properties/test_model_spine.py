"""Laws of frontiers and of the spine, under whatever is done to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvariantViolated
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain
from persist_engine.model.spine.edit import SpineEdit
from persist_engine.model.spine.spine import MergeOutcome, MergeReq, MergeRes
from persist_engine.model.spine.trace import Trace
from persist_kit.depth import draws
from persist_kit.states import batch, description

frontiers = st.one_of(st.none(), st.integers(0, 2**64 - 1), st.integers(0, 3)).map(Antichain)


@given(frontiers, frontiers, frontiers)
def test_frontiers_form_a_lattice(a: Antichain, b: Antichain, c: Antichain) -> None:
    """Spec 1.2."""
    assert a.meet(b) == b.meet(a)
    assert a.join(b) == b.join(a)
    assert a.meet(b.meet(c)) == a.meet(b).meet(c)
    assert a.join(b.join(c)) == a.join(b).join(c)
    assert a.meet(a.join(b)) == a == a.join(a.meet(b))
    assert (a <= b) == (a.meet(b) == a) == (a.join(b) == b) == (b >= a)
    assert (a < b) == (a <= b and a != b)
    assert a <= b or b <= a


@given(frontiers, frontiers, st.integers(0, 2**64 - 1))
def test_order_agrees_with_times(a: Antichain, b: Antichain, time: int) -> None:
    if a <= b and b.less_equal(time):
        assert a.less_equal(time)
    assert a.less_equal(time) == (not a.is_empty() and (a.less_than(time) or a.elements == (time,)))
    advanced = a.advance(time)
    assert (advanced is None) == a.is_empty()
    if advanced is not None:
        assert advanced >= time
        assert a.less_equal(advanced)
        assert a.advance(advanced) == advanced


rows = st.one_of(st.just(0), st.integers(1, 4), st.integers(0, 300), st.integers(0, 100_000))
actions = st.one_of(
    st.tuples(st.just("push"), rows, st.integers(1, 3)),
    st.tuples(st.just("push"), rows, st.integers(1, 3)),
    st.tuples(st.just("exert"), st.integers(0, 2000), st.just(0)),
    st.tuples(st.just("since"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("compact"), st.integers(0, 50), st.integers(0, 100)),
    st.tuples(st.just("claim"), st.integers(0, 50), st.integers(0, 100)),
    st.tuples(st.just("replace"), st.integers(0, 50), st.integers(0, 100)),
)


def output_of(request: MergeReq, percent: int) -> HollowBatch:
    """What compacting `request` might give: `percent` of its rows, sometimes none."""
    total = sum(each.rows for _, each in request.inputs) * percent // 100
    desc = request.desc
    return replace(batch(0, 1, total, keys=(f"out/{request.id}-{total}",) if total else ()), desc=desc)


class Driver:
    """A trace, and every request it ever made: results may come at any time, in any order, or twice."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.requests: list[MergeReq] = []

    def do(self, kind: str, one: int, two: int) -> None:
        upper = self.trace.upper.time or 0
        match kind:
            case "push":
                self.trace, new = self.trace.push(batch(upper, upper + two, one, keys=(f"w/{upper}",) if one else ()))
                self.requests += new
            case "exert":
                self.trace, new, worked = self.trace.exert(one)
                assert worked or not new
                self.requests += new
            case "since":
                self.trace = self.trace.downgrade_since(self.trace.since.join(Antichain.of(one)))
            case "compact" | "replace" if self.requests:
                request = self.requests[one % len(self.requests)]
                res = MergeRes(output_of(request, two), request.id if kind == "compact" else None)
                levels = [(each.id, each.level) for each in self.trace.spine_batches()]
                merges = [level.merge for level in self.trace.spine.levels]
                held = self.trace.rows
                after, outcome = self.trace.apply_merge_res(res, checked=False)
                assert outcome.applied or after is self.trace
                assert [(each.id, each.level) for each in after.spine_batches()] == levels
                assert [level.merge for level in after.spine.levels] == merges
                assert after.rows <= held
                self.trace = after
            case "claim":
                for request in self.trace.fueled_requests(claimed_before_ms=one)[:1]:
                    self.trace = self.trace.claim(request.id, two)
            case _:
                pass


@pytest.mark.slow
@settings(max_examples=draws(150), deadline=None)
@given(st.lists(actions, max_size=60))
def test_spine_stays_sound_and_survives_flattening(script: list[tuple[str, int, int]]) -> None:
    """After every action: invariants, sums, tiling; flatten and unflatten give the same trace back (spec 2.6, 8.8, 8.9)."""
    driver = Driver()
    for action in script:
        before_upper, before_id = driver.trace.upper, driver.trace.next_id
        driver.do(*action)
        driver.trace.validate(deep=True)
        assert before_upper <= driver.trace.upper
        assert before_id <= driver.trace.next_id
        assert Trace.unflatten(driver.trace.flatten()) == driver.trace
    batches = list(driver.trace.batches())
    assert driver.trace.batch_count == len(batches)
    assert driver.trace.rows == sum(each.rows for each in batches)
    assert driver.trace.part_count == sum(len(each.parts) for each in batches)


@pytest.mark.slow
@settings(max_examples=draws(100), deadline=None)
@given(st.lists(rows, min_size=1, max_size=120))
def test_spine_batches_are_logarithmically_many(sizes: list[int]) -> None:
    """At most two per level, and no level beyond the logarithm of all rows ever pushed (spec C.7)."""
    trace = Trace()
    for index, size in enumerate(sizes):
        trace, _ = trace.push(batch(index, index + 1, size))
    levels = len(trace.spine.levels)
    assert levels <= sum(sizes).bit_length() + 2
    assert sum(1 for _ in trace.spine_batches()) <= 2 * levels


@settings(max_examples=draws(100), deadline=None)
@given(st.lists(rows, min_size=1, max_size=40))
def test_every_merge_is_requested_and_every_request_matches(sizes: list[int]) -> None:
    """A worker that does every request at once ends with each spine batch in one piece."""
    trace = Trace()
    for index, size in enumerate(sizes):
        trace, requests = trace.push(batch(index, index + 1, size))
        for request in requests:
            trace, outcome = trace.apply_merge_res(MergeRes(output_of(request, 100), request.id))
            assert outcome is MergeOutcome.APPLIED_EXACT
        assert all(each.is_compact for each in trace.spine_batches())


@pytest.mark.slow
@given(st.lists(rows, min_size=1, max_size=30))
def test_flat_batches_without_structure_give_the_same_contents(sizes: list[int]) -> None:
    """A trace from before structure was stored is rebuilt by pushing; data batches stay what they were."""
    trace = Trace()
    for index, size in enumerate(sizes):
        trace, _ = trace.push(batch(index, index + 1, size))
    flat = replace(trace.flatten(), spine_batches={}, hollow_batches={}, merges={})
    rebuilt = Trace.unflatten(flat)
    assert not rebuilt.structured
    rebuilt.validate(deep=True)
    assert rebuilt.upper == trace.upper
    assert [each for each in rebuilt.batches() if each.rows] == [each for each in trace.batches() if each.rows]
    assert Trace.unflatten(rebuilt.flatten()) == rebuilt


def test_description_prints_short() -> None:
    assert str(description(3, 7, 2)) == "[3,7)@2"
    assert str(description(3, None, None)) == "[3,∞)@∞"


def test_no_fuel_makes_more_levels_than_are_read_back() -> None:
    trace = Trace()
    for lower, rows in ((0, 100), (1, 1), (2, 7)):
        trace, _ = trace.push(batch(lower, lower + 1, rows))
    for _ in range(5):
        trace, _, _ = trace.exert(2**200)
        assert Trace.unflatten(trace.flatten()) == trace
    edit = SpineEdit(trace.push(batch(3, 4, 5))[0].spine)
    edit.exert(2**200)
    with pytest.raises(InvariantViolated, match="more levels than are read back"):
        edit.finish()[0].validate()
