"""`PersistTable`: deletions beside other writers, metadata and maintenance, against rows that are counted here. On classic sessions and over
Spark Connect.
"""

import random
import threading
from collections import Counter
from datetime import UTC, datetime

import pytest
from persist_engine import Antichain, Location, PersistClient, Schema, ShardId
from persist_engine.base.errors import InvalidUsage, ShardNotFound
from persist_kit.depth import draws
from persist_kit.servers import redis_server, s3_server
from persist_spark import PersistTable, register
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from table_shard import SCHEMA, Shard

pytestmark = pytest.mark.spark

A = Antichain.of


def row(i):
    return ((i, None if i % 5 == 0 else f"a{i % 3}"), (None if i % 7 == 3 else i % 10, f"s{i}"))


def left(rows, is_gone):
    """The rows that stay. `is_gone` gets id, area, n and s."""
    return Counter({each: count for each, count in rows.items() if not is_gone(*each[0], *each[1])})


@pytest.fixture
def spark(either_spark):
    register(either_spark)
    return either_spark


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


# -- names and frames ----------------------------------------------------------------------------------------------------


def test_a_table_is_found_by_name_and_by_id(spark, shard):
    stores = {"blob": shard.location.blob, "consensus": shard.location.consensus}
    register(spark, **stores)
    try:
        for name in ("flights", "demo/flights", "demo.flights", str(shard.id)):
            assert PersistTable.forName(spark, name).shard == shard.id
        with pytest.raises(ShardNotFound, match="near names are .*flights"):
            PersistTable.forName(spark, "fligths")
        with pytest.raises(ShardNotFound):
            PersistTable.forShard(spark, ShardId.new())
    finally:
        register(spark)
    with pytest.raises(InvalidUsage, match="table flights needs blob and consensus: give the addresses"):
        PersistTable.forName(spark, "flights")
    assert PersistTable.forShard(spark, shard.id, **stores).shard == shard.id


def test_frames_show_the_contents_at_a_time(spark, shard):
    shard.add([row(1), row(1), row(2)])
    first = shard.upper() - 1
    shard.add([row(3)])
    table = shard.table(spark)
    assert sorted(each.id for each in table.toDF().collect()) == [1, 1, 2, 3]
    for as_of in (first, datetime(1970, 1, 1, 0, 0, 0, first * 1000, UTC)):
        assert sorted(each.id for each in table.toDF(as_of).collect()) == [1, 1, 2]
    with pytest.raises(InvalidUsage, match="as_of: 2013-01-01 00:00:00 has no time zone"):
        table.toDF(datetime(2013, 1, 1))


# -- delete --------------------------------------------------------------------------------------------------------------


def test_a_delete_removes_the_rows_of_its_condition_with_all_their_copies(spark, shard):
    shard.add([row(i) for i in range(200)] + [row(150), row(150), row(3)])
    table, held, start = shard.table(spark), shard.rows(), shard.upper()
    assert table.delete("id >= 140 AND (area = 'a0' OR area IS NULL)") == sum(
        count for ((i, area), _), count in held.items() if i >= 140 and area in ("a0", None)
    )
    held = left(held, lambda i, area, n, s: i >= 140 and area in ("a0", None))
    assert shard.rows() == held
    assert shard.updates(start) == 200 - len(held), "one retraction for each row, and nothing else"
    assert table.delete("id = 100000") == 0
    # What no filter of the engine expresses is a query. A condition that is null keeps the row.
    for condition, is_gone in (
        ("n % 4 = 1", lambda i, area, n, s: n is not None and n % 4 == 1),
        (F.col("s").like("%7") & (F.col("id") > 20), lambda i, area, n, s: s.endswith("7") and i > 20),
        ("id = (SELECT 3)", lambda i, area, n, s: i == 3),
    ):
        before = held
        held = left(held, is_gone)
        assert table.delete(condition) == before.total() - held.total() > 0
        assert shard.rows() == held
    assert table.delete(" TRUE ") == held.total()
    assert shard.rows() == Counter()


