"""A Mirror of large files: a sketch finds the rows that may differ, and only they are exchanged. The shard then holds the input's rows."""

import os
import random
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from mirror_files import MIRROR, Files, as_counted, put, rows_of
from persist_kit.depth import draws
from persist_spark import frames, staging
from persist_spark.envelopes import sketch, sketched, small
from persist_spark.envelopes.mirror import WantedRows, hashed
from persist_spark.envelopes.sketch import AddUp, SumUp, buckets_of
from persist_spark.failures import FailureClass, classify
from persist_spark.spec import OnError
from pyspark.sql import SparkSession

BUCKETS = 1 << 6
pytestmark = [pytest.mark.spark, pytest.mark.slow]


# -- the sketch alone, without Spark -------------------------------------------------------------------------------------


def side(hashes: list[int], diffs: list[int] | None = None, *, has_errors: bool = False) -> list[dict[str, Any]]:
    """The pieces of one task. Without `diffs` all are 1."""
    columns = {"h": pa.array(hashes, pa.int64())}
    if diffs is not None:
        columns["diff"] = pa.array(diffs, pa.int64())
    if has_errors:
        columns["error"] = pa.array([each % 5 == 0 for each in hashes], pa.bool_())
    batch = pa.RecordBatch.from_pydict(columns)
    halves = [batch.slice(0, len(batch) // 2), batch.slice(len(batch) // 2)]
    return [row for out in SumUp(BUCKETS)(iter(halves)) for row in out.to_pylist()]


def added(pieces: list[dict[str, Any]]) -> sketch.Sums | None:
    """The sums of these pieces, which two tasks add up first. They are those that the driver finds alone."""
    rows = []
    for task in (0, 1):
        batches = [pa.RecordBatch.from_pylist([piece]) for piece in pieces if piece["piece"] % 2 == task]
        rows += [row for out in AddUp()(iter(batches)) for row in out.to_pylist()]
    sums, alone = sketch.total(rows, BUCKETS), sketch.total(pieces, BUCKETS)
    assert (sums is None) == (alone is None)
    if sums is not None:
        assert np.array_equal(sums.net, alone.net)
        assert replace(sums, net=None) == replace(alone, net=None)
    return sums


HASHES = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)


@drawn(max_examples=draws(100))
@given(
    equal=st.lists(HASHES, max_size=30),
    only_desired=st.lists(HASHES, max_size=6),
    only_persisted=st.lists(HASHES, max_size=6),
    cut=st.integers(0, 30),
)
def test_exactly_the_buckets_with_other_rows_differ(equal, only_desired, only_persisted, cut):
    desired, persisted = [*equal[cut:], *only_desired, *equal[:cut]], [*equal, *only_persisted]
    ours = added(side(desired[:cut], has_errors=True) + side(desired[cut:], has_errors=True))
    # An update that was retracted is still among those of the persisted side.
    theirs = added(side(persisted, [-1] * len(persisted)) + side([7, 7, 2**40], [-3, 3, 0]))
    net = Counter(only_desired)
    net.subtract(only_persisted)
    differ = {each % BUCKETS for each, diff in net.items() if diff and each != 0}  # the hash 0 adds nothing, with 2^-64
    assert ours is not None
    assert theirs is not None
    found = sketch.differing(ours, theirs)
    if len(differ) * 4 >= BUCKETS:
        assert found is None
        return
    assert found is not None
    assert set(found.numbers.tolist()) <= differ
    for bucket in differ - set(found.numbers.tolist()):  # sums of different rows that are 0 by the choice of the hashes
        assert sum(each * diff for each, diff in net.items() if each % BUCKETS == bucket) % 2**64 == 0
    errors = sum(each % 5 == 0 for each in desired)
    low, high = sum(each & 0xFFFFFFFF for each in desired), sum((each >> 32) & 0xFFFFFFFF for each in desired)
    assert found.desired.wanted == WantedRows(len(desired), low, high, errors)
    assert found.net[0] == len(only_desired) - len(only_persisted)


def test_pieces_of_two_readings_of_a_partition_are_no_sketch():
    """A repeated task may have read another input. Whatever pieces are of its first reading, the sketch is given up."""
    first, second = (side([1, 2, 3 << 33, each]) for each in (5, 9))
    assert added(first) is not None
    assert added(second) is not None
    changed = [
        number for number, (ours, theirs) in enumerate(zip(first, second, strict=True)) if ours["net"] != theirs["net"]
    ]
    assert changed == [1, 2]
    for number in changed:
        mixed = [ours if ours["piece"] == number else theirs for ours, theirs in zip(first, second, strict=True)]
        assert added(mixed) is None


def test_a_diff_too_large_to_be_added_up_gives_up_the_sketch():
    """2^62 copies leave two bits of each half of a hash, and two such rows overflow their number."""
    for diffs in ([-(2**62), -(2**62)], [-(2**62), 2**62], [-(2**63) + 1, 3], [2**31 + 1, 0]):
        assert added(side([1], [-1]) + side([4 << 32 | 4, 8 << 32 | 8], diffs)) is None
    ours, theirs = added(side([1])), added(side([1, 2, 3], [-1, -(2**31), -(2**31)]))
    assert ours is not None
    assert theirs is not None
    found = sketch.differing(ours, theirs)
    assert found is not None
    assert (found.numbers.tolist(), found.net[0]) == ([2, 3], -(2**32))


def test_a_bucket_whose_sum_cancels_shows_in_the_net_sums():
    """2^31 copies of a row leave 33 bits of its hash in the sum of the bucket, and all of them in the sums of halves."""
    ours, theirs = added(side([1])), added(side([1, 1 << 33], [-1, -(2**31)]))
    assert ours is not None
    assert theirs is not None
    found = sketch.differing(ours, theirs)
    assert found is not None
    assert found.numbers.tolist() == []
    assert found.net == (-(2**31), 0, -(2**32) % 2**63)


def test_few_rows_go_through_few_partitions(monkeypatch):
    def tasks(size_bytes: int | None, differing: int) -> int | None:
        monkeypatch.setattr(sketch, "planned_bytes", lambda _: size_bytes)
        found = sketch.Differing(
            np.arange(differing), 1 << 20, sketch.Sums(np.zeros(0, np.int64), 0, 0, 0, 0), (0, 0, 0)
        )
        return sketch.tasks_within(None, found)

    assert tasks(20 << 20, 20_000) == 1
    assert tasks(0, 0) == 1
    assert tasks(1 << 30, 10_000) == 3
    assert tasks(1 << 32, 1 << 17) is None
    assert tasks(None, 1) is None


# -- whole sinks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["driver", "tasks"])
def small_sketches(request, monkeypatch) -> str:
    """Also small inputs are sketched, by the driver or by tasks. Both ways write the same updates."""
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 0)
    if request.param == "tasks":
        monkeypatch.setattr(small, "ROWS_MAX", -1)
    return request.param


