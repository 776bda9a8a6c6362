"""One section per command: what it changes, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import (
    FinalizationError,
    InvalidEmptyTimeInterval,
    InvalidUsage,
    InvariantViolated,
)
from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands as c
from persist_engine.model.frontier import EMPTY, MINIMUM
from persist_engine.model.ids import SENTINEL_TOKEN
from persist_engine.model.queries import rollup_seqnos
from persist_engine.model.spine.spine import MergeOutcome, MergeRes
from persist_engine.model.state import SchemaPair, SourceProgress
from persist_engine.model.transitions import Applied, Refused, transition
from persist_kit.states import (
    DEBUG,
    SCHEMA,
    Stepper,
    append,
    batch,
    committed,
    critical_id,
    downgrade,
    frontier,
    inline_batch,
    leased_id,
    refused,
    register,
    rollup,
    token,
    writer_id,
)


def tombstone() -> Stepper:
    shard = Stepper()
    register(shard)
    committed(shard, append(batch(0, 5, 10), token_number=1))
    committed(shard, append(batch(5, None), token_number=2))
    committed(shard, downgrade(1, None))
    for _ in range(20):
        answer = shard.do(c.BecomeTombstone())
        if answer == c.TombstoneStep(finalized=True, progressed=False):
            return shard
    raise AssertionError("never finalized")


# --- compare and append


def test_append_pushes_and_registers_the_writer() -> None:
    shard = Stepper(now_ms=7)
    content = batch(0, 5, 10)
    assert committed(shard, append(content, token_number=1)) == c.Appended(())
    writer = shard.state.writers[writer_id(1)]
    assert (writer.most_recent_write_token, writer.most_recent_write_upper) == (token(1), frontier(5))
    assert writer.last_heartbeat_ms == 7
    assert list(shard.state.trace.batches()) == [content]
    assert shard.state.trace.upper == frontier(5)


def test_append_elsewhere_is_a_mismatch_that_names_the_writers_own_upper() -> None:
    shard = Stepper()
    committed(shard, append(batch(0, 5, 1), by=1, token_number=1))
    committed(shard, append(batch(5, 8, 1), by=2, token_number=2))
    answer = refused(shard, append(batch(5, 9, 1), by=1, token_number=3))
    assert answer == c.UpperMismatch(current=frontier(8), expected=frontier(5), writer_upper=frontier(5))
    answer = refused(shard, append(batch(9, 10, 1), by=3, token_number=4))
    assert answer == c.UpperMismatch(current=frontier(8), expected=frontier(9), writer_upper=MINIMUM)
    assert writer_id(3) not in shard.state.writers


def test_append_of_the_same_token_was_already_committed_even_when_others_wrote_since() -> None:
    """Bug 2: the token is looked at before the upper (spec 9.3)."""
    shard = Stepper()
    again = append(batch(0, 5, 1), by=1, token_number=1)
    committed(shard, again)
    assert refused(shard, again) == c.AlreadyCommitted()
    committed(shard, append(batch(5, 8, 1), by=2, token_number=2))
    assert refused(shard, again) == c.AlreadyCommitted()


def test_append_of_a_token_that_was_used_for_other_bounds_is_an_error() -> None:
    shard = Stepper()
    committed(shard, append(batch(0, 5, 1), token_number=1))
    with pytest.raises(InvariantViolated, match="another upper"):
        shard.do(append(batch(0, 6, 1), token_number=1))


def test_append_of_nothing_in_an_empty_interval_is_a_heartbeat() -> None:
    shard = Stepper()
    committed(shard, append(batch(0, 5, 1), token_number=1))
    shard.now_ms = 50
    trace = shard.state.trace
    assert committed(shard, append(batch(5, 5), token_number=2)) == c.Appended(())
    assert shard.state.trace == trace
    assert shard.state.writers[writer_id(1)].last_heartbeat_ms == 50


def test_append_of_data_in_an_empty_interval_is_refused_before_anything_else() -> None:
    shard = Stepper()
    data = batch(3, 3, 1)
    with pytest.raises(InvalidEmptyTimeInterval) as caught:
        shard.do(append(data, token_number=1))
    assert caught.value.detail == {"lower": frontier(3), "upper": frontier(3), "parts": tuple(data.blob_keys())}
    assert len(caught.value.detail["parts"]) == 1


def test_append_of_an_advanced_batch_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="advanced beyond"):
        Stepper().do(append(batch(0, 5, 1, since=3), token_number=1))


def test_heartbeat_of_a_writer_never_goes_back() -> None:
    """Bug 34: clocks step back."""
    shard = Stepper(now_ms=50)
    committed(shard, append(batch(0, 5, 1), token_number=1))
    shard.now_ms = 20
    committed(shard, append(batch(5, 6, 1), token_number=2))
    assert shard.state.writers[writer_id(1)].last_heartbeat_ms == 50


def test_inline_data_is_bounded_exclusively() -> None:
    shard = Stepper()
    committed(shard, append(inline_batch(0, 1, b"x" * 60), token_number=1, inline_total_bytes_max=100))
    full = append(inline_batch(1, 2, b"x" * 40), token_number=2, inline_total_bytes_max=100)
    assert refused(shard, full) == c.InlineBackpressure()
    committed(shard, append(batch(1, 2, 10), token_number=3, inline_total_bytes_max=10))
    committed(shard, append(inline_batch(2, 3, b"x" * 39), token_number=4, inline_total_bytes_max=100))
    assert shard.state.trace.inline_bytes == 99


def test_upper_is_checked_before_backpressure() -> None:
    answer = refused(Stepper(), append(inline_batch(1, 2, b"xx"), token_number=1, inline_total_bytes_max=1))
    assert isinstance(answer, c.UpperMismatch)


def test_progress_is_committed_with_the_data_and_compared_first() -> None:
    shard = Stepper()

    def with_progress(lower: int, new: bytes, expected: bytes | None, number: int) -> c.CompareAndAppend:
        cmd = append(batch(lower, lower + 1, 1), token_number=number)
        return replace(cmd, progress=("sink", SourceProgress(new, frontier(number))), expected_progress=expected)

    assert refused(shard, with_progress(0, b"b", b"a", 1)) == c.ProgressMismatch(None)
    committed(shard, with_progress(0, b"a", None, 2))
    assert shard.state.progress["sink"] == SourceProgress(b"a", frontier(2))
    stored = SourceProgress(b"a", frontier(2))
    assert refused(shard, with_progress(0, b"b", None, 3)) == c.ProgressMismatch(stored)
    assert isinstance(refused(shard, with_progress(0, b"b", b"a", 4)), c.UpperMismatch)
    assert refused(shard, with_progress(0, b"a", None, 2)) == c.AlreadyCommitted()
    committed(shard, append(batch(1, 2, 1), token_number=5))
    assert shard.state.progress["sink"] == stored


def test_append_claims_the_merges_that_fell_due() -> None:
    shard = Stepper(now_ms=3)
    for index in range(2):
        committed(shard, append(batch(index, index + 1, 8), token_number=index))
    answer = committed(shard, append(batch(2, 3, 8), token_number=2))
    assert isinstance(answer, c.Appended)
    assert [str(request.id) for request in answer.requests] == ["0-2"]
    claims = {str(each.id): each.active_compaction_start_ms for each in shard.state.trace.spine_batches()}
    assert claims == {"0-2": 3, "2-3": None}
    assert shard.maintenance.requests == answer.requests


@pytest.mark.parametrize(
    ("now_ms", "rows", "taken"), [(999, 1, []), (1000, 0, []), (1000, 1, ["0-2"])], ids=["claimed", "empty", "lapsed"]
)
def test_append_takes_over_an_abandoned_compaction(now_ms: int, rows: int, taken: list[str]) -> None:
    """Only an append with data and without work of its own does, and only once the claim is older than claim_ms."""
    shard = Stepper()
    for index in range(3):
        committed(shard, append(batch(index, index + 1, 64), token_number=index))
    shard.now_ms = now_ms
    answer = committed(shard, append(batch(3, 4, rows), token_number=3))
    assert isinstance(answer, c.Appended)
    assert [str(request.id) for request in answer.requests] == taken


@pytest.mark.parametrize(
    ("percent", "token_number", "taken"),
    [(0, 3, 0), (100, 3, 1), (300, 3, 3), (150, 49, 2), (150, 50, 1), (30, 29, 1), (30, 30, 0), (1000, 3, 4)],
)
def test_how_many_abandoned_compactions_an_append_takes_over_is_decided_by_percent_and_token(
    percent: int, token_number: int, taken: int
) -> None:
    """One for each hundred, and one more when the token falls into the rest: a retry of the call takes the same (spec 9.4)."""
    shard = Stepper()
    trace = shard.state.trace
    for upper, size in enumerate((4096, 256, 16, 4)):
        trace, _ = trace.push(batch(upper, upper + 1, size, keys=(f"{size}a", f"{size}b"), runs=2))
    shard.state = replace(shard.state, trace=trace)
    open_requests = trace.fueled_requests(claimed_before_ms=0)
    assert len(open_requests) == 4
    cmd = replace(append(batch(4, 5, 1), token_number=token_number), claim_percent=percent)
    answer = committed(shard, cmd)
    assert isinstance(answer, c.Appended)
    assert answer.requests == open_requests[:taken], "oldest first"


@pytest.mark.parametrize(
    ("key", "min_version", "taken"),
    [
        ("n0000009/pa", "0.1.0", True),
        ("n0000100/pa", "0.1.0", False),
        ("n0000009/pa", None, False),
    ],
)
def test_batches_with_parts_of_older_code_are_claimed_although_they_are_compact(
    key: str, min_version: str | None, taken: bool
) -> None:
    """Spec 11.10."""
    shard = Stepper()
    committed(shard, append(batch(0, 1, 64, keys=(key,)), token_number=1))
    later = append(batch(1, 2, 1, keys=("n0000100/pb",)), token_number=2)
    answer = committed(shard, replace(later, claim_min_version=min_version))
    assert isinstance(answer, c.Appended)
    assert [str(request.id) for request in answer.requests] == (["0-1"] if taken else [])
    shard.now_ms = 2000
    claimed = shard.do(c.ClaimCompactions(max_requests=5, claim_ms=1000, claim_min_version=min_version))
    assert isinstance(claimed, c.CompactionsClaimed)
    assert [str(request.id) for request in claimed.requests] == (["0-1"] if taken else [])


@pytest.mark.parametrize(("start_ms", "free"), [(5_000, False), (6_000, False), (6_001, True), (10**12, True)])
def test_a_claim_from_the_far_future_is_a_broken_clock_and_no_claim(start_ms: int, free: bool) -> None:
    shard = Stepper(now_ms=5_000)
    committed(shard, append(batch(0, 1, 64, keys=("a", "b"), runs=2), token_number=1))
    (held,) = shard.state.trace.spine_batches()
    shard.state = replace(shard.state, trace=shard.state.trace.claim(held.id, start_ms))
    answer = shard.do(c.ClaimCompactions(max_requests=5, claim_ms=1000))
    assert isinstance(answer, c.CompactionsClaimed)
    assert bool(answer.requests) is free


# --- rollups


def test_adding_a_rollup_twice_is_applied_and_another_one_is_not() -> None:
    shard = Stepper()
    register(shard)
    assert committed(shard, c.AddRollup(SeqNo(2), rollup(2))) == c.RollupAdded(applied=True)
    assert committed(shard, c.AddRollup(SeqNo(2), rollup(2))) == c.RollupAdded(applied=True)
    assert committed(shard, c.AddRollup(SeqNo(2), rollup(2, "other"))) == c.RollupAdded(applied=False)
    assert shard.state.rollups[SeqNo(2)] == rollup(2)
    with pytest.raises(InvalidUsage, match="cannot be linked"):
        shard.do(c.AddRollup(shard.state.seqno.next(), rollup(9)))


def test_a_rollup_that_was_removed_is_never_linked_again_whatever_came_late() -> None:
    """A slow writer's is linked between the listing of what a collection removes, and its removal (spec 9.14)."""
    shard = Stepper()
    for number in range(6):
        committed(shard, append(batch(number, number + 1, 1), token_number=number + 1))
    for seqno in (4, 5, 3):
        assert committed(shard, c.AddRollup(SeqNo(seqno), rollup(seqno))) == c.RollupAdded(applied=True)
    first = shard.state.rollups[SeqNo(1)]
    answer = committed(shard, c.RemoveRollups(((SeqNo(1), first), (SeqNo(4), rollup(4)))))
    assert answer == c.RollupsRemoved((SeqNo(1), SeqNo(3), SeqNo(4)))
    assert list(shard.state.rollups) == [5]
    # The other was taken for an orphan by a scan, while the first of its version was linked.
    for late in (rollup(4), rollup(4, "other")):
        assert committed(shard, c.AddRollup(SeqNo(4), late)) == c.RollupAdded(applied=False)


