"""The output of a run: a structured log while it runs (JSON lines), and a report at its end (one JSON object in the termination log or a
file, and on the last line of stdout).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from persist_engine.base.env import Env

from persist_spark.failures import Failure

#: The interval of progress lines. It is short enough to show that a run is alive, and long enough to keep its log readable.
PROGRESS_INTERVAL_S = 5.0
#: The file from which the kubelet reads a container's termination message.
TERMINATION_LOG = Path("/dev/termination-log")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    """The report of one run. Times are the shard's, in ms; None when nothing was appended."""

    run_id: str
    lower: int | None = None
    upper: int | None = None
    input_upper: int | None = None
    """For an input that is a shard: the run has read all updates at times before this one."""
    rows_read: int = 0
    errors: int = 0
    """How many of the read rows could not be written and are errors in the shard."""
    updates_written: int = 0
    missing: int | None = None
    """For a run that only compares: the number of rows that the shard lacks. `extra`: the number of rows that it has in excess."""
    extra: int | None = None
    executors: int = 0
    already_done: bool = False
    batches: int | None = None
    """The number of batches that a stream committed. None for a run over a batch source."""
    stopped: bool = False
    """Whether SIGTERM ended a stream."""

    def with_batch(self, done: SinkReport) -> SinkReport:
        """The report of a stream after one more batch. `done`: the report of that batch."""
        return replace(
            self,
            lower=done.lower if self.lower is None else self.lower,
            upper=self.upper if done.upper is None else done.upper,
            input_upper=self.input_upper if done.input_upper is None else done.input_upper,
            rows_read=self.rows_read + done.rows_read,
            errors=self.errors + done.errors,
            updates_written=self.updates_written + done.updates_written,
            missing=None if done.missing is None else (self.missing or 0) + done.missing,
            extra=None if done.extra is None else (self.extra or 0) + done.extra,
            batches=(self.batches or 0) + 1,
        )

    def to_json(self, *, duration_ms: int, failure: Failure | None = None) -> dict[str, Any]:
        """The report in the format that the operator reads."""
        return {
            "type": "Sink",
            "outcome": "Failed" if failure else "Stopped" if self.stopped else "Succeeded",
            "class": failure.failure_class.value if failure else None,
            "message": failure.message if failure else self._message(),
            **asdict(self),
            "duration_ms": duration_ms,
        }

    def _message(self) -> str:
        if self.batches is not None:
            end = "stopped" if self.stopped else "the source has nothing new"
            errors = f", errors: {self.errors}" if self.errors else ""
            if self.missing is not None:
                what = f"rows missing in the shard: {self.missing}, rows too many: {self.extra}"
                return f"compared batches: {self.batches}, {what}{errors}; {end}"
            return f"batches: {self.batches}, updates: {self.updates_written}{errors}; {end}"
        if self.already_done:
            return f"run {self.run_id} was appended before; nothing was written"
        if self.missing is not None:
            what = f"rows missing in the shard: {self.missing}, rows too many: {self.extra}"
            return f"compared with the shard up to {self.upper}: {what if self.missing or self.extra else 'equal'}"
        errors = f"; {self.errors} of {self.rows_read} rows are errors" if self.errors else ""
        return f"wrote {self.updates_written} updates at [{self.lower},{self.upper}){errors}"


def write_report(report: dict[str, Any], *, path: Path | None, stdout: TextIO) -> None:
    """Writes `report` to `path` (None: the termination log, if it exists) and as the last line of `stdout`.

    If the file cannot be written, the report is still on stdout, because that failure must not hide the run's outcome.
    """
    line = json.dumps(report, ensure_ascii=False, sort_keys=True)
    target = path or (TERMINATION_LOG if TERMINATION_LOG.exists() else None)
    if target is not None:
        try:
            target.write_text(line + "\n", encoding="utf-8")
        except OSError as error:
            stdout.write(json.dumps({"event": "report_not_written", "path": str(target), "error": str(error)}) + "\n")
    stdout.write(line + "\n")
    stdout.flush()


class Log:
    """A structured log: one JSON object per line, with the time and the given `fields` (the sink, run and shard). Thread-safe."""

    def __init__(self, stream: TextIO, env: Env, **fields: str) -> None:
        self._stream, self._env, self._fields = stream, env, fields
        self._lock = threading.Lock()
        self.listener: Callable[[str, Mapping[str, Any]], None] = lambda _event, _fields: None
        """Called for each event with the event's own fields, in the thread of the caller."""

    def event(self, event: str, **fields: Any) -> None:
        """Writes one line, and calls the listener."""
        self.listener(event, fields)
        line = json.dumps({"time_ms": self._env.now_ms(), "event": event, **self._fields, **fields}, default=str)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


class StageTracker(Protocol):
    """The part of Spark's status tracker that this module uses."""

    def getActiveStageIds(self) -> list[int]:  # noqa: N802
        """The ids of the running stages."""

    def getStageInfo(self, stageId: int) -> Any:  # noqa: N802, N803
        """The counts of a stage's tasks. None when Spark no longer knows the stage."""


@contextmanager
def progress_lines(log: Log, tracker: StageTracker, *, interval_s: float = PROGRESS_INTERVAL_S) -> Iterator[None]:
    """While the body runs, logs the number of finished tasks of the active stages every `interval_s`. The thread has ended on return."""
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(interval_s):
            for stage_id in tracker.getActiveStageIds():
                info = tracker.getStageInfo(stage_id)
                if info is not None:
                    log.event(
                        "stage",
                        stage=info.stageId,
                        tasks=info.numTasks,
                        done=info.numCompletedTasks,
                        failed=info.numFailedTasks,
                    )

    thread = threading.Thread(target=watch, name="sink-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
