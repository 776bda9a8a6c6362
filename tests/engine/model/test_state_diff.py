"""Applying diffs: strictly, once, and on traces from before structure was stored by every path (spec 8.4 to 8.9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import InvariantViolated
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands as c
from persist_engine.model.batch import HollowBatch
from persist_engine.model.diff.legacy_diff import apply_unstructured, lenient_replacement
from persist_engine.model.diff.state_diff import (
    Delete,
    Insert,
    StateDiff,
    Update,
    apply,
    between,
    deleted_blobs,
    inserted_blobs,
)
from persist_engine.model.diff.trace_diff import TraceDiff, changes
from persist_engine.model.frontier import MINIMUM
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.flatten import pushed
from persist_engine.model.spine.spine import MergeRes, Spine
from persist_engine.model.spine.trace import Trace
from persist_kit.states import (
    DEBUG,
    Stepper,
    append,
    batch,
    description,
    first_state,
    frontier,
    leased_id,
    rollup,
    token,
    writer_id,
)


def one_append() -> tuple[Stepper, StateDiff]:
    shard = Stepper()
    shard.do(append(batch(0, 5, 3), token_number=1))
    return shard, shard.diffs[-1]


def test_an_append_says_what_it_changed_and_nothing_else() -> None:
    shard, diff = one_append()
    named = {field: getattr(diff, field) for field in diff.__slots__ if isinstance(getattr(diff, field), tuple)}
    assert {field for field, changes in named.items() if changes} == {"writers", "legacy_batches", "spine_batches"}
    assert diff.legacy_batches == (Insert(batch(0, 5, 3), None),)
    assert [change.key for change in diff.spine_batches] == [SpineId(0, 1)]
    assert diff.writers == (Insert(writer_id(1), shard.state.writers[writer_id(1)]),)
    shard.do(append(batch(5, 5), token_number=2))
    update = shard.diffs[-1].writers[0]
    assert isinstance(update, Update)
    assert (update.old.most_recent_write_token, update.to.most_recent_write_token) == (token(1), token(2))


def test_applying_is_idempotent_and_starts_where_the_diff_does() -> None:
    shard, diff = one_append()
    first = first_state()[0]
    after = apply(first, diff)
    assert after == shard.state
    assert apply(after, diff) is after
    shard.do(append(batch(5, 6), token_number=2))
    with pytest.raises(InvariantViolated, match="applied to v1"):
        apply(first, shard.diffs[-1])
    with pytest.raises(InvariantViolated, match="goes back"):
        apply(after, replace(diff, seqno_from=SeqNo(2), seqno_to=SeqNo(1)))


def test_an_old_value_that_does_not_stand_is_an_error() -> None:
    _, diff = one_append()
    first = first_state()[0]
    old = rollup(1, "other")
    wrong: list[StateDiff] = [
        replace(diff, rollups=(Insert(SeqNo(1), old),)),
        replace(diff, rollups=(Update(SeqNo(1), old, rollup(1)),)),
        replace(diff, rollups=(Delete(SeqNo(1), old),)),
        replace(diff, rollups=(Delete(SeqNo(7), old),)),
        replace(diff, last_gc_req=(Update(None, SeqNo(3), SeqNo(4)),)),
        replace(diff, since=(Update(None, frontier(3), frontier(4)),)),
        replace(diff, legacy_batches=(Delete(batch(0, 5, 3), None),)),
        replace(diff, legacy_batches=()),
        replace(diff, legacy_batches=(*diff.legacy_batches, Insert(batch(5, 9, 3), None))),
        replace(diff, spine_batches=()),
        replace(diff, hollow_batches=(Insert(SpineId(5, 6), batch(9, 9)),)),
    ]
    for bad in wrong:
        with pytest.raises(InvariantViolated):
            apply(first, bad)


def test_regression_24_a_wrong_host_name_is_taken_and_counted() -> None:
    """Bug 24."""
    shard, diff = one_append()
    counted: list[str] = []
    forced = replace(diff, hostname=(Update(None, "another", "host2"),))
    after = apply(first_state()[0], forced, count=counted.append)
    assert after == replace(shard.state, hostname="host2")
    assert sorted(counted) == ["hostname_mismatch", "structured"]


def test_states_of_two_shards_or_out_of_order_have_no_diff() -> None:
    shard, _ = one_append()
    with pytest.raises(InvariantViolated, match="out of order"):
        between(shard.state, first_state()[0])
    with pytest.raises(InvariantViolated, match="codecs"):
        between(first_state()[0], replace(shard.state, codecs=replace(shard.state.codecs, key="other")))


def test_exact_replacement_of_one_part_leaves_the_thin_form_alone() -> None:
    """The spine batch is not named by the diff, only its hollow batch is."""
    shard = Stepper()
    shard.do(append(batch(0, 5, 4, keys=("a", "b"), runs=2), token_number=1))
    before = shard.state
    shard.do(c.ApplyMergeRes(MergeRes(batch(0, 5, 4, keys=("ab",)), SpineId(0, 1))))
    diff = shard.diffs[-1]
    assert diff.spine_batches == ()
    assert [type(change) for change in diff.legacy_batches] == [Delete, Insert]
    counted: list[str] = []
    assert apply(before, diff, count=counted.append) == shard.state
    assert counted == ["structured"]


def test_regression_10_empties_that_were_grouped_otherwise_are_regrouped_by_the_full_path() -> None:
    """Bug 10: a structured diff that names an empty batch as another replica grouped it (spec 11.13)."""
    trace = Trace.unflatten(
        replace(
            Trace(pushed(MINIMUM, [batch(0, 1, 100), batch(1, 2)])).flatten(),
            legacy_batches=(batch(0, 1, 100), batch(1, 2)),
        )
    )
    grown = trace.push_without_requests(batch(2, 3))
    diff = changes(trace, grown)
    one_more = replace(
        diff,
        legacy_batches=(Insert(batch(2, 3), None),),  # beside the old one, not in its place
    )
    counted: list[str] = []
    state = replace(first_state()[0], trace=trace)
    full = StateDiff(
        "0.1.0",
        state.shard_id,
        state.birth,
        SeqNo(1),
        SeqNo(2),
        1,
        "v1/first",
        legacy_batches=one_more.legacy_batches,
        spine_batches=one_more.spine_batches,
    )
    assert apply(state, full, count=counted.append).trace == grown
    assert counted == ["structured_full"]


# --- without structure


def bare(*batches: HollowBatch) -> Trace:
    """A trace whose structure was never stored."""
    return Trace(pushed(MINIMUM, list(batches)), structured=False)


def applied(trace: Trace, *legacy: Insert[HollowBatch, None] | Delete[HollowBatch, None]) -> tuple[Trace, list[str]]:
    counted: list[str] = []
    out = apply_unstructured(trace, TraceDiff(legacy_batches=legacy), counted.append)
    out.validate(deep=True)
    assert not out.structured
    return out, counted


def insert(content: HollowBatch) -> Insert[HollowBatch, None]:
    return Insert(content, None)


def delete(content: HollowBatch) -> Delete[HollowBatch, None]:
    return Delete(content, None)


def test_fast_an_append() -> None:
    trace, counted = applied(bare(batch(0, 1, 5)), insert(batch(1, 2, 7)))
    assert list(trace.batches()) == [batch(0, 1, 5), batch(1, 2, 7)]
    assert counted == ["fast_append"]


def test_fast_an_empty_batch_made_longer() -> None:
    trace, counted = applied(bare(batch(0, 1, 100), batch(1, 2)), delete(batch(1, 2)), insert(batch(1, 3)))
    assert list(trace.batches()) == [batch(0, 1, 100), batch(1, 3)]
    assert counted == ["fast_empty"]


def test_fast_a_compaction() -> None:
    before = bare(batch(0, 1, 5), batch(1, 2, 5), batch(2, 3, 5))
    output = batch(0, 2, 9)
    trace, counted = applied(before, delete(batch(0, 1, 5)), delete(batch(1, 2, 5)), insert(output))
    assert list(trace.batches()) == [output, batch(2, 3, 5)]
    assert counted == ["fast_compaction"]


def test_fast_an_append_together_with_a_compaction() -> None:
    before = bare(batch(0, 1, 5), batch(1, 2, 5), batch(2, 3, 5))
    output = batch(0, 2, 9)
    trace, counted = applied(
        before, delete(batch(0, 1, 5)), delete(batch(1, 2, 5)), insert(output), insert(batch(3, 4, 2))
    )
    assert list(trace.batches()) == [output, batch(2, 3, 5), batch(3, 4, 2)]
    assert counted == ["fast_compaction"]


def test_lenient_a_compaction_of_empties_grouped_otherwise() -> None:
    """The producer had [1,2) and [2,4) as two empties; here they are one, and the output ends within it."""
    before = bare(batch(0, 1, 100), batch(1, 4), batch(4, 5, 100))
    output = batch(0, 2, 90)
    trace, counted = applied(before, delete(batch(0, 1, 100)), delete(batch(1, 2)), insert(output))
    assert list(trace.batches()) == [output, batch(2, 4), batch(4, 5, 100)]
    assert counted == ["lenient"]


def test_lenient_replacement_never_cuts_data() -> None:
    batches = [batch(0, 2, 5), batch(2, 4), batch(4, 6, 5)]
    assert lenient_replacement(batches, batch(3, 6, 4)) == [batch(0, 2, 5), batch(2, 3), batch(3, 6, 4)]
    sinces = [batch(0, 2, since=1), batch(2, 4, 5, since=2), batch(4, 6, since=3)]
    kept = [batch(0, 1, since=1), batch(1, 5, 4, since=7), batch(5, 6, since=3)]
    assert lenient_replacement(sinces, batch(1, 5, 4, since=7)) == kept, "what is left of a batch keeps its own since"
    for output in (batch(1, 4, 1), batch(2, 5, 1)):
        with pytest.raises(InvariantViolated, match="would cut"):
            lenient_replacement(batches, output)
    with pytest.raises(InvariantViolated, match="overlaps no batch"):
        lenient_replacement(batches, batch(6, 7, 1))
    with pytest.raises(InvariantViolated, match="gap"):
        lenient_replacement(batches[1:], batch(2, 4))


def test_slow_several_batches_at_once() -> None:
    before = bare(batch(0, 1, 5), batch(1, 2, 5), batch(2, 3, 5))
    trace, counted = applied(
        before,
        delete(batch(0, 1, 5)),
        delete(batch(1, 2, 5)),
        insert(batch(0, 1, 3)),
        insert(batch(1, 2, 4)),
    )
    assert list(trace.batches()) == [batch(0, 1, 3), batch(1, 2, 4), batch(2, 3, 5)]
    assert counted == ["slow"]


def test_reconstruction_when_the_producer_had_rebuilt_its_trace() -> None:
    """Here two empties lie apart; the producer's fresh trace of the same batches had fused them."""
    apart = Trace(apart_empties(), structured=False)
    trace, counted = applied(
        apart,
        delete(batch(0, 1, 100)),
        delete(batch(1, 3)),
        insert(batch(0, 1, 90)),
        insert(batch(1, 3)),
        delete(batch(3, 4, 100)),
        insert(batch(3, 4, 80)),
    )
    assert [each for each in trace.batches() if each.rows] == [batch(0, 1, 90), batch(3, 4, 80)]
    assert counted == ["reconstruction"]


