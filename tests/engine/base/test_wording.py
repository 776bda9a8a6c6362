"""Times and lengths of time in messages."""

import pytest
from persist_engine.base.wording import is_instant, iso_text, lasting


@pytest.mark.parametrize(
    ("length_ms", "text"),
    [
        (604_800_000, "7 days"),
        (86_400_000, "1 day"),
        (90 * 60_000, "90 minutes"),
        (7_200_000, "2 hours"),
        (1_000, "1 second"),
        (1_500, "1,500 ms"),
        (0, "0 ms"),
    ],
)
def test_a_length_is_a_whole_number_of_its_largest_unit(length_ms, text):
    assert lasting(length_ms) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (7, None),
        (99_999_999_999, None),
        (1_790_000_000_000, "2026-09-21T14:13:20Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        (253_402_300_800_000, None),
        (1_790_000_000_000_000, None),
        (1_790_000_000_000_000_000, None),
    ],
    ids=["counter", "seconds", "now", "last", "after the last", "microseconds", "nanoseconds"],
)
def test_a_time_is_an_instant_if_it_has_a_date_as_milliseconds(time, text):
    assert iso_text(time) == text
    assert is_instant(time) == (text is not None)
