"""Converts children of the local runner to runs for the planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from persist_operator.api.redact import redact
from persist_operator.api.shard_status import Runner
from persist_operator.api.sink_status import RunningProgress
from persist_operator.local.processes import Child
from persist_operator.plan.observed import Phase, Run, RunKind

_LOG_LINES = 20
_PHASE = {None: Phase.RUNNING, 0: Phase.SUCCEEDED}
_KINDS: tuple[RunKind, ...] = get_args(RunKind)


def runs_of(children: Iterable[Child], owner: str) -> tuple[Run, ...]:
    """The runs of one resource (`owner` is `<Kind>/<name>`), oldest first."""
    return tuple(_run(child) for child in children if child.owner == owner)


def _run(child: Child) -> Run:
    labels = child.labels
    kind = next(one for one in _KINDS if one == labels["kind"])
    phase = _PHASE.get(child.exit_code, Phase.FAILED)
    scheduled = labels.get("scheduled_ms", "")
    return Run(
        name=child.name,
        kind=kind,
        phase=phase,
        created_ms=child.started_ms,
        started_ms=child.started_ms,
        finished_ms=child.ended_ms,
        seqno=int(labels.get("seqno", 0)),
        runner=next((one for one in get_args(Runner) if one == labels.get("runner")), None),
        attempt=int(labels.get("attempt", 0)),
        run_number=int(labels.get("run_number", 0)),
        run_id=labels.get("run_id", ""),
        revision=labels.get("revision", ""),
        scheduled_ms=int(scheduled) if scheduled else None,
        stands_by=labels.get("stands_by") == "true",
        planned_reason=labels.get("reason", ""),
        exit_code=child.exit_code,
        report=child.report,
        running=RunningProgress.parse(child.progress),
        log_tail=redact(child.log_tail(_LOG_LINES)) if phase is Phase.FAILED else "",
    )
