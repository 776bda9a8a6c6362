"""Replicas of one sink, stepped in any order, on a shard that others edit: at rest it is as desired, at every time that
which only the sink wrote.

No threads: hypothesis chooses which part of which replica handles its next event. Stores lose calls and answers.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from persist_engine import Antichain, Appended, PersistClient, SinceAhead
from persist_engine.base.errors import Fenced, MissingBlob
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.dataflow.sink.actors import AllowWrites, Desired, DesiredFrontier
from persist_engine.dataflow.sink.handle import SinkOptions, SinkParts, assemble
from persist_engine.flow.desired import Stream
from persist_engine.rows.ingest import normalise
from persist_engine.rows.partitioning import deal
from persist_engine.work.perform import perform_due
from persist_kit.depth import draws
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
REPLICAS = 3
HOSTILE = Settings(
    batch=BatchSettings(inline_part_bytes_max=0),
    maintenance=MaintenanceSettings(rollup_threshold=3),
    compaction=CompactionSettings(sift_bytes_min=0, inputs_min=2, parts_min=2, updates_min=1),
)

replicas = st.integers(0, REPLICAS - 1)
#: (key, name, time from the frontier, diff)
rows_ = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from("ab"), st.integers(0, 3), st.sampled_from([-1, 1, 2])), max_size=5
)


class Replica:
    """A sink in pieces: its parts, and how much of the desired collection it was fed."""

    def __init__(self, client: PersistClient, shard_id, options: SinkOptions, directory: Path) -> None:
        self.options = options
        self.writer = client.open_writer(shard_id, SCHEMA, purpose="replica")
        self.parts: SinkParts = assemble(
            options,
            open_reader=lambda: client.open_leased_reader(shard_id, SCHEMA, purpose="replica"),
            writer=self.writer,
            spill_directory=lambda _: directory,
        )
        self.fed = 0
        self.is_over = False
        """Whether its lease lapsed and it missed history."""

    def feed(self, updates: list, frontier: int) -> None:
        news = [row(key, name, time, diff) for key, name, time, diff in updates if self.fed <= time < frontier]
        for table in normalise(news, SCHEMA):
            for inbox, share in zip(self.parts.worker_inboxes, deal(table, self.options.workers), strict=True):
                inbox.put(Desired(share))
        self.fed = frontier
        for inbox in (*self.parts.worker_inboxes, self.parts.control_inbox):
            inbox.put(DesiredFrontier(Stream.OK, A(frontier)))

    def step(self, part: int) -> bool:
        """Let one part handle one event; whether there was one."""
        parts = self.parts
        if self.is_over:
            return False
        part %= len(parts.workers) + 2
        if part == len(parts.workers) + 1:
            before = parts.reader.frontier, parts.reader.lapses
            try:
                parts.reader.step(timeout_s=0)
            except (Fenced, MissingBlob):
                self.is_over = True
            return (parts.reader.frontier, parts.reader.lapses) != before
        inbox, actor = (
            (parts.control_inbox, parts.control)
            if part == len(parts.workers)
            else (parts.worker_inboxes[part], parts.workers[part])
        )
        event = inbox.poll()
        if event is None:
            return False
        actor.handle(event)
        return True

    def settle(self) -> bool:
        """Step until nothing is left; whether anything happened."""
        happened = False
        while any(self.step(part) for part in range(len(self.parts.workers) + 2)):
            happened = True
        return happened

    def crash(self) -> None:
        """Nothing is given up properly; only the thread of the lease ends with its process."""
        self.parts.reader.handle._heartbeat.stop()


class Sinks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(settings=HOSTILE)
        self.directory = tempfile.TemporaryDirectory()
        self.shard_id = self.world.shard_id()
        self.outside = self.world.process()
        self.outside.initialise(self.shard_id, SCHEMA)
        self.holder = self.outside.open_leased_reader(self.shard_id, SCHEMA, purpose="hold")
        self.desired: list[tuple[int, str, int, int]] = []
        self.frontier = 0
        self.not_ours: list[range] = []
        self.ever_linked: set[str] = set()
        self.has_crashed = False
        self.replicas: list[Replica | None] = [None] * REPLICAS
        self.world.faults.set_rates(happens=0.95, answers=0.95)

    @initialize(workers=st.integers(1, 3), as_of=st.sampled_from([0, 5]), rows=rows_, past=st.integers(-2, 6))
    def begin(self, workers: int, as_of: int, rows: list, past: int) -> None:
        """Often with something in the shard already, and often with a since that is ahead of it."""
        if rows:
            self.edit(rows=rows, width=3)
            self.move_since(past_upper=past)
        self.start(replica=0, workers=workers, read_only=False, as_of=as_of)

    # -- the desired collection ------------------------------------------------------------------------------------------

    @rule(rows=rows_, width=st.integers(1, 5))
    def desire(self, rows: list, width: int) -> None:
        self.desired += [(key, name, self.frontier + off, diff) for key, name, off, diff in rows if off < width]
        self.frontier += width

    @precondition(lambda self: any(self.replicas))
    @rule(replica=replicas)
    def feed(self, replica: int) -> None:
        fed = self.replicas[replica]
        if fed is not None:
            fed.feed(self.desired, self.frontier)

    # -- replicas --------------------------------------------------------------------------------------------------------

    @rule(replica=replicas, workers=st.integers(1, 3), read_only=st.booleans(), as_of=st.sampled_from([0, 0, 0, 4, 9]))
    def start(self, replica: int, workers: int, read_only: bool, as_of: int) -> None:
        if self.replicas[replica] is None:
            options = SinkOptions(workers=workers, read_only=read_only, as_of=as_of)
            self.not_ours.append(range(as_of))
            self.replicas[replica] = Replica(self.world.process(), self.shard_id, options, Path(self.directory.name))

    @precondition(lambda self: any(self.replicas))
    @rule(replica=replicas)
    def crash(self, replica: int) -> None:
        crashed, self.replicas[replica] = self.replicas[replica], None
        if crashed is not None:
            crashed.crash()
            self.has_crashed = True

    @precondition(lambda self: any(self.replicas))
    @rule(replica=replicas)
    def lapse(self, replica: int) -> None:
        """Its machine sleeps past the lease; when it wakes it soon notices."""
        asleep = self.replicas[replica]
        if asleep is not None:
            handle = asleep.parts.reader.handle
            self.outside.machine(self.shard_id).expire_leased_reader(handle.reader_id)
            handle._heartbeat._lost.set()
            handle._downgraded_ms = 0

    @precondition(lambda self: any(self.replicas))
    @rule(replica=replicas)
    def allow_writes(self, replica: int) -> None:
        promoted = self.replicas[replica]
        if promoted is not None:
            promoted.parts.control_inbox.put(AllowWrites())

    @precondition(lambda self: any(self.replicas))
    @rule(steps=st.lists(st.tuples(replicas, st.integers(0, 4)), min_size=5, max_size=40))
    def step(self, steps: list[tuple[int, int]]) -> None:
        for replica, part in steps:
            stepped = self.replicas[replica]
            if stepped is not None:
                stepped.step(part)

    @precondition(lambda self: any(self.replicas))
    @rule(replica=replicas)
    def run_dry(self, replica: int) -> None:
        """One replica is faster than all others."""
        fast = self.replicas[replica]
        if fast is not None:
            fast.feed(self.desired, self.frontier)
            fast.settle()

    # -- other writers ---------------------------------------------------------------------------------------------------

    @rule(rows=rows_, width=st.integers(1, 4))
    def edit(self, rows: list, width: int) -> None:
        with self.outside.open_writer(self.shard_id, SCHEMA, purpose="vandal") as vandal:
            lower = vandal.fetch_recent_upper().time
            updates = [row(key, name, lower + off, diff) for key, name, off, diff in rows if off < width]
            outcome = vandal.compare_and_append(updates, expected_upper=A(lower), new_upper=A(lower + width))
            assert isinstance(outcome, Appended)
        self.not_ours.append(range(lower, lower + width))

    @rule(past_upper=st.integers(-6, 6))
    def move_since(self, past_upper: int) -> None:
        upper = self.outside.recent_upper(self.shard_id).time
        self.holder.downgrade_since(A(max(0, upper + past_upper)).join(self.holder.since))

    @rule()
    def maintain(self) -> None:
        perform_due(self.outside.machine(self.shard_id))

    # -- laws ------------------------------------------------------------------------------------------------------------

    @invariant()
    def see_what_is_linked(self) -> None:
        state = self.outside.machine(self.shard_id).refresh()
        keys = [key for batch in state.trace.batches() for key in batch.blob_keys()]
        self.ever_linked.update(f"{self.shard_id}/{key}" for key in keys)

    def teardown(self) -> None:
        self.world.faults.heal()
        try:
            running: list[Replica] = []
            while not running or any(replica.is_over for replica in running):
                running = self._running()
                running[0].parts.control_inbox.put(AllowWrites())
                self.desire(rows=[], width=1)
                self._rest(running)
                self.desire(rows=[], width=max(1, self.outside.recent_upper(self.shard_id).time - self.frontier + 30))
                self._rest(running)
            assert self.outside.recent_upper(self.shard_id) == A(self.frontier)
            for replica in running:
                for worker in replica.parts.workers:
                    worker._write.buffer.consolidate_at_since()
                    assert worker._write.buffer.size().rows == 0
                replica.crash()
            self._compare()
            self.see_what_is_linked()
            if not self.has_crashed:
                assert self.world.blob_keys(self.shard_id, kind="part") <= self.ever_linked, "staged blobs leaked"
        finally:
            self.holder.expire()
            self.directory.cleanup()

    def _running(self) -> list[Replica]:
        """All that still can; at least one."""
        for number, replica in enumerate(self.replicas):
            if replica is not None and replica.is_over:
                self.crash(number)
        if not any(self.replicas):
            self.start(replica=0, workers=2, read_only=False, as_of=0)
        return [replica for replica in self.replicas if replica is not None]

    def _rest(self, running: list[Replica]) -> None:
        for replica in running:
            replica.feed(self.desired, self.frontier)
        while any(replica.settle() for replica in running):
            pass

    def _compare(self) -> None:
        spoiled = {time for times in self.not_ours for time in times}
        since = self.holder.since.time
        with self.outside.open_leased_reader(self.shard_id, SCHEMA, purpose="check") as reader:
            for time in range(since, self.frontier):
                if time in spoiled:
                    continue
                snapshot = reader.snapshot(time, timeout_s=0)
                assert not isinstance(snapshot, SinceAhead)
                with snapshot:
                    rows = snapshot.to_table().to_pylist()
                found = Counter({(r["key"]["id"], r["val"]["name"]): r["diff"] for r in rows})
                wanted: Counter = Counter()
                for key, name, at, diff in self.desired:
                    if at <= time:
                        wanted[key, name] += diff
                assert found == Counter({data: diff for data, diff in wanted.items() if diff}), f"at {time}"


TestSinks = pytest.mark.slow(Sinks.TestCase)
TestSinks.settings = settings(
    max_examples=draws(10),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
