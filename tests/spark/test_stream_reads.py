"""`spark.readStream.format("persist")`: the contents and then the changes, each once, also after a restart."""

import threading
from collections import Counter

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import KIB, BatchSettings, Settings
from persist_engine.model.ids import LeasedReaderId
from persist_engine.work.repair.force import force_compaction
from persist_spark.datasource import register
from persist_spark.options import Ago
from persist_spark.row_shape import changes_row_type
from persist_spark.source import stream_read
from persist_spark.source.stream_read import LEASE_MS, ShardStreamReader, StreamOptions
from pyspark.errors import StreamingQueryException
from pyspark.sql import types as T
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

pytestmark = pytest.mark.spark

A = Antichain.of
SCHEMA = Schema.from_ddl("id BIGINT", "n BIGINT")
GIVEN = {"shard": "s00000000-0000-0000-0000-000000000001", "blob": "mem:", "consensus": "mem:", "rows": "updates"}


class Shard:
    def __init__(self, folder):
        self.folder = folder
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=4 * KIB), retain_ms=None)
        self.client, self.id = PersistClient.open(self.location, settings=settings), ShardId.new()
        self.client.open_writer(self.id, SCHEMA, purpose="test").expire()
        self.given = {"shard": str(self.id), "blob": self.location.blob, "consensus": self.location.consensus}

    def write(self, *rows, upper):
        """Rows (id, n, diff), all at the time before `upper`."""
        with self.client.open_writer(self.id, SCHEMA, purpose="test") as writer:
            lower = writer.fetch_recent_upper().time
            updates = [(((key,), (n,)), upper - 1, diff) for key, n, diff in rows]
            writer.compare_and_append(updates, expected_upper=A(lower), new_upper=A(upper))

    def options(self, **given):
        return StreamOptions.parse({**self.given, "rows": "updates", **given})

    def at(self, upper):
        """The offset of a stream that has read everything before `upper`."""
        return {"upper": upper, "shard": str(self.id)}

    def ends_leases(self):
        for reader in self.client.inspect(self.id).readers:  # those of queries that Spark has stopped
            self.client.machine(self.id).expire_leased_reader(LeasedReaderId(reader.id))

    def forgets(self, since):
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            reader.downgrade_since(A(since))
        force_compaction(self.client.machine(self.id), full=True)

    def leases(self):
        return self.client.metadata(self.id, "holds").to_pylist()


def stream(spark, shard, checkpoint, *, rows="updates", **options):
    """All that is there: the rows of each batch."""
    batches = []
    source = spark.readStream.format("persist").options(**shard.given, rows=rows, **options).load()
    writer = source.writeStream.foreachBatch(lambda frame, _: batches.append([tuple(row) for row in frame.collect()]))
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return [Counter(batch) for batch in batches if batch]


def updates(*rows):
    return Counter(((key,), (n,), time, diff) for key, n, time, diff in rows)


