"""The input of a plan: the observations of children, stores and the shard. The operator builds these values from pods and Jobs, and the
local runner builds them from processes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import Owner

from persist_operator.api import conditions
from persist_operator.api.shard import NO_LABELS, Shard, ShardSchema, StorageRefused, StoreLocation
from persist_operator.api.shard_status import Ddl, Runner
from persist_operator.api.sink import SinkSpec
from persist_operator.api.sink_status import STANDBY_STAGES, RunningProgress
from persist_operator.settings import OperatorSettings

#: Reason of a condition: the API server refused a request of the operator. The condition's message contains the API server's.
ACTION_REFUSED = "ActionRefused"
#: Reason of a condition: the spec's schema cannot succeed the shard's schema, so the shard keeps its own.
SCHEMA_REFUSED = "SchemaRefused"
#: Reasons for which a shard is stalled although it can be written and read. They concern only its maintenance or its next schema.
_HARMLESS = {ACTION_REFUSED, SCHEMA_REFUSED, "InvalidWindow"}
#: Reasons that are also harmless, except on inline storage. There a pod of the same template must inspect the stores, so nothing is known
#: about them.
_OF_PODS = {"InvalidTemplate", "ServiceAccountNotAllowed"}
#: Reason of a condition: a start waits for a place (plan.waiting), or its pod for the queue of its scheduler.
QUEUED = "Queued"
#: Reason of a condition: all facts about the shard that a driver needs are known.
RESOLVED = "Resolved"
#: The reasons of `ShardView.of` for a shard that a sink reads.
_OF_INPUTS = {
    "ShardNotFound": "InputNotFound",
    "ShardStalled": "InputStalled",
    "ShardNotReady": "InputNotReady",
    "StorageUnreachable": "InputUnreachable",
}
#: A run that is pending for longer counts as stuck: to find a node and pull an image takes less.
STUCK_MS = 60_000
RunKind = Literal["compaction", "rollup", "gc", "verify", "orphanScan", "reclaim", "driver", "inspection"]


class Phase(enum.StrEnum):
    """The phase of a run."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self in {Phase.SUCCEEDED, Phase.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One child: a maintenance run, an inspection, or a driver with its executors."""

    name: str
    kind: RunKind
    phase: Phase
    created_ms: int
    started_ms: int | None = None
    finished_ms: int | None = None
    deleting: bool = False
    deleted_ms: int | None = None
    """When the pod should be gone, grace period included; of a Job, when its deletion was asked for. None unless `deleting`."""
    held_by: tuple[str, ...] = ()
    """The finalizers of a Job that is being deleted, or of a pod that is deleted already, without a grace period: it goes when their
    controllers remove them.
    """
    seqno: int = 0
    """Maintenance: the state version at which the run was planned. Inspection: the version that the wish knew."""
    attempt: int = 0
    run_number: int = 0
    run_id: str = ""
    revision: str = ""
    scheduled_ms: int | None = None
    stands_by: bool = False
    """Whether a driver began on standby. It may have taken over since; `running` shows that."""
    runner: Runner | None = None
    """For a compaction: where it runs."""
    planned_reason: str = ""
    """Maintenance: the reason for which the plan started the run."""
    exit_code: int | None = None
    reason: str = ""
    """The reason from Kubernetes: OOMKilled, Evicted, ImagePullBackOff, ..."""
    message: str = ""
    podless: bool = False
    """The run is a Job that has no pod, or that ended without one."""
    refused: bool = False
    """Events of the Job report that its pod is refused; `message` contains them."""
    report: Mapping[str, Any] | None = None
    """The JSON report of the run; None when it left none."""
    running: RunningProgress | None = None
    """The progress that a running driver reports; None when it reports nothing."""
    hears_stop: bool = False
    """Whether it is a driver that runs and can be asked to end."""
    log_tail: str = ""
    """The last lines of the log, redacted. Read only for a failure that is not yet on the status."""

    def stuck_ms(self, since_ms: int | None = None) -> int:
        """From when on the run counts as stuck if it is pending: a minute after its creation, or after `since_ms` if that is later."""
        return max(self.created_ms, since_ms or 0) + STUCK_MS + 1

    def is_stuck(self, now_ms: int, since_ms: int | None = None) -> bool:
        """Whether the run has been pending for more than a minute; `since_ms` is as in `stuck_ms`."""
        return self.phase is Phase.PENDING and not self.deleting and now_ms >= self.stuck_ms(since_ms)

    @property
    def is_held(self) -> bool:
        """Whether finalizers keep a run that is being deleted and has not ended."""
        return bool(self.held_by) and not self.phase.finished

    @property
    def is_queued(self) -> bool:
        """Whether a queue holds its pod back from the scheduler (Kueue)."""
        return self.phase is Phase.PENDING and self.reason == "SchedulingGated"

    @property
    def is_on_standby(self) -> bool:
        """Whether it is a driver that began on standby and has not reported that it writes."""
        return self.stands_by and (self.running is None or self.running.stage in STANDBY_STAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """Numbers of executor pods of the newest attempt."""

    running: int = 0
    pending: int = 0
    failed: int = 0
    pending_from_ms: int = 0
    """When the oldest of those that are pending was created."""
    why_pending: str = ""
    """What Kubernetes says of it; empty when it says nothing."""

    @property
    def stuck_ms(self) -> int | None:
        """From when on the status says why executors do not start; None when there is nothing to say."""
        return self.pending_from_ms + STUCK_MS + 1 if self.pending and self.why_pending else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailure:
    """A store did not answer, or its answer cannot be used.

    A `permanent` failure (corrupt or newer state, a store without guarantees) stays until a person acts. Any other failure can pass without
    an action.
    """

    reason: str
    message: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class ShardMissing:
    """The stores answered that there is no such shard."""


@dataclass(frozen=True, slots=True)
class NotInspected:
    """The stores were not asked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """An inspection pod has not answered, for the given `reason` and `message`. The current state of the shard is unknown."""

    reason: str
    message: str


#: What an owner does with its shard. Gone: there is no such resource, or it is being deleted and leaves its shard as it is. Ends: it is
#: being deleted and ends its shard. Keeps: it keeps its shard, or nothing is known about it.
OwnerState = Literal["Gone", "Ends", "Keeps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotOwned:
    """The stores answered that `owner` owns the shard, or (None) that the shard exists without an owner. No other fact about it
    was read.
    """

    shard_id: str
    owner: Owner | None
    owner_state: OwnerState = "Keeps"


Inspected = Inspection | ShardMissing | StoreFailure | NotInspected | Awaited | NotOwned


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The shard that a resource claims in its stores: `wanted`, else the shard that is registered for the owner, else `proposed`."""

    owner: Owner
    wanted: str | None
    proposed: str
    take_over: bool = False
    known_seqno: int | None = None
    """The newest version on the status. The inspection also reads the tag of this version, for a comparison with the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The answer to a claim. `shard_id` is the shard that the resource now owns; None when it owns none or that is unknown."""

    inspected: Inspected
    shard_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFailure:
    """The refusal of an action, kept until the action succeeds. A `permanent` refusal ends only with a change of the resource."""

    reason: str
    message: str
    permanent: bool
    at_ms: int
    count: int = 1
    """Consecutive refusals."""
    place: int = 0
    """For a waiting start: its place in the queue. 0 for a refusal."""
    generation: int = 0
    """The generation of the resource at the refusal. For another generation the action is tried at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardObserved:
    """Everything except the resource itself that the plan of a PersistShard needs."""

    inspected: Inspected = field(default_factory=NotInspected)
    shard_id: str | None = None
    """The shard that the resource owns according to the stores; None when it owns none or the stores were not asked."""
    inspected_ms: int | None = None
    """For the answer of an inspection pod, a time before its reads; None when the operator has just read the state itself."""
    readers_left_out: int = 0
    writers_left_out: int = 0
    """Numbers of readers and writers that the inspection does not list."""
    may_take_over: bool = False
    """Whether an inspection pod may take the shard from its owner (plan.ownership)."""
    inspections: tuple[Run, ...] = ()
    runs: tuple[Run, ...] = ()
    sinks: tuple[str, ...] = ()
    """Names of the SparkSinks that write or read the shard. Observed only while the resource is being deleted."""
    failures: Mapping[str, ActionFailure] = field(default_factory=dict)
    """By `plan.actions.action_key`."""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the resource's namespace, when its profile selects by labels; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """The facts that a sink needs about the PersistShard that it writes or reads. `usable` iff all facts that a driver needs are known and
    the stores answer.
    """

    found: bool
    reason: str
    message: str
    shard_id: str = ""
    schema: ShardSchema | None = None
    location: StoreLocation | None = None

    @property
    def usable(self) -> bool:
        """Whether a driver may start on this shard."""
        return self.reason == RESOLVED

    @classmethod
    def of(
        cls, name: str, shard: Shard | None, settings: OperatorSettings, namespace_labels: Mapping[str, str] = NO_LABELS
    ) -> ShardView:
        """The view of the shard that a sink names as `name`. `namespace_labels` are the labels of their namespace."""
        if shard is None or shard.meta.deleting:
            return cls(
                found=False, reason="ShardNotFound", message=f"there is no PersistShard {name} in this namespace"
            )
        stalled = conditions.find(shard.status, "Stalled")
        reasons = _HARMLESS if shard.spec.storage is not None else _HARMLESS | _OF_PODS
        harmless = stalled is None or stalled.get("reason") in reasons
        if stalled is not None and stalled.get("status") == "True" and not harmless:
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
            reason=RESOLVED,
            message=f"writes {known.shard_id}",
            shard_id=known.shard_id,
            schema=ShardSchema(key=known.schema.key or "", value=known.schema.value or ""),
            location=location,
        )

    @classmethod
    def of_input(
        cls,
        name: str,
        shard: Shard | None,
        settings: OperatorSettings,
        namespace_labels: Mapping[str, str] = NO_LABELS,
        *,
        is_stream: bool,
    ) -> ShardView:
        """The view of the shard that a sink reads. A sink may read only the stores that it may write. A stream itself waits for the first
        rows of its input. A run needs a time at which the input is readable.
        """
        view = cls.of(name, shard, settings, namespace_labels)
        if not view.usable or shard is None:
            return replace(view, reason=_OF_INPUTS.get(view.reason, view.reason))
        frontiers = shard.known.frontiers
        if frontiers.since == "" or (is_stream and frontiers.upper == ""):
            text = f"PersistShard {name} is closed: nothing more comes; name another one in input.shard"
            return cls(found=True, reason="InputClosed", message=text)
        if not is_stream and frontiers.upper in {None, "0"}:
            text = f"nothing was written to PersistShard {name} yet, so there is no time at which it could be read"
            return cls(found=True, reason="InputNotWritten", message=text)
        return replace(view, message=f"reads {view.shard_id}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSource:
    """The shard that a driver reads."""

    shard_id: str
    location: StoreLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkObserved:
    """Everything except the resource itself that the plan of a SparkSink needs."""

    shard: ShardView
    input: ShardView | None = None
    """The shard that the sink reads; None for an input of another type."""
    runs: tuple[Run, ...] = ()
    executors: Executors = field(default_factory=Executors)
    leftovers: tuple[str, ...] = ()
    """Names of attempts that left objects but have no driver. Observed only while no attempt is under way."""
    failures: Mapping[str, ActionFailure] = field(default_factory=dict)
    """By `plan.actions.action_key`."""

    @property
    def obstacle(self) -> ShardView | None:
        """The shard that prevents the start of a driver; None when a driver can start."""
        views = (self.shard, *(() if self.input is None else (self.input,)))
        return next((one for one in views if not one.usable), None)

    @property
    def source(self) -> DriverSource | None:
        """The shard that a driver reads; None when there is none, or it cannot be read yet."""
        view = self.input
        if view is None or not view.usable or view.location is None:
            return None
        return DriverSource(shard_id=view.shard_id, location=view.location)

    def mounted(self, spec: SinkSpec) -> tuple[str, ...]:
        """What the pod of a driver of this spec mounts: without one of these in the namespace, the pod does not start."""
        read = None if self.source is None else self.source.location
        stores = [
            one for location in (self.shard.location, read) if location is not None for one in location.secrets_needed
        ]
        return tuple(dict.fromkeys((*spec.mounted, *(f"Secret {one}" for one in stores))))

    @property
    def input_id(self) -> str | None:
        """The id of the shard that the sink reads, if it is known."""
        return None if self.source is None else self.source.shard_id
