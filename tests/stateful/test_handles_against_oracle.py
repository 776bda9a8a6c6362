"""Random histories of several processes on one shard, done twice: to the shard and to a dict on paper.

Stores lose calls and answers all the while; thresholds are tiny, so that rollups, cut parts and inline refusals are common.
Some processes are pushed what others commit, late, twice or never; the schema grows, and some handles keep the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from persist_engine import Antichain, Appended, PersistClient, Schema, SinceAhead, UpperMismatch, WriteHandle
from persist_engine.base.errors import Fenced
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import VersionedData
from persist_engine.client.read.listen import Updates
from persist_engine.model.batch import HollowRollup
from persist_engine.model.commands import SchemaEvolved
from persist_engine.model.invariants import check_invariants
from persist_engine.model.state import ShardState
from persist_engine.shard.schemas import SchemaIncompatible
from persist_engine.storage.notify import Listener, abridged
from persist_engine.testing.oracle import Oracle
from persist_engine.work.perform import perform_due
from persist_kit.depth import draws
from persist_kit.world import SCHEMA, World

A = Antichain.of
PROCESSES = 3
HOSTILE = Settings(
    batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=4096, inline_total_bytes_max=16_000),
    maintenance=MaintenanceSettings(rollup_threshold=3, recent_diffs_max=4, validate_roundtrip=True),
    compaction=CompactionSettings(sift_bytes_min=0, inputs_min=2, parts_min=2, updates_min=1, memory_bytes_max=8192),
)

#: What the schema may grow into, one after the other or at once. Rows on paper are of the last.
SCHEMAS = (
    SCHEMA,
    Schema(key=SCHEMA.key, val=pa.schema([*SCHEMA.val, ("note", pa.string())])),
    Schema(key=SCHEMA.key, val=pa.schema([*SCHEMA.val, ("note", pa.string()), ("size", pa.int64())])),
)

processes = st.integers(0, PROCESSES - 1)
schemas = st.integers(0, len(SCHEMAS) - 1)
names = st.sampled_from(["a", "b", "c"])
#: (key, name, note, size, how far past the lower, diff)
rows_ = st.lists(
    st.tuples(
        st.integers(0, 3),
        names,
        st.sampled_from([None, "x"]),
        st.sampled_from([None, 7]),
        st.integers(0, 4),
        st.sampled_from([-1, 1, 2]),
    ),
    max_size=6,
)
widths = st.integers(1, 5)


class Post:
    """News on their way: each listening process gets them, at once or when a rule says so."""

    def __init__(self) -> None:
        self.is_prompt = True
        self.listeners: list[tuple[str, Listener]] = []
        self.under_way: list[tuple[Listener, VersionedData]] = []

    def subscribe(self, key: str, listener: Listener) -> None:
        if all(listener is not known for _, known in self.listeners):
            self.listeners.append((key, listener))

    def publish(self, key: str, new: VersionedData) -> None:
        for to, listener in self.listeners:
            if to == key and self.is_prompt:
                listener.hear(abridged(new))
            elif to == key:
                self.under_way.append((listener, abridged(new)))

    def is_live(self, key: str) -> bool:
        return True

    def await_live(self, key: str, timeout_s: float | None) -> bool:
        return True

    def close(self) -> None:
        pass


class Handles(RuleBasedStateMachine):
    """Three processes write, read, restart and maintain one shard."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(settings=HOSTILE)
        self.shard_id = self.world.shard_id()
        self.oracle = Oracle()
        self.post = Post()
        self.states: dict[int, ShardState] = {}
        self.registered = {0}
        self.written = [0] * PROCESSES
        self.clients: list[PersistClient] = [
            self.world.process(push=self.post if index else None) for index in range(PROCESSES)
        ]
        self.writers: list[WriteHandle] = [self._writer(process) for process in range(PROCESSES)]
        self.readers = [client.open_leased_reader(self.shard_id, purpose="reader") for client in self.clients]
        self.world.faults.set_rates(happens=0.9, answers=0.9)

    def _writer(self, process: int) -> WriteHandle:
        """Its process is pushed from now on what others commit, like one that has once waited."""
        self.clients[process].initialise(self.shard_id, SCHEMA)
        self.clients[process].machine(self.shard_id)._applier.subscribe()
        return self.clients[process].open_writer(self.shard_id, SCHEMAS[self.written[process]], purpose="writer")

    def teardown(self) -> None:
        self.world.faults.heal()
        for reader in self.readers:
            reader.expire()
        for schema in self.registered:
            self._compare(self.clients[0], None, schema)

    # -- writing ---------------------------------------------------------------------------------------------------------

    @rule(process=processes, rows=rows_, width=widths, off=st.sampled_from([0, 0, 0, 1, -1]))
    def compare_and_append(self, process: int, rows: list, width: int, off: int) -> None:
        lower = max(0, self.oracle.upper.time + off)
        shard_rows, paper = self._rows(process, rows, lower, lower + width)
        outcome = self.writers[process].compare_and_append(
            shard_rows, expected_upper=A(lower), new_upper=A(lower + width)
        )
        self._agree(outcome, self.oracle.compare_and_append(paper, expected_upper=A(lower), new_upper=A(lower + width)))

    @rule(process=processes, rows=rows_, width=widths, back=st.integers(0, 4))
    def append(self, process: int, rows: list, width: int, back: int) -> None:
        lower = max(0, self.oracle.upper.time - back)
        shard_rows, paper = self._rows(process, rows, lower, lower + width)
        outcome = self.writers[process].append(shard_rows, lower=A(lower), upper=A(lower + width))
        self._agree(outcome, self.oracle.append(paper, lower=A(lower), upper=A(lower + width)))

    @rule(stagers=st.lists(processes, min_size=1, max_size=4), appender=processes, rows=rows_, width=widths, cut=widths)
    def append_staged_batches(self, stagers: list[int], appender: int, rows: list, width: int, cut: int) -> None:
        lower = self.oracle.upper.time
        sent, written = [], []
        for stager in stagers:
            shard_rows, paper = self._rows(stager, rows, lower, lower + width)
            batch = self.writers[stager].batch(shard_rows, lower=A(lower), upper=A(lower + width))
            sent.append(batch.to_transmittable())
            written += paper
        writer = self.writers[appender]
        upper = A(lower + min(width, cut))
        outcome = writer.compare_and_append_batch(
            [writer.batch_from_transmittable(data) for data in sent], expected_upper=A(lower), new_upper=upper
        )
        self._agree(outcome, self.oracle.compare_and_append(written, expected_upper=A(lower), new_upper=upper))

    # -- reading ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.upper.time > 0)
    @rule(process=processes, back=st.integers(1, 12), schema=schemas)
    def snapshot(self, process: int, back: int, schema: int) -> None:
        self._compare(self.clients[process], max(0, self.oracle.upper.time - back), schema)

    @precondition(lambda self: self.oracle.upper.time > 0)
    @rule(process=processes, schema=schemas)
    def listen(self, process: int, schema: int) -> None:
        """All that comes after the earliest readable time."""
        schema = self._known(schema)
        found: Counter[tuple[Hashable, int]] = Counter()
        with self.clients[process].open_leased_reader(self.shard_id, SCHEMAS[schema], purpose="check") as reader:
            as_of = reader.since.time
            listen = reader.listen(as_of)
            while listen.frontier < self.oracle.upper:
                for event in listen.next_batch(timeout_s=60):
                    if isinstance(event, Updates):
                        for r in event.table.to_pylist():
                            found[(r["key"]["id"], *r["val"].values()), r["time"]] += r["diff"]
        wanted: Counter[tuple[Hashable, int]] = Counter()
        for data, time, diff in self.oracle.updates:
            if time > as_of:
                wanted[data[: 2 + schema], time] += diff
        assert {key: diff for key, diff in found.items() if diff} == {key: diff for key, diff in wanted.items() if diff}

    @rule(process=processes, back=st.integers(0, 6))
    def downgrade_since(self, process: int, back: int) -> None:
        try:
            self.readers[process].downgrade_since(A(max(0, self.oracle.upper.time - back)))
        except Fenced:  # so much time has passed that its lease is over
            self.readers[process] = self.clients[process].open_leased_reader(self.shard_id, purpose="reader")

    @rule(process=processes)
    def fetch_upper(self, process: int) -> None:
        assert self.writers[process].fetch_recent_upper() == self.oracle.upper

    @rule(process=processes)
    def wait_in_vain(self, process: int) -> None:
        assert not self.writers[process].wait_for_upper_past(self.oracle.upper, timeout=0)

    # -- life ------------------------------------------------------------------------------------------------------------

    @rule(process=processes, is_pushed=st.booleans(), schema=schemas)
    def restart(self, process: int, is_pushed: bool, schema: int) -> None:
        """A process dies without a word; its reader's lease stays behind. The next one may know another schema."""
        self.readers[process].expire()
        self.clients[process] = self.world.process(push=self.post if is_pushed else None)
        self.written[process] = self._known(schema)
        self.writers[process] = self._writer(process)
        self.readers[process] = self.clients[process].open_leased_reader(self.shard_id, purpose="reader")

    @rule(process=processes)
    def expire_writer(self, process: int) -> None:
        self.writers[process].expire()
        self.writers[process] = self._writer(process)

    @rule(process=processes, schema=schemas, goes_along=st.booleans())
    def evolve(self, process: int, schema: int, goes_along: bool) -> None:
        """Only to a schema that holds all that there is; a handle goes on with its own schema."""
        answer = self.clients[process].evolve_schema(self.shard_id, SCHEMAS[schema])
        if schema < max(self.registered):
            assert isinstance(answer, SchemaIncompatible)
            return
        self.registered.add(schema)
        assert answer == SchemaEvolved(len(self.registered) - 1)
        if goes_along:
            self.written[process] = schema
            self.writers[process].expire()
            self.writers[process] = self._writer(process)

    @rule()
    def change_the_post(self) -> None:
        self.post.is_prompt = not self.post.is_prompt

    @rule(letters=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["heard", "twice", "lost", "missed"]))))
    def deliver(self, letters: list[tuple[int, str]]) -> None:
        for number, fate in letters:
            if not self.post.under_way:
                return
            listener, news = self.post.under_way.pop(number % len(self.post.under_way))
            for _ in range({"heard": 1, "twice": 2}.get(fate, 0)):
                listener.hear(news)
            if fate == "missed":
                listener.hear(None)

    @rule(process=processes)
    def maintain(self, process: int) -> None:
        """Rollup, compaction and garbage collection by any process, while the stores fail."""
        perform_due(self.clients[process].machine(self.shard_id))

    @rule(process=processes)
    def roll_up(self, process: int) -> None:
        machine = self.clients[process].machine(self.shard_id)
        state = machine.refresh()
        written = machine.versions.write_rollup_for_state(state)
        if written is not None:
            added, _ = machine.add_rollup(state.seqno, HollowRollup(*written))
            assert added.applied

    @rule(rate=st.sampled_from([0.5, 0.9, 1.0]))
    def change_the_weather(self, rate: float) -> None:
        self.world.faults.set_rates(happens=rate, answers=rate)

    @rule(milliseconds=st.integers(-5_000, 60_000))
    def time_passes(self, milliseconds: int) -> None:
        self.world.env.advance_ms(milliseconds)

    @invariant()
    def every_state_is_sound(self) -> None:
        for client in self.clients:
            state = client.machine(self.shard_id).state
            check_invariants(None, state, deep=True)
            assert self.states.setdefault(state.seqno, state) == state, "two processes know two states of one version"

    # -- what is compared ------------------------------------------------------------------------------------------------

    def _rows(self, process: int, rows: list, lower: int, upper: int) -> tuple[list, list]:
        """As the process's schema has them, and on paper, where what it does not know is null."""
        schema = self.written[process]
        shard_rows, paper = [], []
        for key, name, *more, past, diff in rows:
            time, known = min(lower + past, upper - 1), more[:schema]
            shard_rows.append((((key,), (name, *known)), time, diff))
            paper.append(((key, name, *known, *[None] * (len(more) - schema)), time, diff))
        return shard_rows, paper

    def _known(self, schema: int) -> int:
        """The newest that the shard has, up to `schema`."""
        return max(known for known in self.registered if known <= schema)

    def _agree(self, outcome: object, refusal: UpperMismatch | None) -> None:
        if refusal is None:
            assert isinstance(outcome, Appended)
            assert outcome.upper == self.oracle.upper
        else:
            assert outcome == refusal

    def _compare(self, client: PersistClient, as_of: int | None, schema: int) -> None:
        if as_of is None:
            as_of = self.oracle.upper.time - 1
        if as_of < 0:
            return
        schema = self._known(schema)
        with client.open_leased_reader(self.shard_id, SCHEMAS[schema], purpose="check") as reader:
            snapshot = reader.snapshot(A(as_of), timeout_s=60)
            if isinstance(snapshot, SinceAhead):
                assert not snapshot.since <= A(as_of)
                return
            found = {(r["key"]["id"], *r["val"].values()): r["diff"] for r in snapshot.to_table().to_pylist()}
        wanted: Counter[Hashable] = Counter()
        for data, count in self.oracle.contents(as_of).items():
            wanted[data[: 2 + schema]] += count
        assert found == {data: count for data, count in wanted.items() if count}


Handles.TestCase.settings = settings(
    max_examples=draws(20),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHandles = pytest.mark.slow(Handles.TestCase)
