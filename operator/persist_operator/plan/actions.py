"""What a plan may ask for: small, idempotent, free of manifests and processes.

Every action can be repeated after a crash: names are deterministic, engine calls idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from persist_engine.model.ownership import Owner

from persist_operator.api.names import MaintenanceKind
from persist_operator.api.shard import InlineLocation, ShardSchema, StoreLocation
from persist_operator.api.sink import SinkSpec
from persist_operator.plan.observed import RunKind

StopEvent = Literal["", "DriverStopped", "DriverForcedOut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialiseShard:
    """Make the shard with this schema; nothing happens when it exists with the same one."""

    owner: Owner
    shard_id: str
    location: StoreLocation
    schema: ShardSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceSince:
    """Register the operators' critical reader if it is not, make it `owner`'s, and move its since to `since_ms` (never back)."""

    owner: Owner
    shard_id: str
    location: StoreLocation
    critical_id: str
    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJob:
    """Start one Job of a shard. A Job of this name that exists is the same one."""

    name: str
    location: StoreLocation
    ttl_seconds: int
    priority_class_name: str | None
    service_account_name: str | None
    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMaintenance(StartJob):
    """Start one maintenance run."""

    kind: MaintenanceKind
    shard_id: str
    seqno: int
    reason: str
    memory: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInspection(StartJob):
    """Start one pod that looks after a shard on stores which its resource names itself."""

    location: InlineLocation
    wish: str
    """As persist_engine.codec.tending writes it."""
    known_seqno: int
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDriver:
    """Start one attempt of a sink's run; one of this name that exists is the same one.

    Attempts of one run share `run_id`, which is committed with the data: whoever comes second finds its work done.
    """

    name: str
    attempt: int
    run_number: int
    run_id: str
    scheduled_ms: int | None
    executor_prefix: str
    shard_id: str
    schema: ShardSchema
    location: StoreLocation
    spec: SinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """Stop a run, if it still goes, and remove what it was made of. `event`: the reason of the Event that tells of it, if any."""

    kind: RunKind
    name: str
    reason: str
    grace_seconds: int
    event: StopEvent = ""


Action = InitialiseShard | AdvanceSince | StartMaintenance | StartInspection | StartDriver | StopRun


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth an Event; `kind` as Kubernetes has it."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next steps. `status` is the whole new status and holds the intent of every action: it is written before
    they are done.

    The resource wants another look after `requeue_after_s`, at once after actions, and whenever something of it
    changes.
    """

    status: Mapping[str, Any]
    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None
    notes: tuple[Note, ...] = ()
    """Events of what the plan saw. The reconciler posts an action's own (`done_note`) once the action is done."""
    is_periodic: bool = False
    """The look comes round again and again and may be spread over time: a little later is as good. Not so for what is due."""
    refused: frozenset[str] = frozenset()
    """By `action_key`: refusals of starts and stops that still stand. Others may be forgotten."""


def action_key(action: Action) -> str:
    """What a refusal is remembered by: two actions with one key are two tries of the same thing."""
    match action:
        case StartMaintenance():
            return maintenance_key(action.kind)
        case StopRun():
            return f"StopRun/{action.name}"
        case _:
            return type(action).__name__


def maintenance_key(kind: MaintenanceKind) -> str:
    """`action_key` of the start of any run of this kind."""
    return f"StartMaintenance/{kind}"


def done_note(action: Action) -> Note | None:
    """The Event of an action that was done now, and not before; None for what is no news."""
    match action:
        case StartMaintenance():
            return Note("Normal", "MaintenanceStarted", f"{action.name}: {action.reason}")
        case StartDriver():
            return Note("Normal", "DriverStarted", f"{action.name}: run {action.run_number}, attempt {action.attempt}")
        case StopRun() if action.event:
            kind: Literal["Normal", "Warning"] = "Warning" if action.event == "DriverForcedOut" else "Normal"
            return Note(kind, action.event, f"{action.name}: {action.reason}")
        case _:
            return None