def test_a_delete_by_a_struct_that_is_named_as_a_side(spark, tmp_path):
    """Spark's meaning counts: the engine would take `key.id` for the field of the key."""
    shard = Shard(tmp_path, Schema.from_ddl("id BIGINT", "key STRUCT<id: BIGINT>"))
    rows = [((1,), ({"id": 2},)), ((2,), ({"id": 1},)), ((3,), (None,))]
    shard.add(rows)
    table = shard.table(spark)
    options = {"shard": table.shard, "blob": shard.location.blob, "consensus": shard.location.consensus}
    with pytest.raises(Exception, match="column key.id may be the field id of the key"):
        spark.read.format("persist").options(**options, where="key.id = 2").load()
    assert table.delete("key.id = 2") == 1
    assert sorted(each.id for each in table.toDF().collect()) == [2, 3]
    assert table.delete("id = 2") == 1
    assert [each.id for each in table.toDF().collect()] == [3]
    shard.client.close()


def test_a_delete_without_a_meaning_changes_nothing(spark, shard):
    table = shard.table(spark)
    assert table.delete("true") == table.delete("id = 1") == table.delete("n % 2 = 0") == 0
    assert shard.upper() == 0
    shard.add([row(1)])
    start = shard.upper()
    with pytest.raises(InvalidUsage, match=r"delete needs a condition; delete\(\"true\"\) removes all rows"):
        table.delete()
    for condition in ("nosuch = 1", "id >", "upper(nosuch) = 'A'"):
        with pytest.raises(AnalysisException):
            table.delete(condition)
    assert shard.upper() == start
    assert shard.rows() == Counter([row(1)])


def test_a_time_without_its_zone_is_a_time_of_the_session(spark, tmp_path):
    shard = Shard(tmp_path, Schema.from_ddl("id BIGINT", "at TIMESTAMP"))
    shard.add([((hour,), (datetime(2024, 3, 10, hour, tzinfo=UTC),)) for hour in (1, 4, 6)])
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for zone, left in (("UTC", {1, 4, 6}), ("America/New_York", {6})):
            spark.conf.set("spark.sql.session.timeZone", zone)
            shard.table(spark).delete("at < TIMESTAMP '2024-03-10 00:00:00'")
            assert {key[0] for key, _ in shard.rows()} == left
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
        shard.client.close()


def test_a_delete_leaves_the_errors_of_a_collection(spark, tmp_path):
    shard = Shard(tmp_path, Schema.from_ddl("id BIGINT, err STRING", "n BIGINT"))
    rows = [((i, None), (i,)) for i in range(5)]
    failed = ((None, "bad input"), (None,))
    shard.add([*rows, failed])
    assert shard.table(spark).delete("id >= 2") == 3
    assert shard.rows() == Counter([*rows[:2], failed])
    shard.client.close()


def test_deletes_beside_a_writer_remove_no_other_row(spark, shard):
    """Every second row of the rival satisfies the condition. The others must all be there in the end."""
    shard.add([row(i) for i in range(100)])
    table, ended = shard.table(spark), threading.Event()
    added = []

    def rival():
        while not ended.wait(
            0.01
        ):  # some twenty commits during each attempt of a delete, and not all that a core can do
            added.append(row(1000 + len(added)))
            shard.add([added[-1]])

    thread = threading.Thread(target=rival)
    thread.start()
    try:
        removed = sum(table.delete(f"id >= {start} AND s IN ('s0', 's1', 's10')") for start in (0, 5, 10))
        removed += table.delete("id % 2 = 1")
    finally:
        ended.set()
        thread.join()
    found = shard.rows()
    wanted = [each for each in [*map(row, range(100)), *added] if each[0][0] not in (0, 1, 10) and each[0][0] % 2 == 0]
    assert Counter(wanted) - found == Counter(), "rows that no delete named are gone"
    assert found.total() == 100 + len(added) - removed
    assert all(i % 2 == 0 or i >= 1000 for (i, _), _ in found)


