"""The leases that a session's frames hold, read from the shard's own state after each load and drop. Without Spark."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, InvalidUsage, MissingBlob, ShardNotFound
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId
from persist_engine.storage.open import open_blob
from persist_engine.work.repair.force import force_compaction, force_gc
from persist_spark.held_frames import HeldFrames, _HeldShard
from persist_spark.options import Options
from persist_spark.source.stream_read import ShardStreamReader, StreamOptions
from pyspark.sql import types as T

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")


class Shard:
    """A shard on files with one row for each time 0, 10, 20, ..."""

    def __init__(self, folder):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        in_blobs = Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None)
        self.client = PersistClient.open(self.location, settings=in_blobs)
        self.id = ShardId.new()
        self.writer = self.client.open_writer(self.id, SCHEMA, purpose="test")

    def write(self, time: int) -> None:
        upper, rows = self.writer.fetch_recent_upper(), [(((time,), (f"n{time}",)), time, 1)]
        self.writer.compare_and_append(rows, expected_upper=upper, new_upper=Antichain.of(time + 1))

    def options(self, **more: str) -> Options:
        named = {"shard": self.id, "blob": self.location.blob, "consensus": self.location.consensus}
        return Options.parse({**named, **more})

    def readers(self):
        return self.client.inspect(self.id).readers

    def sinces(self) -> list[int]:
        return sorted(reader.since for reader in self.readers())

    def ids(self, splits: list[bytes]) -> list[int]:
        blob = open_blob(self.location.blob, env=SystemEnv(), metrics=NoMetrics())
        pieces = [batch for split in splits for batch in SnapshotSplit.from_bytes(split).to_batches(blob)]
        return sorted(row["id"] for batch in pieces for row in batch.column("key").to_pylist())


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


@pytest.fixture
def held():
    made = HeldFrames(settings=Settings(), env=SystemEnv())
    yield made
    made.close()


def test_frames_of_one_shard_share_a_lease_and_the_last_drop_releases_it(shard, held):
    for time in (0, 10, 20):
        shard.write(time)
        held.load(f"f{time}", shard.options())
    assert len(shard.readers()) == 1
    assert [held.load("f10", shard.options()).as_of, held.count] == [10, 3], (
        "a frame that is loaded already keeps its time"
    )
    for time in (0, 10, 20):
        splits = held.splits(f"f{time}", held.load(f"f{time}", shard.options()).row_type)
        assert shard.ids(splits) == [each for each in (0, 10, 20) if each <= time]
    held.drop("f0")
    held.drop("f20")
    assert len(shard.readers()) == 1
    held.drop("f10")
    held.drop("f10")
    assert (shard.readers(), held.count) == ((), 0)


def test_leases_advance_to_the_oldest_frame_but_not_past_critical_readers(shard, held):
    for time in (0, 10, 20):
        shard.write(time)
    retention = shard.client.open_critical_since(shard.id, CriticalReaderId.new(), opaque=b"a")
    held.load("old", shard.options(as_of="5"))
    held.load("new", shard.options())
    assert shard.sinces() == [0, 0], "one lease for both"
    for opaque, since, leased in ((b"b", 3, 3), (b"c", 12, 5)):
        before = retention.opaque
        retention.compare_and_downgrade_since(before, (opaque, Antichain.of(since)))
        held.advance(shard.location)
        assert shard.sinces() == [leased, since]
    held.drop("old")
    held.advance(shard.location)
    assert shard.sinces() == [12, 12]
    retention.compare_and_downgrade_since(b"c", (b"d", Antichain.of(30)))
    held.advance(shard.location)
    held.advance(shard.location)
    assert shard.sinces() == [20, 30]


def test_leases_advance_with_the_retention_of_the_shard(shard, held):
    for time in (0, 10, 20):
        shard.write(time)
    shard.client.set_retention(shard.id, 5)
    held.load("new", shard.options())
    assert shard.sinces() == [16]
    shard.write(30)
    held.advance(shard.location)
    assert shard.sinces() == [20], "not past its frame"
    assert shard.client.inspect(shard.id).since == 20


def test_a_read_does_not_release_history(shard, held):
    """Without critical readers and retention all history is kept, also while frames at the latest time come and go."""
    for time in (0, 10, 20):
        shard.write(time)
        held.load(f"f{time}", shard.options())
        held.advance(shard.location)
    held.drop("f0")
    held.advance(shard.location)
    assert held.load("past", shard.options(as_of="5")).as_of == 5
    assert shard.sinces() == [0]


def test_a_frame_that_no_lease_serves_gets_a_lease_of_its_own(shard, held):
    shard.write(0)
    shard.write(10)
    retention = shard.client.open_critical_since(shard.id, CriticalReaderId.new(), opaque=b"a")
    with shard.client.open_leased_reader(shard.id, purpose="keeps the past"):
        retention.compare_and_downgrade_since(b"a", (b"b", Antichain.of(10)))
        held.load("new", shard.options())
        held.advance(shard.location)
        assert shard.sinces() == [0, 10, 10]
        held.load("old", shard.options(as_of="5"))
    assert shard.sinces() == [0, 10, 10]
    held.drop("old")
    assert shard.sinces() == [10, 10]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"as_of": "11"}, "its upper is {11}, the latest readable time is 10"),
        ({"where": "nope = 1"}, "no column nope"),
        ({"columns": "nope"}, "no column nope"),
    ],
)
def test_a_refused_load_holds_nothing(shard, held, more, message):
    with pytest.raises(InvalidUsage, match="no column nope" if "columns" in more or "where" in more else "upper"):
        held.load("f", shard.options(**({"as_of": "0"} if "as_of" in more else more)))
    shard.write(0)
    shard.write(10)
    with pytest.raises(InvalidUsage) as raised:
        held.load("f", shard.options(**more))
    assert message in str(raised.value)
    assert (shard.readers(), held.count) == ((), 0)


def test_a_time_before_since_is_refused_and_holds_nothing(shard, held):
    shard.write(0)
    shard.write(10)
    with shard.client.open_leased_reader(shard.id, purpose="test") as reader:
        reader.downgrade_since(Antichain.of(10))
    with pytest.raises(InvalidUsage, match=r"at as_of 5: times before since 10 are no longer readable"):
        held.load("f", shard.options(as_of="5"))
    assert (shard.readers(), held.count) == ((), 0)


class ActsBeforeTheLease(SystemEnv):
    """Runs `act` once, when the next id is drawn: a load draws the id of its reader after it has looked up the latest time."""

    act: Callable[[], None] | None = None

    def random_bytes(self, count):
        act, self.act = self.act, None
        if act is not None:
            act()
        return super().random_bytes(count)


def test_a_load_takes_its_lease_before_it_chooses_the_latest_time(shard):
    """Between two steps of the load a writer commits, and since follows its commit at once."""
    env = ActsBeforeTheLease()
    held = HeldFrames(settings=Settings(), env=env)
    shard.write(0)
    first = held.load("first", shard.options())  # opens the client, so that a load draws nothing else
    held.drop("first")

    def overtake():
        shard.write(6)
        since = shard.client.open_critical_since(shard.id, CriticalReaderId.new(), opaque=b"a")
        since.compare_and_downgrade_since(b"a", (b"b", Antichain.of(6)))

    env.act = overtake
    loaded = held.load("f", shard.options())
    assert (first.as_of, loaded.as_of, env.act) == (0, 6, None)
    assert shard.ids(held.splits("f", loaded.row_type)) == [0, 6]
    held.close()


def test_a_load_of_an_unknown_shard_is_refused_and_creates_nothing(shard, held):
    unknown = ShardId.new()
    with pytest.raises(ShardNotFound, match=unknown):
        held.load(
            "f", Options.parse({"shard": unknown, "blob": shard.location.blob, "consensus": shard.location.consensus})
        )
    assert list(shard.client.shards()) == [shard.id]


def test_a_frame_of_a_shard_without_writes_stays_empty(shard, held):
    shard.client.initialise(shard.id, SCHEMA)
    loaded = held.load("f", shard.options())
    shard.write(0)
    assert (loaded.as_of, held.splits("f", loaded.row_type), shard.readers()) == (None, [], ())
    held.drop("f")


def test_a_frame_keeps_the_columns_of_the_schema_at_its_load(shard, held):
    shard.write(0)
    before = held.load("before", shard.options())
    grown = Schema.from_ddl("id BIGINT", "country STRING, name STRING")
    shard.client.evolve_schema(shard.id, grown)
    with shard.client.open_writer(shard.id, grown, purpose="newer") as writer:
        rows = [(((10,), ("c", "n10")), 10, 1)]
        writer.compare_and_append(rows, expected_upper=Antichain.of(1), new_upper=Antichain.of(11))
    after = held.load("after", shard.options())
    assert (before.row_type.names, after.row_type.names) == (["id", "name"], ["id", "country", "name"])
    assert shard.ids(held.splits("before", before.row_type)) == [0]
    assert shard.ids(held.splits("after", after.row_type)) == [0, 10]
    with pytest.raises(InvalidUsage, match="has column name string where the frame was made for column country string"):
        held.splits("before", after.row_type)


@pytest.mark.parametrize(
    "more", [{"where": "country IS NULL"}, {"columns": "country"}, {"columns": "country", "from": "0"}]
)
def test_regression_a_load_knows_the_columns_that_another_process_added(shard, held, more):
    shard.write(0)
    held.load("before", shard.options())
    shard.client.evolve_schema(shard.id, Schema.from_ddl("id BIGINT", "name STRING, country STRING"))
    loaded = held.load("after", shard.options(**more))
    assert "country" in loaded.row_type.simpleString()


@pytest.mark.parametrize(
    "more",
    [
        {"from": "-1h"},
        {"from": "2026-01-01T00:00:00Z", "rows": "changes"},
        {"from": "1", "to": "-1h"},
        {"as_of": "-1h"},
    ],
)
def test_a_shard_that_counts_its_writes_has_no_instants(shard, held, more):
    """All of its times are before any instant, so its changes since then were none."""
    counting = ShardId.new()
    shard.client.initialise(counting, SCHEMA, clock="counter")
    with pytest.raises(InvalidUsage, match=f"shard {counting} counts its writes, so a time of it is a number"):
        held.load("f", shard.options(**more, shard=counting))
    assert held.load("f", shard.options(shard=counting, **{"from": "0"})).as_of is None
    reader = ShardStreamReader(
        StreamOptions.parse(
            {
                "shard": counting,
                "blob": shard.location.blob,
                "consensus": shard.location.consensus,
                "rows": "changes",
                "startingTime": "-1h",
            }
        ),
        T.StructType([]),
    )
    with pytest.raises(InvalidUsage, match="counts its writes"):
        reader.initialOffset()
    reader.stop()


def test_a_look_in_an_older_schema_shows_its_columns(shard, held):
    shard.write(0)
    shard.client.evolve_schema(shard.id, Schema.from_ddl("id BIGINT", "name STRING, country STRING"))
    assert [held.look(shard.options(), schema).row_type.names for schema in (SCHEMA, None)] == [
        ["id", "name"],
        ["id", "name", "country"],
    ]


def test_blobs_of_a_frame_are_collected_only_after_its_drop(shard, held):
    for time in range(0, 100, 10):
        shard.write(time)
    splits = held.splits("f", held.load("f", shard.options(as_of="45")).row_type)
    machine = shard.client.machine(shard.id)
    force_compaction(machine, full=True)
    force_gc(machine)
    assert shard.ids(splits) == [0, 10, 20, 30, 40]
    held.drop("f")
    force_gc(machine)
    with pytest.raises(MissingBlob):
        shard.ids(splits)


def test_a_lost_lease_is_an_error_and_the_next_load_gets_a_new_one(shard):
    held = HeldFrames(settings=Settings(), env=SystemEnv())
    shard.write(0)
    loaded = held.load("f", shard.options())
    (reader,) = shard.readers()
    shard.client.machine(shard.id).expire_leased_reader(LeasedReaderId(reader.id))
    lease = held._shards[shard.location, shard.id]._leases[0].reader
    lease._heartbeat._lost.set()  # as the next heartbeat finds, in minutes
    with pytest.raises(Fenced, match="ran out.*load the frame again"):
        held.splits("f", loaded.row_type)
    with pytest.raises(Fenced, match="ran out.*load the frame again"):
        held.aggregates("f", [])
    again = held.load("g", shard.options())
    assert shard.ids(held.splits("g", again.row_type)) == [0]
    assert len(shard.readers()) == 1
    held.close()
    assert shard.readers() == ()


def test_a_load_after_close_is_refused(shard, held):
    shard.write(0)
    held.load("f", shard.options())
    held.close()
    assert shard.readers() == ()
    with pytest.raises(InvalidUsage, match="has ended"):
        held.load("g", shard.options())
    with pytest.raises(InvalidUsage, match="the session does not hold frame .*: load it again"):
        held.splits("f", T.StructType())
    assert shard.readers() == ()


def test_aggregates_fetch_no_part(shard, tmp_path):
    held = HeldFrames(settings=Settings(), env=SystemEnv())
    shard.write(0)
    shard.write(10)
    held.load("f", shard.options())
    held.load("some", shard.options(where="id < 5"))
    for part in (tmp_path / "blobs" / shard.id).glob("n*/p*"):
        part.unlink()
    found = held.aggregates("f", ["key.id"])
    assert (found.rows, found.fields["key.id"].greatest.as_py()) == (2, 10)
    assert held.aggregates("some", []).rows == 1
    assert held.aggregates("none", []) is None


def test_regression_a_load_that_a_close_overtakes_leaves_no_lease(shard, held, monkeypatch):
    """The stores were closed before the frame was known, so that its lease could not be released."""
    shard.write(0)
    load, closing = _HeldShard.load, []

    def overtaken(*args, **named):
        loaded = load(*args, **named)
        closing.append(threading.Thread(target=held.close))
        closing[0].start()
        closing[0].join(timeout=1)  # it waits for this load, or has closed the stores
        return loaded

    monkeypatch.setattr(_HeldShard, "load", overtaken)
    with suppress(InvalidUsage):
        held.load("f", shard.options())
    closing[0].join()
    assert (shard.readers(), held.count) == ((), 0)
    with pytest.raises(InvalidUsage, match="has ended"):
        held.look(shard.options())


def test_regression_a_frame_that_is_dropped_while_its_files_are_asked_for_has_none(shard, held):
    """It was a KeyError."""
    shard.write(0)
    held.load("f", shard.options())
    known = held._frames["f"]

    class Dropping:
        """The lock of the shard, which is taken after the drop."""

        def __enter__(self):
            known.lock = lock
            held.drop("f")

        def __exit__(self, *_):
            pass

    lock, known.lock = known.lock, Dropping()
    assert held.plain("f") is None
    assert (shard.readers(), held.count) == ((), 0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_store_that_does_not_answer_keeps_no_lease_of_another(tmp_path, held, monkeypatch, first):
    shards = [Shard(tmp_path / "a"), Shard(tmp_path / "b")]
    for number in (first, 1 - first):
        shards[number].write(0)
        held.load(f"f{number}", shards[number].options())
    drop, answers, other = _HeldShard.drop, threading.Event(), threading.Event()

    def dropped(self, frame):
        if frame == "f0":
            answers.wait(60)
        drop(self, frame)
        if frame == "f1":
            other.set()

    monkeypatch.setattr(_HeldShard, "drop", dropped)
    closing = threading.Thread(target=held.close)
    closing.start()
    try:
        assert other.wait(60)
        assert (len(shards[0].readers()), shards[1].readers()) == (1, ())
    finally:
        answers.set()
        closing.join()
    assert shards[0].readers() == ()
    for one in shards:
        one.client.close()
