"""The actions of a plan: small, idempotent, free of manifests and processes.

An action can be repeated after a crash, because names are deterministic and calls of the engine are idempotent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from persist_engine.model.ownership import Owner

from persist_operator.api.names import MaintenanceKind
from persist_operator.api.shard import InlineLocation, ShardCodecs, ShardSchema, StoreLocation
from persist_operator.api.shard_status import Runner
from persist_operator.api.sink import SinkSpec
from persist_operator.plan.keeping.auditing import Audit
from persist_operator.plan.observed import DriverSource, RunKind

StopEvent = Literal["", "DriverStopped", "DriverForcedOut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialiseShard:
    """Create the shard with this schema, these codecs and the operators' critical reader. No effect when the shard exists with the same
    schema and codecs.
    """

    owner: Owner
    shard_id: str
    location: StoreLocation
    schema: ShardSchema
    codecs: ShardCodecs | None = None
    """None: those of the engine's release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveSchema:
    """Make this schema the shard's newest. No effect when it is."""

    owner: Owner
    shard_id: str
    location: StoreLocation
    schema: ShardSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceSince:
    """Register the operators' critical reader if it is not registered, give it to `owner`, and move its since to `since_ms`, but
    never back.
    """

    owner: Owner
    shard_id: str
    location: StoreLocation
    critical_id: str
    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJob:
    """Start one Job of a shard. An existing Job of this name counts as started."""

    name: str
    location: StoreLocation
    ttl_seconds: int
    priority_class_name: str | None
    service_account_name: str | None
    template: Mapping[str, Any]
    queue_priority: int = 0
    """Among waiting starts with the same due time and debt, a greater priority goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMaintenance(StartJob):
    """Start one maintenance run."""

    kind: MaintenanceKind
    shard_id: str
    seqno: int
    reason: str
    memory: str | None
    record_days: int
    """How many days the records of the run's deletions are kept."""
    full: bool = False
    """Whether a compaction merges all batches, or a collection deletes everything that was released."""
    max_bytes: int | None = None
    """For a compaction: the most bytes that its merges may read together. None: no bound. A full compaction is one merge and has
    no bound.
    """
    runner: Runner | None = None
    """For a compaction: where it runs. None for other kinds."""
    spark_executors: int = 0
    debt_bytes: int = 0
    """The bytes that wait for this run. Among starts that wait for a place, a greater debt goes first."""
    due_ms: int | None = None
    """When the run should be done; None if it has no due time. An earlier time goes first."""
    audit: Audit | None = None
    """For a verification or an orphan scan: what it does."""
    ended_driver: str | None = None
    """The last compaction, if it ran on Spark: it has ended, and its Secret is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReclaim(StartJob):
    """Start one run that reclaims the shard of a resource that is being deleted."""

    shard_id: str | None
    """The shard. None: the shard that is registered for `owner`."""
    owner: str
    """The owner that the shard must have in the stores. The run removes this owner's critical reader."""
    purge: bool
    deletes_max: int
    record_days: int
    """See StartMaintenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFinalizer:
    """Set the operator's finalizer on the resource, or remove it. No effect when that is already done."""

    present: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInspection(StartJob):
    """Start one inspection of a shard on inline storage."""

    location: InlineLocation
    wish: str
    """The wish, encoded by persist_engine.codec.tending."""
    known_seqno: int
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDriver:
    """Start one attempt of a sink's run. An existing driver of this name counts as started.

    Attempts of one run share `run_id`, which is committed with the data. So a later attempt recognises that an earlier one committed.
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
    source: DriverSource | None = None
    """The shard that the driver reads; None for an input of another type."""
    stands_by: bool = False
    """Whether the driver begins on standby. It then writes nothing until PromoteDriver."""
    due_ms: int | None = None
    """When the rows of the shard become too old; None if they have no such time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteDriver:
    """Order a driver on standby to take over from the driver that writes. No effect when it was ordered before."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """Stop a run that has not ended, and remove its objects. `event` is the reason of the Event that reports the stop; "" for none."""

    kind: RunKind
    name: str
    reason: str
    grace_seconds: int
    event: StopEvent = ""
    asks: bool = False
    """Whether a driver is first asked to end. If it accepts, its objects stay, and it is cleaned up like every driver that has ended."""


#: Actions on the shard itself, by calls of the engine.
ShardAction = InitialiseShard | EvolveSchema | AdvanceSince
Action = (
    ShardAction
    | KeepFinalizer
    | StartMaintenance
    | StartInspection
    | StartReclaim
    | StartDriver
    | PromoteDriver
    | StopRun
)


@dataclass(frozen=True, slots=True)
class Note:
    """The content of one Event. `kind` is the type of the Event in Kubernetes."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next steps. `status` is the whole new status with the intent of every action. It is written before the actions are taken.

    The resource is planned again after `requeue_after_s`, at once after actions, and whenever the resource or a child of it changes.
    """

    status: Mapping[str, Any]
    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None
    notes: tuple[Note, ...] = ()
    """Events about observations. The reconciler posts the Event of an action (`done_note`) after the action."""
    is_periodic: bool = False
    """Whether the requeue only repeats a routine inspection. A delay is then harmless, and the queue may spread the requeues."""
    is_settled: bool = False
    """Whether, without news, nothing becomes due before the stores are asked again. A periodic requeue may then wait until that time."""
    refused: frozenset[str] = frozenset()
    """The `action_key` of each start or stop whose refusal is still in force. The reconciler may forget all other refusals."""


#: The `action_key` of the start of a driver on standby. Its refusal shows on the rollout, because the running driver continues.
STANDBY_KEY = "StartDriver/standby"


def action_key(action: Action) -> str:
    """The key under which the refusal of an action is stored. Actions with the same key are tries of the same action."""
    match action:
        case StartMaintenance():
            return maintenance_key(action.kind)
        case StopRun():
            return f"StopRun/{action.name}"
        case StartDriver(stands_by=True):
            return STANDBY_KEY
        case _:
            return type(action).__name__


def maintenance_key(kind: MaintenanceKind) -> str:
    """The `action_key` of each StartMaintenance of this kind."""
    return f"StartMaintenance/{kind}"


def done_note(action: Action) -> Note | None:
    """The Event for an action that has just had an effect; None for an action without an Event."""
    match action:
        case StartMaintenance():
            return Note("Normal", "MaintenanceStarted", f"{action.name}: {action.reason}")
        case StartReclaim():
            return Note(
                "Normal", "DeletionStarted", f"{action.name}: {'purge' if action.purge else 'make a tombstone'}"
            )
        case StartDriver():
            how = ", on standby" if action.stands_by else ""
            text = f"{action.name}: run {action.run_number}, attempt {action.attempt}{how}"
            return Note("Normal", "DriverStarted", text)
        case StopRun() if action.event:
            kind: Literal["Normal", "Warning"] = "Warning" if action.event == "DriverForcedOut" else "Normal"
            return Note(kind, action.event, f"{action.name}: {action.reason}")
        case _:
            return None
