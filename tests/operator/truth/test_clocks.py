"""Schedules and clocks: each tick comes once, when it is due, under every change of the wall clock."""

from datetime import UTC, datetime

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_operator.api import times
from persist_operator.api.sink import Schedule
from persist_operator.cluster.port import PERSIST_SHARD, POD, SPARK_SINK
from persist_operator.handlers.controller import Controller
from persist_operator.plan import schedule

MINUTE, HOUR = 60_000, 3_600_000
#: (cron, from, hours, ticks): Europe/Berlin moves from 02:00 to 03:00 on March 29th (01:00Z), from 03:00 to 02:00 on October 25th.
CHANGES = {
    "a tick in the gap comes at its end": ("30 2 * * *", "2026-03-28T12:00Z", 40, ["29 01:00", "30 00:30"]),
    "two ticks in the gap are one": ("0,30 2 * * *", "2026-03-29T00:00Z", 23, ["29 01:00"]),
    "the hour after the gap has its own": (
        "30 1-3 * * *",
        "2026-03-28T22:00Z",
        8,
        ["29 00:30", "29 01:00", "29 01:30"],
    ),
    "a tick in the doubled hour comes once": ("30 2 * * *", "2026-10-24T12:00Z", 40, ["25 00:30", "26 01:30"]),
    "hours that are named come once": (
        "0,30 2-3 * * *",
        "2026-10-24T22:00Z",
        8,
        ["25 00:00", "25 00:30", "25 02:00", "25 02:30"],
    ),
    "each hour goes on through both": (
        "0 * * * *",
        "2026-10-24T22:30Z",
        4,
        ["24 23:00", "25 00:00", "25 01:00", "25 02:00"],
    ),
    "each half hour goes on through the gap": ("*/30 * * * *", "2026-03-29T00:10Z", 1, ["29 00:30", "29 01:00"]),
}


def berlin(cron):
    return Schedule(cron=cron, time_zone="Europe/Berlin", starting_deadline_seconds=None)


def ms(text):
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def shown(moments):
    return [datetime.fromtimestamp(one / 1000, tz=UTC).strftime("%d %H:%M") for one in moments]


@pytest.mark.parametrize("case", CHANGES)
def test_ticks_at_a_change_of_clocks(case):
    cron, start, hours, expected = CHANGES[case]
    begin, found = ms(start), []
    while (following := schedule.next_tick_ms(berlin(cron), found[-1] if found else begin)) <= begin + hours * HOUR:
        found.append(following)
    assert shown(found) == expected
    # `last_tick_ms` finds the same ticks as time passes, each when it is due.
    passed, last = [], begin
    for now in range(begin, begin + hours * HOUR + 1, 10 * MINUTE):
        tick = schedule.last_tick_ms(berlin(cron), after_ms=last, until_ms=now)
        if tick is not None:
            assert tick == now
            passed.append(tick)
            last = tick
    assert passed == found


@pytest.mark.parametrize("cron", ["0 0 31 2 *", "0 0 30 2 *", "0 0 31 4,6,9,11 *"])
def test_a_schedule_that_never_comes_is_refused(cron):
    for ask in (schedule.next_tick_ms, lambda one, now: schedule.last_tick_ms(one, after_ms=0, until_ms=now)):
        with pytest.raises(InvalidUsage, match="never comes"):
            ask(berlin(cron), ms("2026-01-01T00:00Z"))


def test_a_random_cron_field_is_refused():
    with pytest.raises(InvalidUsage, match="five cron fields"):
        schedule.next_tick_ms(berlin("R * * * *"), 0)


@pytest.fixture
def scheduled(house, keys, shard_resource, sink_resource):
    def make(**spec):
        house.cluster.create(PERSIST_SHARD, shard_resource())
        house.live(keys[0], 20)
        wanted = {"mode": "Scheduled", "schedule": {"cron": "*/10 * * * *", **spec}}
        house.cluster.create(SPARK_SINK, sink_resource(wanted, creationTimestamp=times.to_text(house.env.now_ms())))
        return keys[1]

    return make


def test_a_sink_whose_schedule_never_comes_stalls_with_the_cron_text(house, scheduled):
    key = scheduled(cron="0 0 31 2 *")
    house.look(key)
    assert house.condition(key, "Stalled") == ("True", "InvalidSchedule")
    assert "'0 0 31 2 *' never comes" in house.words(key, "Stalled")


@pytest.mark.slow
def test_the_requeue_of_a_sink_alone_misses_no_tick(house, scheduled):
    """Ticks have a starting deadline of 10 s. The worker takes keys from the queue, and no resync or watch adds any."""
    key = scheduled(startingDeadlineSeconds=10)
    controller = Controller(house.reconciler, house.cluster, house.settings, house.env, house.metrics)
    controller.changed(house.resource(key))
    queue, late_ms = controller._queue, []
    until_ms = house.env.now_ms() + 40 * 10 * MINUTE
    started = set()
    while house.env.now_ms() < until_ms:
        taken = queue.take(timeout_s=0)
        if taken is None:
            house.env.advance_ms(max(1, round(1000 * (queue._heap[0][0] - house.env.monotonic_s()))))
            continue
        controller._one(taken)
        for pod in house.cluster.find(POD, "team", {}):
            name = pod["metadata"]["name"]
            if name not in started:
                started.add(name)
                late_ms.append(house.env.now_ms() % (10 * MINUTE))
            end = {"exitCode": 0, "message": '{"outcome": "Succeeded"}', "finishedAt": "2026-09-20T00:00:00Z"}
            status = {"phase": "Succeeded", "containerStatuses": [{"name": "driver", "state": {"terminated": end}}]}
            house.cluster.edit(POD, "team", name, lambda one, status=status: one.update(status=status))
            controller.changed(house.resource(key))
    assert len(started) == 40
    assert max(late_ms) < 1000
    assert "ScheduleMissed" not in house.cluster.events("team")


@pytest.mark.parametrize("step_ms", [-3 * HOUR, -5 * MINUTE, 5 * MINUTE, 25 * MINUTE, 26 * HOUR])
def test_a_wall_clock_that_steps_repeats_no_tick_and_stops_none(house, scheduled, step_ms):
    """Only the wall clock steps. The queue measures real time, so requeued keys still come when they should."""
    key, orders = scheduled(), []

    def runs(count):
        for _ in range(count):
            house.live(key, 10 * 60)
            finish(house, key)
            order = int(house.status(key)["run"]["id"].rpartition("-")[2])
            orders.extend([order] if order not in orders else [])

    runs(2)
    house.env._now_ms += step_ms
    # All ticks that the step passed over make one run.
    house.live(key, 1)
    finish(house, key)
    assert house.status(key)["run"]["number"] <= len(orders) + 1
    runs(4)
    assert orders == sorted(orders)
    assert len(orders) >= 5
    assert house.status(key)["run"]["number"] <= len(orders) + 1


def finish(house, key):
    name = house.status(key)["driver"].get("podName")
    if house.cluster.get(POD, "team", name) is not None:
        end = {"exitCode": 0, "message": '{"outcome": "Succeeded"}', "finishedAt": "2026-09-20T00:00:00Z"}
        status = {"phase": "Succeeded", "containerStatuses": [{"name": "driver", "state": {"terminated": end}}]}
        house.cluster.edit(POD, "team", name, lambda one: one.update(status=status))
    house.live(key, 1)
