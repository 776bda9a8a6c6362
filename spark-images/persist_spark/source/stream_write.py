"""`df.writeStream.format("persist")`: each batch of a streaming query is appended once, however often Spark repeats it.

The append commits the number of the batch with the rows, under the id of the query, which Spark keeps in the query's checkpoint. A batch
that Spark repeats after a failure finds its number and appends nothing. The output mode `complete` overwrites the shard's contents.

Invariant (spec 17.12): the first batch of a query commits its number even without rows. So if the shard has no number of a query and the
query continues with a later batch, its checkpoint belongs to another shard, which has the earlier rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from persist_engine import PersistClient, SourceProgress
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, InvalidUsage, InvariantViolated
from persist_engine.base.secrets import without_secrets
from pyspark import TaskContext
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from persist_spark.partitions import StagedBatch, StageTask, sink_settings
from persist_spark.source.commit import StreamProgress, Written, append, overwrite
from persist_spark.source.write import WriteOptions, WritePlan, stage_partition
from persist_spark.spec import TARGET_PART_BYTES

_QUERY_ID = "sql.streaming.queryId"
#: Options of every streaming query, which Spark passes on to the format.
_CHECKPOINT = "checkpointlocation"
_OF_SPARK = (_CHECKPOINT, "queryname")


@dataclass
class StagedPart(WriterCommitMessage):  # type: ignore[misc]  # pyspark has no types here: its classes are Any
    """The result of one task of one batch. It carries everything that the commit needs, because Spark makes a new writer for
    each commit.
    """

    batch: StagedBatch
    task: StageTask
    query_id: str


class ShardStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]  # as above
    """Writes for one streaming query."""

    def __init__(self, options: Mapping[str, str], columns: T.StructType, *, overwrites: bool) -> None:
        self.columns, self.overwrites = columns, overwrites
        self.checkpoint = next((value for name, value in options.items() if name.lower() == _CHECKPOINT), None)
        own = {name: value for name, value in options.items() if name.lower() not in _OF_SPARK}
        self.checked = WriteOptions.parse(own, overwrites=False)

    @cached_property
    def plan(self) -> WritePlan:
        """The schema and the times for the tasks."""
        return WritePlan.of(self.checked, self.columns)

    def __getstate__(self) -> dict[str, Any]:
        """The state for tasks. Tasks must not open the shard, so the driver makes the plan here, when Spark pickles the writer."""
        assert self.plan is not None
        return self.__dict__

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedPart:
        """Stages one partition. A repeated task stages another batch, and Spark passes the message of one of them to `commit`."""
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
        if not query_id:
            raise InvariantViolated("a task of a streaming write does not know the id of its query")
        return StagedPart(stage_partition(self.plan, iterator), self.plan.task, query_id)

    def commit(self, messages: Sequence[StagedPart | None], batchId: int) -> None:  # noqa: N803 - Spark's signature
        """Appends a batch once. A batch without rows changes nothing, with two exceptions: the first batch commits its number, and the
        output mode complete overwrites the contents.

        Raises Fenced when the shard has a later batch of the query, and InvalidUsage when the query continues but the shard has no batch of
        it. Then nothing was written.
        """
        parts = [message for message in messages if message is not None]
        if not parts:
            return
        sink_id = f"spark stream {parts[0].query_id}"
        stored = self._stored(sink_id)
        written = self._written(parts, StreamProgress(sink_id=sink_id, token=str(batchId).encode(), expected=stored))
        if stored is not None and int(stored.token) >= batchId:
            written.delete()
            if int(stored.token) > batchId:
                raise Fenced(
                    f"shard {self.checked.shard} has batch {int(stored.token)} of query {parts[0].query_id}, but the checkpoint repeats "
                    f"batch {batchId}: another run of the query uses the checkpoint, or it is an old copy; nothing was written"
                )
            return
        if stored is None and batchId > 0:
            written.delete()
            raise InvalidUsage(self._of_another_shard(parts[0].query_id, batchId))
        if self.overwrites:
            overwrite(written, where=None, allow_empty=True)
        else:
            append(written, lands_nothing=stored is None)

    def abort(self, messages: Sequence[StagedPart | None], batchId: int) -> None:  # noqa: N803 - Spark's signature
        """Deletes the staged batches of a failed batch. After a failed commit every task has a message, and nothing is deleted here,
        because the append may have happened.
        """
        parts = [message for message in messages if message is not None]
        if parts and len(parts) < len(messages):
            self._written(parts, None).delete()

    def _of_another_shard(self, query_id: str, batch: int) -> str:
        where = "" if self.checkpoint is None else f" in {without_secrets(self.checkpoint)}"
        return (
            f"the checkpoint of query {query_id}{where} continues with batch {batch}, but shard {self.checked.shard} has no earlier batch "
            "of the query: they were written to another shard; nothing was written now. Write to that shard, or start a query with a new "
            "checkpointLocation, which reads its source from the beginning"
        )

    def _stored(self, sink_id: str) -> SourceProgress | None:
        settings = sink_settings(TARGET_PART_BYTES)
        with PersistClient.open(self.checked.location, settings=settings, env=SystemEnv(), create=False) as client:
            return client.progress(self.checked.shard, sink_id)

    def _written(self, parts: Sequence[StagedPart], progress: StreamProgress | None) -> Written:
        return Written(
            location=self.checked.location,
            shard=self.checked.shard,
            task=parts[0].task,
            batches=tuple(part.batch for part in parts),
            progress=progress,
        )