def apart_empties() -> Spine:
    """A spine whose two empties a push would have fused: a compaction made the second one empty."""
    trace = Trace(pushed(MINIMUM, [batch(0, 1, 100), batch(1, 2), batch(2, 3, 1), batch(3, 4, 100)]))
    trace, outcome = trace.apply_merge_res(MergeRes(batch(2, 3), None), checked=False)
    assert outcome.applied
    return trace.spine


def test_a_diff_that_no_path_understands_is_an_error() -> None:
    with pytest.raises(InvariantViolated):
        applied(bare(batch(0, 1, 5)), delete(batch(0, 1, 4)), delete(batch(7, 8, 4)))


@pytest.mark.parametrize("structured", [True, False])
def test_regression_an_update_of_a_flat_batch_to_itself_changes_nothing_and_names_no_new_blob(structured: bool) -> None:
    """Old code wrote them (spec 7.7). One path refused the whole diff, and audits saw the blobs appear a second time."""
    shard = Stepper(settings=Settings() if structured else FLAT)
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    if not structured:
        shard.state = replace(shard.state, trace=bare())
    shard.do(append(batch(0, 1, 5), token_number=1))
    before = shard.state
    shard.do(append(batch(1, 9, 5), token_number=2))
    diff = shard.diffs[-1]
    assert before.trace.structured is structured
    assert list(inserted_blobs(diff))
    held = list(shard.state.trace.batches())[-1]
    updates = tuple(Update(each, None, None) for each in before.trace.batches())
    more = replace(diff, legacy_batches=(*updates, *diff.legacy_batches))
    assert apply(before, more) == apply(before, diff)
    assert list(inserted_blobs(more)) == list(inserted_blobs(diff))
    assert list(deleted_blobs(more)) == list(deleted_blobs(diff))
    only = replace(diff, legacy_batches=(Update(held, None, None),))
    assert not [*inserted_blobs(only), *deleted_blobs(only)]


