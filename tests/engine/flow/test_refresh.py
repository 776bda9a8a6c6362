"""Rounding up to refreshes: never down, monotone, the same for one time as for a column of them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.flow.refresh import Refresh
from persist_engine.model.frontier import Antichain

TIME_MAX = 2**63 - 1
times = st.one_of(st.integers(0, 60), st.integers(0, TIME_MAX), st.integers(TIME_MAX - 60, TIME_MAX))


@st.composite
def schedules(draw) -> Refresh:
    every = draw(st.one_of(st.none(), st.integers(1, 50), st.integers(1, TIME_MAX)))
    at = draw(st.lists(times, max_size=4, min_size=0 if every else 1))
    try:
        return Refresh(every=every, aligned_to=draw(times), at=tuple(at))
    except InvalidUsage:
        assume(False)
        raise


@given(schedules(), st.lists(times, min_size=1, max_size=6))
def test_rounding_is_monotone_idempotent_and_never_down(refresh, some):
    rounded = [(time, refresh.round_up(time)) for time in sorted(some)]
    for time, up in rounded:
        assert up is None or (up >= time and refresh.round_up(up) == up)
    for (_, before), (_, after) in zip(rounded, rounded[1:], strict=False):
        assert after is None or (before is not None and before <= after)


@pytest.mark.slow
@given(schedules(), times, times)
def test_a_rounded_frontier_bounds_rounded_times(refresh, frontier, time):
    assume(frontier <= time)
    up = refresh.round_up(time)
    assert up is None or refresh.frontier(Antichain.of(frontier)).less_equal(up)


@given(schedules(), st.lists(times, max_size=6))
def test_a_column_is_rounded_as_its_times_are(refresh, some):
    table = refresh.apply(pa.table({"time": pa.array(some, pa.int64())}))
    assert table["time"].to_pylist() == [up for time in some if (up := refresh.round_up(time)) is not None]


@given(schedules(), times)
def test_no_refresh_is_between_the_last_one_before_a_time_and_the_time(refresh, time):
    last = refresh.last_before(time)
    if last is not None:
        assert last < time
        assert refresh.round_up(last) == last
    after = refresh.round_up(0 if last is None else last + 1)
    assert after is None or after >= time
