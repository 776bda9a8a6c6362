"""Retention: since stays `retain_ms` behind upper whatever readers let go of, and follows it in the diffs of appends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import FinalizationError, InvalidUsage
from persist_engine.base.settings import RETAIN_MS
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.model import commands as c
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.frontier import EMPTY, Antichain
from persist_engine.model.inspection import inspection_of
from persist_engine.model.retention import current, in_words, planned, retention_of
from persist_engine.model.state import ShardState
from persist_kit.states import DEBUG, Stepper, append, batch, critical_id, first_state, leased_id, refused

A = Antichain.of


def shard(retain_ms: int | None = 100, upper: int = 0) -> Stepper:
    made = Stepper(replace(first_state()[0], retain_ms=retain_ms))
    if upper:
        write(made, upper)
    return made


def write(to: Stepper, upper: int | None) -> c.Answer:
    lower = to.state.trace.upper.time
    assert lower is not None
    return to.do(append(batch(lower, upper), token_number=to.state.seqno))


def since(of: Stepper) -> int | None:
    return of.state.trace.since.time


def reader(to: Stepper, number: int, at: int | None = None) -> None:
    to.do(c.RegisterLeasedReader(reader_id=leased_id(number), lease_ms=1000, debug=DEBUG))
    if at is not None:
        lets_go(to, number, A(at))


def lets_go(to: Stepper, number: int, at: Antichain) -> None:
    to.do(c.DowngradeSince(reader_id=leased_id(number), outstanding_seqno=None, new_since=at))


def test_what_a_reader_lets_go_of_is_kept_while_it_is_in_the_window() -> None:
    made = shard(upper=1000)
    reader(made, 1, 999)
    assert since(made) == 900
    lets_go(made, 1, EMPTY)
    assert since(made) == 900
    without = shard(None, upper=1000)
    reader(without, 1, 999)
    assert since(without) == 999


def test_since_follows_upper_in_the_diff_of_an_append_and_only_when_it_lags() -> None:
    """Spec 25.2."""
    made = shard(10_000, upper=20_000)
    assert since(made) == 10_000
    moves = [since(made)]
    for upper in range(20_010, 20_301, 10):
        write(made, upper)
        moves.append(since(made))
    assert sorted(set(moves)) == [10_000, 10_100, 10_200, 10_300]
    assert sum(1 for diff in made.diffs[1:] if diff.since) == 3


def test_a_diff_that_leaves_since_alone_is_as_small_as_without_retention() -> None:
    sizes = {}
    for retain_ms in (None, RETAIN_MS):
        made = shard(retain_ms, upper=2 * RETAIN_MS)
        reader(made, 1, RETAIN_MS)
        write(made, 2 * RETAIN_MS + 60_000)
        sizes[retain_ms] = len(encode_state_diff(made.diffs[-1]))
    assert sizes[None] == sizes[RETAIN_MS]


def test_a_reader_or_a_critical_reader_holds_longer_than_retention() -> None:
    """Spec 25.1."""
    made = shard(upper=200)
    made.do(c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"me", debug=DEBUG))
    write(made, 1000)
    assert since(made) == 100
    move = {"reader_id": critical_id(1), "expected_opaque": b"me", "new_opaque": b"me"}
    made.do(c.CompareAndDowngradeSince(**move, new_since=A(950)))
    assert since(made) == 900
    assert made.do(c.CompareAndDowngradeSince(**move, new_since=EMPTY)) == c.CriticalDowngraded(EMPTY)
    assert since(made) == 900


def test_a_reader_that_holds_as_critical_readers_do_holds_what_is_retained() -> None:
    made = shard(upper=200)
    made.do(c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"me", debug=DEBUG))
    move = {"reader_id": critical_id(1), "expected_opaque": b"me", "new_opaque": b"me"}
    made.do(c.CompareAndDowngradeSince(**move, new_since=EMPTY))
    lease = c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=1000, debug=DEBUG, since_from_critical=True)
    assert made.do(lease) == c.Registered(A(100), made.state.seqno)


def test_the_end_of_a_lease_moves_nothing_and_the_next_append_does() -> None:
    made = shard(upper=200)
    reader(made, 1)
    write(made, 500)
    made.now_ms = 5000
    made.do(c.ExpireWriter(append(batch(0, 1), token_number=1).writer_id))
    assert not made.state.leased_readers
    assert since(made) == 100
    write(made, 501)
    assert since(made) == 401


def test_a_longer_retention_brings_nothing_back_and_says_so() -> None:
    made = shard(upper=1000)
    assert made.do(c.SetRetention(400)) == c.RetentionSet(400, A(900))
    assert "times before 900 are gone" in current(made.state).remark
    reader(made, 1, 1000)
    assert since(made) == 900
    write(made, 1200)
    assert since(made) == 900
    write(made, 1400)
    assert since(made) == 1000
    assert current(made.state).remark == "since follows upper as far as readers allow"


def test_a_longer_retention_keeps_what_readers_still_held() -> None:
    made = shard(upper=100)
    reader(made, 1)
    write(made, 1000)
    made.do(c.SetRetention(1000))
    made.do(c.ExpireLeasedReader(leased_id(1)))
    write(made, 1050)
    assert since(made) == 50


def test_a_shorter_retention_lets_since_follow_at_once() -> None:
    made = shard(upper=1000)
    plan = planned(made.state, 10)
    assert made.do(c.SetRetention(10)) == c.RetentionSet(10, A(990))
    assert plan == current(made.state)


def test_without_a_retention_since_stays_until_a_reader_lets_go() -> None:
    made = shard(upper=1000)
    assert made.do(c.SetRetention(None)) == c.RetentionSet(None, A(900))
    write(made, 5000)
    assert since(made) == 900
    reader(made, 1, 5000)
    assert since(made) == 5000


def test_without_a_retention_since_is_at_once_where_readers_hold_it() -> None:
    """An operator ends the retention of a shard that it took over: what it wants forgotten waits for no further write."""
    made = shard(upper=1000)
    reader(made, 1, 950)
    assert since(made) == 900
    assert made.do(c.SetRetention(None)) == c.RetentionSet(None, A(950))


def test_setting_what_is_set_commits_so_that_the_answer_is_linearized() -> None:
    """Spec 25.3."""
    made = shard(upper=1000)
    before = made.state.seqno
    made.do(c.SetRetention(100))
    assert made.state.seqno == before + 1
    assert made.diffs[-1].retain_ms == ()


@pytest.mark.parametrize("retain_ms", [0, -1, 2**63])
def test_other_values_are_refused_as_a_retention(retain_ms: int) -> None:
    with pytest.raises(InvalidUsage, match="from 1 to"):
        shard().do(c.SetRetention(retain_ms))


def test_a_closed_upper_keeps_since_and_the_shard_is_finalized_once_retention_ended() -> None:
    made = shard(upper=1000)
    write(made, None)
    reader(made, 1)
    lets_go(made, 1, EMPTY)
    assert since(made) == 900
    with pytest.raises(FinalizationError, match="retention of 100 ms holds since"):
        made.do(c.BecomeTombstone())
    made.do(c.SetRetention(None))
    lets_go(made, 1, EMPTY)
    made.do(c.SetRetention(7))  # where since is closed there is nothing left to keep
    made.do(c.BecomeTombstone())
    assert made.state.retain_ms is None
    assert refused(made, c.SetRetention(5)) == c.RetentionSet(None, EMPTY)


@pytest.mark.parametrize("retain_ms", [1, 100, RETAIN_MS, 2**63 - 1])
@pytest.mark.parametrize("upper", [2**63 - 1, 2**63, 2**64 - 1])
def test_the_newest_time_that_can_be_asked_for_is_always_kept(retain_ms: int, upper: int) -> None:
    """Spec 25.4."""
    made = shard(retain_ms, upper=upper)
    assert since(made) <= made.state.trace.upper.newest_complete


def test_diffs_carry_the_retention() -> None:
    made = shard(None)
    states: list[ShardState] = [made.state]
    for wanted in (5, 9, None):
        made.do(c.SetRetention(wanted))
        states.append(made.state)
    for before, after, diff in zip(states, states[1:], made.diffs, strict=False):
        assert apply(before, diff).retain_ms == after.retain_ms


def test_logical_times_keep_the_whole_history_and_a_warning_says_so() -> None:
    made = shard(RETAIN_MS, upper=3)
    assert current(made.state).remark.startswith("the whole history is kept: upper is 3, within 604800000.")
    seen = inspection_of(made.state, live_diffs=1, earliest_seqno=1, now_ms=0)
    assert (seen.retain_ms, seen.retained_since) == (RETAIN_MS, 0)


def test_a_retention_is_described_in_words() -> None:
    texts = ["none", "7d", "12h", "90m", "45s", "1500ms"]
    assert [in_words(retention_of(text)) for text in texts] == texts
    for text in ["", "7", "d", "7 d", "-1d", "0d", "1.5d", "1d12h", "7D", "9" * 5000 + "d", "٧d", "None", "7ds"]:
        with pytest.raises(InvalidUsage, match="a retention is"):
            retention_of(text)
