"""Holds on since: the readers on the status, since when each holds, and what SinceAdvancing says."""

from dataclasses import replace

import pytest
from persist_engine.model.inspection import ReaderInfo
from persist_operator.api import conditions, names, times
from persist_operator.api.shard_status import Holds
from persist_operator.local.hints import local_words
from persist_operator.plan.hints import Expire, cluster_words
from persist_operator.plan.keeping import holding
from persist_operator.plan.observed import ShardObserved
from persist_operator.plan.shard import plan_shard

SHARD_ID = names.shard_id_of("uid-shard")
OWN = names.critical_id_of(SHARD_ID)
HOUR_MS = 3_600_000


def reader(number, since=5, *, kind="leased", purpose="monthly report"):
    letters = "r" if kind == "leased" else "c"
    return ReaderInfo(
        id=f"{letters}{number:08d}-89ab-cdef-0123-456789abcdef", kind=kind, since=since, seqno=3, purpose=purpose,
        hostname="laptop", last_heartbeat_ms=1,
    )  # fmt: skip


@pytest.fixture
def plan(make_shard, settings, make_inspection, make_own_reader, now):
    def make(*readers, status=None, at=now, since=5, seqno=10, upper=now):
        own = make_own_reader(now - HOUR_MS)
        found = make_inspection(seqno=seqno, upper=upper, since=since, readers=(own, *readers))
        shard = make_shard(status=status or {"shardId": SHARD_ID})
        observed = ShardObserved(inspected=found, shard_id=SHARD_ID)
        return plan_shard(shard, observed, now_ms=at, settings=settings)

    return make


def message(plan):
    found = conditions.find(plan.status, "SinceAdvancing")
    assert (found["status"], found["reason"]) == ("False", "HeldByReader")
    return found["message"]


def test_a_hold_is_named_with_purpose_host_age_and_what_to_do(plan, now):
    held = plan(reader(1))
    assert held.status["holds"]["blocking"] == [
        {
            "id": reader(1).id, "purpose": "monthly report", "kind": "leased", "host": "laptop", "since": "5",
            "heldFrom": times.to_text(now), "heldSeconds": 0,
        }
    ]  # fmt: skip
    text = message(held)
    for word in (reader(1).id, "monthly report", "laptop", times.to_text(now), f"--expire {reader(1).id} --commit"):
        assert word in text
    assert "--force" not in text


def test_a_host_that_a_terminal_would_obey_is_shown_as_text(plan):
    """A program with the stores' credentials chooses it."""
    held = plan(replace(reader(1), hostname="pod\x1b[2J\x00"))
    assert held.status["holds"]["blocking"][0]["host"] == "pod [2J "
    assert "\x1b" not in message(held)


def test_a_hold_keeps_its_beginning_until_its_since_moves(plan, now):
    first = plan(reader(1))
    later = plan(reader(1), status=first.status, at=now + 2 * HOUR_MS, seqno=11)
    (hold,) = later.status["holds"]["blocking"]
    assert (hold["heldFrom"], hold["heldSeconds"]) == (times.to_text(now), 7200)
    assert message(later) == message(first), "the text changes with the hold, not with time"
    moved = plan(reader(1, since=6), status=later.status, at=now + 3 * HOUR_MS, since=6, seqno=12)
    assert moved.status["holds"]["blocking"][0]["heldFrom"] == times.to_text(now + 3 * HOUR_MS)


def test_a_new_hold_is_on_the_status_at_once_although_the_numbers_are_young(plan, now):
    first = plan(reader(1))
    second = plan(reader(1), reader(2), status=first.status, at=now + 1000)
    assert [one["heldFrom"] for one in second.status["holds"]["blocking"]] == [
        times.to_text(now),
        times.to_text(now + 1000),
    ]
    again = plan(reader(1), reader(2), status=second.status, at=now + 2000)
    assert again.status == second.status


def test_five_holds_are_named_the_longest_first(plan, now):
    status = plan(reader(9)).status
    status = plan(*map(reader, range(1, 9)), reader(9), status=status, at=now + 60_000, seqno=11).status
    blocking = status["holds"]["blocking"]
    assert len(blocking) == holding.BLOCKING_MAX
    assert blocking[0]["id"] == reader(9).id
    assert status["holds"]["readers"] == 10


def test_readers_that_hold_nothing_back_are_not_named(make_inspection, make_own_reader, now):
    ahead, closed = reader(1, since=6), reader(2, since=None)
    found = make_inspection(since=5, upper=now, readers=(make_own_reader(5), ahead, closed))
    assert holding.holders(Holds(), found, critical_id=OWN, now_ms=now) == ()


def test_a_clock_that_was_set_back_gives_no_hold_from_the_future(plan, now):
    ahead = plan(reader(1), at=now + HOUR_MS)
    back = plan(reader(1), status=ahead.status, at=now, seqno=11)
    assert back.status["holds"]["blocking"][0]["heldFrom"] == times.to_text(now)
    assert back.status["holds"]["blocking"][0]["heldSeconds"] == 0


def test_secrets_in_a_purpose_reach_neither_message_nor_status(plan):
    held = plan(reader(1, purpose="copy to redis://user:hunter2@host:6379/0"))
    assert "hunter2" not in str(held.status)


def test_to_end_a_critical_hold_needs_a_word_more():
    expire = Expire(shard_id=SHARD_ID, reader_id="c1", is_critical=True)
    assert cluster_words(expire) == f"`persist admin holds {SHARD_ID} --expire c1 --force --commit`"
    leased = replace(expire, reader_id="r1", is_critical=False)
    assert local_words("flights")(leased) == "`persist local admin holds flights --expire r1 --commit`"
