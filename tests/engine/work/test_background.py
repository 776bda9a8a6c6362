"""Maintenance in the background: which work is queued, which is dropped, and how it ends."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.settings import CompactionSettings, RetrySettings
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.maintenance import Maintenance
from persist_engine.work.background import CompactionSwitch
from persist_engine.work.rollup import write_rollup
from persist_kit.counted import CountedMetrics
from persist_kit.recorded import SCHEMA, SETTINGS, RecordedShard

at = Antichain.of
#: Much longer than anything here takes. A test that waits this long fails.
PATIENCE_S = 60


class Gate:
    """A blob store whose reads of parts wait while it is closed off."""

    def __init__(self, inner):
        self._inner = inner
        self._changed = threading.Condition()
        self._is_shut, self._waiting = True, 0
        self.fails = False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get(self, key):
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._is_shut, PATIENCE_S)
        if self.fails:
            raise OSError("no such luck")
        return self._inner.get(key)

    def open(self):
        with self._changed:
            self._is_shut = False
            self._changed.notify_all()

    def wait_until_reached(self):
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting > 0, PATIENCE_S)


class Shop:
    """A shard with a compaction due, and a client whose reads of parts can be made to wait."""

    def __init__(self, **compaction):
        self.stores = RecordedShard()
        self.stores.append(times=8)
        given = {"memory_bytes_max": 1 << 20, "claim_ms": 0, "inputs_min": 1, "concurrency": 1, "queue_max": 2}
        settings = replace(
            SETTINGS,
            maintenance=replace(SETTINGS.maintenance, rollup_claim_ms=0),
            compaction=CompactionSettings(**{**given, **compaction}),
            retry=RetrySettings(initial_ms=0.1, clamp_ms=0.5, give_up_ms=1),
        )
        self.gate, self.metrics = Gate(self.stores.blob), CountedMetrics()
        self.client = PersistClient(
            self.gate, self.stores.consensus, settings=settings, env=SystemEnv(), metrics=self.metrics
        )
        self.gate.open()
        self.machine = self.client.machine(self.stores.shard_id)
        self.gate._is_shut, self.gate._waiting = True, 0
        self.requests = self.machine.claim_compactions(max_requests=10)[0].requests
        assert self.requests

    def offer(self, upkeep, times=1):
        for _ in range(times):
            upkeep.offer(Maintenance(requests=self.requests[:1]))


@pytest.mark.slow
def test_a_writer_with_background_maintenance_keeps_its_shard_small():
    stores = RecordedShard()
    metrics = CountedMetrics()
    roomy = replace(SETTINGS, compaction=CompactionSettings(memory_bytes_max=1 << 20))
    client = PersistClient(stores.blob, stores.consensus, settings=roomy, env=SystemEnv(), metrics=metrics)
    with (
        client.background_maintenance() as background,
        client.open_writer(stores.shard_id, SCHEMA, purpose="test") as writer,
    ):
        upkeep = background.of(writer.machine)
        for i in range(50):
            updates = [(((j, "a"), (i % 2,)), i, 1) for j in range(10)]
            stores.history += updates
            stores.upper = i + 1
            upkeep.offer(writer.compare_and_append(updates, expected_upper=at(i), new_upper=at(i + 1)).maintenance)
        assert background.drain(PATIENCE_S)
        assert metrics.total("shard_compactions_applied") > 0
        assert metrics.total("gc_truncated_diffs") > 0
        assert metrics.total("background_failed") == 0
        assert len(metrics.observed_s("compaction_queued")) >= metrics.total("compaction_started") > 0
    stores.check_nothing_lost()
    stores.check_contents()


def test_work_that_does_not_fit_the_queue_is_dropped_and_counted():
    shop = Shop()
    with shop.client.background_maintenance() as background:
        upkeep = background.of(shop.machine)
        shop.offer(upkeep)
        shop.gate.wait_until_reached()
        shop.offer(upkeep, times=4)
        assert shop.metrics.total("compaction_skipped", reason="queue_full") == 2
        assert shop.metrics.total("compaction_concurrency_waits") == 2
        assert not background.drain(0)
        other = background.of(shop.machine)
        shop.offer(other)
        assert shop.metrics.total("compaction_skipped", reason="queue_full") == 2, "every handle has its own queue"
        shop.gate.open()
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("compaction_requested") == 6
    assert shop.metrics.total("compaction_started") == 4
    assert shop.metrics.total("compaction", outcome="applied exact") == 1
    assert len(shop.metrics.observed_s("compaction_queued")) == 4
    shop.stores.check_nothing_lost()
    shop.stores.check_contents()


def test_merge_requests_below_the_thresholds_are_not_queued():
    shop = Shop(inputs_min=1000, parts_min=1000, updates_min=10**6)
    with shop.client.background_maintenance() as background:
        shop.offer(background.of(shop.machine))
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("compaction_skipped", reason="small") == 1
    assert shop.metrics.total("compaction_started") == 0


def test_maintenance_that_a_compaction_makes_due_is_performed_too():
    """The version that a compaction commits makes a rollup due."""
    shop = Shop()
    shop.gate.open()
    with shop.client.background_maintenance() as background:
        shop.offer(background.of(shop.machine))
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("compaction", outcome="applied exact") == 1
    assert shop.metrics.total("rollup_write", outcome="written") > 0


def test_switching_maintenance_off_drops_the_queued_work():
    shop, switch = Shop(), CompactionSwitch()
    with shop.client.background_maintenance(switch) as background:
        upkeep = background.of(shop.machine)
        shop.offer(upkeep)
        shop.gate.wait_until_reached()
        shop.offer(upkeep)
        switch.turn_off()
        shop.gate.open()
        assert background.drain(PATIENCE_S)
        assert shop.metrics.total("compaction_skipped", reason="disabled") == 1
        assert shop.metrics.total("compaction_started") == 1, "what runs goes on"
        switch.turn_on()
        shop.offer(upkeep)
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("compaction_started") == 2


def test_closing_drops_queued_work_and_stops_running_work():
    shop = Shop()
    before = shop.stores.blobs()
    background = shop.client.background_maintenance()
    upkeep = background.of(shop.machine)
    shop.offer(upkeep)
    shop.gate.wait_until_reached()
    shop.offer(upkeep)
    closing = threading.Thread(target=background.close)
    closing.start()
    while not background.is_closed():  # the first step of close
        threading.Event().wait(0.001)
    shop.gate.open()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert shop.metrics.total("compaction") == 0, "stopped before it was offered to state"
    assert shop.metrics.total("compaction_skipped", reason="closed") == 1
    shop.offer(upkeep)
    upkeep.offer(Maintenance(gc=shop.machine.state.seqno, rollup=shop.machine.state.seqno))
    assert shop.metrics.total("compaction_skipped", reason="closed") == 2
    assert shop.stores.blobs() == before
    background.close()
    shop.stores.check_contents()


def test_an_error_of_work_is_logged_and_the_queue_continues(caplog):
    shop = Shop()
    with shop.client.background_maintenance() as background:
        upkeep = background.of(shop.machine)
        shop.gate.fails = True
        shop.gate.open()
        shop.offer(upkeep)
        assert background.drain(PATIENCE_S)
        assert shop.metrics.total("background_failed", work="compaction") == 1
        assert shop.metrics.total("compaction_failed") == 1
        shop.gate.fails = False
        shop.offer(upkeep)
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("compaction", outcome="applied exact") == 1
    (logged,) = [record for record in caplog.records if record.name.endswith("background")]
    assert str(shop.stores.shard_id) in logged.getMessage()


def test_regression_a_process_that_ends_logs_no_error_of_its_compactions():
    """Each script that did not close its database ended with a traceback."""
    program = """
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import CompactionSettings
from persist_engine.work.background import BackgroundMaintenance

