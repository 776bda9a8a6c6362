"""The batches of the corrections of a Mirror have ranges of keys that share no more than their ends. A hot key is in several of them."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from envelope_run import Target
from persist_spark import sink
from persist_spark.envelopes import corrected, persisted, sketch
from persist_spark.failures import classify
from persist_spark.partitions import blob_at
from persist_spark.report import SinkReport
from persist_spark.spec import Envelope, EnvelopeType, Input, Write
from pyspark.errors import PythonException

MIRROR = Envelope(type=EnvelopeType.MIRROR)
pytestmark = [pytest.mark.spark, pytest.mark.slow]
Row = tuple[int | None, str | None, float | None]


@pytest.fixture
def target(make_target, monkeypatch) -> Target:
    """A shard of keys of two fields. Few rows already make several tasks."""
    monkeypatch.setattr(corrected, "SMALL_TASK_BYTES", 1 << 12)
    monkeypatch.setattr(persisted.frames, "SMALL_TASK_BYTES", 1 << 12)
    monkeypatch.setattr(sketch, "SMALL_TASK_BYTES", 1 << 12)
    return make_target("id BIGINT, name STRING", "score DOUBLE")


def mirror(target: Target, rows: Sequence[Row], *, tasks: int | None) -> SinkReport:
    """A Mirror of `rows` in several Parquet files."""
    target.runs += 1
    folder = target.folder / f"files{target.runs}"
    folder.mkdir()
    schema = pa.schema({"id": pa.int64(), "name": pa.string(), "score": pa.float64()})
    for number in range(3):
        each = [dict(zip(schema.names, row, strict=True)) for row in rows[number::3]]
        pq.write_table(pa.Table.from_pylist(each, schema), folder / f"{number}.parquet")
    spec = target.spec([], "id BIGINT", MIRROR, write=Write(parallelism=tasks))
    return sink.run_sink(target.spark, replace(spec, input=Input(format="parquet", options={"path": str(folder)})))


def newest_parts(target: Target) -> list[pa.Table]:
    """The updates of each part that the last run appended."""
    newest = list(target.client.machine(target.id).refresh().trace.batches())[-1]
    upper = target.client.recent_upper(target.id).time
    blob = blob_at(target.location.blob)
    with (
        target.client.open_leased_reader(target.id, purpose="test") as reader,
        reader.snapshot(upper - 1) as snapshot,
    ):
        parts = [part for part in snapshot.lease_parts() if part.part in newest.parts]
        return [pa.concat_tables(part.fetch(blob)) for part in parts]


@contextmanager
def small_tasks(target: Target, size_bytes: int) -> Iterator[None]:
    """Within the block, Spark makes tasks of about so many bytes."""
    conf = target.spark.conf
    wanted = {
        "spark.sql.adaptive.advisoryPartitionSizeInBytes": f"{size_bytes}b",
        "spark.sql.adaptive.coalescePartitions.minPartitionSize": f"{size_bytes}b",
    }
    for name, value in wanted.items():
        conf.set(name, value)
    yield
    for name in wanted:
        conf.unset(name)


def contents(target: Target) -> list[tuple[int | None, str | None, float | None, int]]:
    upper = target.client.recent_upper(target.id).time
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        rows = reader.snapshot(upper - 1).to_table().to_pylist()
    return [(row["key"]["id"], row["key"]["name"], row["val"]["score"], row["diff"]) for row in rows]


def counted(rows: Sequence[Row]) -> list[tuple[int | None, str | None, float | None, int]]:
    """The rows, each once with the number of its copies, in the order of a read: nulls last."""
    counts = Counter(rows)
    return sorted(((*row, count) for row, count in counts.items()), key=lambda row: [(f is None, f) for f in row])


def ranges(parts: Sequence[pa.Table]) -> list[tuple[int, int]]:
    """The least and the greatest id of each part, in order."""
    ids = [pc.struct_field(part.column("key"), "id") for part in parts]
    return sorted((pc.min(each).as_py(), pc.max(each).as_py()) for each in ids)


@pytest.mark.parametrize("is_sketched", [True, False], ids=["sketched", "whole"])
@pytest.mark.parametrize("tasks", [None, 4], ids=["by bytes", "four tasks"])
def test_batches_of_corrections_have_ranges_of_keys_of_their_own(target, monkeypatch, is_sketched, tasks):
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 0 if is_sketched else 1 << 40)
    rng = random.Random(4)
    rows: list[Row] = [(index, f"n{rng.random()}", rng.random()) for index in range(6000)]
    mirror(target, rows, tasks=tasks)
    changed = [(id_, name, -1.0) if id_ % 10 == 0 else (id_, name, score) for id_, name, score in rows]
    changed += [(6000 + index, "new", 0.0) for index in range(600)] + changed[-3:]
    with small_tasks(target, 1 << 13):
        report = mirror(target, changed, tasks=tasks)
    assert (report.rows_read, report.updates_written) == (len(changed), 2 * 600 + 600 + 3)
    parts = newest_parts(target)
    found = ranges(parts)
    assert len(found) == 4 if tasks == 4 else len(found) > 2, found
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found)), found
    assert sum(map(len, parts)) == report.updates_written
    assert contents(target) == counted(changed)


@pytest.mark.parametrize("is_sketched", [True, False], ids=["sketched", "whole"])
def test_the_corrections_of_a_hot_key_are_divided(target, monkeypatch, is_sketched):
    """One key has nearly all rows, and some keys have nulls."""
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 0 if is_sketched else 1 << 40)
    rows: list[Row] = [(7, "hot", float(index)) for index in range(20_000)] + [(None, "x", None), (3, None, 0.0)]
    mirror(target, rows, tasks=4)
    changed: list[Row] = [
        (id_, name, -1.0 - index if index % 10 == 0 else score) for index, (id_, name, score) in enumerate(rows)
    ]
    report = mirror(target, changed, tasks=4)
    parts = newest_parts(target)
    assert report.updates_written == sum(map(len, parts)) == 2 * 2000 + 2
    assert len(parts) == 4
    assert max(map(len, parts)) < 2000
    assert contents(target) == counted(changed)


def test_few_corrections_are_one_batch(target, monkeypatch):
    """Although several tasks made them, for Spark's estimate of the input was too large."""
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 1 << 40)
    rows: list[Row] = [(index, "a", float(index)) for index in range(3000)]
    mirror(target, rows, tasks=None)
    changed = [*rows[:-4], *((id_, name, -1.0) for id_, name, _ in rows[-4:])]
    with small_tasks(target, 1 << 10):
        report = mirror(target, changed, tasks=None)
    assert report.updates_written == 8
    assert len(newest_parts(target)) == 1
    assert contents(target) == counted(changed)
    with small_tasks(target, 1 << 10):
        assert mirror(target, changed, tasks=None).updates_written == 0
    assert contents(target) == counted(changed)


