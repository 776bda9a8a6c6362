"""A small Mirror: the driver compares both sides itself. If it cannot, tasks do, and the shard then holds the same rows."""

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from all_types import KEY, SCHEMA, VALUE, rows_of_all_types
from mirror_files import Files, rows_of
from persist_spark.envelopes import sketch, sketched, small

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _small_inputs_are_sketched(monkeypatch) -> None:
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 0)


@pytest.fixture
def by_tasks(monkeypatch) -> list[str]:
    """What tasks did, in place of the driver."""
    done: list[str] = []
    for name in ("desired_sums", "persisted_sums", "staged_corrections"):
        monkeypatch.setattr(sketched, name, noting(done, getattr(sketched, name)))
    return done


def noting(done: list[str], function: Any) -> Any:
    def noted(*args: Any, **more: Any) -> Any:
        done.append(function.__name__)
        return function(*args, **more)

    return noted


def texts(names: list[str]) -> pa.Table:
    return pa.table({"id": pa.array(range(len(names))), "name": names})


def all_types(seed: int, count: int) -> pa.Table:
    """Rows with the names of SCHEMA."""
    names = [field.name for field in (*SCHEMA.key, *SCHEMA.val)]
    rows = rows_of_all_types(seed, count).rename_columns(names)
    return rows.filter(rows.column("name").is_valid())  # NOT NULL


def test_rows_of_all_types_need_no_tasks(make_target, by_tasks):
    """The shard then holds what the first Mirror of the same rows writes into another shard."""
    files, rng, rows = Files(make_target(KEY, VALUE)), random.Random(1), all_types(1, 400)
    for turn in range(3):
        files.put(rows.slice(0, 150), rows.slice(150))
        assert files.run().rows_read == rows.num_rows
        fresh = Files(make_target(KEY, VALUE))
        fresh.put(rows)
        fresh.run()
        assert rows_of(files.target) == rows_of(fresh.target)
        assert (files.event("sketched") is None) == (turn == 0)
        assert files.run().updates_written == 0
        rows = pa.concat_tables(
            [rows.take(rng.sample(range(rows.num_rows), rows.num_rows - 10)), all_types(10 + turn, 10)]
        )
    assert by_tasks == []


@pytest.mark.parametrize(
    ("change", "done"),
    [
        ("few rows", []),
        ("a long text", ["staged_corrections"]),
        ("many copies of a row", ["staged_corrections"]),
        ("many rows", ["desired_sums"]),
        ("a large shard", ["persisted_sums", "staged_corrections"]),
        ("large rows", ["staged_corrections"]),
        ("long texts of the shard", ["staged_corrections"]),
        ("many texts", ["staged_corrections"]),
        ("a small maxResultSize", ["desired_sums", "persisted_sums", "staged_corrections"]),
        ("a wanted parallelism", ["staged_corrections"]),
    ],
)
def test_tasks_do_what_the_driver_cannot_hold(make_target, monkeypatch, by_tasks, change, done):
    """Without a loss: the driver looks at each limit before it writes."""
    monkeypatch.setattr(small, "_ROWS_MORE", 100)
    files, names = Files(make_target("id BIGINT", "name STRING")), [f"n{each}" for each in range(1000)]
    files.put(texts(names))
    files.run()
    changed, parallelism = texts(["changed", *names[1:]]), None
    match change:
        case "a long text":
            changed = texts(["changed" * 40_000, *names[1:]])
        case "many copies of a row":
            changed = pa.concat_tables([texts(names), *[texts(["n0"])] * 500])
        case "many rows":
            changed = texts(names * 3)
        case "a large shard":
            monkeypatch.setattr(small, "SHARD_BYTES_MAX", 10)
        case "large rows":
            monkeypatch.setattr(small, "WITHIN_BYTES_MAX", 1000)
        case "long texts of the shard":
            files.put(texts(["long" * 2000, *names[1:]]))
            files.run()
            monkeypatch.setattr(small, "WITHIN_BYTES_MAX", 6000)
            by_tasks.clear()
        case "many texts":
            monkeypatch.setattr(small, "_TEXT_BYTES", 100)
            monkeypatch.setattr(small, "_LONGER", 0)
        case "a small maxResultSize":
            monkeypatch.setattr(small, "_RESULT_BYTES", 1 << 40)
        case "a wanted parallelism":
            parallelism = 2
    files.put(changed)
    assert files.run(parallelism=parallelism).rows_read == changed.num_rows
    assert files.event("changed_input") is None
    assert by_tasks[: len(done)] == done
    assert bool(by_tasks) == bool(done)
    counted = Counter(repr([row["id"], row["name"]]) for row in changed.to_pylist())
    assert rows_of(files.target) == counted
    assert files.run().updates_written == 0


@pytest.mark.parametrize("null", ["NULL", "CAST(NULL AS STRUCT<x: INT>)"])
@pytest.mark.parametrize("way", ["driver", "tasks"])
def test_a_null_in_the_place_of_a_struct_with_not_null_fields(make_target, monkeypatch, by_tasks, null, way):
    """The driver gets it from Spark as the tasks do."""
    files, kind = Files(make_target("id BIGINT", "at STRUCT<x: INT NOT NULL>")), pa.struct({"x": pa.int32()})
    files.put(pa.table({"id": range(9), "at": pa.array([{"x": each} for each in range(9)], kind)}))
    files.run()
    if way == "tasks":
        monkeypatch.setattr(small, "ROWS_MAX", -1)
    files.run(sql=f"SELECT id, {null} AS at FROM input WHERE id < 3")
    assert rows_of(files.target) == Counter(["[0, None]", "[1, None]", "[2, None]"])
    assert bool(by_tasks) == (way == "tasks")


def test_the_driver_never_gets_many_more_rows_than_it_asks_for(local_spark, tmp_path):
    """However many rows the partitions have."""
    for _ in range(4):
        local_spark.range(1000).coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "_SPREAD", 1)
        rows, seen = local_spark.read.parquet(str(tmp_path / "in")).selectExpr("xxhash64(id) AS h"), []
        partitions = small.partitions_of(rows)
        to_arrow = type(rows).toArrow
        patch.setattr(type(rows), "toArrow", lambda frame: seen.append(to_arrow(frame)) or seen[-1])
        assert small.first_rows(rows, 4000, 4000).num_rows == 4000
        assert small.first_rows(rows, 3999, 4000) is None
        assert small.first_rows(rows, 4000, 100) is None
        assert seen[-1].num_rows == 101 * partitions
        patch.setattr(small, "ROWS_MAX", 100)
        assert small.collected_sums(rows, 100, partitions) is None
        assert seen[-1].num_rows <= 101 * partitions


def test_many_changes_of_few_rows_need_no_tasks(make_target, by_tasks):
    """Most buckets are empty, and each changed row is in a bucket of its own."""
    files, rows = Files(make_target("id BIGINT", "name STRING")), 4000
    files.put(texts([f"n{each}" for each in range(rows)]))
    files.run()
    changed = texts([f"{'m' if each % 2 else 'n'}{each}" for each in range(rows)])
    files.put(changed)
    assert files.run().updates_written == rows
    assert sum(rows_of(files.target).values()) == rows
    assert by_tasks == []
