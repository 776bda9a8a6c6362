"""`PersistTable.upsert` against a dictionary: values, order, removals, other writers. On classic sessions and over Spark Connect."""

import random
import threading
from collections import Counter

import pytest
from persist_engine import Schema
from persist_engine.base.errors import InvalidUsage
from persist_engine.work.audit.verify import verify_shard
from persist_kit.depth import draws
from persist_spark import register
from persist_spark.table.attempt import Attempt
from pyspark.sql import functions as F
from table_shard import Shard

COLUMNS = "id BIGINT, area STRING, n INT, s STRING"


pytestmark = pytest.mark.spark


@pytest.fixture
def spark(either_spark):
    register(either_spark)
    return either_spark


@pytest.fixture
def shard(tmp_path):
    made = Shard(tmp_path)
    yield made
    made.client.close()


def held(values):
    """The rows of a dictionary from key to value, each once."""
    return Counter(values.items())


def frame(spark, values, columns=COLUMNS):
    return spark.createDataFrame([(*key, *val) for key, val in values], columns)


def test_an_upsert_changes_the_keys_that_it_names_and_no_other(spark, shard):
    values = {(i, None if i % 4 == 0 else "a"): (i, f"s{i}") for i in range(40)}
    table = shard.table(spark)
    assert table.upsert(frame(spark, values.items())) == 40, "into a shard that was never written"
    assert shard.rows() == held(values)
    start = shard.upper()
    assert table.upsert(frame(spark, values.items())) == 0
    assert shard.upper() == start, "unchanged rows write nothing"
    given = {(0, None): (0, "s0"), (4, None): (5, "new"), (5, "a"): (None, "s5"), (99, "b"): (1, None)}
    values |= given
    assert table.upsert(frame(spark, given.items())) == 2 + 2 + 1
    assert shard.rows() == held(values)
    assert shard.updates(start) == 5
    gone = {(6, "a"): (None, None), (100, "a"): (None, None)}
    assert table.upsert(frame(spark, gone.items())) == 1, "a row without values removes its key"
    del values[6, "a"]
    assert shard.rows() == held(values)
    assert table.upsert(frame(spark, []).where("id < 0")) == 0


def test_a_column_that_another_process_adds_after_the_table_was_opened(spark, shard):
    table = shard.table(spark)
    shard.add([((1, "a"), (1, "s1"))])
    wider = Schema.from_ddl("id BIGINT NOT NULL, area STRING", "n INT, s STRING, note STRING")
    shard.client.evolve_schema(shard.id, wider)
    shard.schema = wider
    columns = f"{COLUMNS}, note STRING"
    assert table.upsert(frame(spark, [((2, "a"), (2, "s2", "new"))], columns)) == 1
    rows = frame(spark, [((3, "a"), (3, "s3", "new"))], columns)
    stores = {"shard": str(shard.id), "blob": shard.location.blob, "consensus": shard.location.consensus}
    rows.write.format("persist").options(**stores).mode("append").save()
    assert table.delete("note = 'new' AND n = 3") == 1
    assert shard.rows() == held({(1, "a"): (1, "s1", None), (2, "a"): (2, "s2", "new")})


def test_the_last_row_of_a_key_wins(spark, shard):
    table = shard.table(spark)
    rows = [
        ((1, "a"), (1, "x")),
        ((1, "a"), (3, "z")),
        ((1, "a"), (2, "y")),
        ((2, "a"), (7, "x")),
        ((2, "a"), (7, "x")),
    ]
    with pytest.raises(
        InvalidUsage, match=r'several different rows for key \{"id":1,"area":"a"\}.*: set order_by to a column'
    ):
        table.upsert(frame(spark, rows))
    with pytest.raises(InvalidUsage, match="missing: s"):
        table.upsert(frame(spark, rows).drop("s"))
    assert shard.upper() == 0
    table.upsert(frame(spark, rows), order_by="n")
    assert shard.rows() == held({(1, "a"): (3, "z"), (2, "a"): (7, "x")})
    assert table.upsert(frame(spark, [((1, "a"), (2, "late")), ((2, "a"), (8, "new"))]), order_by="n") == 2
    assert shard.rows() == held({(1, "a"): (3, "z"), (2, "a"): (8, "new")})
    logged = [
        (1, "a", 1, "first", 10, "u"),
        (1, "a", 2, "gone", 12, "d"),
        (2, "a", 1, "kept", 11, "u"),
        (3, "a", 1, "q", 9, "d"),
    ]
    log = spark.createDataFrame(logged, f"{COLUMNS}, at BIGINT, op STRING")
    with pytest.raises(InvalidUsage, match="not in the shard's schema: op"):
        table.upsert(log, order_by="at")
    table.upsert(log, order_by="at", delete_when="op = 'd'")
    assert shard.rows() == held({(2, "a"): (1, "kept")})
    table.upsert(frame(spark, [((2, "a"), (1, "kept"))]), delete_when=F.col("id") == 2)
    assert shard.rows() == Counter()


