"""`option("from", ...)`: the changes of a shard as frames, beside the same updates in plain Parquet."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine import Antichain, ChangesSplit, Location, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_engine.storage.open import open_blob
from persist_engine.work.repair.force import force_compaction
from persist_spark.datasource import PersistDataSource, register
from persist_spark.options import Ago, Feed, Options
from persist_spark.row_shape import changes_row_type

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT, area STRING", "n INT, p STRUCT<x: DOUBLE>")
GIVEN = {"shard": "s00000000-0000-0000-0000-000000000001", "blob": "mem:", "consensus": "mem:"}
UPPER = 50


def value(i, version):
    return (None if (i + version) % 7 == 0 else i + version, None if i % 5 == 0 else {"x": i / 2})


def history():
    """(key, val, time, diff): rows come, some come twice, every third gets another value, every tenth goes."""
    key = lambda i: (None if i == 13 else i, "north" if i % 2 else None)  # noqa: E731
    rows = [(key(i), value(i, 0), 3, 2 if i % 50 == 0 else 1) for i in range(400)]
    rows += [(key(i), value(i, 0), 20, -1) for i in range(0, 400, 3) if i % 50]
    rows += [(key(i), value(i, 1), 20, 1) for i in range(0, 400, 3) if i % 50]
    rows += [(key(i), value(i, 0), 31, -1) for i in range(1, 400, 10) if i % 3]
    return rows


class Shard:
    def __init__(self, folder):
        self.folder = folder
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4 * KIB), retain_ms=None)
        self.client, self.id = PersistClient.open(self.location, settings=settings), ShardId.new()
        with self.client.open_writer(self.id, SCHEMA, purpose="test") as writer:
            for lower, upper in ((0, 10), (10, 30), (30, UPPER)):
                rows = [((key, val), time, diff) for key, val, time, diff in history() if lower <= time < upper]
                writer.compare_and_append(rows, expected_upper=A(lower), new_upper=A(upper))
        self.given = {"shard": str(self.id), "blob": self.location.blob, "consensus": self.location.consensus}

    def forgets(self, since):
        """Since moves on, and what is before it is compacted."""
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            reader.downgrade_since(A(since))
        force_compaction(self.client.machine(self.id), full=True)
        return self.client.inspect(self.id).since

    def parquet(self):
        names = ("id", "area", "n", "p", "time", "diff")
        rows = [dict(zip(names, (*key, *val, time, diff), strict=True)) for key, val, time, diff in history()]
        types = pa.schema([*SCHEMA.key, *SCHEMA.val, ("time", pa.int64()), ("diff", pa.int64())])
        pq.write_table(pa.Table.from_pylist(rows, types), self.folder / "history.parquet")
        return str(self.folder / "history.parquet")


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


@pytest.mark.parametrize(
    ("given", "feed"),
    [
        ({"from": "3"}, Feed(3, None, "updates")),
        ({"FROM": "-1h", "to": "-30m", "rows": "Changes"}, Feed(Ago(3_600_000), Ago(1_800_000), "rows")),
        ({"from": "1970-01-01T00:00:01Z", "to": "2000"}, Feed(1000, 2000, "updates")),
    ],
)
def test_times_are_said_as_everywhere(given, feed):
    assert Options.parse({**GIVEN, **given}).feed == feed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"to": "3"}, "option to: needs option from"),
        ({"rows": "changes"}, "option rows: needs option from"),
        ({"from": "3", "as_of": "4"}, "option from does not go with as_of"),
        ({"from": "3", "updates": "true"}, "option from does not go with updates: changes have times .* option rows"),
        ({"from": "3", "rows": "all"}, "option rows: 'all' is not updates or changes"),
        ({"from": "-1"}, "option from: '-1' is not a time ago such as -1h"),
        ({"from": "-none"}, "option from: '-none' is not a time ago"),
        ({"from": "3", "to": "-1w"}, "option to: '-1w' is not a time ago"),
        (
            {"from": "soon"},
            "option from: 'soon' is not a time: a whole number, ISO 8601 text with its zone, or a time ago such as -1h",
        ),
        ({"from": ""}, "option from: '' is not a time"),
        ({"from": "2013-01-02T03:04:05"}, "option from is '2013-01-02T03:04:05', which has no time zone"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(InvalidUsage, match=message):
        Options.parse({**GIVEN, **given})


@pytest.mark.parametrize(
    ("feed", "upper", "window"),
    [
        (Feed(3, None, "updates"), A(10), (3, 10)),
        (Feed(3, 7, "updates"), A(10), (3, 7)),
        (Feed(3, 3, "updates"), A(10), (3, 3)),
        (Feed(0, None, "updates"), A(0), (0, 0)),
        (Feed(12, None, "updates"), A(10), (12, 12)),
        (Feed(Ago(40), Ago(10), "updates"), A(100), (60, 90)),
        (Feed(Ago(400), None, "updates"), A(7), (0, 7)),
    ],
)
def test_the_window_ends_where_the_shard_does(feed, upper, window):
    assert feed.window(upper, now_ms=100) == window


def test_a_window_that_is_not_there_names_both_ends():
    with pytest.raises(InvalidUsage, match="option from: 8 is after option to: 7"):
        Feed(8, 7, "updates").window(A(10), now_ms=0)
    with pytest.raises(InvalidUsage, match="option to: 11 is past the shard's upper 10, where it ends so far"):
        Feed(8, 11, "updates").window(A(10), now_ms=0)


def test_columns_of_a_change_have_names_of_their_own():
    with pytest.raises(InvalidUsage, match="columns _time, as option rows=changes has: read with rows=updates"):
        changes_row_type(Schema.from_ddl("id BIGINT", "_time BIGINT"), shape="rows")
    with pytest.raises(InvalidUsage, match="both have id: read with option updates=true \\(changes: rows=updates\\)"):
        changes_row_type(Schema.from_ddl("id BIGINT", "id BIGINT"), shape="rows")


@pytest.mark.parametrize("shape", ["updates", "rows"])
def test_pieces_hold_each_change_once(shard, shape):
    blob = open_blob(shard.location.blob, env=SystemEnv(), metrics=NoMetrics())
    with (
        shard.client.open_leased_reader(shard.id, purpose="test") as reader,
        reader.changes(5, 45, shape=shape, where="n > 30", columns=["id", "n"]) as changes,
    ):
        pieces = [ChangesSplit.from_bytes(piece.to_bytes()) for piece in changes.splits(5)]
        whole = changes.to_table()
        read = [batch for piece in pieces for batch in piece.to_batches(blob)]
        assert len(pieces) == 5
        assert sum(any(True for _ in piece.to_batches(blob)) for piece in pieces) == 5
    assert pa.Table.from_batches(read, schema=whole.schema).to_pylist() == whole.to_pylist() != []
    data = pieces[0].to_bytes()
    with pytest.raises(Incompatible, match="split of changes of format 99"):
        ChangesSplit.from_bytes(data.replace(b'"format": %d' % ChangesSplit.FORMAT, b'"format": 99'))
    for damaged in (data[:-9], b"{}", data.replace(b'"rows": [5', b'"rows": ["x"')):
        with pytest.raises(CorruptData, match="split of changes"):
            ChangesSplit.from_bytes(damaged)


def test_changes_behind_since_are_refused_by_name_and_hold_nothing(shard):
    assert shard.forgets(20) == 20
    for start in ("0", "3", "20"):
        with pytest.raises(
            InvalidUsage, match=rf"from {start}: its since is 20\. .* as_of 20, and the changes from 21 on"
        ):
            reader_of(shard, start).partitions()
    assert shard.client.inspect(shard.id).readers == ()
    assert len(reader_of(shard, "21").partitions()) == 1


def reader_of(shard, start):
    """As Spark makes it in a session without a keeper."""
    source = PersistDataSource({**shard.given, "from": start})
    return source.reader(source.schema())


def test_a_plan_without_a_keeper_shows_the_window_of_its_load(shard):
    source = PersistDataSource({**shard.given, "from": "10"})
    row = source.schema()
    with shard.client.open_writer(shard.id, SCHEMA, purpose="later") as writer:
        writer.compare_and_append([(((1, "a"), (1, None)), UPPER, 1)], expected_upper=A(UPPER), new_upper=A(UPPER + 1))
    reader = source.reader(row)
    times = [time for each in reader.partitions() for batch in reader.read(each) for time in batch["time"].to_pylist()]
    assert set(times) == {20, 31}
    with pytest.raises(InvalidUsage, match="needs the options from and to as times"):
        PersistDataSource({**shard.given, "from": "-1h", "to": "50"}).reader(row)
    pinned = PersistDataSource({**shard.given, "from": "10", "to": "30"}).reader(row)
    assert pinned.partitions()


UPDATES = "SELECT key.id, key.area, val.n, val.p, time, diff FROM feed"
EXPECTED = """SELECT id, area, n, p, time, sum(diff) AS diff FROM history WHERE time >= {} AND time < {}
    GROUP BY id, area, n, p, time HAVING sum(diff) <> 0"""


def rows_of(frame):
    return sorted(repr(tuple(row)) for row in frame.collect())


@pytest.mark.spark
def test_the_updates_are_those_of_a_parquet_file(local_spark, shard):
    register(local_spark)
    local_spark.read.parquet(shard.parquet()).createOrReplaceTempView("history")
    for start, end in ((0, UPPER), (4, 31), (20, 20)):
        feed = local_spark.read.format("persist").options(**shard.given, splits="3").option("from", start)
        feed.option("to", end).load().createOrReplaceTempView("feed")
        expected = rows_of(local_spark.sql(EXPECTED.format(start, end)))
        assert rows_of(local_spark.sql(UPDATES)) == expected, (start, end)
        assert bool(expected) == (start < 20)
    frame = local_spark.read.format("persist").options(**shard.given, splits="2").option("from", 4).load()
    assert frame.rdd.getNumPartitions() == 2
    early, late = frame.where("time = 20"), frame.where("time = 31")
    counts = {time: sum(row[2] == time for row in history()) for time in (20, 31)}
    assert shard.forgets(45) == 0, "held: since stays, and compaction takes nothing from a loaded frame"
    both = early.union(late).groupBy("time").count().collect()
    assert dict(map(tuple, both)) == counts, "each scan has its own filter"


@pytest.mark.spark
def test_the_changes_turn_one_time_into_another(local_spark, shard):
    register(local_spark)
    loaded = local_spark.read.format("persist").options(**shard.given)
    feed = loaded.option("from", 11).option("to", 40).option("rows", "changes").option("splits", 3).load()
    assert feed.columns == ["_time", "_change", "id", "area", "n", "p"]
    assert feed.dtypes[:2] == [("_time", "bigint"), ("_change", "string")]
    plain = local_spark.read.parquet(shard.parquet())
    counts = {row["_change"]: row["count"] for row in feed.groupBy("_change").count().collect()}
    gone = plain.where("time = 31").count()
    updated = plain.where("time = 20 AND diff = 1").count()
    assert counts == {"update_before": updated, "update_after": updated, "delete": gone}
    fresh = local_spark.read.format("persist").options(**shard.given)
    came = feed.where("_change IN ('insert', 'update_after')").select("id", "area", "n", "p")
    went = feed.where("_change IN ('delete', 'update_before')").select("id", "area", "n", "p")
    before = fresh.option("as_of", 10).load()
    after = fresh.option("as_of", 39).load()
    assert rows_of(before.unionAll(came).exceptAll(went)) == rows_of(after)
    with pytest.raises(
        Exception, match=f"option to: {UPPER + 1} is past the shard's upper {UPPER}, where it ends so far"
    ):
        local_spark.read.format("persist").options(**shard.given).option("from", 5).option("to", UPPER + 1).load()
