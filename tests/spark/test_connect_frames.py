"""Frames over Spark Connect keep what they showed at their load, and their actions share a lease."""

import pytest
from persist_engine import Schema
from persist_spark import register
from persist_spark.datasource import PersistDataSource
from persist_spark.source.connect_frames import pinned_options
from persist_spark.source.loaded import LOOK_OPTION
from table_shard import Shard


@pytest.fixture
def spark(connect_alone):
    register(connect_alone)
    return connect_alone


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


def row(i):
    return ((i, "a"), (i, f"s{i}"))


def load(spark, shard, **options):
    stores = {"blob": shard.location.blob, "consensus": shard.location.consensus}
    return spark.read.format("persist").options(**stores, **options).load("demo/flights")


def ids(frame):
    return sorted(each.id for each in frame.collect())


def shown(given):
    """The rows that the format yields for these options, as the server's workers would read them."""
    source = PersistDataSource(dict(given))
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("feed", [{}, {"from": "0", "rows": "changes"}])
def test_the_times_of_a_load_are_options_of_every_later_load(shard, feed):
    stores = {"blob": shard.location.blob, "consensus": shard.location.consensus}
    given = {**stores, "shard": "flights", **feed}
    pinned = []
    for number in range(3):
        [times] = shown({**given, LOOK_OPTION: "true"})
        pinned.append({**given, **pinned_options(times, is_feed=bool(feed))})
        shard.add([row(number)])
    assert [sorted(each["id"] for each in shown(options)) for options in pinned] == [[], [0], [0, 1]]


@pytest.mark.spark
def test_frames_show_the_times_of_their_load(spark, shard):
    empty, nothing = load(spark, shard), load(spark, shard, **{"from": "0", "rows": "changes"})
    shard.add([row(1), row(2)])
    frame = load(spark, shard)
    feed = load(spark, shard, **{"from": "0", "rows": "changes"})
    versions = load(spark, shard, table="versions")
    count = versions.count()
    given = spark.read.format("persist").schema("id BIGINT, area STRING, n INT, s STRING")
    given = given.options(blob=shard.location.blob, consensus=shard.location.consensus, shard=str(shard.id)).load()
    shard.add([row(1)], -1)
    shard.add([row(3)])
    assert [ids(each) for each in (empty, nothing)] == [[], []]
    assert [ids(each) for each in (frame, frame.where("id > 1"), frame.union(frame))] == [[1, 2], [2], [1, 1, 2, 2]]
    assert sorted((each.id, each["_change"]) for each in feed.collect()) == [(1, "insert"), (2, "insert")]
    assert ids(given) == [1, 2]
    assert versions.count() == count
    assert ids(load(spark, shard)) == [2, 3]


@pytest.mark.spark
def test_frames_keep_the_columns_of_their_load(spark, shard):
    empty = load(spark, shard)
    shard.add([row(1)])
    used, unused = load(spark, shard), load(spark, shard)
    feed = load(spark, shard, **{"from": "0", "rows": "updates"})
    assert used.columns == ["id", "area", "n", "s"]
    shard.client.evolve_schema(
        shard.id, Schema.from_ddl("id BIGINT NOT NULL, area STRING", "n BIGINT, s STRING, note STRING")
    )
    shard.add([row(2)])
    assert [each.schema.simpleString() for each in (empty, used, unused)] == [
        "struct<id:bigint,area:string,n:int,s:string>"
    ] * 3
    assert [ids(each) for each in (empty, used, unused, used.union(unused))] == [[], [1], [1], [1, 1]]
    assert [tuple(each.val) for each in feed.collect()] == [(1, "s1")]
    newest = load(spark, shard)
    assert (newest.schema["n"].dataType.simpleString(), newest.columns[-1], ids(newest)) == ("bigint", "note", [1, 2])


@pytest.mark.spark
def test_the_actions_of_a_frame_share_a_lease(spark, shard):
    shard.add([row(i) for i in range(5)])
    frame = load(spark, shard)
    assert shard.client.inspect(shard.id).readers == (), "a load holds nothing"
    assert [frame.count(), ids(frame), frame.where("id = 3").count()] == [5, list(range(5)), 1]
    assert [reader.purpose for reader in shard.client.inspect(shard.id).readers] == ["spark read"]


@pytest.mark.spark
def test_a_load_that_shows_nothing_is_refused_at_once(spark, shard):
    with pytest.raises(Exception, match="no shard of this store is named demo/flight"):
        spark.read.format("persist").options(blob=shard.location.blob, consensus=shard.location.consensus).load(
            "demo/flight"
        )
    with pytest.raises(Exception, match="the latest readable time is -1"):
        load(spark, shard, as_of="5")
    with pytest.raises(Exception, match="option asof: not known"):
        load(spark, shard, asof="5")


@pytest.mark.spark
def test_streams_read_and_write(spark, shard, tmp_path):
    stores = {"blob": shard.location.blob, "consensus": shard.location.consensus}
    target = Shard(tmp_path / "target")
    shard.add([row(i) for i in range(5)])
    query = (
        spark.readStream.format("persist")
        .options(**stores, shard="flights", rows="changes")
        .load()
        .where("_change = 'insert'")
        .drop("_time", "_change")
        .writeStream.format("persist")
        .options(blob=target.location.blob, consensus=target.location.consensus, shard="flights")
        .option("checkpointLocation", f"{tmp_path}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(240)
    assert target.rows() == shard.rows()
    target.client.close()
