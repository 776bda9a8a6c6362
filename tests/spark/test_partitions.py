"""The functions that executors run: Arrow in, Arrow out. Without Spark."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from persist_engine import Location, PersistClient, ShardId
from persist_engine.base.settings import KIB, MIB, BatchSettings, Settings
from persist_engine.model.ids import staged_ms
from persist_engine.rows.schema import Schema
from persist_kit.depth import draws
from persist_spark import partitions
from persist_spark.columns import RECORD_ROWS
from persist_spark.failures import FailureClass, TaskFailure, classify
from persist_spark.partitions import ReadParts, StageRows, StageTask, grouped
from persist_spark.spec import PARALLELISM_MAX


@pytest.mark.parametrize("time", [4, 9], ids=["earlier", "later"])
def test_an_input_that_changed_between_two_readings_is_an_application_failure(tmp_path, time):
    """The operator runs an Application failure again. It would not run a Configuration failure again."""
    task = StageTask(
        blob=f"file://{tmp_path}",
        shard_id=ShardId("s00000000-0000-0000-0000-000000000001"),
        schema=Schema.from_ddl("id BIGINT"),
        schema_id=0,
        lower=5,
        upper=9,
        time=None,
        target_part_bytes=1 << 20,
    )
    rows = pa.RecordBatch.from_pydict({"k0": pa.array([1, 2], pa.int64()), "time": pa.array([5, time], pa.int64())})
    with pytest.raises(TaskFailure) as raised:
        list(StageRows(task)(iter([rows])))
    failure = classify(RuntimeError(f"Job aborted\n{raised.value}\n\tat org.apache"))
    assert failure.failure_class is FailureClass.APPLICATION
    assert failure.message.startswith(
        f"the input changed while it was read for shard {task.shard_id}: update at time {time} is"
    )


def test_an_executor_stages_no_earlier_than_the_staging_floor(tmp_path):
    """The floor comes from a clock that ran ahead. A part staged before the floor would be refused."""
    floor_ms = 2**47
    task = StageTask(
        blob=f"file://{tmp_path}",
        shard_id=ShardId("s00000000-0000-0000-0000-000000000001"),
        schema=Schema.from_ddl("id BIGINT"),
        schema_id=0,
        lower=5,
        upper=9,
        time=5,
        target_part_bytes=1 << 20,
        staging_floor_ms=floor_ms,
    )
    rows = pa.RecordBatch.from_pydict({"k0": pa.array([i * i * i for i in range(10_000)], pa.int64())})
    list(StageRows(task)(iter([rows])))
    (part,) = (path.name for path in (tmp_path / task.shard_id).rglob("p*"))
    assert staged_ms(part) == floor_ms


class Sized:
    """A part as `grouped` sees it. Real parts of such sizes would first have to be written."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.bytes_estimate = number, size

    def to_bytes(self) -> bytes:
        return b"%d" % self.number


@given(st.lists(st.integers(0, 512 * MIB), max_size=100), st.integers(1, 64))
@drawn(max_examples=draws(30))
def test_grouping_keeps_every_part_in_its_order(sizes, cores):
    groups = grouped([Sized(number, size) for number, size in enumerate(sizes)], cores=cores)
    assert [int(part) for group in groups for part in group] == list(range(len(sizes)))
    assert all(groups)
    assert len(groups) <= PARALLELISM_MAX


