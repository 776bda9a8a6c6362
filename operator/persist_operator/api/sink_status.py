"""The status of a SparkSink as a value.

Fields have the names that `kubectl explain sparksink.status` shows. Times are texts, as in the resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from persist_operator.api.blocks import Block

AttemptOutcome = Literal["Succeeded", "Failed", "Stopped"]
DriverPhase = Literal["Creating", "Pending", "Running", "Succeeded", "Failed", "Lost", "Deleted"]
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
class Progress(Block):
    """What the last successful run wrote, as far as its driver reported it."""

    upper: str | None = None
    input_upper: str | None = None
    rows_read: int | None = None
    updates_written: int | None = None
    last_commit_time: str | None = None

    @classmethod
    def reported(cls, report: Mapping[str, Any], *, end: str) -> Progress:
        """From the report of a driver that ended at `end`. An earlier attempt may have committed and been lost with its numbers: then the
        numbers on the status would belong to the run before.
        """
        done = bool(report.get("already_done"))

        def text(name: str) -> str | None:
            return None if report.get(name) is None else str(report[name])

        def number(name: str) -> int | None:
            value = report.get(name)
            return value if isinstance(value, int) and not done else None

        return cls(
            upper=text("upper"),
            input_upper=text("input_upper"),
            rows_read=number("rows_read"),
            updates_written=number("updates_written"),
            last_commit_time=end,
        )


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
    progress: Progress = Progress()
    last_failure: LastFailure = LastFailure()
    schedule: Ticks = Ticks()
    last_handled_requests: Mapping[str, str] | None = None
    history: tuple[Attempt, ...] | None = None
    conditions: tuple[Mapping[str, Any], ...] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the status shows an attempt that has not ended."""
        return self.driver.phase in UNDER_WAY