def test_removing_rollups_takes_only_those_that_are_there_and_never_the_newest() -> None:
    shard = Stepper()
    register(shard)
    committed(shard, c.AddRollup(SeqNo(2), rollup(2)))
    first = shard.state.rollups[SeqNo(1)]
    assert refused(shard, c.RemoveRollups(())) == c.RollupsRemoved(())
    assert committed(shard, c.RemoveRollups(((SeqNo(1), rollup(1, "other")),))) == c.RollupsRemoved(())
    with pytest.raises(InvariantViolated, match="newest"):
        shard.do(c.RemoveRollups(((SeqNo(2), rollup(2)),)))
    answer = committed(shard, c.RemoveRollups(((SeqNo(1), first), (SeqNo(7), rollup(7)))))
    assert answer == c.RollupsRemoved((SeqNo(1),))
    assert list(shard.state.rollups) == [2]


# --- compaction


def test_a_merge_result_is_committed_whatever_came_of_it() -> None:
    """Spec 9.15."""
    shard = Stepper()
    for index in range(3):
        committed(shard, append(batch(index, index + 1, 8), token_number=index))
    output = batch(0, 2, 10, keys=("out",))
    output = replace(output, parts=(replace(output.parts[0], diffs_sum=16),))
    assert committed(shard, c.ApplyMergeRes(MergeRes(output, None))) == c.MergeApplied(MergeOutcome.APPLIED_EXACT)
    assert [list(each.blob_keys()) for each in shard.state.trace.batches()] == [["out"], ["w/p2-3-8"]]
    answer = committed(shard, c.ApplyMergeRes(MergeRes(batch(0, 3, 1), None)))
    assert answer == c.MergeApplied(MergeOutcome.NOT_APPLIED_NO_MATCH)


