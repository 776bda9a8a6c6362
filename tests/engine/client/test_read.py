"""Snapshots, splits and listening on real in-memory and file stores, compared with a dictionary of all appended updates."""

import collections
import pickle
import random
import threading
from dataclasses import replace

import pyarrow as pa
import pytest
from persist_engine.base.errors import CorruptData, Fenced, InvalidUsage, MissingBlob, Unavailable
from persist_engine.base.settings import BatchSettings, LeaseSettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.read.listen import Progress, Updates
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_engine.work.repair.force import force_compaction
from persist_kit.world import AheadEnv, StillEnv, World

SCHEMA = Schema(key=pa.schema([("id", pa.int64()), ("tag", pa.string())]), val=pa.schema([("x", pa.float64())]))
SETTINGS = Settings(batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=0), retain_ms=None)
at = Antichain.of


@pytest.fixture
def client():
    with PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=SETTINGS) as opened:
        yield opened


def rows_of(batches):
    return [
        ((r["key"]["id"], r["key"]["tag"], r["val"]["x"]), r["time"], r["diff"]) for b in batches for r in b.to_pylist()
    ]


def fill(client, *, appends=20, rows=40, seed=0, schema=SCHEMA):
    """A shard with `appends` batches [10i, 10i+10) of random inserts and retractions, and all of its updates."""
    rng = random.Random(seed)
    shard_id = ShardId.new()
    history = []
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        for i in range(appends):
            updates = []
            for _ in range(rows):
                key = (rng.choice([None, *range(-50, 50)]), rng.choice([None, "", "a", "é"]))
                val = (rng.choice([None, 0.5, 2.0]),)
                updates.append(((key, val), 10 * i + rng.randrange(10), rng.choice([1, 1, -1])))
            history += updates
            writer.compare_and_append(updates, expected_upper=at(10 * i), new_upper=at(10 * i + 10))
    return shard_id, history


def contents(history, as_of):
    sums = collections.Counter()
    for (key, val), time, diff in history:
        if time <= as_of:
            sums[(*key, *val)] += diff
    return {row: diff for row, diff in sums.items() if diff}


def nulls_last(row):
    return tuple((v is None, v if v is not None else 0) for v in row)


@pytest.mark.slow
def test_a_snapshot_is_sorted_consolidated_and_equals_the_history_at_every_time(client):
    """Spec 1.1, 15.2."""
    shard_id, history = fill(client)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        for as_of in (0, 9, 10, 57, 123, 199):
            with reader.snapshot(at(as_of)) as snapshot:
                got = rows_of(snapshot.to_batches(memory_bytes=0))
                assert rows_of([snapshot.to_table()]) == got
            assert {row: diff for row, _, diff in got} == contents(history, as_of)
            assert {time for _, time, _ in got} <= {as_of}
            keys = [nulls_last(row) for row, _, _ in got]
            assert keys == sorted(set(keys))


def test_an_empty_shard_reads_as_an_empty_table_of_its_schema(client):
    shard_id = ShardId.new()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([], expected_upper=at(0), new_upper=at(5))
    with client.open_leased_reader(shard_id, purpose="test") as reader, reader.snapshot(4) as snapshot:
        table = snapshot.to_table()
        assert table.num_rows == 0
        assert table.schema == SCHEMA.updates_schema
        assert [b for split in snapshot.splits(4) for b in split.to_batches(reader.blob)] == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