@pytest.mark.parametrize("diff", [1, -1])
def test_rows_that_change_while_a_delete_looks_them_up(spark, shard, diff):
    """The condition, when Spark computes it, makes another writer add or remove a row that satisfies it."""
    shard.add([row(i) for i in range(20)])
    given, shard_id = shard.location, shard.id
    changed = row(30 if diff == 1 else 8)
    table = shard.table(spark)

    def condition(number):
        if number == 10:
            with (
                PersistClient.open(given) as client,
                client.open_writer(shard_id, SCHEMA, purpose="rival") as writer,
                client.open_leased_reader(shard_id, purpose="rival") as reader,
            ):
                upper = writer.fetch_recent_upper().time
                held = reader.snapshot(A(upper - 1), where=f"id = {changed[0][0]}").to_table().num_rows
                if held == (diff == -1):
                    updates = [(changed, upper, diff), (((100, None), (1, "x")), upper, 1)]
                    writer.compare_and_append(updates, expected_upper=A(upper), new_upper=A(upper + 1))
        return number % 2 == 0 and number < 50

    removed = table.delete(F.udf(condition, "boolean")("id"))
    stay = [row(i) for i in range(20) if i % 2] + [((100, None), (1, "x"))]
    if diff == 1:
        assert (removed, shard.rows()) == (10, Counter([*stay, changed])), "what was added meanwhile stays"
    else:
        assert (removed, shard.rows()) == (9, Counter(stay)), "no row is removed twice"


@pytest.mark.parametrize("seed", range(draws(1)))
def test_random_deletes_end_as_a_list_of_rows_would(spark, shard, seed):
    rng, held, table = random.Random(seed), Counter(), shard.table(spark)
    for _ in range(6):
        shard.add(more := [row(rng.randrange(60)) for _ in range(40)])
        held += Counter(more)
        low, digit = rng.randrange(60), rng.randrange(10)
        condition, is_gone = rng.choice(
            [
                (f"id < {low}", lambda i, area, n, s, low=low: i < low),
                (f"NOT (n = {digit})", lambda i, area, n, s, digit=digit: n is not None and n != digit),
                (f"id % 10 = {digit}", lambda i, area, n, s, digit=digit: i % 10 == digit),
                ("area IN ('a1', NULL)", lambda i, area, n, s: area == "a1"),
            ]
        )
        before, held = held, left(held, is_gone)
        assert table.delete(condition) == before.total() - held.total()
        assert shard.rows() == held


# -- metadata and maintenance --------------------------------------------------------------------------------------------


def test_the_history_is_that_of_the_log(spark, shard):
    for i in range(3):
        shard.add([row(i)])
    versions = shard.client.metadata(shard.id, "versions").to_pylist()
    shown = shard.table(spark).history()
    expected = [(each["seqno"], each["walltime_ms"], dict(each["changed"]), each["bytes"]) for each in versions]
    found = shown.selectExpr("version", "unix_millis(timestamp)", "changed", "bytes").collect()
    assert [tuple(each) for each in found] == expected[::-1]
    assert [each.version for each in shard.table(spark).history(2).collect()] == [e[0] for e in expected[:-3:-1]]
    with pytest.raises(InvalidUsage, match="limit: 0 is not a whole number of at least 1"):
        shard.table(spark).history(0)


def test_the_detail_is_one_row_about_the_shard(spark, shard):
    shard.add([row(i) for i in range(9)])
    shard.client.set_retention(shard.id, 5000)
    report = shard.client.inspect(shard.id)
    [found] = shard.table(spark).detail().collect()
    assert (found.format, found.id, found.name) == ("persist", shard.id, "demo/flights")
    assert (found.version, found.since, found.upper) == (report.seqno, report.since, report.upper)
    assert (found.numFiles, found.numUpdates, found.sizeInBytes) == (report.parts, 9, report.live_bytes)
    assert (found.keySchema, found.valueSchema) == ("id BIGINT NOT NULL, area STRING", "n INT, s STRING")
    assert found.properties == {"retain_ms": "5000"}
    assert (found.location, found.consensus) == (shard.location.blob, shard.location.consensus)
    assert round(found.lastModified.timestamp() * 1000) == report.walltime_ms


