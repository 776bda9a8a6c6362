"""Lengths of time in messages, in the unit that a person would choose."""

import pytest
from persist_engine.base.wording import lasting


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