@pytest.fixture
def files(make_target, small_sketches) -> Files:
    return Files(make_target("id BIGINT", "name STRING, score DOUBLE, at STRUCT<x: INT, y: STRING>"))


TYPE = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "score": pa.float64(),
        "at": pa.struct({"x": pa.int32(), "y": pa.string()}),
    }
)


def random_rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    floats = [0.0, -0.0, float("nan"), 1.5, None]
    structs = [None, {"x": None, "y": None}, {"x": 1, "y": None}, {"x": None, "y": "1"}]
    return [
        {
            "id": rng.choice([None, index, index, index]),
            "name": rng.choice([None, "", f"n{index % 7}"]),
            "score": rng.choice(floats),
            "at": rng.choice(structs),
        }
        for index in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_shard_holds_the_rows_of_the_files_after_each_of_many_small_changes(files, seed):
    """With rows that are there several times, nulls, NaN and both zeros. Few rows are exchanged, and an unchanged input needs no sketch."""
    rng = random.Random(seed)
    rows = random_rows(rng, 400)
    for turn in range(4):
        table = pa.Table.from_pylist(rows, TYPE)
        cut = rng.randrange(400)
        files.put(table.slice(0, cut), table.slice(cut))
        report = files.run()
        assert (report.rows_read, rows_of(files.target)) == (len(rows), as_counted(table))
        event = files.event("sketched")
        assert (event is None) == (turn == 0), "the first run finds an empty shard"
        assert event is None or event["differing"] <= 40
        assert files.run().updates_written == 0
        assert files.event("unchanged") is not None
        for _ in range(5):
            rows.pop(rng.randrange(len(rows)))
        rows += random_rows(rng, 5) + rng.sample(rows, 5)
        rng.shuffle(rows)


@pytest.mark.parametrize("sql", [None, "select * from input where id is not null"], ids=["files", "query"])
def test_an_unchanged_mirror_of_files_is_planned_once(files, monkeypatch, sql):
    """The query of a user may shuffle as many rows as it likes, so Spark plans it again."""
    files.put(pa.Table.from_pylist([{"id": number} for number in range(100)], TYPE))
    files.run(sql=sql)
    scanned, seen = staging.scanned, []

    def noted(rows, schema):
        wanted = scanned(rows, schema)
        seen.append(rows.sparkSession.conf.get("spark.sql.adaptive.enabled", "true"))
        return wanted

    monkeypatch.setattr(staging, "scanned", noted)
    # The input is older than the shard, so that no sketch is made of it.
    for file in files.folder.iterdir():
        os.utime(file, (1, 1))
    assert files.run(sql=sql).rows_read == 100
    assert files.event("unchanged") is not None
    assert seen == ["false" if sql is None else "true"]


def test_a_mirror_with_no_digest_and_no_difference_writes_nothing(files):
    table = pa.Table.from_pylist(random_rows(random.Random(1), 100), TYPE)
    files.put(table)
    files.run()
    # A rival's write and its retraction: the shard holds the same rows, and the digest means nothing any more.
    row = {((900,), ("rival", 0.0, None)): 1}
    files.target.write(row)
    files.target.write(dict.fromkeys(row, -1))
    report = files.run()
    assert files.event("sketched")["differing"] == 0
    assert (report.rows_read, report.updates_written) == (100, 0)
    assert files.run().rows_read == 100
    assert files.event("unchanged") is not None


def test_rows_with_so_large_diffs_that_their_sums_are_0_are_removed(files):
    """Of a hash times 2^62 only the two lowest bits of each half count. Two such rows with opposite diffs have no net sums at all."""
    table = pa.Table.from_pylist(random_rows(random.Random(1), 100), TYPE)
    files.put(table)
    files.run()
    flat = files.target.spark.range(900, 1900).selectExpr(
        "id AS k0", "'n' AS v0", "0D AS v1", "CAST(null AS STRUCT<x: INT, y: STRING>) AS v2"
    )
    hidden = hashed(flat, files.target.schema).where(f"h & {3 << 32 | 3} = 0").limit(2).collect()
    files.target.write(
        {((row.k0,), ("n", 0.0, None)): diff for row, diff in zip(hidden, (2**62, -(2**62)), strict=True)}
    )
    assert files.run().updates_written == 2
    assert rows_of(files.target) == as_counted(table)


def test_most_rows_changed_are_all_compared(files):
    def numbered(first: int) -> pa.Table:
        ids = pa.array(range(first, first + 40_000))
        return pa.table(
            [ids, ids.cast(pa.string()), pa.nulls(40_000, pa.float64()), pa.nulls(40_000, TYPE[3].type)], schema=TYPE
        )

    files.put(numbered(0))
    files.run()
    files.put(numbered(50_000))
    report = files.run()
    assert files.event("sketched")["differing"] is None
    assert (report.rows_read, report.updates_written) == (40_000, 80_000)
    assert rows_of(files.target) == as_counted(numbered(50_000))


def test_errors_of_equal_and_of_changed_rows_are_counted(make_target, small_sketches):
    files = Files(make_target("id BIGINT, err STRING", "name STRING"))
    kind = pa.schema({"id": pa.int64(), "name": pa.string(), "err": pa.string()})
    rows = [{"id": each, "name": "n", "err": f"bad {each}" if each % 10 == 0 else None} for each in range(100)]
    collecting = replace(MIRROR, on_error=OnError.COLLECT)
    for turn in range(2):
        rows[10] = {"id": 10, "name": "n", "err": f"worse {turn}"}
        rows[11] = {"id": 11, "name": "n", "err": f"bad, too, {turn}"}
        files.put(pa.Table.from_pylist(rows, kind))
        report = files.run(collecting)
        assert (report.rows_read, report.errors) == (100, 11)
    assert files.event("sketched")["differing"] <= 4
    assert report.updates_written == 4
    assert sum(rows_of(files.target).values()) == 100


@pytest.mark.parametrize("value", ["LIST", "PRICE"])
def test_rows_that_only_spark_can_hash(make_target, small_sketches, monkeypatch, value):
    """The pieces of many tasks are added up by tasks."""
    monkeypatch.setattr(sketch, "_COLLECTED_BYTES_MAX", 0)
    ddl, kind = {"LIST": ("ARRAY<INT>", pa.list_(pa.int32())), "PRICE": ("DECIMAL(20,2)", pa.decimal128(20, 2))}[value]
    files = Files(make_target("id BIGINT", f"v {ddl}"))
    for turn in range(3):
        values = [
            [turn, None] if value == "LIST" else Decimal(turn),
            None,
            *([] if value == "LIST" else Decimal(7) for _ in range(98)),
        ]
        table = pa.table({"id": pa.array(range(100)), "v": pa.array(values, kind)})
        files.put(table.slice(0, 50), table.slice(50))
        assert files.run().updates_written == (100 if turn == 0 else 2)
        assert rows_of(files.target) == as_counted(table)
    assert files.event("sketched")["differing"] <= 2


def ids(changed: dict[int, int]) -> pa.Table:
    """200 rows, of which some have another score."""
    scores = np.arange(200, dtype=float)
    for index, score in changed.items():
        scores[index] = score
    columns = [pa.array(range(200)), pa.array(["n"] * 200), pa.array(scores), pa.nulls(200, TYPE[3].type)]
    return pa.table(columns, schema=TYPE)


@pytest.mark.parametrize(
    ("second", "is_noticed"),
    [({7: -1, 50: -3}, True), ({7: -1, 8: -2, 50: -3, 51: -4}, True), ({7: -1, 8: -2}, False)],
    ids=["a differing row again", "others too", "only others"],
)
def test_an_input_that_changes_between_its_two_readings(files, monkeypatch, second, is_noticed):
    """The shard holds one of the two readings whole, and the next run finds the other."""
    files.put(ids({}))
    files.run()
    first = ids({50: -3} if not is_noticed else {7: -9, 50: -3})
    second_rows = ids({50: -3} | second)
    files.put(first)

    def differing(*args: Any) -> Any:
        put(second_rows, files.folder / "0.parquet")
        return sketch.differing(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sketched, "differing", differing)
        report = files.run()
    assert (files.event("changed_input") is not None) == is_noticed
    assert report.rows_read == 200
    assert rows_of(files.target) == as_counted(second_rows if is_noticed else first)
    files.run()
    assert rows_of(files.target) == as_counted(second_rows)


def test_files_that_are_gone_at_the_second_reading(files, monkeypatch):
    """The failure names the file. It is one that the operator retries, and the next attempt finds the files that are left."""
    files.put(ids({}).slice(0, 100), ids({}).slice(100))
    files.run()
    files.put(ids({7: -1}).slice(0, 100), ids({}).slice(100))

    def differing(*args: Any) -> Any:
        (files.folder / "1.parquet").unlink()
        return sketch.differing(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sketched, "differing", differing)
        with pytest.raises(Exception, match="FILE_NOT_EXIST") as raised:
            files.run()
    failure = classify(raised.value)
    assert failure.failure_class is FailureClass.APPLICATION
    assert f"{files.folder}/1.parquet: gone after the input was listed" in failure.message
    assert rows_of(files.target) == as_counted(ids({}))
    files.run()
    assert rows_of(files.target) == as_counted(ids({7: -1}).slice(0, 100))


def test_a_partitioned_table_of_a_catalog(files, local_spark: SparkSession):
    """Spark lists its files only while it optimizes a query. Each run after the first failed, because it looked for them earlier."""
    files.put(ids({}))
    folder = files.target.folder / "table"
    local_spark.sql(
        f"CREATE TABLE mirrored (id BIGINT, name STRING, part INT) USING parquet PARTITIONED BY (part) LOCATION '{folder}'"
    )
    try:
        for last, unchanged in ((7, False), (7, True), (8, False)):
            local_spark.sql(
                f"INSERT OVERWRITE mirrored SELECT id, 'a', CAST(id % 2 AS INT) FROM range(100) UNION ALL SELECT {last}, 'b', 1"
            )
            files.run(
                sql="SELECT id, name, CAST(part AS DOUBLE) AS score, CAST(NULL AS STRUCT<x: INT, y: STRING>) AS at FROM mirrored"
            )
            assert (files.event("unchanged") is not None) == unchanged
            rows = [[each, "a", each % 2 + 0.0, None] for each in range(100)] + [[last, "b", 1.0, None]]
            assert rows_of(files.target) == Counter(map(repr, rows))
    finally:
        local_spark.sql("DROP TABLE mirrored")


def test_a_sketch_is_made_of_large_files_of_columns_alone(local_spark: SparkSession, tmp_path, monkeypatch):
    spark, path = local_spark, str(tmp_path / "in")
    spark.range(1000).selectExpr("id", "id % 7 as a").write.parquet(path)
    spark.range(1000).write.csv(f"{path}.csv")
    parquet = spark.read.parquet(path)
    assert buckets_of(parquet) is None, "it is small"
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 0)
    for cheap in (parquet, parquet.where("a > 3").selectExpr("id + 1 as id"), parquet.unionAll(parquet)):
        assert buckets_of(cheap) == sketch.BUCKETS_MIN
    dear = [
        spark.read.csv(f"{path}.csv"),
        spark.range(10),
        parquet.join(parquet.withColumnRenamed("a", "b"), "id"),
        parquet.groupBy("a").count(),
        parquet.selectExpr("explode(array(id, a)) as id"),
        parquet.mapInArrow(lambda batches: batches, parquet.schema),
        parquet.orderBy("a").limit(10),
        local_spark.sql("select * from {rows} where a > (select avg(a) from {rows})", rows=parquet),
        local_spark.sql("select id, exists(select 1 from {rows} where a > 9) as a from {rows}", rows=parquet),
    ]
    assert [buckets_of(frame) for frame in dear] == [None] * len(dear)
    monkeypatch.setattr(sketch, "planned_bytes", lambda _: 1 << 40)
    assert buckets_of(parquet) == sketch.BUCKETS_MAX
    assert frames.planned_bytes(parquet) is not None
    newest_ms = max(int(1000 * file.stat().st_mtime) for file in Path(path).glob("*.parquet"))
    assert buckets_of(parquet, newer_than=newest_ms + 1) is None
    assert buckets_of(parquet.unionAll(parquet), newer_than=newest_ms - 1) == sketch.BUCKETS_MAX
