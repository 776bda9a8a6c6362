"""What says a time, and what does not."""

from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import EMPTY, TIME_MAX, Antichain, frontier_of, time_of

NEW_YEAR = 1_356_998_400_000


@pytest.mark.parametrize(
    ("given", "time"),
    [
        (0, 0),
        (TIME_MAX, TIME_MAX),
        (np.int64(7), 7),
        (np.uint64(TIME_MAX), TIME_MAX),
        (Antichain.of(3), 3),
        (datetime(2013, 1, 1, tzinfo=UTC), NEW_YEAR),
        (datetime(2013, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), NEW_YEAR),
        (datetime(2013, 1, 1, 0, 0, 0, 1_999, tzinfo=UTC), NEW_YEAR + 1),
        (pd.Timestamp("2013-01-01", tz="Europe/Berlin"), NEW_YEAR - 3_600_000),
        ("2013-01-01T00:00:00Z", NEW_YEAR),
        ("2013-01-01 00:00:00.001+00:00", NEW_YEAR + 1),
    ],
)
def test_numbers_frontiers_and_instants_say_times(given, time):
    assert time_of(given) == time
    assert frontier_of(given) == Antichain(time)
    assert type(time_of(given)) is int


@pytest.mark.parametrize(
    "given",
    [9.99, 7.0, "7", "20130101", "", "yesterday", "x" * 500, True, np.bool_(True), np.float64(3), None, b"7", [5], {}, object(), date(2013, 1, 1), pd.NaT, np.array([1, 2])],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_expected(given):
    for read in (time_of, frontier_of):
        with pytest.raises(InvalidUsage, match=r"^as_of must be a whole number, a datetime with its time zone, or ISO"):
            read(given, "as_of")
    with pytest.raises(InvalidUsage, match="time must be"):
        Antichain.of(given)
    if given is not None:
        with pytest.raises(InvalidUsage, match="time must be"):
            Antichain(given)


@pytest.mark.parametrize("given", [datetime(2013, 1, 1), "2013-01-01T00:00:00", "2013-01-01"])
def test_without_a_zone_no_instant_is_said(given):
    with pytest.raises(InvalidUsage, match=r"no time zone.*add one, as in 2013-01-01T00:00:00\+00:00 or"):
        time_of(given, "as_of")


@pytest.mark.parametrize("given", [-1, TIME_MAX + 1, "1960-01-01T00:00:00Z", datetime(1, 1, 1, tzinfo=UTC)])
def test_frontiers_have_bounds(given):
    with pytest.raises(InvalidUsage, match=r"outside \[0, 2\*\*64 - 1\]"):
        frontier_of(given)


def test_the_empty_frontier_is_a_frontier_and_no_time():
    assert frontier_of(EMPTY) is EMPTY
    with pytest.raises(InvalidUsage, match="the given frontier is empty"):
        time_of(EMPTY)


@pytest.mark.slow
@given(st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.timezones()).filter(lambda at: at >= datetime(1970, 1, 1, tzinfo=UTC)))  # fmt: skip
def test_texts_and_datetimes_say_the_same(at):
    assert time_of(at.astimezone(UTC).isoformat()) == time_of(at)
    assert datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_of(at)) <= at.astimezone(UTC)