@pytest.mark.parametrize(
    "key_fields",
    [
        [("id", pa.int64()), ("tag", pa.string())],
        [("tag", pa.string()), ("id", pa.int64())],
        [("x", pa.float64()), ("id", pa.int64())],
        [("s", pa.struct([("id", pa.int64())])), ("id", pa.int64())],
        [("day", pa.date32()), ("id", pa.int64())],
        [("at", pa.timestamp("us", tz="UTC")), ("id", pa.int64())],
    ],
)
def test_splits_together_are_the_snapshot_exactly_once(client, count, key_fields):
    """Spec 15.6."""
    schema = Schema(key=pa.schema(key_fields), val=pa.schema([]))
    rng = random.Random(count)
    shard_id = ShardId.new()

    def first(i):
        value = 10 * i + rng.randrange(10)
        match key_fields[0][0]:
            case "id" | "day" | "at":
                return rng.choice([None, value])
            case "tag":
                return rng.choice([None, f"k{value:03}"])
            case "x":
                return rng.choice([None, float("nan"), value / 4 if i else -0.0])
        return {"id": value}

    with client.open_writer(shard_id, schema, purpose="test") as writer:
        for i in range(10):
            keys = _keys(schema, [(first(i), j) for j in range(30)])
            table = pa.table(
                [keys, pa.array([{}] * 30, pa.struct([])), pa.array([i] * 30), pa.array([1] * 30)],
                schema=schema.updates_schema,
            )
            writer.compare_and_append(table, expected_upper=at(i), new_upper=at(i + 1))
    with client.open_leased_reader(shard_id, purpose="test") as reader, reader.snapshot(9) as snapshot:
        splits = snapshot.splits(count)
        assert 1 <= len(splits) <= count
        pieces = []
        for split in splits:
            again = SnapshotSplit.from_bytes(pickle.loads(pickle.dumps(split.to_bytes())))
            assert again == split
            pieces += list(again.to_batches(reader.blob))
        together = pa.Table.from_batches(pieces, schema=schema.updates_schema)
        whole = snapshot.to_table()
        assert together.num_rows == whole.num_rows > 0
        # Ranges ascend as rows do, so the splits in their order are the sorted whole.
        assert str(together.to_pylist()) == str(whole.to_pylist())
        if count > 1 and key_fields[0][0] != "s":
            assert len(splits) > 1
            assert splits[0].bytes_estimate < snapshot.bytes_estimate


def _keys(schema, rows):
    columns = []
    for index, field in enumerate(schema.key):
        raw = [row[index] for row in rows]
        whole = {pa.date32(): pa.int32(), pa.timestamp("us", tz="UTC"): pa.int64()}.get(field.type)
        raw = [str(value) for value in raw] if index and pa.types.is_string(field.type) else raw
        columns.append(pa.array(raw, whole).cast(field.type) if whole else pa.array(raw, field.type))
    return pa.StructArray.from_arrays(columns, fields=list(schema.key))


@pytest.mark.slow
def test_splits_of_whole_numbers_balance_one_large_part(client):
    schema = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([]))
    shard_id = ShardId.new()
    table = pa.table({"key": [{"id": i} for i in range(20_000)], "time": [0] * 20_000, "diff": [1] * 20_000})
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        writer.compare_and_append(table, expected_upper=at(0), new_upper=at(1))
    with client.open_leased_reader(shard_id, purpose="test") as reader, reader.snapshot(0) as snapshot:
        sizes = [sum(b.num_rows for b in split.to_batches(reader.blob)) for split in snapshot.splits(4)]
    assert len(sizes) == 4
    assert sum(sizes) == 20_000
    assert max(sizes) < 1.5 * min(sizes)


def test_a_read_before_since_is_answered_by_a_value_with_both_frontiers(client):
    """Spec A.3."""
    shard_id, _ = fill(client, appends=3)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert reader.downgrade_since(at(15)) == at(15)
        answer = reader.snapshot(14)
        assert answer == SinceAhead(since=at(15), as_of=14)
        for use in (answer.to_table, answer.to_batches, lambda: answer.splits(2), lambda: list(answer)):
            with pytest.raises(InvalidUsage, match=r"14.*15"):
                use()
        assert isinstance(reader.listen(14), SinceAhead)
        assert reader.snapshot(15).to_table().num_rows


def test_a_snapshot_of_the_future_waits_for_the_append_or_its_deadline(client):
    shard_id, history = fill(client, appends=1)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        with pytest.raises(Unavailable, match="upper is still .10. after 0 s"):
            reader.snapshot(10, timeout_s=0)
        with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
            later = threading.Timer(
                0.05, lambda: writer.compare_and_append([], expected_upper=at(10), new_upper=at(11))
            )
            later.start()
            got = rows_of(reader.snapshot(10, timeout_s=30).to_batches())
            later.join()
    assert {row: diff for row, _, diff in got} == contents(history, 10)


