"""Applier and Machine: one shared state, one round trip, waits, and what races leave behind."""

from __future__ import annotations

import threading

import pytest
from persist_engine import Antichain, Appended, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Determinate, InvalidUsage, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import RetrySettings, Settings, WatchSettings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.frontier import EMPTY
from persist_engine.model.ids import LeasedReaderId
from persist_engine.shard import applier
from persist_engine.shard.machine import SinceAhead
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
READER = LeasedReaderId.from_bytes(b"r" * 16)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def shard_id(world: World) -> ShardId:
    shard_id = world.shard_id()
    world.process().initialise(shard_id, SCHEMA)
    return shard_id


def append(client: PersistClient, shard_id: ShardId, lower: int, upper: int) -> None:
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    assert isinstance(writer.append([row(lower, "x", lower)], lower=A(lower), upper=A(upper)), Appended)


def test_a_lost_race_costs_one_scan_and_one_more_compare_and_set(world: World, shard_id: ShardId):
    """Spec 7.2, 9.1, 9.2."""
    client = world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    client.machine(shard_id)
    # Someone else commits something that does not move the upper.
    world.process().machine(shard_id).register_leased_reader(READER, lease_ms=60_000, purpose="rival")
    before = world.consensus.calls.copy()
    assert isinstance(writer.append([], lower=A(0), upper=A(5)), Appended)
    assert world.consensus.calls - before == {"compare_and_set": 2, "scan": 1}


def test_commit_cost_does_not_grow_with_the_history(world: World, shard_id: ShardId):
    """The diff of a small append stays small however many versions and batches there were."""
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    for time in range(300):
        assert isinstance(writer.append([], lower=A(time), upper=A(time + 1)), Appended)
    sizes = [len(entry.data) for entry in world.consensus.scan(shard_id, writer.machine.state.seqno, 1)]
    early = [len(entry.data) for entry in world.consensus.scan(shard_id, SeqNo(5), 50)]
    assert sizes[0] <= max(early) * 1.2


