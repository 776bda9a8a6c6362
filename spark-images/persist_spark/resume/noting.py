"""Write tasks note here what they staged, for another driver of their run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from persist_engine import StagingNote, StagingNotes
from persist_engine.rows.schema import Schema

from persist_spark.resume.key_ranges import KeyRange

JOB_BYTES = 16

if TYPE_CHECKING:
    from persist_spark.partitions import ExecutorStore, StagedBatch


@dataclass(frozen=True, slots=True)
class Noted:
    """The job and the run of a task. The driver sends it to executors."""

    sink_id: str
    run: bytes
    """The name of the run, which its token contains."""
    job: bytes
    """JOB_BYTES random bytes that identify the job. The tasks of a job have disjoint ranges of keys."""


class Noting:
    """The note of one task, made while the rows of the task pass."""

    def __init__(self, noted: Noted, schema: Schema) -> None:
        self._noted, self._range = noted, KeyRange(schema)

    def add(self, rows: pa.RecordBatch) -> None:
        """Extends the range of keys by these flat rows."""
        self._range.add(rows)

    def put(self, store: ExecutorStore, staged: StagedBatch, *, errors: int, low: int, high: int) -> None:
        """Stores the note of the batch that was staged from the rows. Stores nothing when there is no batch or the keys have no range.
        Raises Unavailable when the store failed for too long; the note may then be stored or not.
        """
        texts = self._range.texts()
        if staged.batch is None or texts is None:
            return
        noted = self._noted
        note = StagingNote(
            shard_id=store.shard_id,
            sink_id=noted.sink_id,
            run=noted.run,
            job=noted.job,
            batch=staged.batch,
            rows=staged.rows,
            errors=errors,
            least_time=staged.least_time,
            low=low,
            high=high,
            least=texts[0],
            greatest=texts[1],
        )
        StagingNotes(store, noted.sink_id, noted.run).put(note)