@given(st.lists(st.integers(0, 4 * MIB), min_size=1, max_size=60), st.integers(1, 16))
@drawn(max_examples=draws(30))
def test_there_are_no_more_groups_than_cores_while_groups_stay_small(sizes, cores):
    """When the share of a core was rounded down, the remainder became a task of its own after all others."""
    groups = grouped([Sized(number, size) for number, size in enumerate(sizes)], cores=cores)
    within = -(-sum(size + partitions._PART_COST_BYTES for size in sizes) // cores) <= partitions.READ_BYTES_MAX
    assert not within or len(groups) <= cores


def test_the_remainder_of_the_division_is_no_group_of_its_own():
    sizes = [4 * MIB, 4 * MIB, 4 * MIB + 1]
    assert [len(group) for group in grouped([Sized(*each) for each in enumerate(sizes)], cores=2)] == [1, 2]
    assert [len(group) for group in grouped([Sized(*each) for each in enumerate(sizes)], cores=3)] == [1, 1, 1]


def test_groups_are_bounded_in_bytes_and_number():
    large = [Sized(number, 16 * MIB - partitions._PART_COST_BYTES) for number in range(64)]
    assert [len(group) for group in grouped(large, cores=2)] == [4] * 16
    many = [Sized(number, 64 * MIB) for number in range(3 * PARALLELISM_MAX)]
    assert len(grouped(many, cores=2)) <= PARALLELISM_MAX
    assert grouped([], cores=4) == ()
    assert len(grouped([Sized(number, 0) for number in range(8)], cores=8)) == 1, "empty parts are one task"


def test_each_group_is_read_as_negated_flat_rows(tmp_path):
    """However groups are assigned to tasks, the tasks together read every row of the snapshot once."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    schema = Schema.from_ddl("id BIGINT", "name STRING, p STRUCT<x: INT>")
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0, target_part_bytes=16 * KIB))
    rows = [
        (((number,), (f"{number * number:x}", {"x": number % 7})), 3 if number < 8000 else 5, 1 + number % 2)
        for number in range(12_000)
    ]
    with PersistClient.open(location, settings=settings) as client:
        shard = ShardId.new()
        with client.open_writer(shard, schema, purpose="test") as writer:
            writer.compare_and_append(rows[:8000], expected_upper=0, new_upper=5)
            writer.compare_and_append(rows[8000:], expected_upper=5, new_upper=6)
        with client.open_leased_reader(shard, purpose="test") as reader, reader.snapshot(5) as snapshot:
            parts = snapshot.lease_parts()
            assert len(parts) > 10
            read = ReadParts(blob=location.blob, groups=tuple((part.to_bytes(),) for part in parts))
            numbers = pa.array(range(len(parts)), pa.int64())
            tasks = [numbers[:3], numbers[3:3], numbers[3:]]
            batches = [list(read(iter([pa.RecordBatch.from_arrays([task], ["id"])]))) for task in tasks]
    assert batches[1] == []
    table = pa.Table.from_batches([batch for task in batches for batch in task])
    assert table.column_names == ["k0", "v0", "v1", "diff"]
    assert max(batch.num_rows for task in batches for batch in task) <= RECORD_ROWS
    found = sorted(zip(*(table.column(name).to_pylist() for name in ("k0", "v0", "diff")), strict=True))
    assert found == sorted((key[0], val[0], -diff) for (key, val), _, diff in rows)


def test_a_missing_blob_in_an_executor_is_a_storage_failure_in_the_driver(tmp_path):
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0))
    with PersistClient.open(location, settings=settings) as client:
        shard = ShardId.new()
        with client.open_writer(shard, Schema.from_ddl("id BIGINT"), purpose="test") as writer:
            writer.compare_and_append([(((1,), ()), 3, 1)], expected_upper=0, new_upper=5)
        with client.open_leased_reader(shard, purpose="test") as reader, reader.snapshot(4) as snapshot:
            (part,) = snapshot.lease_parts()
            for path in (tmp_path / "blobs" / shard).rglob("p*"):
                path.unlink()
            read = ReadParts(blob=location.blob, groups=((part.to_bytes(),),))
            with pytest.raises(TaskFailure) as raised:
                list(read(iter([pa.RecordBatch.from_arrays([pa.array([0], pa.int64())], ["id"])])))
    failure = classify(RuntimeError(f"Job aborted\n{raised.value}\n\tat org.apache"))
    assert failure.failure_class is FailureClass.STORAGE