def test_exertion_ripens_an_idle_shard() -> None:
    """Spec 9.20."""
    shard = Stepper(now_ms=4)
    committed(shard, append(batch(0, 1, 100), token_number=1))
    assert refused(shard, c.SpineExert(1000)) == c.Exerted(())
    committed(shard, append(batch(1, 2, 3), token_number=2))
    assert refused(shard, c.SpineExert(0)) == c.Exerted(())
    for _ in range(3):
        answer = committed(shard, c.SpineExert(1000))
        assert isinstance(answer, c.Exerted)
        if answer.requests:
            break
    assert shard.maintenance.requests == answer.requests
    claims = {each.id: each.active_compaction_start_ms for each in shard.state.trace.spine_batches()}
    assert [claims[request.id] for request in answer.requests] == [4]


def test_compactions_are_claimed_oldest_first_and_once() -> None:
    shard = Stepper()
    for index in range(3):
        committed(shard, append(batch(index, index + 1, 64), token_number=index))
    claim = c.ClaimCompactions(max_requests=5, claim_ms=1000)
    assert refused(shard, claim) == c.CompactionsClaimed(()), "the append that made it has claimed it"
    shard.now_ms = 1000
    answer = committed(shard, claim)
    assert isinstance(answer, c.CompactionsClaimed)
    assert [str(request.id) for request in answer.requests] == ["0-2"]
    assert refused(shard, claim) == c.CompactionsClaimed(())
    shard.now_ms = 5000
    assert refused(shard, replace(claim, max_requests=0)) == c.CompactionsClaimed(())


