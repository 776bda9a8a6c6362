"""A commit costs what it changes, not what the state holds. Work is counted, not timed: hollow batches and records
that are looked at, and objects that are shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.model.batch import HollowBatch
from persist_engine.model.diff import trace_diff
from persist_engine.model.diff.state_diff import apply, between
from persist_engine.model.leases import expires_after_ms
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine import flatten
from persist_engine.model.spine.spine import Sizes
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import LeasedReader, Writer
from persist_kit.depth import draws
from persist_kit.states import DEBUG, Stepper, append, batch, leased_id, rollup, writer_id

BATCHES = 4096


def big_shard() -> Stepper:
    """A shard of many batches, never compacted, with many readers, writers and rollups."""
    trace = Trace()
    for index in range(BATCHES):
        trace = trace.push_without_requests(batch(index, index + 1, 1))
    shard = Stepper()
    state = shard.state
    readers = {leased_id(n): LeasedReader(state.seqno, trace.since, 0, 10**9, DEBUG) for n in range(1000)}
    writers = {writer_id(n): Writer(0, 10**9, DEBUG) for n in range(2, 1000)}
    rollups = {**dict(state.rollups.items()), **{type(state.seqno)(n): rollup(n) for n in range(2, 1000)}}
    shard.state = replace(
        state,
        seqno=type(state.seqno)(1000),
        trace=trace,
        leased_readers=SharedMap(readers),
        writers=SharedMap(writers),
        rollups=SharedMap(rollups),
    )
    return shard


class Counts:
    """How often something was looked at."""

    def __init__(self) -> None:
        self.parts = 0
        self.map_walks = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    counted = Counts()
    real_thin, real_split, real_sizes = flatten.thin, trace_diff._split, Sizes.of
    real_values, real_items, real_iter = SharedMap.values, SharedMap.items, SharedMap.__iter__

    def thin(held):
        counted.parts += len(held.parts)
        return real_thin(held)

    def split(parts):
        counted.parts += len(parts)
        return real_split(parts)

    def sizes(content: HollowBatch) -> Sizes:
        counted.parts += 1
        return real_sizes(content)

    def walk(real):
        def walked(self):
            counted.map_walks += len(self)
            return real(self)

        return walked

    monkeypatch.setattr(flatten, "thin", thin)
    monkeypatch.setattr(trace_diff, "_split", split)
    monkeypatch.setattr(Sizes, "of", staticmethod(sizes))
    monkeypatch.setattr(SharedMap, "values", walk(real_values))
    monkeypatch.setattr(SharedMap, "items", walk(real_items))
    monkeypatch.setattr(SharedMap, "__iter__", walk(real_iter))
    return counted


@pytest.mark.slow
def test_an_append_looks_at_what_merges_and_not_at_what_is_there(counts: Counts) -> None:
    """Per append, amortised, the hollow batches looked at are logarithmic in those there are, on the committing side
    and on a replica; maps are not walked at all once their minima are known."""
    shard = big_shard()
    shard.do(append(batch(BATCHES, BATCHES + 1, 1), token_number=1, lease_ms=10**9))
    replica = shard.state
    counts.parts = counts.map_walks = 0
    appends = 512
    for index in range(appends):
        lower = BATCHES + 1 + index
        shard.do(append(batch(lower, lower + 1, 1), token_number=2 + index, lease_ms=10**9))
    per_append = counts.parts / appends
    assert per_append < 8 * (BATCHES + appends).bit_length(), f"{per_append} hollow batches looked at per append"
    assert counts.map_walks == 0
    counts.parts = 0
    paths: list[str] = []
    for diff in shard.diffs[1:]:
        replica = apply(replica, diff, count=paths.append)
    assert set(paths) == {"structured"}
    per_apply = counts.parts / appends
    assert per_apply < 16 * (BATCHES + appends).bit_length(), f"{per_apply} hollow batches looked at per diff"
    assert replica == shard.state


@pytest.mark.slow
def test_an_append_shares_every_spine_batch_that_did_not_merge() -> None:
    shard = big_shard()
    before = {id(each.parts) for each in shard.state.trace.spine_batches()}
    readers, rollups = shard.state.leased_readers, shard.state.rollups
    shard.do(append(batch(BATCHES, BATCHES + 1, 1), token_number=1))
    after = list(shard.state.trace.spine_batches())
    old = max(after, key=lambda each: len(each.parts))
    assert len(old.parts) > BATCHES // 4
    assert id(old.parts) in before
    assert shard.state.leased_readers == readers
    assert shard.state.leased_readers is readers
    assert shard.state.rollups is rollups


@pytest.mark.slow
def test_a_claim_alone_looks_at_no_hollow_batch(counts: Counts) -> None:
    shard = big_shard()
    before = shard.state.trace
    target = max(before.spine_batches(), key=lambda each: len(each.parts))
    counts.parts = 0
    diff = trace_diff.changes(before, before.claim(target.id, 7))
    assert counts.parts == 0
    assert [change.key for change in diff.merges] == [target.id]
    assert diff == trace_diff.TraceDiff(merges=diff.merges)


@pytest.mark.slow
def test_sums_are_carried_along() -> None:
    trace = big_shard().state.trace
    assert (trace.rows, trace.part_count, trace.batch_count) == (BATCHES, BATCHES, BATCHES)
    assert trace.sizes == Sizes.total(tuple(part for each in trace.spine_batches() for part in each.parts))


# --- the map


def test_edits_of_a_sealed_map_are_all_that_is_compared() -> None:
    base: SharedMap[int, int] = SharedMap({n: n for n in range(100)})
    edited = base.set(3, 30).remove(4).set(200, 1).set(5, 5)
    assert edited.changes_since(base) == [(3, 3, 30), (4, 4, None), (200, None, 1)]
    assert edited.sealed().set(6, 60).changes_since(edited.sealed()) == [(6, 6, 60)]
    assert edited.sealed().changes_since(base) == edited.changes_since(base), (
        "without the memory of edits, both are walked"
    )
    assert base.set(3, 30).set(3, 3).changes_since(base) == []


@pytest.mark.slow
@settings(max_examples=draws(40), deadline=None)
@given(st.integers(0, 300), st.lists(st.tuples(st.integers(0, 400), st.none() | st.integers(0, 50)), max_size=60))
def test_the_least_is_the_least_whatever_was_edited(size: int, edits: list[tuple[int, int | None]]) -> None:
    """Also of maps that are kept while others are made of them."""
    holders: SharedMap[int, Writer] = SharedMap({n: Writer(n, 10, DEBUG) for n in range(size)})
    made = [holders]
    for number, (key, beat) in enumerate(edits):
        holders = holders.remove(key) if beat is None else holders.set(key, Writer(beat, 10, DEBUG))
        if number % 3 == 0:
            assert holders.least(expires_after_ms) == min(map(expires_after_ms, holders.values()), default=None)
        if number % 5 == 0:
            holders = holders.sealed()
        made.append(holders)
    for each in made:
        ends = {key: expires_after_ms(value) for key, value in each.items()}
        assert each.least(expires_after_ms) == min(ends.values(), default=None)
        for bound in (0, 30, 1000):
            assert each.keys_below(expires_after_ms, bound) == sorted(key for key, end in ends.items() if end < bound)


@pytest.mark.slow
@given(
    st.dictionaries(st.integers(0, 20), st.integers(0, 5)),
    st.dictionaries(st.integers(0, 20), st.none() | st.integers(0, 5)),
    st.booleans(),
)
def test_many_edits_at_once_are_those_edits_one_by_one(
    start: dict[int, int], changes: dict[int, int | None], begins_edited: bool
) -> None:
    base = SharedMap(start)
    at_once = one_by_one = base.set(99, 1) if begins_edited else base
    at_once = at_once.edited(changes)
    for key, value in changes.items():
        one_by_one = one_by_one.remove(key) if value is None else one_by_one.set(key, value)
    assert at_once == one_by_one
    assert at_once.changes_since(base) == one_by_one.changes_since(base)
    assert (at_once is base) == (one_by_one is base)


@pytest.mark.slow
def test_mass_expiry_and_the_diff_of_it_are_one_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each edit copies the memory of those before it: one by one, 100,000 readers took six minutes to go."""
    shard = big_shard()
    before = shard.state
    edits: list[frozenset[object]] = []
    real = SharedMap._edit

    def edit(self, new_map, keys):
        edits.append(keys)
        return real(self, new_map, keys)

    monkeypatch.setattr(SharedMap, "_edit", edit)
    shard.now_ms += 10**9 + 1
    shard.do(append(batch(BATCHES, BATCHES + 1, 1), token_number=1))
    assert len(shard.state.leased_readers) == 0
    assert [len(keys) for keys in edits].count(1000) == 1
    edits.clear()
    assert apply(before, between(before, shard.state)) == shard.state
    assert [len(keys) for keys in edits].count(1000) == 1
    assert len(edits) < 20


@pytest.mark.slow
def test_an_edit_among_100_000_looks_at_few() -> None:
    looked: list[int] = []

    def measure(value: int) -> int:
        looked.append(value)
        return value

    many: SharedMap[int, int] = SharedMap({n: n for n in range(100_000)})
    assert many.least(measure) == 0
    looked.clear()
    for beat in range(100):
        many = many.set(beat, 100_000 + beat).sealed()
        assert many.least(measure) == beat + 1
    assert len(looked) < 100 * 60
    looked.clear()
    assert many.keys_below(measure, 103) == [100, 101, 102]
    assert len(looked) < 200


def test_what_was_derived_is_forgotten_by_an_edit_and_kept_by_a_seal() -> None:
    calls: list[int] = []

    def total(values: SharedMap[int, int]) -> int:
        calls.append(1)
        return sum(values.values())

    base: SharedMap[int, int] = SharedMap({1: 1, 2: 2})
    edited = base.set(3, 3)
    assert (base.derived(total), base.derived(total), len(calls)) == (3, 3, 1)
    assert (edited.derived(total), len(calls)) == (6, 2)
    assert (edited.sealed().derived(total), len(calls)) == (6, 2)
