"""The status of a SparkSink as a value.

Fields have the names that `kubectl explain sparksink.status` shows. Times are texts, as in the resource.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from persist_operator.api import times
from persist_operator.api.blocks import Block

AttemptOutcome = Literal["Succeeded", "Failed", "Stopped"]
DriverPhase = Literal["Creating", "Pending", "Running", "Succeeded", "Failed", "Lost", "Deleted"]
RunningStage = Literal["Reading", "Appending", "Streaming", "StandingBy", "Proven", "Differs"]
#: The stages of a driver on standby.
STANDBY_STAGES: frozenset[RunningStage | None] = frozenset({"StandingBy", "Proven", "Differs"})
RolloutPhase = Literal["Starting", "CatchingUp", "ReadyToPromote", "Promoting", "RolledBack"]
#: The longest progress text of a driver, and the greatest number in it that the resource definition allows.
_TOLD_MAX, _NUMBER_MAX = 1024, 2**63 - 1
#: The greatest time of a frontier.
_TIME_MAX = 2**64 - 1
#: The last second of the year 9999.
_TIME_MAX_MS = 253_402_300_799_000
#: Phases of a driver that has not ended.
UNDER_WAY: frozenset[DriverPhase | None] = frozenset({"Creating", "Pending", "Running"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(Block):
    """The newest run. `first_attempt` is the number of the first attempt with this run's id."""

    number: int | None = None
    id: str | None = None
    revision: str | None = None
    shard_id: str | None = None
    input_shard_id: str | None = None
    first_attempt: int | None = None
    state: Literal["Running", "Succeeded", "Failed", "Skipped"] | None = None
    scheduled_time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState(Block):
    """The driver of the newest attempt."""

    pod_name: str | None = None
    phase: DriverPhase | None = None
    start_time: str | None = None
    end_time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCounts(Block):
    """Executors of the attempt that is under way."""

    running: int | None = None
    pending: int | None = None
    failed: int | None = None
    selector: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProgress(Block):
    """The progress that the running driver reports. Absent when no driver runs, or it has reported nothing yet."""

    stage: RunningStage | None = None
    rows_read: int | None = None
    errors: int | None = None
    bytes_read: int | None = None
    updates_written: int | None = None
    batches: int | None = None
    tasks: int | None = None
    tasks_done: int | None = None
    task_seconds: int | None = None
    gc_seconds: int | None = None
    shuffle_bytes: int | None = None
    lag_seconds: int | None = None
    compared: int | None = None
    missing: int | None = None
    extra: int | None = None
    upper: str | None = None
    input_upper: str | None = None
    fresh_time: str | None = None
    observed_time: str | None = None

    @classmethod
    def parse(cls, text: str | None) -> RunningProgress | None:
        """Parses the report of a driver. None for an invalid text: the driver runs the user's code, so the text may be anything. A number
        that the resource definition does not allow counts as absent.
        """
        if text is None or len(text) > _TOLD_MAX:
            return None
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("stage") not in get_args(RunningStage):
            return None

        def number(name: str) -> int | None:
            return _number(document, name)

        def time(name: str) -> str | None:
            value = number(name)
            return None if value is None else str(value)

        def seconds(name: str) -> int | None:
            value = number(name)
            return None if value is None else value // 1000

        fresh_ms = number("fresh_ms")
        return cls(
            stage=document["stage"],
            rows_read=number("rows_read"),
            errors=number("errors"),
            bytes_read=number("bytes_read"),
            updates_written=number("updates_written"),
            batches=number("batches"),
            tasks=number("tasks"),
            tasks_done=number("tasks_done"),
            task_seconds=seconds("task_ms"),
            gc_seconds=seconds("gc_ms"),
            shuffle_bytes=number("shuffle_bytes"),
            lag_seconds=seconds("lag_ms"),
            compared=number("compared"),
            missing=number("missing"),
            extra=number("extra"),
            upper=time("upper"),
            input_upper=time("input_upper"),
            fresh_time=None if fresh_ms is None or fresh_ms > _TIME_MAX_MS else times.to_text(fresh_ms),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Block):
    """The results of the last ended run, if its driver reported them, and the progress of the running driver."""

    upper: str | None = None
    input_upper: str | None = None
    rows_read: int | None = None
    errors: int | None = None
    updates_written: int | None = None
    missing: int | None = None
    extra: int | None = None
    last_commit_time: str | None = None
    running: RunningProgress = RunningProgress()

    @classmethod
    def reported(cls, report: Mapping[str, Any], *, end: str) -> Progress:
        """From the report of a driver that ended at `end`. If an earlier attempt committed and was lost with its numbers, the numbers are
        absent, because those on the status belong to the run before. A number that the resource definition does not allow counts as absent.
        """
        done = bool(report.get("already_done"))

        def time(name: str) -> str | None:
            found = _number(report, name, most=_TIME_MAX)
            return None if found is None else str(found)

        def number(name: str) -> int | None:
            return None if done else _number(report, name)

        return cls(
            upper=time("upper"),
            input_upper=time("input_upper"),
            rows_read=number("rows_read"),
            errors=number("errors"),
            updates_written=number("updates_written"),
            missing=number("missing"),
            extra=number("extra"),
            last_commit_time=end,
        )


