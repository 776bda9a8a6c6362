"""What was seen of the world, in the words of the plan. Built by the operator from pods and Jobs, by the local
runner from processes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import Owner

from persist_operator.api import conditions
from persist_operator.api.shard import NO_LABELS, Shard, ShardSchema, StorageRefused, StoreLocation
from persist_operator.api.shard_status import Ddl
from persist_operator.settings import OperatorSettings

#: Reason of a condition: the API server refused what the operator asked for; the message has its words.
ACTION_REFUSED = "ActionRefused"
RunKind = Literal["compaction", "rollup", "gc", "driver", "inspection"]


class Phase(enum.StrEnum):
    """Where a run stands."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether it will not change any more."""
        return self in {Phase.SUCCEEDED, Phase.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One child: a maintenance run, or a driver with its executors. Times in ms."""

    name: str
    kind: RunKind
    phase: Phase
    created_ms: int
    started_ms: int | None = None
    finished_ms: int | None = None
    deleting: bool = False
    deleted_ms: int | None = None
    """By when it was to be gone, its grace period included; None unless `deleting`."""
    seqno: int = 0
    """Maintenance: the state version it was started at."""
    attempt: int = 0
    run_number: int = 0
    run_id: str = ""
    revision: str = ""
    scheduled_ms: int | None = None
    planned_reason: str = ""
    """Maintenance: why the plan started it."""
    exit_code: int | None = None
    reason: str = ""
    """One word of the platform: OOMKilled, Evicted, ImagePullBackOff, ..."""
    message: str = ""
    podless: bool = False
    """A Job's: it has no pod, or ended without having had one."""
    refused: bool = False
    """Its Events say that it is refused a pod; `message` has the words."""
    report: Mapping[str, Any] | None = None
    """The JSON that the run left behind."""
    log_tail: str = ""
    """Last lines of its log, redacted; read only for failures that are not yet on the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """Executor counts of the newest attempt."""

    running: int = 0
    pending: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailure:
    """A store did not answer, or what it answered cannot be used.

    `permanent` failures need a person (corrupt or newer state, a store without guarantees); the others pass by
    themselves.
    """

    reason: str
    message: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class ShardMissing:
    """The stores answered: there is no such shard."""


@dataclass(frozen=True, slots=True)
class NotInspected:
    """Nobody has asked the stores yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """A pod was to ask the stores, and has not answered: why. Nothing is known of the shard now."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOwned:
    """The stores answered: the shard is `owner`'s, or (None) it exists and has none. Nothing else was asked."""

    shard_id: str
    owner: Owner | None


Inspected = Inspection | ShardMissing | StoreFailure | NotInspected | Awaited | NotOwned


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a resource asks its stores for: `wanted`, else the shard that its name leads to, else `proposed`."""

    owner: Owner
    wanted: str | None
    proposed: str
    take_over: bool = False
    known_seqno: int | None = None
    """A version that the status tells of: whether it is still the same entry is asked, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The answer to a claim. `shard_id`: the shard, which is the resource's now; None when it is not known."""

    inspected: Inspected
    shard_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFailure:
    """An action that was refused, kept until it succeeds. `permanent`: only a change of the resource can help."""

    reason: str
    message: str
    permanent: bool
    at_ms: int
    count: int = 1
    """Refusals in a row."""
    generation: int = 0
    """Of the resource that was refused; another one is tried at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardObserved:
    """Everything about a PersistShard that is not on the resource itself."""

    inspected: Inspected = field(default_factory=NotInspected)
    shard_id: str | None = None
    """The shard that the stores say is the resource's; None when they were not asked, or did not say so."""
    inspected_ms: int | None = None
    """Before which nothing of it was read, when a pod did; None: it was read just now."""
    readers_left_out: int = 0
    writers_left_out: int = 0
    """Not told one by one."""
    may_take_over: bool = False
    """Whether a shard that is another's may be taken from it (plan.ownership), when a pod has to do it."""
    inspections: tuple[Run, ...] = ()
    runs: tuple[Run, ...] = ()
    failures: Mapping[str, ActionFailure] = field(default_factory=dict)
    """By `plan.actions.action_key`."""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Of the resource's namespace, where some profile asks for labels; otherwise none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """A PersistShard as its sinks need it. `usable` iff everything that a driver needs is known and the stores
    answered.
    """

    found: bool
    reason: str
    message: str
    shard_id: str = ""
    schema: ShardSchema | None = None
    location: StoreLocation | None = None

    @property
    def usable(self) -> bool:
        """Whether a driver may be started on it."""
        return self.reason == "Resolved"

    @classmethod
    def of(
        cls, name: str, shard: Shard | None, settings: OperatorSettings, namespace_labels: Mapping[str, str] = NO_LABELS
    ) -> ShardView:
        """What a sink may know of the shard it names, in a namespace with these labels."""
        if shard is None or shard.meta.deleting:
            return cls(
                found=False, reason="ShardNotFound", message=f"there is no PersistShard {name} in this namespace"
            )
        stalled = conditions.find(shard.status, "Stalled")
        # A shard whose maintenance is refused can be written all the same.
        if stalled is not None and stalled.get("status") == "True" and stalled.get("reason") != ACTION_REFUSED:
            return cls(
                found=True,
                reason="ShardStalled",
                message=f"PersistShard {name} is stalled: {stalled.get('message', '')}",
            )
        reachable = conditions.find(shard.status, "StorageReachable")
        if reachable is not None and reachable.get("status") == "False":
            return cls(found=True, reason="StorageUnreachable", message=str(reachable.get("message", "")))
        known = shard.known
        if not known.shard_id or known.schema == Ddl():
            return cls(found=True, reason="ShardNotReady", message=f"PersistShard {name} is not initialised yet")
        try:
            location = shard.location(settings, namespace_labels)
        except StorageRefused as error:
            return cls(found=True, reason="ShardStalled", message=str(error))
        return cls(
            found=True,
            reason="Resolved",
            message=f"writes {known.shard_id}",
            shard_id=known.shard_id,
            schema=ShardSchema(key=known.schema.key or "", value=known.schema.value or ""),
            location=location,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkObserved:
    """Everything about a SparkSink that is not on the resource itself."""

    shard: ShardView
    runs: tuple[Run, ...] = ()
    executors: Executors = field(default_factory=Executors)
    leftovers: tuple[str, ...] = ()
    """Attempts of which there is something, but no driver; looked for only while none is under way."""
    failures: Mapping[str, ActionFailure] = field(default_factory=dict)
    """By `plan.actions.action_key`."""