# --- schemas


def test_a_schema_is_found_or_refused_once_there_is_one() -> None:
    """Spec 9.17."""
    shard = Stepper()
    assert refused(shard, c.RegisterSchema(SCHEMA)) == c.SchemaRegistered(0)
    assert refused(shard, c.RegisterSchema(SchemaPair(b"x", b"y"))) == c.SchemaRegistered(None)
    bare = Stepper(state=replace(shard.state, schemas=shard.state.schemas.remove(0)))
    assert committed(bare, c.RegisterSchema(SCHEMA)) == c.SchemaRegistered(0)


# --- tombstones


def test_only_a_closed_shard_can_be_finalized() -> None:
    shard = Stepper()
    with pytest.raises(FinalizationError, match="both must be empty"):
        shard.do(c.BecomeTombstone())
    committed(shard, append(batch(0, None), token_number=1))
    with pytest.raises(FinalizationError):
        shard.do(c.BecomeTombstone())


def test_a_tombstone_has_no_readers_writers_or_parts() -> None:
    """Spec 1.9, 9.16."""
    state = tombstone().state
    assert not state.writers
    assert not state.leased_readers
    assert [(each.desc.lower, each.desc.upper, each.parts) for each in state.trace.batches()] == [(MINIMUM, EMPTY, ())]