def test_since_moves_without_structure_too() -> None:
    out = apply_unstructured(
        bare(batch(0, 1, 5)), TraceDiff(since=(Update(None, MINIMUM, frontier(3)),)), lambda _: None
    )
    assert out.since == frontier(3)
    with pytest.raises(InvariantViolated):
        apply_unstructured(out, TraceDiff(since=(Update(None, MINIMUM, frontier(4)),)), lambda _: None)


FLAT = Settings(maintenance=MaintenanceSettings(structure_flat_traces=False))


def test_a_trace_without_structure_diffs_and_applies_without_it() -> None:
    shard = Stepper(settings=FLAT)
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    shard.state = replace(shard.state, trace=bare(batch(0, 1, 5)))
    replica = shard.state
    for index in range(1, 6):
        shard.do(append(batch(index, index + 1, 5), token_number=index))
        replica = apply(replica, shard.diffs[-1])
        assert shard.diffs[-1].spine_batches == ()
        assert replica.trace == replace(shard.state.trace, spine=unclaimed(shard.state.trace))


def test_a_flat_trace_gets_its_structure_with_the_next_version_and_keeps_it() -> None:
    """Whatever the next command is, and even where its process still leaves traces flat."""
    shard = Stepper()
    shard.state = replace(shard.state, trace=bare(batch(0, 1, 5), batch(1, 2, 5)))
    replica = shard.state
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    assert shard.state.trace.structured
    shard.settings = FLAT
    shard.do(append(batch(2, 3, 5), token_number=1))
    for diff in shard.diffs:
        replica = apply(replica, diff)
    assert replica == shard.state
    assert replica.trace.structured