def test_several_values_of_a_key_are_refused(spark, shard):
    shard.add([((1, "a"), (1, "x")), ((1, "a"), (2, "x")), ((2, "a"), (1, "x"))])
    before, table = shard.rows(), shard.table(spark)
    with pytest.raises(Exception, match="the shard holds 2 values of key"):
        table.upsert(frame(spark, [((1, "a"), (5, "y"))]))
    assert shard.rows() == before
    assert table.upsert(frame(spark, [((2, "a"), (5, "y"))])) == 2


@pytest.mark.parametrize("order_by", [None, "n"])
def test_values_that_others_write_before_the_append(spark, shard, monkeypatch, order_by):
    """Between the read and the append, another writer changes two of the run's keys, and two others."""
    values = {(i, "a"): (i, "old") for i in range(10)}
    shard.add(values.items())
    land, rivals = Attempt.land, [((2, "a"), (50, "rival")), ((3, "a"), (0, "rival")), ((7, "a"), (70, "rival"))]

    def later(attempt, *args, **more):
        if rivals:
            theirs = dict(rivals)
            rivals.clear()
            shard.add([(key, values[key]) for key in theirs], -1)
            shard.add([*theirs.items(), ((20, "b"), (20, "rival"))])
            values.update(theirs)
            values[20, "b"] = (20, "rival")
        return land(attempt, *args, **more)

    monkeypatch.setattr(Attempt, "land", later)
    given = {(i, "a"): (10 + i, "mine") for i in range(1, 5)}
    shard.table(spark).upsert(frame(spark, given.items()), order_by=order_by)
    theirs = {(2, "a"): (50, "rival")} if order_by == "n" else {}
    assert not rivals
    assert shard.rows() == held(values | given | theirs)


@pytest.mark.parametrize("seed", range(draws(1)))
def test_random_upserts_and_deletes_end_as_a_dictionary_would(spark, shard, seed):
    rng, values, table = random.Random(seed), {}, shard.table(spark)
    for turn in range(4):
        given = {}
        for _ in range(30):
            key = (rng.randrange(25), rng.choice(["a", None]))
            given[key] = (None, None) if rng.random() < 0.2 else (rng.randrange(3), rng.choice(["x", None]))
        table.upsert(frame(spark, given.items()).repartition(1 + turn % 2))
        values = {key: val for key, val in (values | given).items() if val != (None, None)}
        assert shard.rows() == held(values)
        low = rng.randrange(25)
        assert table.delete(f"id = {low} OR n = 2") == sum(key[0] == low or val[0] == 2 for key, val in values.items())
        values = {key: val for key, val in values.items() if key[0] != low and val[0] != 2}


def test_writers_of_one_table_at_once_lose_and_double_nothing(local_spark, shard):
    """Two write every key again and again, one adds rows and takes some away, one compacts on executors. Each key ends with the last value
    of one of the two.
    """
    turns, keys, failed = 3, range(40), []

    def upserts(me):
        for turn in range(turns):
            values = {(key, "a"): (turn, f"{me}-{turn}") for key in keys}
            shard.table(local_spark).upsert(frame(local_spark, values.items()))

    def adds():
        writer = shard.table(local_spark)
        for turn in range(turns):
            rows = frame(local_spark, [((1000 + turn, "b"), (turn, "added"))])
            stores = {"blob": shard.location.blob, "consensus": shard.location.consensus, "shard": str(shard.id)}
            rows.write.format("persist").options(**stores).mode("append").save()
            writer.delete(f"id = {1000 + turn - 1} AND area = 'b'")

    def compacts():
        for _ in range(turns):
            shard.table(local_spark).optimize(full=True, on_executors=True).collect()

    def caught(act, *given):
        try:
            act(*given)
        except Exception as error:  # noqa: BLE001 - shown below
            failed.append(error)

    register(local_spark)
    acts = [(upserts, "one"), (upserts, "two"), (adds,), (compacts,)]
    threads = [threading.Thread(target=caught, args=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    rows = shard.rows()
    assert set(rows.values()) == {1}
    assert sorted(key for key, _ in rows) == [*((key, "a") for key in keys), (1000 + turns - 1, "b")]
    assert {value[1] for _, value in rows} <= {f"one-{turns - 1}", f"two-{turns - 1}", "added"}
    assert verify_shard(shard.client.machine(shard.id)).findings == []
