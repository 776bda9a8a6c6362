"""Random histories of several processes on one shard, done twice: to the shard and to a dict on paper.

Stores lose calls and answers all the while; thresholds are tiny, so that rollups, cut parts and inline refusals are common.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from persist_engine import Antichain, Appended, PersistClient, SinceAhead, UpperMismatch, WriteHandle
from persist_engine.base.errors import Fenced
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.model.batch import HollowRollup
from persist_engine.model.invariants import check_invariants
from persist_engine.testing.oracle import Oracle
from persist_engine.testing.world import SCHEMA, World, row
from persist_engine.work.perform import perform_due

A = Antichain.of
PROCESSES = 3
HOSTILE = Settings(
    batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=4096, inline_total_bytes_max=16_000),
    maintenance=MaintenanceSettings(rollup_threshold=3, recent_diffs_max=4, validate_roundtrip=True),
    compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1, memory_bytes_max=8192),
)

processes = st.integers(0, PROCESSES - 1)
names = st.sampled_from(["a", "b", "c"])
#: (key, name, how far past the lower, diff)
rows_ = st.lists(st.tuples(st.integers(0, 3), names, st.integers(0, 4), st.sampled_from([-1, 1, 2])), max_size=6)
widths = st.integers(1, 5)


class Handles(RuleBasedStateMachine):
    """Three processes write, read, restart and maintain one shard."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(settings=HOSTILE)
        self.shard_id = self.world.shard_id()
        self.oracle = Oracle()
        self.clients: list[PersistClient] = [self.world.process() for _ in range(PROCESSES)]
        self.writers: list[WriteHandle] = [self._writer(client) for client in self.clients]
        self.readers = [client.open_leased_reader(self.shard_id, purpose="reader") for client in self.clients]
        self.world.faults.set_rates(happens=0.9, answers=0.9)

    def _writer(self, client: PersistClient) -> WriteHandle:
        return client.open_writer(self.shard_id, SCHEMA, purpose="writer")

    def teardown(self) -> None:
        self.world.faults.heal()
        for reader in self.readers:
            reader.expire()
        self._compare(self.clients[0], None)

    # -- writing ---------------------------------------------------------------------------------------------------------

    @rule(process=processes, rows=rows_, width=widths, off=st.sampled_from([0, 0, 0, 1, -1]))
    def compare_and_append(self, process: int, rows: list, width: int, off: int) -> None:
        lower = max(0, self.oracle.upper.time + off)
        shard_rows, paper = self._rows(rows, lower, lower + width)
        outcome = self.writers[process].compare_and_append(
            shard_rows, expected_upper=A(lower), new_upper=A(lower + width)
        )
        self._agree(outcome, self.oracle.compare_and_append(paper, expected_upper=A(lower), new_upper=A(lower + width)))

    @rule(process=processes, rows=rows_, width=widths, back=st.integers(0, 4))
    def append(self, process: int, rows: list, width: int, back: int) -> None:
        lower = max(0, self.oracle.upper.time - back)
        shard_rows, paper = self._rows(rows, lower, lower + width)
        outcome = self.writers[process].append(shard_rows, lower=A(lower), upper=A(lower + width))
        self._agree(outcome, self.oracle.append(paper, lower=A(lower), upper=A(lower + width)))

    @rule(stagers=st.lists(processes, min_size=1, max_size=4), appender=processes, rows=rows_, width=widths, cut=widths)
    def append_staged_batches(self, stagers: list[int], appender: int, rows: list, width: int, cut: int) -> None:
        lower = self.oracle.upper.time
        sent, written = [], []
        for stager in stagers:
            shard_rows, paper = self._rows(rows, lower, lower + width)
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
    @rule(process=processes, back=st.integers(1, 12))
    def snapshot(self, process: int, back: int) -> None:
        self._compare(self.clients[process], max(0, self.oracle.upper.time - back))

    @rule(process=processes, back=st.integers(0, 6))
    def downgrade_since(self, process: int, back: int) -> None:
        try:
            self.readers[process].downgrade_since(A(max(0, self.oracle.upper.time - back)))
        except Fenced:  # so much time has passed that its lease is over
            self.readers[process] = self.clients[process].open_leased_reader(self.shard_id, purpose="reader")

    @rule(process=processes)
    def fetch_upper(self, process: int) -> None:
        assert self.writers[process].fetch_recent_upper() == self.oracle.upper

    # -- life ------------------------------------------------------------------------------------------------------------

    @rule(process=processes)
    def restart(self, process: int) -> None:
        """A process dies without a word; its reader's lease stays behind."""
        self.readers[process].expire()
        self.clients[process] = self.world.process()
        self.writers[process] = self._writer(self.clients[process])
        self.readers[process] = self.clients[process].open_leased_reader(self.shard_id, purpose="reader")

    @rule(process=processes)
    def expire_writer(self, process: int) -> None:
        self.writers[process].expire()
        self.writers[process] = self._writer(self.clients[process])

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
            check_invariants(None, client.machine(self.shard_id).state, deep=True)

    # -- what is compared ------------------------------------------------------------------------------------------------

    def _rows(self, rows: list, lower: int, upper: int) -> tuple[list, list]:
        times = [(key, name, min(lower + past, upper - 1), diff) for key, name, past, diff in rows]
        return (
            [row(key, name, time, diff) for key, name, time, diff in times],
            [((key, name), time, diff) for key, name, time, diff in times],
        )

    def _agree(self, outcome: object, refusal: UpperMismatch | None) -> None:
        if refusal is None:
            assert isinstance(outcome, Appended)
            assert outcome.upper == self.oracle.upper
        else:
            assert outcome == refusal

    def _compare(self, client: PersistClient, as_of: int | None) -> None:
        if as_of is None:
            as_of = self.oracle.upper.time - 1
        if as_of < 0:
            return
        with client.open_leased_reader(self.shard_id, purpose="check") as reader:
            snapshot = reader.snapshot(A(as_of), timeout_s=60)
            if isinstance(snapshot, SinceAhead):
                assert not snapshot.since <= A(as_of)
                return
            found = {(r["key"]["id"], r["val"]["name"]): r["diff"] for r in snapshot.to_table().to_pylist()}
        assert found == dict(self.oracle.contents(as_of))


Handles.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestHandles = Handles.TestCase