def test_optimize_and_vacuum_keep_the_contents(spark, shard, tmp_path):
    for i in range(0, 120, 10):
        shard.add([row(j) for j in range(i, i + 10)])
    table, held = shard.table(spark), shard.rows()
    assert shard.client.inspect(shard.id).parts == 12
    done = table.optimize(full=True).collect()
    assert [(each.type, each.outcome) for each in done] == [("Compaction", "Succeeded")]
    assert shard.client.inspect(shard.id).parts == 1
    assert table.optimize(full=True).collect() == []
    blobs = len([path for path in (tmp_path / "blobs").rglob("n*/*") if path.is_file()])
    done = table.vacuum().collect()
    assert [(each.type, each.outcome) for each in done] == [("Rollup", "Succeeded"), ("GC", "Succeeded")]
    assert done[1].blobs_deleted == 12
    assert done[1].versions_truncated > 12
    assert len([path for path in (tmp_path / "blobs").rglob("n*/*") if path.is_file()]) == blobs - 12
    assert table.history().count() == shard.client.metadata(shard.id, "versions").num_rows < 6
    assert shard.rows() == held


@pytest.mark.redis
@pytest.mark.s3
def test_a_table_on_servers(local_spark, tmp_path):
    """S3 and Redis with a password, both from files, as in a pod."""
    register(local_spark)
    with redis_server(password="hunter2") as redis, s3_server() as s3:
        for name, text in (
            (
                "aws-credentials",
                f"[default]\naws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n",
            ),
            ("redis-password", "hunter2"),
        ):
            (tmp_path / name).write_text(text)
        blob, consensus = (
            f"{s3.location('tables')}&credentials_dir={tmp_path}",
            f"redis://{redis.address}/0?credentials_dir={tmp_path}",
        )
        shard = Shard(tmp_path, location=Location(blob=blob, consensus=consensus))
        table = shard.table(local_spark)
        held = Counter([row(i) for i in range(50)])
        assert (
            table.upsert(
                local_spark.createDataFrame(
                    [(*key, *val) for key, val in held], "id BIGINT, area STRING, n INT, s STRING"
                )
            )
            == 50
        )
        assert (table.delete("id >= 40"), table.delete("id % 2 = 1")) == (10, 20)
        held = left(held, lambda i, area, n, s: i >= 40 or i % 2 == 1)
        assert shard.rows() == held
        assert [each.outcome for each in table.optimize(full=True).collect()] == ["Succeeded"]
        # The frame that a query deletes by holds a version until the JVM collects it, so a vacuum may find nothing to do.
        assert {each.outcome for each in table.vacuum().collect()} <= {"Succeeded"}
        assert shard.rows() == held
        [found] = table.detail().collect()
        assert (found.location, found.consensus) == ("s3://persist/tables", f"redis://{redis.address}/0")
        assert "hunter2" not in f"{table!r} {found}"
        shard.client.close()


def test_conditions_that_do_not_name_errors_leave_them(spark, tmp_path):
    """The other fields of an error are null."""
    schema = Schema.from_ddl("id BIGINT, err STRING", "n INT")
    shard = Shard(tmp_path, schema)
    rows = [((1, None), (5,)), ((2, None), (None,)), ((None, None), (7,)), ((None, "boom"), (None,))]
    shard.add(rows)
    table = shard.table(spark)
    assert table.delete("id is null") == 1
    assert table.delete(F.col("n").isNull()) == 1
    error, first = rows[3], rows[0]
    assert shard.rows() == Counter([error, first])
    options = {"shard": str(shard.id), "blob": shard.location.blob, "consensus": shard.location.consensus}
    given = spark.createDataFrame([(1, None, 6)], "id BIGINT, err STRING, n INT")
    given.write.format("persist").options(**options, replace_where="id = 1").mode("overwrite").save()
    assert shard.rows() == Counter([error, ((1, None), (6,))])
    assert table.delete("err = 'boom' or n is null") == 1
    assert shard.rows() == Counter([((1, None), (6,))])
    shard.client.close()