@pytest.mark.slow
def test_listen_yields_every_later_update_once_and_progress_after_it(client):
    shard_id, history = fill(client, appends=6)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        listen = reader.listen(25)
        assert reader.since == at(25)
        got, frontier = [], None
        while frontier != at(60):
            event = next(listen)
            match event:
                case Updates(table):
                    rows = rows_of([table])
                    assert frontier is None or all(time >= frontier.time for _, time, _ in rows)
                    got += rows
                case Progress(frontier):
                    assert listen.frontier == frontier
        expected = collections.Counter(((*k, *v), t, d) for (k, v), t, d in history if t > 25)
        summed, wanted = collections.Counter(), collections.Counter()
        for row, time, diff in got:
            summed[row, time] += diff
        for (row, time, diff), n in expected.items():
            wanted[row, time] += diff * n
        assert {k: v for k, v in summed.items() if v} == {k: v for k, v in wanted.items() if v}
        assert listen.next_batch(timeout_s=0) is None


@pytest.mark.slow
def test_subscribe_yields_the_snapshot_then_every_later_update(client):
    """Spec 15.4."""
    shard_id, history = fill(client, appends=4)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        sums = collections.Counter()
        for event in reader.subscribe(12):
            if isinstance(event, Updates):
                for row, _, diff in rows_of([event.table]):
                    sums[row] += diff
            elif event.frontier == at(40):
                break
    assert {row: diff for row, diff in sums.items() if diff} == contents(history, 39)


def test_listening_ends_when_the_shard_is_closed(client):
    shard_id, _ = fill(client, appends=1)
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.compare_and_append([], expected_upper=at(10), new_upper=Antichain.empty())
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        events = list(reader.listen(9))
    assert events == [Progress(at(10)), Progress(Antichain.empty())]


def test_regression_22_since_moves_at_a_request_and_not_at_a_heartbeat_after_another_reader_expired(client):
    shard_id, _ = fill(client, appends=2)
    since = lambda: client.machine(shard_id).refresh().trace.since  # noqa: E731
    with (
        client.open_leased_reader(shard_id, purpose="behind") as behind,
        client.open_leased_reader(shard_id, purpose="ahead") as ahead,
    ):
        ahead.downgrade_since(at(15))
        behind.expire()
        assert ahead._beat()
        assert since() == at(0)
        ahead.downgrade_since(at(15))
        assert since() == at(15)


def test_an_open_snapshot_holds_its_version_until_it_is_closed(client):
    shard_id, _ = fill(client, appends=2)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        snapshot = reader.snapshot(19)
        held = client.machine(shard_id).state.seqno
        for _ in range(3):
            reader.downgrade_since(at(5))
        hold = lambda: client.machine(shard_id).refresh().leased_readers[reader.reader_id].seqno  # noqa: E731
        assert hold() == held
        snapshot.close()
        snapshot.close()
        reader.downgrade_since(at(5))
        assert hold() == client.machine(shard_id).state.seqno - 1
        with pytest.raises(InvalidUsage, match="closed"):
            snapshot.to_table()
        reader.snapshot(19).to_table()  # a dropped snapshot releases its version
        reader.downgrade_since(at(5))
        assert hold() == client.machine(shard_id).state.seqno - 1


def test_errors_of_a_missing_and_of_a_damaged_blob_name_its_key(client):
    """Spec 15.5."""
    shard_id, _ = fill(client, appends=2)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        parts = [info.key for info in reader.blob.list_prefix(f"{shard_id}/n")]
        data = reader.blob.get(parts[0])
        reader.blob.set(parts[0], data[:100] + bytes([data[100] ^ 1]) + data[101:])
        with pytest.raises(CorruptData, match=parts[0]):
            reader.snapshot(19).to_table()
        reader.blob.delete(parts[0])
        with pytest.raises(MissingBlob, match=parts[0]) as caught:
            reader.snapshot(19).to_table()
        assert caught.value.detail["key"] == parts[0]


