"""UpsertHandle: the contents of the shard after upserts of one handle, of several at once, and after failures."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from persist_engine import (
    Antichain,
    Hydration,
    PersistClient,
    ProgressMismatch,
    Schema,
    ShardId,
    UpperMismatch,
    Upserted,
)
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.base.settings import Settings
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.model.frontier import EMPTY
from persist_kit.depth import draws
from persist_kit.upserts import Row, commands, contents, opened
from persist_kit.world import SCHEMA, World, row
from prometheus_client import CollectorRegistry

A = Antichain.of


def test_the_last_value_of_a_key_wins_and_null_deletes_the_key(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with opened(client, shard_id) as upserts:
        done = upserts.upsert(commands((1, "a"), (2, "b"), (1, "c")))
        assert (done.inserted, done.retracted, done.late) == (2, 0, 0)
        assert contents(client, shard_id) == {1: "c", 2: "b"}
        done = upserts.upsert(commands((1, None), (2, "b"), (3, "d"), (4, None)))
        assert (done.inserted, done.retracted) == (1, 1)
        assert done.upper == upserts.upper == client.recent_upper(shard_id)
    assert contents(client, shard_id) == {2: "b", 3: "d"}
    state = client.machine(shard_id).refresh()
    assert not state.writers
    assert not state.leased_readers


def test_the_greatest_order_key_wins(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with opened(client, shard_id) as upserts:
        upserts.upsert(commands((1, "a"), (1, "b"), (1, "c"), (2, "n"), (2, "m"), order=[3, 3, 1, None, -5]))
        assert contents(client, shard_id) == {1: "a", 2: "m"}
        upserts.upsert(commands((1, "lower order, later time"), order=[0]))
        assert contents(client, shard_id)[1] == "lower order, later time"


@pytest.mark.parametrize("backend", ["memory", "rocksdb", "auto"])
def test_a_new_handle_hydrates_the_existing_contents(
    world: World, shard_id: ShardId, backend: str, tmp_path: Path
) -> None:
    """Spec 16.1."""
    more: dict[str, Any] = {"backend": backend, "directory": tmp_path / "state", "spill_bytes": 2000}
    with opened(world.process(), shard_id, **more) as upserts:
        upserts.upsert(commands(*((key, f"first {key}") for key in range(100))))
        upserts.upsert(commands(*((key, f"second {key}") for key in range(50, 150))))
        assert upserts.state_bytes > 2000
    hydrations: list[Hydration] = []
    with opened(world.process(), shard_id, on_hydration=hydrations.append, **more) as upserts:
        assert upserts.hydrate() == world.process().recent_upper(shard_id)
        assert [hydrations[0].rows, hydrations[-1].rows] == [0, 150]
        assert hydrations[-1].rows_max >= 150
        upserts.upsert(commands(*((key, None) for key in range(0, 150, 2)), (1, "third")))
    expected = {key: f"{'second' if key >= 50 else 'first'} {key}" for key in range(1, 150, 2)} | {1: "third"}
    assert contents(world.process(), shard_id) == expected
    assert not any((tmp_path / "state").glob("*/*.sst")), "the state is thrown away"


def test_one_emission_covers_many_times(world: World, shard_id: ShardId) -> None:
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    with client.open_leased_reader(shard_id, SCHEMA, purpose="holds since"), opened(client, shard_id) as upserts:
        before = client.machine(shard_id).state.seqno
        done = upserts.upsert_at(commands((1, "a"), (1, "b"), (2, "c"), (1, None), time=[3, 5, 5, 9]), upper=A(20))
        assert (done.upper, done.inserted, done.retracted) == (A(20), 3, 2)
        assert client.machine(shard_id).refresh().seqno - before <= 3, "register, append, listen"
        at = {time: contents(client, shard_id, time) for time in (2, 3, 5, 9, 19)}
    assert at == {2: {}, 3: {1: "a"}, 5: {1: "b", 2: "c"}, 9: {2: "c"}, 19: {2: "c"}}


def test_replicas_of_one_input_write_each_time_once(world: World, shard_id: ShardId) -> None:
    """Two replicas, one behind the other: written times are dropped, new ones are decided against what the other wrote."""
    one, two = opened(world.process(), shard_id), opened(world.process(), shard_id)
    two.hydrate()
    whole = commands((1, "a"), (2, "b"), (1, "c"), (3, "d"), time=[1, 2, 3, 4])
    assert one.upsert_at(whole.slice(0, 2), upper=A(3)).late == 0
    done = two.upsert_at(whole, upper=A(5))
    assert (done.late, done.inserted, done.retracted) == (2, 2, 1)
    again = one.upsert_at(whole, upper=A(5))
    assert (again.late, again.inserted, again.retracted, again.upper) == (4, 0, 0, A(5))
    assert contents(world.process(), shard_id) == {1: "c", 2: "b", 3: "d"}


def test_commands_that_lost_a_race_are_decided_again(world: World, shard_id: ShardId) -> None:
    one, two = opened(world.process(), shard_id), opened(world.process(), shard_id)
    one.upsert(commands((1, "one"), (2, "one")))
    two.upsert(commands((1, "two"), (3, "two")))
    done = one.upsert(commands((1, "three"), (3, None)))
    assert (done.inserted, done.retracted) == (1, 2)
    assert contents(world.process(), shard_id) == {1: "three", 2: "one"}


def test_handles_that_race_in_threads_converge(world: World, shard_id: ShardId) -> None:
    handles = [opened(world.process(), shard_id) for _ in range(2)]

    def work(number: int) -> None:
        for turn in range(6):
            handles[number].upsert(commands(*((key, f"{number}/{turn}") for key in range(turn, turn + 5)), (99, None)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = contents(world.process(), shard_id)
    assert found.keys() == set(range(10))
    uppers = {handle.hydrate() for handle in handles}
    assert len(uppers) == 1
    for handle in handles:  # equal states: deleting everything retracts everything and leaves nothing
        handle.upsert(commands((0, "last")))
    done = handles[0].upsert(commands(*((key, None) for key in range(10))))
    assert done.retracted == 10
    assert contents(world.process(), shard_id) == {}


def test_progress_is_committed_with_the_commands(world: World, shard_id: ShardId) -> None:
    client = world.process()
    upserts = opened(client, shard_id)
    upserts.upsert(commands((1, "a")), progress=("sink", b"1"))
    assert client.progress(shard_id, "sink").token == b"1"
    refused = upserts.upsert(commands((1, "b")), progress=("sink", b"2"), expected_progress=b"0")
    assert isinstance(refused, ProgressMismatch)
    assert upserts.upsert(commands((2, "c"))).inserted == 1
    assert contents(client, shard_id) == {1: "a", 2: "c"}


def test_progress_is_stored_although_all_commands_were_written_before(world: World, shard_id: ShardId) -> None:
    """The upsert dropped the progress. The source began again at its old position for ever, or was superseded."""
    client = world.process()
    upserts, other = opened(client, shard_id), opened(world.process(), shard_id)
    other.upsert_at(commands((1, "other"), time=[3]), upper=A(10))
    one: dict[str, Any] = {"upper": A(5), "progress": ("sink", b"1")}
    for _ in range(2):  # the second pass repeats the first
        done = upserts.upsert_at(commands((1, "late"), time=[3]), **one)
        assert isinstance(done, Upserted)
        assert (done.late, done.inserted, done.upper) == (1, 0, A(10))
        assert client.progress(shard_id, "sink").token == b"1"
    refused = upserts.upsert_at(commands(time=[]), upper=A(6), progress=("sink", b"3"), expected_progress=b"2")
    assert isinstance(refused, ProgressMismatch)
    assert contents(client, shard_id) == {1: "other"}
    upserts.upsert_at(commands(time=[]), upper=EMPTY, progress=("sink", b"2"), expected_progress=b"1")
    assert isinstance(upserts.upsert_at(commands(time=[]), upper=EMPTY, progress=("sink", b"2")), Upserted)
    with pytest.raises(InvalidUsage, match="closed"):
        upserts.upsert_at(commands(time=[]), upper=EMPTY, progress=("sink", b"3"), expected_progress=b"2")


def test_a_stream_is_visible_as_a_whole_or_not_at_all(world: World, shard_id: ShardId) -> None:
    client = world.process()
    upserts, other = opened(client, shard_id), opened(world.process(), shard_id)
    upserts.upsert(commands((1, "a"), (2, "b")))
    before = client.recent_upper(shard_id)
    tables = [commands((1, "x"), (3, "y")), commands((1, None), (2, "z"), (3, "y2")), commands((1, "w"))]

    def watched() -> Any:
        for table in tables:
            yield table
            assert contents(client, shard_id) == {1: "a", 2: "b"}

    done = upserts.upsert_stream(watched())
    assert before < done.upper
    assert contents(client, shard_id) == {1: "w", 2: "z", 3: "y2"}
    assert upserts.upsert(commands((1, "w"), (2, None))).retracted == 1

    def disturbed() -> Any:
        yield tables[0]
        other.upsert(commands((1, "disturbed")))
        yield tables[1]

    refused = upserts.upsert_stream(disturbed())
    assert isinstance(refused, UpperMismatch)
    assert contents(client, shard_id) == {1: "disturbed", 3: "y2"}
    assert upserts.upsert(commands((1, None), (3, None))).retracted == 2

    def failing() -> Any:
        yield tables[0]
        raise RuntimeError("the input broke")

    with pytest.raises(RuntimeError, match="the input broke"):
        upserts.upsert_stream(failing())
    assert upserts.upsert(commands((3, "after"))).retracted == 0
    assert contents(client, shard_id) == {3: "after"}


class MovingEnv(SeededEnv):
    """A clock that advances with every read."""

    def now_ms(self) -> int:
        self.advance_ms(5)
        return super().now_ms()


def test_a_stream_is_written_although_the_clock_moves_at_every_read() -> None:
    world = World(env=MovingEnv(0))
    shard_id = world.shard_id()
    upserts = opened(world.process(), shard_id)
    for value in ("a", "b"):
        assert isinstance(upserts.upsert_stream([commands((1, value)), commands((2, value))]), Upserted)
    assert contents(world.process(), shard_id) == {1: "b", 2: "b"}


def test_bug_31_hydration_chooses_a_time_that_can_be_read(world: World, shard_id: ShardId) -> None:
    """Since is ahead of upper. A read at upper - 1 would return rows that cannot be distinguished, or none. The handle first
    advances the frontier past since.
    """
    client = world.process()
    with opened(client, shard_id) as upserts:
        upserts.upsert_at(commands((1, "a"), (2, "b"), time=[0, 1]), upper=A(5))
    with client.open_leased_reader(shard_id, purpose="ahead") as reader:
        reader.downgrade_since(A(50))
    with opened(client, shard_id) as upserts:
        assert upserts.hydrate() == A(51)
        done = upserts.upsert_at(commands((1, "c"), (2, None), (9, "late"), time=[60, 61, 50]), upper=A(62))
        assert (done.inserted, done.retracted, done.late) == (1, 2, 1)
    assert contents(client, shard_id) == {1: "c"}


def test_bug_31_a_shard_that_upserts_did_not_write_is_refused_with_its_sums(world: World, shard_id: ShardId) -> None:
    client = world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="appends") as writer:
        writer.append([row(1, "a", 0), row(1, "a", 1), row(2, "b", 1), row(3, "c", 0)], lower=A(0), upper=A(2))
    upserts = opened(client, shard_id)
    for _ in range(2):
        named = rf"^1 keys .*diff_sum 2, .*\(shard {shard_id} at 1; keys: \{{'id': 1\}}\); append updates"
        with pytest.raises(InvariantViolated, match=named):
            upserts.upsert(commands((3, "d")))
    with client.open_writer(shard_id, SCHEMA, purpose="repairs") as writer:
        writer.append([row(1, "a", 2, -1)], lower=A(2), upper=A(3))
    assert upserts.upsert(commands((1, "d"))).retracted == 1
    with client.open_writer(shard_id, SCHEMA, purpose="breaks") as writer:
        upper = writer.fetch_recent_upper()
        writer.append([row(3, "e", upper.time)], lower=upper, upper=A(upper.time + 1))
    with pytest.raises(InvariantViolated, match=r"^1 keys .*diff_sum 2"):
        upserts.upsert(commands((1, "e")))


def test_a_schema_without_values_has_keys_only(world: World, shard_id: ShardId) -> None:
    schema = Schema(key=pa.schema([("id", pa.float64())]), val=pa.schema([]))
    client = world.process()
    empty = pa.StructArray.from_buffers(pa.struct([]), 3, [None], children=[])
    keys = pa.array([{"id": 0.0}, {"id": float("nan")}, {"id": 2.0}], schema.key_type)
    with open_upsert(client, shard_id, schema, purpose="test") as upserts:
        assert upserts.upsert(pa.table({"key": keys, "val": empty})).inserted == 3
        again = pa.array([{"id": -0.0}, {"id": float("nan")}, {"id": None}], schema.key_type)
        assert upserts.upsert(pa.table({"key": again, "val": empty})).inserted == 1
        deleted = upserts.upsert(pa.table({"key": again, "val": pa.nulls(3)}))
        assert (deleted.inserted, deleted.retracted) == (0, 3)
    with client.open_leased_reader(shard_id, purpose="check") as reader:
        rows = reader.snapshot(client.recent_upper(shard_id).time - 1).to_table().to_pylist()
    assert [r["key"]["id"] for r in rows] == [2.0]


def test_regression_the_metric_of_a_spilled_state_is_right_although_other_stores_are_opened(
    world: World, shard_id: ShardId, tmp_path: Path
) -> None:
    """The provisional state of a stream is a store of the same handle."""
    registry = CollectorRegistry()
    client = PersistClient(
        world.blob, world.consensus, settings=Settings(), env=world.env, metrics=PrometheusMetrics(registry)
    )
    with opened(client, shard_id, backend="auto", directory=tmp_path, spill_bytes=5000) as upserts:
        upserts.upsert(commands(*((key, "c" * 100) for key in range(100))))
        upserts.upsert_stream([commands((1, "z"))])
        assert registry.get_sample_value("persist_upsert_spilled", {"shard": str(shard_id)}) == 1


def test_metrics_show_the_size_and_the_backend_of_upsert_state(world: World, shard_id: ShardId, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    client = PersistClient(
        world.blob, world.consensus, settings=Settings(), env=world.env, metrics=PrometheusMetrics(registry)
    )
    labels = {"shard": str(shard_id)}

    def shown(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"persist_upsert_{name}", more or None)

    with opened(client, shard_id, backend="auto", directory=tmp_path, spill_bytes=5000) as upserts:
        upserts.upsert(commands((1, "a"), (2, "b")))
        assert (shown("spilled", **labels), shown("state_bytes", **labels)) == (0, upserts.state_bytes)
        upserts.upsert(commands(*((key, "c" * 100) for key in range(100))))
        assert (shown("spilled", **labels), shown("state_bytes", **labels)) == (1, upserts.state_bytes)
        assert (tmp_path / "state" / "CURRENT").exists()
        upserts.upsert(commands(*((key, None) for key in range(100))))
        assert (shown("spilled", **labels), upserts.state_bytes) == (1, 0)
    assert shown("merged_updates_total") == 2 + 102 + 100
    assert (shown("merged_inserts_total"), shown("merged_deletes_total")) == (102, 102)
    assert shown("store_keys_total", verb="multi_put") == 2 + 100 + 100
    with opened(client, shard_id) as upserts:
        upserts.upsert(commands((1, "a"), (2, "b")))
    with opened(client, shard_id) as upserts:
        upserts.hydrate()
        assert (shown("rehydration_updates", **labels), shown("rehydration_values", **labels)) == (2, 2)
        assert shown("rehydration_bytes", **labels) == upserts.state_bytes


@pytest.mark.slow
def test_a_value_of_ten_megabytes_is_upserted_and_read(world: World, shard_id: ShardId) -> None:
    client = world.process()
    big = "x" * 10_000_000
    with opened(client, shard_id) as upserts:
        upserts.upsert(commands((1, big), (2, "small")))
        upserts.upsert(commands((1, big + "y")))
        assert upserts.upsert(commands((1, None))).retracted == 1
        assert upserts.state_bytes < 1000
    assert contents(client, shard_id) == {2: "small"}


#: The last one takes no streams.
BACKENDS = ("memory", "auto", "rocksdb", "shard")
_NUMBERS = st.integers(0, len(BACKENDS) - 1)


class Upserts(RuleBasedStateMachine):
    """Several handles of several backends, restarted now and then, on stores that fail; compared with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.shard_id = self.world.shard_id()
        self.clients = [self.world.process() for _ in range(len(BACKENDS))]
        self.folder = tempfile.TemporaryDirectory()
        self.handles = [self._opened(number) for number in range(len(BACKENDS))]
        self.paper: dict[int, str] = {}
        self.world.faults.set_rates(happens=0.9, answers=0.9)

    rows_ = st.lists(st.tuples(st.integers(0, 6), st.none() | st.sampled_from(["", "a", "bb", "c" * 30])), max_size=6)

    @rule(number=_NUMBERS, rows=rows_)
    def upsert(self, number: int, rows: list[Row]) -> None:
        self.handles[number].upsert(commands(*rows))
        self._apply(rows)

    @rule(number=st.integers(0, len(BACKENDS) - 2), tables=st.lists(rows_, max_size=3))
    def upsert_stream(self, number: int, tables: list[list[Row]]) -> None:
        outcome = self.handles[number].upsert_stream([commands(*rows) for rows in tables])
        while isinstance(outcome, UpperMismatch):
            outcome = self.handles[number].upsert_stream([commands(*rows) for rows in tables])
        for rows in tables:
            self._apply(rows)

    @rule(number=_NUMBERS, rows=rows_, ahead=st.integers(1, 5))
    def upsert_at(self, number: int, rows: list[Row], ahead: int) -> None:
        upper = self.clients[number].recent_upper(self.shard_id).time
        times = [upper + at % ahead for at in range(len(rows))]
        self.handles[number].upsert_at(commands(*rows, time=times), upper=A(upper + ahead))
        for _, one in sorted(zip(times, rows, strict=True), key=lambda pair: pair[0]):
            self._apply([one])

    @rule(number=_NUMBERS)
    def restart(self, number: int) -> None:
        self.clients[number] = self.world.process()
        self.handles[number].expire()
        self.handles[number] = self._opened(number)

    @rule(number=_NUMBERS)
    def check(self, number: int) -> None:
        assert contents(self.clients[number], self.shard_id) == self.paper

    def teardown(self) -> None:
        self.world.faults.heal()
        assert contents(self.world.process(), self.shard_id) == self.paper
        for handle in self.handles:
            handle.expire()
        self.folder.cleanup()

    def _opened(self, number: int) -> UpsertHandle:
        backend = BACKENDS[number]
        directory = Path(self.folder.name) / str(number)
        return opened(self.clients[number], self.shard_id, backend=backend, directory=directory, spill_bytes=300)

    def _apply(self, rows: list[Row]) -> None:
        for key, name in rows:
            if name is None:
                self.paper.pop(key, None)
            else:
                self.paper[key] = name


Upserts.TestCase.settings = settings(
    max_examples=draws(12), stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestUpserts = pytest.mark.slow(Upserts.TestCase)


def test_a_stream_is_not_refused_for_appends_made_before_it_began(world: World, shard_id: ShardId) -> None:
    """Past the clock, only a read of the upper shows a handle what other handles wrote: the stream was consumed, staged and lost."""
    with opened(world.process(), shard_id) as upserts, opened(world.process(), shard_id) as others:
        future = world.env.now_ms() + 1_000_000
        upserts.upsert_at(commands((1, "a"), time=[future]), upper=A(future + 1))
        others.upsert(commands((2, "b")))
        assert isinstance(upserts.upsert_stream([commands((3, "c"))]), Upserted)
    assert contents(world.process(), shard_id) == {1: "a", 2: "b", 3: "c"}
