"""The newest numbers of a run, as one JSON object of at most `TEXT_MAX` characters. Collects them from the events of the run's log, and
from Spark's counts. Thread-safe. Must not know: the readers.
"""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

#: The limit of the object as text. The object has a fixed set of fields with numbers of at most 20 digits.
TEXT_MAX = 1024


class Stage(enum.StrEnum):
    """The present stage of a run. A stream has one stage for all of its batches, because a stage that changes every second is of no use."""

    READING = "Reading"
    """Executors read the input, and stage batches."""
    APPENDING = "Appending"
    """The driver appends the staged batches."""
    STREAMING = "Streaming"
    """The stream waits for rows, or commits a batch."""
    STANDING_BY = "StandingBy"
    """The stream writes nothing. It follows the writing driver, and has not yet proven whether it would write the same updates."""
    PROVEN = "Proven"
    """Like StandingBy, but it would have written the same updates as the writing driver; a ReadOnly stream would have written nothing."""
    DIFFERS = "Differs"
    """Like StandingBy, but it would have written other updates; a ReadOnly stream would have written updates."""


class Live:
    """The numbers of one run, by the field names of the JSON object. A number that is not known yet is absent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage: Stage | None = None
        self._numbers: dict[str, int] = {}

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Records one event of the run's log. Ignores unknown events."""
        with self._lock:
            match event:
                case "position":
                    if self._stage is not Stage.STREAMING:
                        self._numbers = {}  # the numbers of a standby do not describe what the stream writes
                    self._stage = Stage.STREAMING
                case "batch":
                    self._add(batches=1, rows_read=fields["rows"], updates_written=fields["updates"])
                    self._add(errors=fields["errors"])
                    self._set(upper=fields["upper"], input_upper=fields["input_upper"], lag_ms=fields["lag_ms"])
                case "fresh":
                    self._set(fresh_ms=fields["fresh_ms"])
                case "standing_by":
                    self._stage = Stage(fields["stage"])
                case "followed":
                    self._stage = Stage(fields["stage"])
                    self._set(**{name: fields[name] for name in ("compared", "missing", "extra", "lag_ms")})
                case "compared_batch":
                    self._stage = Stage(fields["stage"])
                    self._add(batches=1, rows_read=fields["rows"], errors=fields["errors"])
                    self._set(**{name: fields[name] for name in ("compared", "missing", "extra", "lag_ms", "upper")})
                case "minted" if self._stage is not Stage.STREAMING:
                    self._stage = Stage.READING
                case "comparing":
                    self._stage = Stage.READING
                case "staged" if self._stage is not Stage.STREAMING:
                    self._stage = Stage.APPENDING
                    self._set(rows_read=fields["rows"], errors=fields["errors"])

    def count(self, spark: SparkSession) -> None:
        """Records Spark's own counts: tasks of the running stages; bytes; time in tasks and in garbage collection; bytes that shuffles
        wrote; and, while the input of a single run is read, rows. Raises Py4J's errors when Spark has stopped.
        """
        store = spark.sparkContext._jsc.sc().statusStore()
        active = _items(store.activeStages())
        executors = _items(store.executorList(False))  # noqa: FBT003 - Java has no named arguments
        with self._lock:
            self._set(
                tasks=sum(one.numTasks() for one in active),
                tasks_done=sum(one.numCompleteTasks() for one in active),
                bytes_read=sum(one.totalInputBytes() for one in executors),
                task_ms=sum(one.totalDuration() for one in executors),
                gc_ms=sum(one.totalGCTime() for one in executors),
                shuffle_bytes=sum(one.totalShuffleWrite() for one in executors),
            )
            if self._stage is Stage.READING:
                # A stage leaves the list when it ends, so the greatest sum keeps the numbers of ended stages.
                self._numbers["rows_read"] = max(
                    self._numbers.get("rows_read", 0), sum(one.inputRecords() for one in active)
                )

    @property
    def stage(self) -> Stage | None:
        """The stage; None before the first one."""
        with self._lock:
            return self._stage

    def text(self) -> str | None:
        """The JSON object; None before the first stage."""
        with self._lock:
            if self._stage is None:
                return None
            return json.dumps({"stage": self._stage, **self._numbers}, sort_keys=True)

    def _set(self, **numbers: int | None) -> None:
        self._numbers.update({name: number for name, number in numbers.items() if number is not None})

    def _add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self._numbers[name] = self._numbers.get(name, 0) + number


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]
