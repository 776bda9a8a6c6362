"""What a run tells while it goes on (JSON lines) and at its end (one JSON object: termination log, file, last line of
stdout).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from persist_engine.base.env import Env

from persist_spark.failures import Failure

#: Often enough to see that a run is alive, seldom enough not to drown its log.
PROGRESS_INTERVAL_S = 5.0
#: Where the kubelet takes a container's last words from.
TERMINATION_LOG = Path("/dev/termination-log")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    """One finished run. Times of the shard in ms; None where nothing was appended."""

    run_id: str
    lower: int | None = None
    upper: int | None = None
    rows_read: int = 0
    updates_written: int = 0
    executors: int = 0
    already_done: bool = False

    def to_json(self, *, duration_ms: int, failure: Failure | None = None) -> dict[str, Any]:
        """The run report of the contract with the operator."""
        return {
            "type": "Sink",
            "outcome": "Failed" if failure else "Succeeded",
            "class": failure.failure_class.value if failure else None,
            "message": failure.message if failure else self._message(),
            **asdict(self),
            "duration_ms": duration_ms,
        }

    def _message(self) -> str:
        if self.already_done:
            return f"run {self.run_id} was appended before; nothing was written"
        return f"wrote {self.updates_written} updates at [{self.lower},{self.upper})"


def write_report(report: dict[str, Any], *, path: Path | None, stdout: TextIO) -> None:
    """Put `report` at `path` (None: the termination log if there is one) and as the last line of `stdout`.

    A report that cannot be written to a file is still on stdout: that failure must not hide the run's outcome.
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
    """Structured log: one JSON object a line, each with the time, the sink, the run and the shard. Thread-safe."""

    def __init__(self, stream: TextIO, env: Env, **fields: str) -> None:
        self._stream, self._env, self._fields = stream, env, fields
        self._lock = threading.Lock()

    def event(self, event: str, **fields: Any) -> None:
        """Write one line."""
        line = json.dumps({"time_ms": self._env.now_ms(), "event": event, **self._fields, **fields}, default=str)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


class StageTracker(Protocol):
    """The part of Spark's status tracker that is asked."""

    def getActiveStageIds(self) -> list[int]:  # noqa: N802
        """Ids of the running stages."""

    def getStageInfo(self, stageId: int) -> Any:  # noqa: N802, N803
        """What is known of a stage, or None."""


@contextmanager
def progress_lines(log: Log, tracker: StageTracker, *, interval_s: float = PROGRESS_INTERVAL_S) -> Iterator[None]:
    """While the body runs, log every `interval_s` how many tasks of the active stages are done. The thread is gone
    afterwards.
    """
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
