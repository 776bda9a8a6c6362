"""When windows of maintenance are open, across changes of the clock, what a moment must look ahead to, and the record of a day's budget."""

import pytest
from persist_operator.api import times
from persist_operator.api.shard import Window
from persist_operator.api.shard_status import RewrittenHour
from persist_operator.plan.waiting import budget, windows

HOUR_S = 3600


def window(schedule, hours, zone="Etc/UTC"):
    return Window.of({"schedule": schedule, "durationSeconds": round(hours * HOUR_S), "timeZone": zone})


def at(text):
    return times.to_ms(text)


NIGHT = window("0 2 * * *", 2)


@pytest.mark.parametrize(
    ("moment", "is_open", "opens"),
    [
        ("2026-11-25T01:59:59Z", False, "2026-11-25T02:00:00Z"),
        ("2026-11-25T02:00:00Z", True, "2026-11-26T02:00:00Z"),
        ("2026-11-25T03:59:59Z", True, "2026-11-26T02:00:00Z"),
        ("2026-11-25T04:00:00Z", False, "2026-11-26T02:00:00Z"),
    ],
)
def test_a_window_is_open_from_its_tick_until_its_duration_is_over(moment, is_open, opens):
    assert windows.is_open([NIGHT], at(moment)) == is_open
    assert windows.next_opening_ms([NIGHT], at(moment)) == at(opens)


def test_without_windows_every_moment_is_open():
    assert windows.is_open([], 0)
    assert windows.horizon_ms([], 5) == 5


@pytest.mark.parametrize(
    ("one", "moment", "is_open"),
    [
        # Summer time begins in Berlin on 2026-03-29: 02:00 becomes 03:00 (01:00 UTC). The tick of 02:30 comes at 03:00.
        (window("30 2 * * *", 1, "Europe/Berlin"), "2026-03-29T00:59:00Z", False),
        (window("30 2 * * *", 1, "Europe/Berlin"), "2026-03-29T01:00:00Z", True),
        (window("30 2 * * *", 1, "Europe/Berlin"), "2026-03-29T02:00:00Z", False),
        # It ends on 2026-10-25: 03:00 becomes 02:00 (01:00 UTC). The tick of 02:30 comes the first time only, at 00:30 UTC.
        (window("30 2 * * *", 0.5, "Europe/Berlin"), "2026-10-25T00:45:00Z", True),
        (window("30 2 * * *", 0.5, "Europe/Berlin"), "2026-10-25T01:45:00Z", False),
        # A window across the change has as many elapsed seconds as ever: from 23:00 UTC on for 4 hours.
        (window("0 1 * * *", 4, "Europe/Berlin"), "2026-10-25T02:59:59Z", True),
        (window("0 1 * * *", 4, "Europe/Berlin"), "2026-10-25T03:00:00Z", False),
        # The zone counts: 02:00 in New York is 07:00 UTC in winter.
        (window("0 2 * * *", 1, "America/New_York"), "2026-11-25T07:30:00Z", True),
        (window("0 2 * * *", 1, "America/New_York"), "2026-11-25T02:30:00Z", False),
    ],
)
def test_windows_follow_the_clocks_of_their_zone(one, moment, is_open):
    assert windows.is_open([one], at(moment)) == is_open


@pytest.mark.parametrize(
    ("several", "moment", "horizon"),
    [
        ([NIGHT], "2026-11-25T12:00:00Z", "2026-11-25T12:00:00Z"),  # closed: only what is due now
        ([NIGHT], "2026-11-25T02:30:00Z", "2026-11-26T02:00:00Z"),
        # Windows that touch or overlap are one.
        ([NIGHT, window("0 4 * * *", 1)], "2026-11-25T02:30:00Z", "2026-11-26T02:00:00Z"),
        ([NIGHT, window("0 3 * * *", 9)], "2026-11-25T02:30:00Z", "2026-11-26T02:00:00Z"),
        ([NIGHT, window("0 5 * * *", 1)], "2026-11-25T02:30:00Z", "2026-11-25T05:00:00Z"),
    ],
)
def test_an_open_window_looks_ahead_to_the_opening_after_it(several, moment, horizon):
    assert windows.horizon_ms(several, at(moment)) == at(horizon)


def test_windows_that_never_close_have_an_end_of_looking_ahead():
    always = window("0 * * * *", 1)
    now_ms = at("2026-11-25T02:30:00Z")
    assert now_ms < windows.horizon_ms([always], now_ms) < now_ms + 65 * HOUR_S * 1000


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (window("99 * * * *", 1), "spec.maintenance.windows[1]: cron '99 * * * *' is not five cron fields"),
        (window("0 0 31 2 *", 1), "spec.maintenance.windows[1]: cron '0 0 31 2 *' never comes"),
        (window("0 0 0 * * *", 1), "is not five cron fields"),
        (window("0 2 * * *", 1, "Mars/Olympus"), "timeZone 'Mars/Olympus' is not an IANA time zone"),
        (window("0 2 * * *", 1, "../../etc/passwd"), "is not an IANA time zone"),
    ],
)
def test_a_window_that_never_opens_is_named(one, says):
    assert says in windows.problem([NIGHT, one], 0)
    assert windows.problem([NIGHT], 0) is None


def test_the_record_of_the_budget_is_never_less_than_any_24_hours():
    noon_ms, hour_ms, day_ms = at("2026-11-25T12:00:00Z"), 1000 * HOUR_S, 24_000 * HOUR_S
    hours, runs = (), []
    for number in range(200):
        at_ms = noon_ms + number * 37 * 60_000
        runs.append((at_ms, number + 1))
        hours = budget.with_run(hours, number + 1, at_ms)
        exact = sum(size for ended_ms, size in runs if ended_ms > at_ms - day_ms)
        day_and_hour = sum(size for ended_ms, size in runs if ended_ms > at_ms - day_ms - hour_ms)
        assert exact <= budget.used_bytes(hours, at_ms) <= day_and_hour
        assert len(hours) <= 25
    assert budget.used_bytes(hours, noon_ms + 200 * 37 * 60_000 + day_ms + hour_ms) == 0
    assert budget.frees_ms(hours, at_ms, need_bytes=11, budget_bytes=10) is None
    assert budget.with_run((RewrittenHour(time="2026-11-25T12:00:00Z", bytes=1),), 0, noon_ms)[0].bytes == 1