def _number(document: Mapping[str, Any], name: str, *, most: int = _NUMBER_MAX) -> int | None:
    """A whole number from 0 to `most` in a driver's document; None for any other value."""
    value = document.get(name)
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
    return value if is_number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure(Block):
    """The last attempt that failed."""

    failure_class: str | None = field(default=None, metadata={"wire": "class"})
    reason: str | None = None
    exit_code: int | None = None
    pod_name: str | None = None
    time: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState(Block):
    """The rollout of a new revision beside the running driver (`status.driver`): it is in progress, or was rolled back. `driver` is the new
    revision's driver.
    """

    state: RolloutPhase | None = None
    from_revision: str | None = field(default=None, metadata={"wire": "from"})
    to_revision: str | None = field(default=None, metadata={"wire": "to"})
    start_time: str | None = None
    promote_time: str | None = None
    run_number: int | None = None
    run_id: str | None = None
    attempt: int | None = None
    driver: DriverState = DriverState()
    failures: int | None = None
    next_attempt_time: str | None = None
    lag_seconds: int | None = None
    compared: int | None = None
    missing: int | None = None
    extra: int | None = None
    message: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether the rollout is in progress."""
        return self.state not in {None, "RolledBack"}

    @property
    def run(self) -> RunState:
        """The run of the new revision."""
        return RunState(number=self.run_number, id=self.run_id, revision=self.to_revision, state="Running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness(Block):
    """The shard has all rows that the input had at `time`."""

    time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks(Block):
    """The last and the next tick of a Scheduled sink, and its last success."""

    last_time: str | None = None
    next_time: str | None = None
    last_success_time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Block):
    """One attempt that ended."""

    attempt: int | None = None
    run: str | None = None
    revision: str | None = None
    start_time: str | None = None
    end_time: str | None = None
    outcome: AttemptOutcome | None = None
    failure_class: str | None = field(default=None, metadata={"wire": "class"})
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStatus(Block):
    """The whole status. `conditions` are as `api.conditions` renders them."""

    observed_generation: int | None = None
    active_revision: str | None = None
    attempt: int | None = None
    consecutive_failures: int | None = None
    next_attempt_time: str | None = None
    run: RunState = RunState()
    driver: DriverState = DriverState()
    executors: ExecutorCounts = ExecutorCounts()
    rollout: RolloutState = RolloutState()
    progress: Progress = Progress()
    freshness: Freshness = Freshness()
    last_failure: LastFailure = LastFailure()
    schedule: Ticks = Ticks()
    last_handled_requests: Mapping[str, str] | None = None
    history: tuple[Attempt, ...] | None = None
    conditions: tuple[Mapping[str, Any], ...] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the status shows an attempt that has not ended."""
        return self.driver.phase in UNDER_WAY