def test_a_tombstone_answers_everything_without_a_commit_but_rollups() -> None:
    shard = tombstone()
    seqno = shard.state.seqno
    expected: list[tuple[c.Command, c.Answer]] = [
        (append(batch(3, 4, 1), token_number=9), c.UpperMismatch(EMPTY, frontier(3), EMPTY)),
        (c.HeartbeatLeasedReader(leased_id(1)), c.HeartbeatSeen(existed=False)),
        (downgrade(1, 3), c.SinceDowngraded(EMPTY)),
        (c.ExpireLeasedReader(leased_id(1)), c.Expired(existed=False)),
        (c.ExpireWriter(writer_id(1)), c.Expired(existed=False)),
        (c.ExpireCriticalReader(critical_id(1)), c.Expired(existed=False)),
        (
            c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"a", debug=DEBUG),
            c.CriticalRegistered(EMPTY, b"a"),
        ),
        (
            c.CompareAndDowngradeSince(
                reader_id=critical_id(1), expected_opaque=b"x", new_opaque=b"y", new_since=frontier(1)
            ),
            c.CriticalDowngraded(EMPTY),
        ),
        (c.RemoveRollups(((SeqNo(1), rollup(1)),)), c.RollupsRemoved(())),
        (c.ApplyMergeRes(MergeRes(batch(0, 5), None)), c.MergeApplied(MergeOutcome.NOT_APPLIED_NO_MATCH)),
        (c.RegisterSchema(SchemaPair(b"x", b"y")), c.SchemaRegistered(None)),
        (c.SpineExert(100), c.Exerted(())),
        (c.ClaimCompactions(max_requests=1, claim_ms=0), c.CompactionsClaimed(())),
        (c.BecomeTombstone(), c.TombstoneStep(finalized=True, progressed=False)),
    ]
    for cmd, answer in expected:
        assert refused(shard, cmd) == answer
    read = c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=1, debug=DEBUG)
    answer = refused(shard, read)
    assert answer == c.Registered(EMPTY, seqno)
    assert committed(shard, c.AddRollup(seqno, rollup(seqno))) == c.RollupAdded(applied=True)


def test_a_tombstone_lets_go_of_rollups_that_hold_data_and_keeps_two_of_its_own() -> None:
    shard = tombstone()
    ended = shard.state.seqno
    assert shard.state.last_gc_req == ended
    for _ in range(2):
        committed(shard, c.AddRollup(shard.state.seqno, rollup(shard.state.seqno)))
    first, own, newest = rollup_seqnos(shard.state)
    assert first < ended == own < newest

    def removal(*seqnos: SeqNo) -> c.RemoveRollups:
        return c.RemoveRollups(tuple((seqno, shard.state.rollups.get(seqno) or rollup(seqno)) for seqno in seqnos))

    assert refused(shard, removal(own)) == c.RollupsRemoved(())
    assert committed(shard, removal(first)) == c.RollupsRemoved((first,))
    assert refused(shard, removal(own, first)) == c.RollupsRemoved(())
    committed(shard, c.AddRollup(shard.state.seqno, rollup(shard.state.seqno)))
    assert committed(shard, removal(own, newest)) == c.RollupsRemoved((own, newest))
    assert refused(shard, removal(*rollup_seqnos(shard.state))) == c.RollupsRemoved(())


def test_transition_does_not_touch_its_input() -> None:
    shard = Stepper()
    before = shard.state
    out = transition(before, append(batch(0, 5, 1), token_number=1), now_ms=0)
    assert isinstance(out, Applied)
    assert before.trace.upper == MINIMUM
    assert not before.writers
    assert out.state.trace.upper == frontier(5)
    assert isinstance(transition(before, append(batch(1, 5, 1), token_number=1), now_ms=0), Refused)
    assert token(1) != SENTINEL_TOKEN
