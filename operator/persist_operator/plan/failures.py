"""What a failed driver means: who has to act, whether it counts, whether trying again can help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persist_operator.api.redact import clip, redact
from persist_operator.plan.observed import ActionFailure, Run

#: Exit codes of the run that the driver's report may have had no chance to tell more precisely.
_EXIT: Mapping[int, tuple[str, str]] = {
    70: ("Storage", "StoreFailed"),
    71: ("Fenced", "Fenced"),
    72: ("Configuration", "InvalidConfiguration"),
    73: ("Application", "Diverged"),
}
#: Repeating does not help, a person must look: not one of the store's failures, as which the driver reports it.
_DIVERGED = 73
_INFRASTRUCTURE = {
    "DeletionByPodGC",
    "DeletionByTaintManager",
    "DriverLost",
    "Evicted",
    "EvictionByEvictionAPI",
    "NodeAffinity",
    "NodeLost",
    "NodeShutdown",
    "Preempting",
    "PreemptionByScheduler",
    "Shutdown",
    "Terminated",
    "TerminationByKubelet",
    "UnexpectedAdmissionError",
}
_CLASSES = {"Application", "Infrastructure", "Scheduling", "Storage", "Fenced", "Timeout", "Configuration"}
#: The world failed, not the sink: tried again for as long as it takes.
_UNCOUNTED = {"Storage", "Infrastructure"}
_MESSAGE_MAX = 4096


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. `message` holds the error and the last log lines, redacted."""

    failure_class: str
    reason: str
    message: str
    exit_code: int | None

    @property
    def counts(self) -> bool:
        """Whether it uses up restart.maxConsecutiveFailures."""
        return self.failure_class not in _UNCOUNTED

    @property
    def is_final(self) -> bool:
        """Whether the same spec can only fail again."""
        return self.failure_class == "Configuration"


def classify(run: Run) -> Failure:
    """The failure of a finished driver: its own report first, then what the platform said, then the exit code."""
    report = run.report or {}
    reported = report.get("class") if report.get("class") in _CLASSES else None
    failure_class, reason = _EXIT.get(run.exit_code or 0, ("Application", run.reason or "Failed"))
    if run.reason in _INFRASTRUCTURE:
        failure_class, reason = "Infrastructure", run.reason
    elif run.reason == "OOMKilled":
        failure_class, reason = "Application", "OOMKilled"
    elif run.reason == "DeadlineExceeded":
        failure_class, reason = "Timeout", "DeadlineExceeded"
    elif reported is not None and run.exit_code != _DIVERGED:
        failure_class, reason = str(reported), reason if reason not in {"Error", ""} else str(reported)
    text = str(report.get("message") or run.message or "")
    if run.reason == "OOMKilled":
        text = f"the driver ran out of memory: raise spark.driver.memory or spark.driver.memoryOverhead. {text}"
    if not text:
        text = (
            f"the driver ended with exit code {run.exit_code}"
            if run.exit_code is not None
            else "the driver failed and left no report"
        )
    if run.log_tail:
        text = f"{text}\n--- last log lines\n{run.log_tail}"
    return Failure(failure_class, reason or "Failed", clip(redact(text.strip()), _MESSAGE_MAX), run.exit_code)


def lost(name: str) -> Failure:
    """The driver is gone although nobody here removed it."""
    return Failure(
        "Infrastructure",
        "DriverLost",
        f"driver {name} disappeared before it ended: its node was lost, or somebody deleted it",
        None,
    )


def not_started(run: Run, seconds: int) -> Failure:
    """The driver was not running in time."""
    why = f"{run.reason}: {run.message}" if run.reason else run.message or "the pod was not scheduled"
    return Failure(
        "Scheduling",
        run.reason or "DriverStartTimeout",
        redact(f"driver {run.name} did not run within {seconds} s: {why}"),
        None,
    )


def not_created(name: str, seconds: int, refusal: ActionFailure) -> Failure:
    """The driver was refused for all of its time to start."""
    return Failure(
        "Scheduling",
        refusal.reason,
        redact(f"driver {name} could not be made within {seconds} s: {refusal.message}"),
        None,
    )


def too_long(run: Run, seconds: int) -> Failure:
    """The attempt took longer than timeouts.activeDeadlineSeconds."""
    return Failure(
        "Timeout",
        "ActiveDeadlineExceeded",
        f"driver {run.name} was stopped after {seconds} s; raise timeouts.activeDeadlineSeconds",
        None,
    )