def unclaimed(trace: Trace) -> Spine:
    """Claims are structure, so they are not stored here."""
    spine = trace.spine
    for each in trace.spine_batches():
        spine = spine.with_batch(replace(each, active_compaction_start_ms=None))
    return spine


def test_a_trace_becomes_structured_by_a_diff_that_carries_structure() -> None:
    before = bare(batch(0, 1, 5), batch(1, 2, 5))
    after = Trace(before.spine).push_without_requests(batch(2, 3, 5))
    counted: list[str] = []
    assert apply_unstructured(before, changes(before, after), counted.append) == after
    assert counted == ["fast_append"]
    with pytest.raises(InvariantViolated, match="lost its structure"):
        changes(after, before)


def test_unflatten_names_what_does_not_fit() -> None:
    flat = Trace(pushed(MINIMUM, [batch(0, 1, 5), batch(1, 2, 5)])).flatten()
    wrong = [
        replace(flat, legacy_batches=flat.legacy_batches[:1]),
        replace(flat, legacy_batches=(*flat.legacy_batches, batch(2, 3, 5))),
        replace(flat, hollow_batches={SpineId(7, 8): batch(1, 1)}),
        replace(flat, merges={}),
        replace(flat, legacy_batches=(batch(0, 1, 5), batch(1, 3, 5))),
        replace(flat, since=frontier(0), spine_batches={}, merges=flat.merges),
    ]
    for bad in wrong:
        with pytest.raises(InvariantViolated):
            Trace.unflatten(bad)
    split = replace(
        Trace(pushed(MINIMUM, [batch(0, 1, 100), batch(1, 4)])).flatten(),
        legacy_batches=(batch(0, 1, 100), batch(1, 2), batch(2, 4, since=0)),
    )
    assert list(Trace.unflatten(split).batches()) == [batch(0, 1, 100), HollowBatch.empty(description(1, 4))]


@pytest.mark.parametrize(
    "damage",
    [
        {"since": (Delete(None, MINIMUM),)},
        {"since": (Insert(None, frontier(3)),)},
        {"last_gc_req": (Delete(None, SeqNo(0)),)},
        {"hostname": (Delete(None, "host"),)},
    ],
    ids=["since deleted", "since inserted", "last_gc_req deleted", "hostname deleted"],
)
@pytest.mark.parametrize("structured", [True, False])
def test_what_always_has_a_value_can_only_be_updated(damage: dict[str, object], structured: bool) -> None:
    """Spec 8.2: it was taken for no change."""
    _, diff = one_append()
    first = first_state()[0]
    before = replace(first, trace=replace(first.trace, structured=structured))
    with pytest.raises(InvariantViolated, match="can only be updated"):
        apply(before, replace(diff, **damage))