def test_a_lost_lease_is_detected_and_an_expired_handle_refuses():
    settings = Settings(lease=LeaseSettings(reader_lease_ms=200))
    with PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=settings) as client:
        shard_id, _ = fill(client, appends=1)
        reader = client.open_leased_reader(shard_id, purpose="test")
        client.machine(shard_id).expire_leased_reader(reader.reader_id)
        for _ in range(3000):
            if reader.since.is_empty():
                break
            threading.Event().wait(0.02)
        assert reader.since.is_empty()
        with pytest.raises(Fenced):
            reader.snapshot(5)
        reader.expire()
        reader.expire()
        with pytest.raises(InvalidUsage, match="expired"):
            reader.downgrade_since(at(3))


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_blob_that_was_deleted_under_a_reader_whose_hold_was_ended_is_no_loss(client, is_ended):
    shard_id, _ = fill(client, appends=3)
    machine = client.machine(shard_id)
    reader = client.open_leased_reader(shard_id, purpose="test")
    snapshot, changes = reader.snapshot(25), reader.changes(None, 25)
    if is_ended:
        machine.expire_leased_reader(reader.reader_id)
    for key in [key for batch in machine.state.trace.batches() for key in batch.blob_keys()]:
        machine.blob.delete(f"{shard_id}/{key}")
    for read in (snapshot.to_table, snapshot.count, changes.to_table):
        with pytest.raises(Fenced if is_ended else MissingBlob):
            read()


@pytest.mark.parametrize("is_ended", [True, False])
def test_nor_is_a_listing_of_parts(is_ended):
    settings = replace(SETTINGS, batch=replace(SETTINGS.batch, run_parts_max=2))
    with PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=settings) as client:
        shard_id, _ = fill(client, appends=3, rows=200)
        machine = client.machine(shard_id)
        force_compaction(machine, full=True)
        batches = list(machine.state.trace.batches())
        assert any(batch.has_hollow_runs for batch in batches)
        reader = client.open_leased_reader(shard_id, purpose="test")
        snapshot, changes, listen = reader.snapshot(25), reader.changes(None, 25), reader.listen(25)
        if is_ended:
            machine.expire_leased_reader(reader.reader_id)
        for key in [key for batch in batches for key in batch.blob_keys()]:
            machine.blob.delete(f"{shard_id}/{key}")
        for read in (snapshot.to_table, snapshot.count, changes.to_table, lambda: next(listen)):
            with pytest.raises(Fenced if is_ended else MissingBlob):
                read()


@pytest.mark.slow
def test_heartbeats_keep_a_short_lease_alive():
    settings, env = Settings(lease=LeaseSettings(reader_lease_ms=300)), StillEnv()
    with PersistClient.open(Location(blob="mem:", consensus="mem:"), settings=settings, env=env) as client:
        shard_id, _ = fill(client, appends=1)
        with client.open_leased_reader(shard_id, purpose="test") as reader:
            beat = lambda: client.machine(shard_id).refresh().leased_readers[reader.reader_id].last_heartbeat_ms  # noqa: E731
            for _ in range(3):
                env.advance_ms(200)
                for _ in range(3000):
                    if beat() == env.now_ms():
                        break
                    threading.Event().wait(0.02)
                assert beat() == env.now_ms()
            assert reader.snapshot(9).to_table().num_rows


@pytest.mark.parametrize("as_of", [-1, 2**63, Antichain.empty()])
def test_an_impossible_time_is_refused(client, as_of):
    shard_id, _ = fill(client, appends=1)
    with client.open_leased_reader(shard_id, purpose="test") as reader, pytest.raises(InvalidUsage, match="as_of"):
        reader.snapshot(as_of)


def test_a_split_by_a_field_whose_name_begins_with_a_dot_is_exact() -> None:
    """Arrow reads such a name as a path: here that of another field."""
    schema = Schema.from_ddl("`.id` BIGINT, id BIGINT")
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)), env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, schema, purpose="t") as writer:
        rows = [(((number, 7), ()), 0, 1) for number in range(100)]
        writer.compare_and_append(rows, expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    with client.open_leased_reader(shard_id, schema, purpose="t") as reader, reader.snapshot(0) as snapshot:
        splits = snapshot.splits(4)
        read = [sum(batch.num_rows for batch in split.to_batches(world.blob)) for split in splits]
    assert len(splits) == 4
    assert sum(read) == 100
    assert all(read)
