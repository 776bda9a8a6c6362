"""What runs on executors, without Spark: Arrow in, Arrow out."""

import pyarrow as pa
import pytest
from persist_engine.codec.schema import Schema
from persist_engine.model.ids import ShardId, staged_ms
from persist_spark.failures import FailureClass, TaskFailure, classify
from persist_spark.partitions import StageRows, StageTask


@pytest.mark.parametrize("time", [4, 9], ids=["earlier", "later"])
def test_an_input_that_changed_between_its_readings_is_read_again(tmp_path, time):
    """Of class Configuration the operator would never run it again."""
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


def test_an_executor_stages_at_the_floor_that_the_driver_knows(tmp_path):
    """A floor that clocks set which ran ahead: what is staged before it is refused."""
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