@pytest.fixture(scope="module")
def spark(local_spark):
    register(local_spark)
    return local_spark


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": "all"}, "option rows: 'all' is not updates or changes"),
        ({"as_of": "3"}, "option as_of: not known to a stream of format persist"),
        ({"maxBytesPerTrigger": "0"}, "option maxbytespertrigger: '0' is not a whole number"),
        ({"maxTimePerTrigger": "soon"}, "option maxTimePerTrigger: 'soon' is not a length of time"),
        ({"refreshEvery": "none"}, "option refreshEvery: 'none' is not a length of time"),
        ({"refreshEvery": "99999999999999d"}, "option refreshEvery: '99999999999999d' is not a length of time"),
        ({"refreshAlignedTo": "5"}, "option refreshAlignedTo: needs option refreshEvery"),
        ({"refreshEvery": "1h", "refreshAlignedTo": "-1h"}, "option refreshAlignedTo: '-1h' is a new time"),
        ({"refreshAt": "soon"}, "option refreshAt"),
        ({"refreshAt": "99999999999999999999"}, "refresh at 99999999999999999999: expected a time"),
        ({"refreshEvery": "1h", "rows": "changes"}, "option refreshEvery: needs option rows=updates"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(given, message):
    with pytest.raises(InvalidUsage, match=message):
        StreamOptions.parse({**GIVEN, **given})


def test_a_start_is_a_time_as_everywhere():
    assert StreamOptions.parse({**GIVEN, "startingTime": "-1h"}).start == Ago(3_600_000)
    assert StreamOptions.parse({**GIVEN, "startingTime": "1970-01-01T00:00:01Z"}).start == 1000


def test_the_contents_come_first_and_then_each_change_once(spark, shard, tmp_path):
    shard.write((1, 10, 1), (2, 20, 2), upper=5)
    shard.write((1, 10, -1), (1, 11, 1), upper=9)
    checkpoint = tmp_path / "checkpoint"
    assert stream(spark, shard, checkpoint) == [updates((1, 11, 8, 1), (2, 20, 8, 2))]
    assert stream(spark, shard, checkpoint) == []
    shard.write((2, 20, -1), upper=12)
    shard.write((3, 30, 1), upper=20)
    assert stream(spark, shard, checkpoint) == [updates((2, 20, 11, -1), (3, 30, 19, 1))]
    held = [lease for lease in shard.leases() if lease["purpose"] == "spark stream"]
    assert all(lease["lease_ends_ms"] - lease["last_heartbeat_ms"] == LEASE_MS for lease in held)


def test_row_changes_say_what_happened(spark, shard, tmp_path):
    shard.write((1, 10, 1), (2, 20, 1), upper=5)
    checkpoint = tmp_path / "checkpoint"
    assert stream(spark, shard, checkpoint, rows="changes") == [Counter([(4, "insert", 1, 10), (4, "insert", 2, 20)])]
    shard.write((1, 10, -1), (1, 11, 1), (2, 20, -1), upper=9)
    assert stream(spark, shard, checkpoint, rows="changes", where="id < 2", columns="n") == [
        Counter([(8, "update_before", 10), (8, "update_after", 11)])
    ]


def test_a_start_omits_what_was_before(spark, shard, tmp_path):
    shard.write((1, 10, 1), upper=5)
    shard.write((2, 20, 1), upper=9)
    assert stream(spark, shard, tmp_path / "a", startingTime="5") == [updates((2, 20, 8, 1))]
    assert stream(spark, shard, tmp_path / "b", startingTime="0") == [updates((1, 10, 4, 1), (2, 20, 8, 1))]
    assert stream(spark, shard, tmp_path / "c", startingTime="9") == []


def test_batches_are_as_large_as_the_options_say(spark, shard, tmp_path):
    for number in range(6):
        shard.write((number, 0, 1), upper=10 * number + 10)
    begin = {"startingTime": "0"}
    small = stream(spark, shard, tmp_path / "bytes", maxBytesPerTrigger="1", **begin)
    assert small == [updates((number, 0, 10 * number + 9, 1)) for number in range(6)]
    timed = stream(spark, shard, tmp_path / "times", maxTimePerTrigger="20ms", **begin)
    assert [sum(batch.values()) for batch in timed] == [2, 2, 2]
    assert len(stream(spark, shard, tmp_path / "whole", maxBytesPerTrigger=str(1 << 30), **begin)) == 1


def test_a_stream_with_refreshes_shows_the_shard_at_those_times_only(spark, shard, tmp_path):
    """The refreshes are 3, 13, 23, ... One is shown when upper has passed it, with all of its updates at its time."""
    every = {"refreshEvery": "10ms", "refreshAlignedTo": "23"}
    shard.write((1, 10, 1), upper=3)
    checkpoint = tmp_path / "checkpoint"
    assert stream(spark, shard, checkpoint, **every) == [], "a write at time 3 may follow"
    shard.write((2, 20, 1), upper=9)
    assert stream(spark, shard, checkpoint, **every) == [updates((1, 10, 3, 1))]
    shard.write((2, 20, -1), (2, 21, 1), upper=10)
    shard.write((4, 40, 1), upper=14)
    assert stream(spark, shard, checkpoint, **every) == [
        updates((2, 20, 13, 1), (2, 20, 13, -1), (2, 21, 13, 1), (4, 40, 13, 1))
    ]
    shard.write((5, 50, 1), upper=20)
    shard.write((6, 60, 1), upper=40)
    limits = {"maxBytesPerTrigger": "1", "maxTimePerTrigger": "2ms"}
    assert stream(spark, shard, checkpoint, **every, **limits) == [updates((5, 50, 23, 1))], (
        "the update at 39 waits for 43"
    )
    assert stream(spark, shard, checkpoint) == [updates((6, 60, 39, 1))], "without refreshes all the rest"


def test_after_the_last_refresh_nothing_is_shown(shard):
    reader = ShardStreamReader(shard.options(refreshAt="8, 1970-01-01T00:00:00.004Z"), T.StructType([]))
    shard.write((1, 10, 1), upper=30)
    assert reader.latestOffset({"upper": -1}, ReadAllAvailable()) == shard.at(9)
    assert reader.latestOffset({"upper": 9}, ReadAllAvailable()) == {"upper": 9}
    reader.stop()


def test_a_stream_does_not_begin_at_a_refresh_that_is_no_longer_readable(shard):
    shard.write((1, 10, 1), upper=18)
    shard.forgets(15)
    reader = ShardStreamReader(shard.options(refreshEvery="10ms"), T.StructType([]))
    assert reader.latestOffset({"upper": -1}, ReadAllAvailable()) == {"upper": -1}
    shard.write((2, 20, 1), upper=21)
    assert reader.latestOffset({"upper": -1}, ReadAllAvailable()) == shard.at(21)
    reader.stop()


def test_a_batch_that_spark_repeats_is_the_same(spark, shard, tmp_path):
    """The driver died after the batch was planned: its end is in the checkpoint, its commit is not."""
    checkpoint = tmp_path / "checkpoint"
    shard.write((1, 10, 1), upper=5)
    first = stream(spark, shard, checkpoint)
    (checkpoint / "commits" / "0").unlink()
    (checkpoint / "commits" / ".0.crc").unlink(missing_ok=True)
    shard.write((2, 20, 1), upper=9)
    assert stream(spark, shard, checkpoint) == [*first, updates((2, 20, 8, 1))]


def test_a_query_that_stood_still_for_too_long_stops_and_skips_nothing(spark, shard, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shard.write((1, 10, 1), upper=5)
    stream(spark, shard, checkpoint)
    shard.write((1, 10, -1), upper=9)
    shard.write((3, 30, 1), upper=20)
    shard.ends_leases()
    shard.forgets(15)
    with pytest.raises(
        StreamingQueryException, match=r"the stream cannot continue: it has read shard .* up to 5, .*since is 15"
    ):
        stream(spark, shard, checkpoint)


def test_a_start_that_since_has_passed_is_not_said_to_have_been_read(spark, shard, tmp_path):
    shard.write((1, 10, 1), upper=5)
    shard.write((3, 30, 1), upper=20)
    shard.forgets(15)
    expected = (
        "the stream cannot begin or continue with the changes of shard .* at 3, "
        ".*since is 15.* with a start past since, or without a start"
    )
    with pytest.raises(StreamingQueryException, match=expected):
        stream(spark, shard, tmp_path / "a", startingTime="3")
    assert stream(spark, shard, tmp_path / "b", startingTime="16") == [updates((3, 30, 19, 1))]


def test_a_checkpoint_over_another_shard_is_refused_by_name(spark, shard, tmp_path):
    """Also in the middle of a batch. A checkpoint of a release that did not note the shard goes on."""
    checkpoint, other = tmp_path / "checkpoint", Shard(tmp_path / "other")
    shard.write((1, 10, 1), upper=5)
    other.write((2, 20, 1), upper=9)
    assert stream(spark, shard, checkpoint) == [updates((1, 10, 4, 1))]
    refusal = rf"has read shard {shard.id} up to 5, .*are not times of shard {other.id}: .*new checkpointLocation"
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=refusal):
            stream(spark, other, checkpoint)
        for name in ("0", ".0.crc"):
            (checkpoint / "commits" / name).unlink(missing_ok=True)
    offsets = checkpoint / "offsets" / "0"
    offsets.write_text(offsets.read_text().replace(f', "shard": "{shard.id}"', ""))
    (checkpoint / "offsets" / ".0.crc").unlink(missing_ok=True)
    assert "shard" not in offsets.read_text()
    shard.write((3, 30, 1), upper=9)
    assert stream(spark, shard, checkpoint) == [updates((1, 10, 4, 1)), updates((3, 30, 8, 1))]
    other.client.close()


def test_a_stream_without_the_shape_of_its_rows_is_refused(spark, shard, tmp_path):
    shard.write((1, 10, 1), upper=5)
    source = spark.readStream.format("persist").options(**shard.given).load()
    query = source.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(StreamingQueryException, match="option rows: '' is not updates or changes; a stream needs it"):
        query.awaitTermination()


def test_the_shard_evolves_while_the_query_runs(shard):
    """The query keeps the columns with which it began; a change of the shard's columns is named."""
    shard.write((1, 10, 1), upper=5)
    options = shard.options()
    columns = T.StructType.fromJson(
        {"type": "struct", "fields": [{"name": "x", "type": "long", "nullable": True, "metadata": {}}]}
    )
    reader = ShardStreamReader(options, columns)
    with pytest.raises(InvalidUsage, match="has column key"):
        reader.partitions({"upper": -1}, {"upper": 5})
    reader.stop()
    assert shard.leases() == []


def test_the_lease_holds_what_the_query_has_not_read(shard):
    """A batch is planned, others compact and collect, and the batch still reads the same."""
    shard.write((1, 10, 1), upper=5)
    options = shard.options()
    reader = ShardStreamReader(options, T.StructType([]))
    assert reader.initialOffset() == shard.at(-1)
    assert reader.latestOffset(shard.at(-1), ReadAllAvailable()) == shard.at(5)
    shard.write((1, 10, -1), upper=9)
    shard.forgets(8)
    assert reader.latestOffset(shard.at(5), ReadMaxBytes(1)) == shard.at(9)
    assert shard.client.inspect(shard.id).since == 0
    reader.prepareForTriggerAvailableNow()
    shard.write((2, 10, 1), upper=12)
    assert reader.latestOffset({"upper": 9}, ReadAllAvailable()) == {"upper": 9}
    assert reader.reportLatestOffset() == shard.at(12)
    reader.stop()
    reader.stop()
    assert shard.leases() == []


def test_a_stream_lets_go_of_the_contents_when_they_are_read(shard):
    """The second reader of the contents ends with their batch. Otherwise it would hold since there as long as the query runs."""
    shard.write((1, 10, 1), upper=5)
    updates_only = changes_row_type(SCHEMA, shape="updates")
    reader = ShardStreamReader(shard.options(), updates_only)
    assert len(reader.partitions(shard.at(-1), shard.at(5))) == 1
    assert [lease["since"] for lease in shard.leases()] == [0, 4]
    shard.write((2, 20, 1), upper=9)
    assert len(reader.partitions(shard.at(5), shard.at(9))) == 1
    assert [lease["since"] for lease in shard.leases()] == [0]
    reader.stop()
    assert shard.leases() == []


def test_a_stream_that_lost_its_lease_lets_go_of_all_that_it_held(shard, monkeypatch):
    monkeypatch.setattr(stream_read, "LEASE_MS", 2_000)
    shard.write((1, 10, 1), upper=5)
    reader = ShardStreamReader(shard.options(), changes_row_type(SCHEMA, shape="updates"))
    reader.partitions(shard.at(-1), shard.at(5))
    lost = reader._follower.reader
    shard.client.machine(shard.id).expire_leased_reader(lost.reader_id)
    pause = threading.Event()
    while not lost.since.is_empty():  # until its next heartbeat
        pause.wait(0.02)
    assert reader.latestOffset(shard.at(5), ReadAllAvailable()) == shard.at(5)
    assert [lease["since"] for lease in shard.leases()] == [0]
    reader.stop()
    assert shard.leases() == []
