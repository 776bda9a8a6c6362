"""The meaning of a failed driver: the class of its failure, whether it counts, whether another attempt can succeed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from persist_operator.api.redact import clip, redact
from persist_operator.plan.observed import ActionFailure, Phase, Run

#: The class and the reason for each exit code, for a driver that left no report.
_EXIT: Mapping[int, tuple[str, str]] = {
    70: ("Storage", "StoreFailed"),
    71: ("Fenced", "Fenced"),
    72: ("Configuration", "InvalidConfiguration"),
    73: ("Application", "Diverged"),
}
#: The driver reports this failure as one of the store. A retry does not help and a person must act, so the exit code decides.
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
#: Classes of failures of the environment, not of the sink. The run is tried again without limit.
_UNCOUNTED = {"Storage", "Infrastructure"}
_MESSAGE_MAX = 4096


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. `message` contains the error and the last lines of the log, redacted."""

    failure_class: str
    reason: str
    message: str
    exit_code: int | None

    @property
    def counts(self) -> bool:
        """Whether the failure counts towards restart.maxConsecutiveFailures."""
        return self.failure_class not in _UNCOUNTED

    @property
    def is_final(self) -> bool:
        """Whether each further attempt with the same spec must fail."""
        return self.failure_class == "Configuration"


def classify(run: Run) -> Failure:
    """The failure of a driver that ended. A cause from Kubernetes has precedence, then the driver's report, then the exit code."""
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
    if run.phase is Phase.SUCCEEDED and not report:
        # The user's code may end the process. If the run was committed, the next attempt finds the commit.
        reason, text = "NoReport", "the driver ended with exit code 0 before it reported what it did"
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
    """The driver is gone, and the operator did not remove it."""
    return Failure(
        "Infrastructure",
        "DriverLost",
        f"driver {name} disappeared before it ended: its node was lost, or a user deleted it",
        None,
    )


def waits_for(run: Run, mounted: Sequence[str]) -> str:
    """The mounts for which a driver may wait without a reason in its status, because only Events of its pod show this. Otherwise empty."""
    return f"it needs {' and '.join(mounted)} in its namespace" if mounted and not run.reason else ""


def not_started(run: Run, seconds: int, *, mounted: Sequence[str] = ()) -> Failure:
    """The driver did not run within its time to start. `mounted`: the objects that the sink makes it mount."""
    text = redact(f"driver {run.name} did not run within {seconds} s: {why_pending(run, mounted)}")
    return Failure("Scheduling", run.reason or "DriverStartTimeout", clip(text, _MESSAGE_MAX), None)


def why_pending(run: Run, mounted: Sequence[str]) -> str:
    """What Kubernetes reports of a driver that does not run, and what the driver mounts if that may be missing."""
    why = f"{run.reason}: {run.message}" if run.reason else run.message or "the pod was not scheduled"
    return "; ".join(one for one in (why, waits_for(run, mounted)) if one)


def not_created(name: str, seconds: int, refusal: ActionFailure) -> Failure:
    """The API server refused the creation of the driver until its time to start was over."""
    return Failure(
        "Scheduling",
        refusal.reason,
        clip(redact(f"driver {name} could not be created within {seconds} s: {refusal.message}"), _MESSAGE_MAX),
        None,
    )


def too_long(run: Run, seconds: int) -> Failure:
    """The attempt ran longer than timeouts.activeDeadlineSeconds."""
    return Failure(
        "Timeout",
        "ActiveDeadlineExceeded",
        f"driver {run.name} was stopped after {seconds} s; raise timeouts.activeDeadlineSeconds",
        None,
    )