def test_a_run_starts_over_when_executors_take_its_copy_of_the_corrections_with_them(target, monkeypatch):
    """Spark cannot compute these rows again, and a second reading of the input might make others."""
    monkeypatch.setattr(sketch, "SKETCHED_BYTES", 1 << 40)
    rows: list[Row] = [(index, "a", float(index)) for index in range(3000)]
    mirror(target, rows, tasks=3)
    real, lost = corrected.corrected, []

    def losing(*given: object, **more: object) -> corrected.Corrected:
        made = real(*given, **more)
        if len(lost) < sink.LOST_COPIES_MAX:
            copies = dict(target.spark.sparkContext._jsc.getPersistentRDDs())
            lost.append(len([copy.unpersist(True) for copy in copies.values()]))
        return made

    monkeypatch.setattr(corrected, "corrected", losing)
    changed = [*rows[:-40], *((id_, name, -1.0) for id_, name, _ in rows[-40:])]
    assert mirror(target, changed, tasks=3).updates_written == 80
    assert len(lost) == sink.LOST_COPIES_MAX
    assert all(lost), "each round had a copy to lose"
    assert contents(target) == counted(changed)


@pytest.mark.parametrize("tasks", [1, 2], ids=["one task", "two tasks"])
@pytest.mark.parametrize("field", ["key.k.z", "val.p.x", "val.p.q.y"])
def test_a_null_in_a_not_null_field_of_a_struct_is_refused_by_name(make_target, tasks, field):
    """However many tasks make the corrections. The JVM, which copies them, would only say that a value is null."""
    target = make_target("k STRUCT<z: INT NOT NULL>", "p STRUCT<x: INT NOT NULL, q: STRUCT<y: STRING NOT NULL>>")
    columns = "k STRUCT<z: INT>, p STRUCT<x: INT, q: STRUCT<y: STRING>>"
    write = Write(parallelism=tasks)
    rows = [{"k": {"z": one}, "p": {"x": one, "q": {"y": "a"}} if one % 2 else None} for one in range(8)]
    target.run(rows, columns, MIRROR, write=write)
    target.run([*rows[1:], {"k": {"z": 8}, "p": {"x": 8, "q": None}}], columns, MIRROR, write=write)
    before = target.state()
    _, *above, last = field.split(".")
    bad = {"k": {"z": 9}, "p": {"x": 9, "q": {"y": "b"}}}
    reduce(lambda within, name: within[name], above, bad)[last] = None
    with pytest.raises(PythonException) as refused:
        target.run([*rows[1:], bad], columns, MIRROR, write=write)
    failure = classify(refused.value)
    assert (failure.exit_code, failure.message) == (72, f"{field} is NOT NULL and null in 1 rows")
    assert target.state() == before