def until_the_process_ends():
    while True:
        threads_of_the_work.submit(int).result()

threads_of_the_work = ThreadPoolExecutor(1)
background = BackgroundMaintenance(CompactionSettings(enabled=True))
assert background.submit("compaction", SimpleNamespace(metrics=NoMetrics(), shard_id="s1"), until_the_process_ends)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("enabled", [True, False])
def test_settings_that_switch_compaction_off_leave_rollups_and_collection(enabled):
    shop = Shop(enabled=enabled)
    shop.gate.open()
    with shop.client.background_maintenance() as background:
        upkeep = background.of(shop.machine)
        state = shop.machine.refresh()
        upkeep.offer(Maintenance(rollup=state.seqno, gc=state.seqno, requests=shop.requests[:1]))
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("compaction_started") == enabled
    assert shop.metrics.total("compaction_skipped", reason="disabled") == (not enabled)
    assert shop.metrics.total("rollup_write", outcome="written") >= 1
    assert shop.metrics.total("gc") >= 1


def test_collections_requested_while_one_runs_are_done_as_one():
    """Spec 14.4."""
    shop = Shop(enabled=False)
    plain = shop.stores.client().machine(shop.stores.shard_id)
    for _ in range(2):
        write_rollup(plain)
        shop.stores.append()
    state = shop.machine.refresh()
    with shop.client.background_maintenance() as background:
        upkeep = background.of(shop.machine)
        upkeep.offer(Maintenance(gc=state.seqno))
        shop.gate.wait_until_reached()
        for _ in range(3):
            upkeep.offer(Maintenance(gc=state.seqno))
        assert shop.metrics.total("gc_merged") == 2, "the first of them waits, the others are merged into it"
        shop.gate.open()
        assert background.drain(PATIENCE_S)
    assert shop.metrics.total("gc") == 2
    assert shop.metrics.total("gc", outcome="Succeeded") == 1
    shop.stores.check_nothing_lost()


def test_regression_a_wait_ends_although_no_thread_takes_the_work():
    """Work that followed at the end of a program stayed counted, and each wait for it was endless."""
    shop = Shop()
    background = shop.client.background_maintenance()
    upkeep = background.of(shop.machine)
    for pool in background._pools.values():
        pool.shutdown()  # the interpreter does this at its end
    for _ in range(3):
        shop.offer(upkeep)
        upkeep.offer(Maintenance(gc=shop.machine.state.seqno, rollup=shop.machine.state.seqno))
    assert background.drain(0)
    assert shop.metrics.total("compaction_skipped", reason="closed") == 3
    assert shop.metrics.total("compaction_skipped", reason="queue_full") == 0
    background.close()