def test_threads_of_one_process_lose_no_races_against_each_other(
    shard_id: ShardId, world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(applier, "_TURN_S", 60.0)  # a loaded machine may stop a thread for longer than a turn
    client = world.process()
    machine = client.machine(shard_id)
    before = world.consensus.calls["compare_and_set"]

    def beat(number: int) -> None:
        reader_id = LeasedReaderId.from_bytes(bytes([number]) * 16)
        machine.register_leased_reader(reader_id, lease_ms=60_000, purpose="thread")
        for _ in range(5):
            answer, _ = machine.heartbeat_leased_reader(reader_id)
            assert answer.existed

    threads = [threading.Thread(target=beat, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.consensus.calls["compare_and_set"] - before == 36
    assert machine.state.seqno == 37


def test_a_refusal_costs_no_round_trip_and_changes_nothing(world: World, shard_id: ShardId):
    machine = world.process().machine(shard_id)
    before, state = world.consensus.calls.copy(), machine.state
    answer, maintenance = machine.spine_exert(0)
    assert (answer.requests, maintenance.is_empty()) == ((), True)
    assert world.consensus.calls == before
    assert machine.state is state


def test_a_snapshot_holds_what_was_written_and_waits_for_what_was_not(world: World, shard_id: ShardId):
    """Spec 9.18."""
    client = world.process()
    append(client, shard_id, 0, 5)
    append(client, shard_id, 5, 9)
    machine = client.machine(shard_id)
    (first,) = machine.snapshot_batches(A(4), 0)
    assert (first.desc.lower, first.desc.upper) == (A(0), A(5))
    assert len(machine.snapshot_batches(A(5), 0)) == 2
    assert machine.snapshot_batches(A(9), 0.5) is None
    append(world.process(), shard_id, 9, 10)
    assert machine.snapshot_batches(A(9), 0) is not None
    with pytest.raises(InvalidUsage, match="closed frontier"):
        machine.snapshot_batches(EMPTY)


def test_a_snapshot_behind_since_is_refused_for_ever(world: World, shard_id: ShardId):
    client = world.process()
    append(client, shard_id, 0, 9)
    machine = client.machine(shard_id)
    machine.register_leased_reader(READER, lease_ms=60_000, purpose="test")
    downgraded, _ = machine.downgrade_since(READER, outstanding_seqno=None, new_since=A(5))
    assert downgraded.since == A(5)
    assert machine.snapshot_batches(A(4)) == SinceAhead(A(5))


def test_listening_finds_the_batch_that_holds_the_frontier(world: World, shard_id: ShardId):
    client = world.process()
    append(client, shard_id, 0, 5)
    machine = client.machine(shard_id)
    for frontier in (0, 3, 4):
        batch = machine.next_listen_batch(A(frontier), 0)
        assert batch is not None
        assert batch.desc.upper == A(5)
    assert machine.next_listen_batch(A(5), 0.2) is None
    append(client, shard_id, 5, 6)
    assert machine.next_listen_batch(A(5), 0) is not None


def test_waiters_wake_on_their_own_process_commits_without_polling():
    """Real clock, a poll once an hour: only the notification can end the wait."""
    settings = Settings(watch=WatchSettings(initial_ms=3_600_000, clamp_ms=3_600_000))
    world = World(settings=settings)
    client = PersistClient(world.blob, world.consensus, settings=settings, env=SystemEnv(), metrics=NoMetrics())
    shard_id = world.shard_id()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    scanned, scan = threading.Event(), world.consensus.scan

    def seen_scan(*args):
        scanned.set()
        return scan(*args)

    world.consensus.scan = seen_scan
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(writer.wait_for_upper_past(A(4))))
    waiter.start()
    assert scanned.wait(60)
    writer.append([], lower=A(0), upper=A(5))
    waiter.join(60)
    assert results == [True]


def test_regression_23_a_lapsed_reader_gets_an_empty_since_and_others_keep_theirs(world: World, shard_id: ShardId):
    """Regression for bug 23 of the specification: a machine that slept past its lease does not crash."""
    machine = world.process().machine(shard_id)
    machine.register_leased_reader(READER, lease_ms=1000, purpose="sleepy")
    world.env.advance_ms(2000)
    append(world.process(), shard_id, 0, 1)
    answer, _ = machine.downgrade_since(READER, outstanding_seqno=None, new_since=A(0))
    assert answer.since == EMPTY
    assert machine.state.trace.since == A(0)


@pytest.mark.parametrize("answered", [False, True])
def test_regression_34_the_clock_is_read_on_every_attempt(world: World, shard_id: ShardId, answered: bool):
    """A registration that was retried for longer than its lease must not be born expired: whether the store did not
    answer or refused (`answered`), as one that is down does.
    """
    machine = world.process().machine(shard_id)
    sleep = world.env.sleep

    def long_sleep(seconds: float) -> None:
        world.env.sleep = sleep
        world.env.advance_ms(60_000)

    world.env.sleep = long_sleep
    world.faults.fail_next("compare_and_set", happened=False, answered=answered)
    machine.register_leased_reader(READER, lease_ms=10_000, purpose="late")
    append(world.process(), shard_id, 0, 1)
    assert READER in machine.refresh().leased_readers


def test_a_command_does_not_wait_for_the_pause_of_a_refused_one(world: World, shard_id: ShardId):
    machine = world.process().machine(shard_id)
    sleep, turns_held = world.env.sleep, []

    def look(seconds: float) -> None:
        turns_held.append(machine._applier._turn.locked())
        sleep(seconds)

    world.env.sleep = look
    world.faults.fail_next("compare_and_set", happened=False, answered=True, times=3)
    machine.register_leased_reader(READER, lease_ms=10_000, purpose="test")
    assert turns_held == [False] * 3


def test_a_command_that_the_store_refuses_until_the_end_surely_did_not_happen(world: World, shard_id: ShardId):
    machine = world.process(settings=Settings(retry=RetrySettings(give_up_ms=1000))).machine(shard_id)
    world.faults.fail_next("compare_and_set", happened=False, answered=True, times=1000)
    with pytest.raises(Unavailable, match=r"compare_and_set of s.* gave up .* mem:") as raised:
        machine.register_leased_reader(READER, lease_ms=10_000, purpose="test")
    assert isinstance(raised.value.__cause__, Determinate)
    world.faults.heal()
    assert READER not in machine.refresh().leased_readers


class Interrupted(NoMetrics):
    """Ctrl-C comes when a command's turn has come."""

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        if name == "command_turn":
            raise KeyboardInterrupt


class TakenOnce:
    """A lock that another thread holds, and has released when one waits for it."""

    def __init__(self) -> None:
        self.holders = 0

    def acquire(self, *, blocking: bool = True, timeout: float = -1) -> bool:
        self.holders += blocking
        return blocking

    def release(self) -> None:
        self.holders -= 1


def test_regression_an_interrupt_as_a_command_takes_its_turn_gives_it_back(world: World, shard_id: ShardId):
    """Every later command of the shard waited a second for a turn that no thread had."""
    client = world.process()
    shared, turn = client.machine(shard_id)._applier, TakenOnce()
    shared._turn = turn  # type: ignore[assignment]  # as far as it is used
    shared.versions.metrics = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        client.machine(shard_id).spine_exert(1)
    assert turn.holders == 0
