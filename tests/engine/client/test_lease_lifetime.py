"""How long a reader holds since and blobs: as long as a handle can use it, no longer, and never while it waits."""

from __future__ import annotations

import gc
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter

import pytest
from persist_engine.base.errors import InvalidUsage, Unavailable
from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
)
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.leased import LeasedPart, Pin
from persist_engine.client.read.listen import Progress, Updates
from persist_engine.model.frontier import EMPTY, Antichain
from persist_engine.model.queries import seqno_since
from persist_engine.work.compact import compact
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, AheadEnv, World, row

A = Antichain.of
PATIENCE_S = 60.0
COMPACTED = Settings(
    batch=BatchSettings(inline_part_bytes_max=0),
    compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1, claim_ms=0),
    maintenance=MaintenanceSettings(gc_versions_min=1),
)


class Shard:
    """A shard of `appends` batches [10i, 10i+10), each with the row i at 10i, in its own world."""

    def __init__(self, world: World, *, appends: int = 6) -> None:
        self.world, self.client, self.id = world, world.process(), world.shard_id()
        self.writer = self.client.open_writer(self.id, SCHEMA, purpose="test")
        self.upper = 0
        for _ in range(appends):
            self.append()

    def append(self) -> None:
        lower, self.upper = self.upper, self.upper + 10
        self.writer.append([row(lower // 10, "x", lower)], lower=A(lower), upper=A(self.upper))

    def reader(self, **options) -> ReadHandle:
        return self.client.open_leased_reader(self.id, purpose="test", **options)

    @property
    def state(self):
        return self.world.process().machine(self.id).state

    def is_registered(self, reader_id) -> bool:
        return reader_id in self.state.leased_readers


def compact_all(machine) -> None:
    """Compacts until nothing is left to merge."""
    while (exerted := machine.spine_exert(1000)[0]).requests:
        for request in exerted.requests:
            compact(machine, request)


def eventually(condition) -> bool:
    """Whether `condition` comes true. It does at once, except for other threads."""
    waiting, left = threading.Event(), int(PATIENCE_S / 0.02)
    while not condition() and left:
        left -= 1
        waiting.wait(0.02)
    return condition()


@pytest.fixture
def shard():
    return Shard(World(env=AheadEnv()))


# -- dropped handles ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dropped_reader_is_collected_and_its_lease_expired(shard):
    reader = shard.reader()
    alive, reader_id, thread = weakref.ref(reader), reader.reader_id, reader._heartbeat._thread
    assert shard.is_registered(reader_id)
    del reader
    gc.collect()
    assert alive() is None
    assert eventually(lambda: not thread.is_alive())
    assert not shard.is_registered(reader_id)


def test_a_reader_whose_last_reference_the_heartbeat_drops_is_expired_too(shard):
    """The last reference may be dropped in any thread and within any call."""
    reader = shard.reader(lease_ms=100)
    reader_id, thread = reader.reader_id, reader._heartbeat._thread
    in_beat, dropped = threading.Event(), threading.Event()
    downgrade = reader._machine.downgrade_since

    def slow(*args, **kwargs):
        in_beat.set()
        dropped.wait(PATIENCE_S)
        return downgrade(*args, **kwargs)

    reader._machine.downgrade_since = slow
    assert in_beat.wait(PATIENCE_S)
    del reader
    dropped.set()
    assert eventually(lambda: not thread.is_alive())
    assert not shard.is_registered(reader_id)


OPENED = {
    "snapshot": lambda reader: reader.snapshot(59),
    "batches being read": lambda reader: reader.snapshot(59).to_batches(),
    "changes": lambda reader: reader.changes(5, 59),
    "listener": lambda reader: reader.listen(5),
    "subscription": lambda reader: reader.subscribe(5),
    "pin": lambda reader: reader.pin(),
    "leased parts of a snapshot": lambda reader: reader.snapshot(59).lease_parts(),
    "leased parts of a listener": lambda reader: reader.listen(5).next_parts(timeout_s=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("opened", OPENED)
def test_an_object_opened_by_a_dropped_reader_keeps_its_lease_until_it_is_dropped(shard, opened):
    reader = shard.reader()
    alive, reader_id = weakref.ref(reader), reader.reader_id
    used = OPENED[opened](reader)
    del reader
    gc.collect()
    assert alive() is not None
    assert not alive()._heartbeat._reason.acquire(timeout=0.01), "the heartbeat has not ended"
    assert shard.is_registered(reader_id)
    del used
    gc.collect()
    assert alive() is None
    assert eventually(lambda: not shard.is_registered(reader_id))


@pytest.mark.parametrize("opened", ["snapshot", "changes"])
def test_a_closed_object_keeps_no_reader_alive(shard, opened):
    used = OPENED[opened](shard.reader())
    reader_id = next(iter(shard.state.leased_readers))
    used.close()
    assert eventually(lambda: not shard.is_registered(reader_id))
    used.close()


def test_a_leased_part_is_pickled_without_its_reader(shard):
    with shard.reader() as reader, reader.snapshot(59) as snapshot:
        part = snapshot.lease_parts()[0]
        travelled = pickle.loads(pickle.dumps(part))
        assert travelled == part
        assert isinstance(travelled, LeasedPart)
        assert (part.holder, travelled.holder) == (reader, None)
        assert reader.return_part(travelled)


@pytest.mark.slow
def test_an_abandoned_reader_keeps_its_lease_until_the_lease_lapses(shard):
    reader = shard.reader()
    reader_id, thread = reader.reader_id, reader._heartbeat._thread
    reader.abandon()
    reader.abandon()
    del reader
    gc.collect()
    assert not thread.is_alive()
    assert shard.is_registered(reader_id)


def test_dropping_a_reader_of_a_closed_client_raises_nothing(monkeypatch):
    troubles: list = []
    monkeypatch.setattr(threading, "excepthook", troubles.append)
    shard = Shard(World(env=AheadEnv()), appends=1)
    reader = shard.reader()
    thread = reader._heartbeat._thread

    def closed() -> None:
        raise ValueError("I/O operation on closed file")

    reader._heartbeat._give_up = closed
    del reader
    assert eventually(lambda: not thread.is_alive())
    assert not troubles


@pytest.mark.slow
def test_a_program_with_open_readers_ends_at_once_and_silently(tmp_path):
    program = f"""
import sys
from persist_engine import Location, PersistClient, ShardId
from persist_kit.world import SCHEMA
client = PersistClient.open(Location(blob="file://{tmp_path}/blob", consensus="sqlite://{tmp_path}/log.db"))
shard_id = ShardId.new()
client.initialise(shard_id, SCHEMA)
kept = [client.open_leased_reader(shard_id, purpose="kept") for _ in range(3)]
listener = kept[0].listen(0)
for _ in range(3):
    client.open_leased_reader(shard_id, purpose="dropped")
print(len(kept))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")


# -- waiting holds nothing ---------------------------------------------------------------------------------------------

WAITING = {
    "listener": lambda reader: reader.listen(60).next_batch(timeout_s=None),
    "listener of parts": lambda reader: reader.listen(60).next_parts(timeout_s=None),
    "snapshot": lambda reader: reader.snapshot(60),
    "changes": lambda reader: reader.changes(5, 60),
}


@pytest.mark.parametrize("waiting", WAITING)
def test_a_waiting_read_holds_no_version_until_its_wait_has_ended(waiting):
    """Spec 15.1."""
    world = World()
    shard = Shard(world)
    others, reader = world.process(), shard.reader()
    wait, held = world.env.wait, []

    def meanwhile(event, seconds):
        if not held:
            with others.open_leased_reader(shard.id, purpose="other") as other:
                for _ in range(20):
                    other.downgrade_since(A(5))
            shard.client.machine(shard.id).refresh()
            assert reader._beat()
            held.append((shard.state.seqno, shard.state.leased_readers[reader.reader_id].seqno))
            shard.append()
        return wait(event, seconds)

    world.env.wait = meanwhile
    used = WAITING[waiting](reader)
    (newest, hold), *_ = held
    assert newest - hold <= 1, "the beat itself makes a version"
    pinned = shard.client.machine(shard.id).state.seqno
    for _ in range(5):
        assert reader._beat()
    assert shard.state.leased_readers[reader.reader_id].seqno == pinned
    assert seqno_since(shard.state) == pinned
    del used
    reader.expire()


def test_a_wait_that_times_out_holds_no_version():
    shard = Shard(World())
    with shard.reader() as reader:
        listen = reader.listen(60)
        assert listen.next_batch(timeout_s=0.5) is None
        with pytest.raises(Unavailable):
            reader.snapshot(60, timeout_s=0.5)
        assert reader._beat()
        assert reader._pins.oldest(None) is None


def test_regression_a_reader_that_released_all_times_keeps_the_blobs_of_its_open_snapshot():
    """Its heartbeat no longer renewed the lease. The lease lapsed under an open snapshot."""
    shard = Shard(World(settings=COMPACTED, env=AheadEnv()))
    machine, lease_ms = shard.client.machine(shard.id), COMPACTED.lease.reader_lease_ms
    with shard.reader() as reader, reader.snapshot(59) as snapshot:
        reader.downgrade_since(EMPTY)
        compact_all(machine)
        for _ in range(3):
            shard.world.env.advance_ms(lease_ms // 2 + 1)
            assert reader._beat()
            shard.append()
            write_rollup(machine)
            gc_and_truncate(machine)
        assert shard.is_registered(reader.reader_id)
        assert snapshot.to_table().num_rows == 6


def test_a_long_wait_for_a_time_is_logged_once_with_its_reason(caplog):
    """Spec 9.19."""
    shard = Shard(World(), appends=0)
    with shard.reader() as reader, caplog.at_level(logging.INFO, "persist_engine.client.read.handle"):
        with pytest.raises(Unavailable):
            reader.snapshot(7, timeout_s=0.5)
        assert not caplog.records
        for read in (lambda: reader.snapshot(7, timeout_s=10), lambda: reader.changes(None, 7, timeout_s=10)):
            with pytest.raises(Unavailable):
                read()
            (record,) = caplog.records
            assert record.getMessage() == f"read of shard {shard.id} at {A(7)} waits: the upper is still {A(0)}"
            assert record.__dict__["shard"] == shard.id
            caplog.clear()


def test_an_error_of_a_read_is_raised_even_if_its_lease_cannot_be_released(caplog):
    world = World(settings=Settings(retry=RetrySettings(give_up_ms=20)))
    shard = Shard(world, appends=1)
    reader = shard.reader()

    def fail() -> None:
        with reader:
            world.faults.break_down()
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        fail()
    assert f"could not expire ReadHandle({reader.reader_id} of" in caplog.text
    world.faults.heal()
    with pytest.raises(Unavailable), shard.reader():
        world.faults.break_down()


class LockThatLetsOthersIn:
    """The lock around the pins of a handle. `meanwhile` happens before it is taken for the first time."""

    def __init__(self, meanwhile) -> None:
        self._inner, self._meanwhile = threading.Lock(), meanwhile

    def __enter__(self) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self._inner.acquire()

    def __exit__(self, *_: object) -> None:
        self._inner.release()


@pytest.mark.parametrize("read", ["snapshot", "changes", "listener"])
def test_a_read_takes_its_batches_after_it_has_pinned_their_version(read):
    """Between the end of the wait and the pin, all batches are compacted and the old blobs deleted."""
    shard = Shard(World(settings=COMPACTED))
    machine = shard.client.machine(shard.id)

    def everything_goes() -> None:
        parts = shard.world.blob_keys(shard.id, kind="part")
        compact_all(machine)
        assert reader._beat()
        write_rollup(machine)
        for _ in range(3):
            assert reader._beat()
            gc_and_truncate(machine)
        assert parts - shard.world.blob_keys(shard.id, kind="part"), "something was deleted"

    with shard.reader() as reader:
        listen = reader.listen(0)
        reader._pins._lock = LockThatLetsOthersIn(everything_goes)
        if read == "snapshot":
            assert reader.snapshot(59).to_table().num_rows == 6
        elif read == "changes":
            assert reader.changes(0, 59).to_table().num_rows == 5
        else:
            events = listen.next_batch(timeout_s=0)
            assert sum(event.table.num_rows for event in events if isinstance(event, Updates)) == 5


# -- several listeners, and how fast since follows ---------------------------------------------------------------------


def rows_until(listen, upper: int) -> Counter:
    found: Counter = Counter()
    while listen.frontier != A(upper):
        for event in listen.next_batch(timeout_s=0):
            if isinstance(event, Updates):
                found.update(event.table.column("time").to_pylist())
    return found


def test_the_since_of_a_handle_waits_for_its_slowest_listener():
    """A compaction past the first listener's frontier was reported as a broken invariant."""
    shard = Shard(World(settings=COMPACTED))
    with shard.reader() as reader:
        behind, ahead = reader.listen(5), reader.listen(45)
        assert reader.since == shard.state.trace.since == A(5)
        assert reader.downgrade_since(A(50)) == A(5)
        compact_all(shard.client.machine(shard.id))
        assert shard.state.trace.batch_count < 6
        assert rows_until(ahead, 60) == Counter([50])
        assert reader.downgrade_since(A(59)) == A(5)
        assert rows_until(behind, 60) == Counter([10, 20, 30, 40, 50])
        assert reader.downgrade_since(EMPTY) == A(59), "one time behind both"
        shard.append()
        assert rows_until(behind, 70) == rows_until(ahead, 70) == Counter([60])


def test_since_does_not_wait_for_a_closed_or_dropped_listener(shard):
    with shard.reader() as reader:
        closed, dropped = reader.listen(5), reader.listen(6)
        subscription = reader.subscribe(7)
        assert reader.downgrade_since(A(50)) == A(5)
        closed.close()
        closed.close()
        with pytest.raises(InvalidUsage, match="closed"):
            next(closed)
        assert reader.downgrade_since(A(50)) == A(6)
        del dropped
        assert reader.downgrade_since(A(50)) == A(7)
        assert isinstance(next(subscription), Updates)
        in_a_traceback = list(reader._listeners)
        subscription.close()
        assert reader.downgrade_since(A(50)) == A(50)
        assert len(in_a_traceback) == 2, "the closed one and the subscription's"


def test_a_listener_at_the_end_of_a_closed_shard_holds_no_since(shard):
    with shard.reader() as reader:
        listen = reader.listen(50)
        shard.writer.append([], lower=A(60), upper=EMPTY)
        assert list(listen)[-1] == Progress(EMPTY)
        assert reader.downgrade_since(EMPTY) == EMPTY


def test_since_trails_a_listener_by_one_batch():
    """Spec 15.3."""
    shard = Shard(World())
    with shard.reader() as reader:
        listen = reader.listen(5)
        seen = []
        for _ in range(4):
            shard.world.env.advance_ms(reader._lease_ms // 4 + 1)
            list(listen.next_batch(timeout_s=0))
            seen.append((listen.frontier.time, reader.since.time))
        assert seen == [(10, 5), (20, 5), (30, 10), (40, 20)]


def test_a_listener_moves_since_at_most_four_times_in_a_lease():
    shard = Shard(World())
    with shard.reader() as reader:
        listen, calls = reader.listen(5), shard.world.consensus.calls
        list(listen.next_batch(timeout_s=0))
        before = calls["compare_and_set"]
        list(listen.next_batch(timeout_s=0))
        reader.maybe_downgrade_since(A(9))
        shard.world.env.advance_ms(reader._lease_ms // 4 - 2)
        list(listen.next_batch(timeout_s=0))
        assert (calls["compare_and_set"], reader.since) == (before, A(5))
        shard.world.env.advance_ms(4)
        list(listen.next_batch(timeout_s=0))
        assert (calls["compare_and_set"], reader.since) == (before + 1, A(20))
        reader.maybe_downgrade_since(A(29))
        assert calls["compare_and_set"] == before + 1


# -- leases that end in other ways --------------------------------------------------------------------------------------


def test_regression_a_dropped_reader_with_a_lease_of_centuries_is_expired(shard):
    """No lock waits that long. The thread ended at once, and dropped readers were never expired."""
    reader = shard.reader(lease_ms=10**17)
    reader_id, thread = reader.reader_id, reader._heartbeat._thread
    assert shard.is_registered(reader_id)
    del reader
    assert eventually(lambda: not thread.is_alive())
    assert not shard.is_registered(reader_id)


def test_regression_a_lease_of_parts_that_failed_leaves_no_part_leased(shard, monkeypatch):
    again, calls = Pin.again, []

    def third_fails(pin: Pin) -> Pin:
        calls.append(pin)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return again(pin)

    monkeypatch.setattr(Pin, "again", third_fails)
    with shard.reader() as reader, reader.snapshot(59) as snapshot:
        with pytest.raises(KeyboardInterrupt):
            snapshot.lease_parts()
        assert reader.leased_parts == 0


@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "not committed"])
def test_an_interrupt_while_a_reader_is_registered_leaves_no_lease(shard, monkeypatch, is_committed):
    """Ctrl-C as a feed began held since until the lease lapsed."""
    commit = shard.world.consensus.compare_and_set

    def interrupted(*args):
        monkeypatch.undo()
        if is_committed:
            commit(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(shard.world.consensus, "compare_and_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard.reader()
    assert not shard.state.leased_readers


def test_an_interrupt_does_not_wait_for_a_store_that_does_not_answer(shard, monkeypatch):
    """The store may be the reason for the interrupt."""
    monkeypatch.setattr("persist_engine.client.read.handle.LET_GO_S", 0.1)
    answers = threading.Event()
    commit = shard.world.consensus.compare_and_set

    def silent(*args):
        assert answers.wait(PATIENCE_S)
        return commit(*args)

    def interrupted(*args):
        commit(*args)
        monkeypatch.setattr(shard.world.consensus, "compare_and_set", silent)
        raise KeyboardInterrupt

    monkeypatch.setattr(shard.world.consensus, "compare_and_set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard.reader()
    assert len(shard.state.leased_readers) == 1
    answers.set()
    assert eventually(lambda: not shard.state.leased_readers)
