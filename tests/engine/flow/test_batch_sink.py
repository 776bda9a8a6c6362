"""Mint and append decide every case of a batch sink; no clock, no store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.flow.append_run import (
    AppendAgain,
    Correct,
    Late,
    Move,
    Recompute,
    Staged,
    after_progress_mismatch,
    after_upper_mismatch,
)
from persist_engine.flow.mint_run import AlreadyDone, Minted, RaiseUpper, RunToken, ShardView, Superseded, mint
from persist_engine.model.frontier import DATA_TIME_MAX, Antichain
from persist_engine.model.state import SourceProgress

AT = Antichain.of


def view(since: int | None, upper: int | None, token: bytes | None = None) -> ShardView:
    progress = None if token is None else SourceProgress(token=token, upper=AT(9))
    return ShardView(since=Antichain(since), upper=Antichain(upper), progress=progress)


@pytest.mark.parametrize("reads_back", [False, True])
def test_time_is_now_unless_the_shard_is_ahead(reads_back):
    assert mint(view(0, 10), run=b"r", now_ms=50, reads_back=reads_back).time == 50
    ahead = mint(view(0, 90), run=b"r", now_ms=50, reads_back=reads_back)
    assert (ahead.time, ahead.lower, ahead.upper) == (90, AT(90), AT(91))


def test_reading_back_asks_for_the_last_written_time():
    assert mint(view(0, 10), run=b"r", now_ms=50, reads_back=True) == Minted(AT(10), 50, 9)
    assert mint(view(0, 10), run=b"r", now_ms=50, reads_back=False) == Minted(AT(10), 50, None)


def test_a_shard_never_written_needs_no_reading():
    assert mint(view(0, 0), run=b"r", now_ms=50, reads_back=True).as_of is None
    assert mint(view(7, 0), run=b"r", now_ms=50, reads_back=True).as_of is None


@pytest.mark.parametrize("since", [10, 11, 400])
def test_since_at_or_beyond_upper_raises_upper_past_it_first(since):
    assert mint(view(since, 10), run=b"r", now_ms=50, reads_back=True) == RaiseUpper(AT(10), AT(since + 1))
    assert mint(view(since, since + 1), run=b"r", now_ms=50, reads_back=True).as_of == since


def test_the_same_run_is_done_and_another_is_not():
    assert mint(view(0, 10, b"r"), run=b"r", now_ms=50, reads_back=False) == AlreadyDone(AT(9))
    assert isinstance(mint(view(0, 10, b"q"), run=b"r", now_ms=50, reads_back=False), Minted)


@pytest.mark.parametrize(
    ("committed", "is_over"),
    [(b"u-2", True), (b"u-10", True), (b"u-1", False), (b"w-9", False), (b"u-x", False), (b"u", False), (b"u-", False)],
)
def test_a_run_that_a_newer_one_of_its_series_overtook_is_over(committed, is_over):
    """The shard knows the last run only: what the older one did is forgotten, and doing it again might double it (spec 17.11)."""
    decision = mint(view(0, 10, committed), run=b"u-1" if is_over else b"u-3", now_ms=50, reads_back=False)
    assert isinstance(decision, Superseded if is_over else Minted)


@given(st.binary(), st.binary(max_size=40))
def test_a_token_is_the_name_of_its_run_and_perhaps_a_digest(run, tail):
    for token in (run, run + b"\nrows-1:" + tail):
        assert RunToken.decode(token).encode() == token
    assert RunToken.decode(run + b"\nrows-2:" + b"0" * 32).rows is None
    if run:
        assert RunToken.decode(RunToken(run, b"0f" * 16).encode()) == RunToken(run, b"0f" * 16)


def test_the_bytes_of_a_token_stay_as_they_are():
    assert RunToken(b"u-7").encode() == b"u-7"
    assert RunToken(b"u-7", b"0123456789abcdef" * 2).encode() == b"u-7\nrows-1:0123456789abcdef0123456789abcdef"


def test_a_run_is_known_by_its_name_whatever_rows_it_left():
    token = RunToken(b"u-7", b"0f" * 16).encode()
    assert mint(view(0, 5, token), run=b"u-7", now_ms=1, reads_back=True) == AlreadyDone(AT(9))
    assert isinstance(mint(view(0, 5, token), run=b"u-6", now_ms=1, reads_back=True), Superseded)
    assert isinstance(mint(view(0, 5, token), run=b"u-8", now_ms=1, reads_back=True), Minted)
    committed = SourceProgress(token=token, upper=AT(9))
    assert after_progress_mismatch(committed, run=b"u-7") == AlreadyDone(AT(9))
    assert after_progress_mismatch(committed, run=b"u-8") == Superseded(committed)


def test_closed_unreadable_and_exhausted_shards_are_refused():
    with pytest.raises(InvalidUsage, match="closed"):
        mint(view(0, None), run=b"r", now_ms=50, reads_back=False)
    with pytest.raises(InvalidUsage, match="since is empty"):
        mint(view(None, 10), run=b"r", now_ms=50, reads_back=True)
    with pytest.raises(InvalidUsage, match="no time"):
        mint(view(0, DATA_TIME_MAX), run=b"r", now_ms=50, reads_back=False)


def timed(**changes) -> Staged:
    """Rows at times of their own, the first at 20."""
    return Staged(**{"lower": AT(10), "upper": AT(31), "time": None, "least_time": 20, **changes})


def chosen(**changes) -> Staged:
    """Everything at the time that the run chose, 30."""
    return Staged(**{"lower": AT(10), "upper": AT(31), "time": 30, "least_time": 30, **changes})


def mirror(**changes) -> Staged:
    """Corrections at 30 of what the shard held at 9."""
    return chosen(**{"reads_back": True, "as_of": 9, **changes})


def test_batches_whose_rows_are_all_past_the_new_upper_are_appended_again():
    assert after_upper_mismatch(timed(), AT(20), now_ms=50) == AppendAgain(AT(20), AT(31))
    assert after_upper_mismatch(timed(least_time=None), AT(30), now_ms=50) == AppendAgain(AT(30), AT(31))
    assert after_upper_mismatch(chosen(), AT(30), now_ms=50) == AppendAgain(AT(30), AT(31))
    assert after_upper_mismatch(chosen(least_time=None), AT(30), now_ms=50) == AppendAgain(AT(30), AT(31))


@pytest.mark.parametrize(("now_ms", "time"), [(5, 31), (31, 31), (32, 32), (400, 400)])
def test_a_chosen_time_that_was_overtaken_moves_to_now_and_never_behind_the_upper(now_ms, time):
    move = Move(AT(31), time)
    assert after_upper_mismatch(chosen(), AT(31), now_ms=now_ms) == move
    assert after_upper_mismatch(chosen(least_time=None), AT(31), now_ms=now_ms) == move, "an empty input moves too"
    assert move.upper == AT(time + 1)


def test_rows_at_their_own_times_are_late_before_the_new_upper():
    assert after_upper_mismatch(timed(), AT(21), now_ms=50) == Late(AT(21))
    assert after_upper_mismatch(timed(), AT(31), now_ms=50) == Late(AT(31))
    assert after_upper_mismatch(timed(least_time=None), AT(31), now_ms=50) == Recompute(), "no row, so none is late"


def test_corrections_stay_and_what_came_since_is_corrected_too():
    fits = after_upper_mismatch(mirror(), AT(15), now_ms=50)
    assert fits == Correct(AT(15), 30, 9)
    assert (fits.upto, fits.upper) == (14, AT(31))
    moved = after_upper_mismatch(mirror(), AT(31), now_ms=50)
    assert moved == Correct(AT(31), 50, 9)
    assert (moved.upto, moved.upper) == (30, AT(51))
    # The next time only what came since the last look.
    again = mirror(lower=AT(31), upper=AT(51), time=50, as_of=30)
    assert after_upper_mismatch(again, AT(99), now_ms=60) == Correct(AT(99), 99, 30)


def test_corrections_go_on_while_since_still_separates_what_came():
    assert after_upper_mismatch(mirror(), AT(15), now_ms=50, since=AT(9)) == Correct(AT(15), 30, 9)
    assert after_upper_mismatch(mirror(), AT(15), now_ms=50, since=AT(10)) == Recompute()
    assert after_upper_mismatch(mirror(), AT(15), now_ms=50, since=Antichain.empty()) == Recompute(), (
        "the lease is lost"
    )


def test_corrections_of_nothing_take_back_all_that_can_be_read_now():
    """Nothing was ever written at mint. Whatever came is read at the last time: since may be past the beginning."""
    first = mirror(lower=AT(0), as_of=None)
    assert after_upper_mismatch(first, AT(15), now_ms=50) == Correct(AT(15), 30, None)
    assert after_upper_mismatch(first, AT(15), now_ms=50, since=AT(14)) == Correct(AT(15), 30, None)
    assert after_upper_mismatch(first, AT(15), now_ms=50, since=AT(15)) == Recompute()


def test_an_upper_that_went_back_closed_or_left_no_time_is_refused():
    for each in (timed(), chosen(), mirror()):
        with pytest.raises(InvariantViolated, match="went back"):
            after_upper_mismatch(each, AT(9), now_ms=50)
        with pytest.raises(InvalidUsage, match="closed"):
            after_upper_mismatch(each, Antichain.empty(), now_ms=50)
    for each in (chosen(), mirror()):
        with pytest.raises(InvalidUsage, match="leaves no time"):
            after_upper_mismatch(each, AT(DATA_TIME_MAX), now_ms=50)


def test_progress_separates_this_run_from_another():
    mine, other = SourceProgress(b"r", AT(5)), SourceProgress(b"q", AT(5))
    assert after_progress_mismatch(mine, run=b"r") == AlreadyDone(AT(5))
    assert after_progress_mismatch(other, run=b"r") == Superseded(other)
    assert after_progress_mismatch(None, run=b"r") == Superseded(None)
