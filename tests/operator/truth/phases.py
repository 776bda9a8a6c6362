"""Every phase of both kinds, with the status that the plan of the operator writes in it."""

import dataclasses

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.inspection import ReaderInfo
from persist_engine.model.ownership import Owner
from persist_operator.api import names, pausing, times
from persist_operator.cluster.port import BY_KIND, ApiError
from persist_operator.plan.observed import (
    ActionFailure,
    Awaited,
    NotOwned,
    Phase,
    Run,
    ShardMissing,
    ShardObserved,
    ShardView,
    SinkObserved,
    StoreFailure,
)
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import InlineStorage
from persist_operator.steps.reconcile import Key

SHARD_ID = names.shard_id_of("uid-shard")
CURRENT, IN_PROGRESS, FAILED = "Current", "InProgress", "Failed"
REFUSED = ActionFailure(reason="ActionRefused", message="403 exceeded quota", permanent=False, at_ms=0, generation=1)
INVALID = dataclasses.replace(REFUSED, message="422 invalid", permanent=True)
SCHEDULED = {"mode": "Scheduled", "schedule": {"cron": "*/10 * * * *"}}
#: The observed state -> (kstatus, reason of Ready).
SHARDS = {
    "not inspected": (IN_PROGRESS, "Inspecting"),
    "to be made": (IN_PROGRESS, "Initialising"),
    "making failed": (IN_PROGRESS, "Unavailable"),
    "making refused": (FAILED, "SchemaMismatch"),
    "healthy": (CURRENT, "Healthy"),
    "suspended": (CURRENT, "Suspended"),
    "paused": (IN_PROGRESS, "Paused"),
    "paused while stalled": (IN_PROGRESS, "Paused"),
    "held by a reader": (CURRENT, "Healthy"),
    "in debt": (CURRENT, "Healthy"),
    "maintained": (CURRENT, "Healthy"),
    "maintenance refused": (IN_PROGRESS, "ActionRefused"),
    "maintenance invalid": (FAILED, "ActionRefused"),
    "store down": (IN_PROGRESS, "StorageUnreachable"),
    "store corrupt": (FAILED, "CorruptState"),
    "no such profile": (FAILED, "UnknownStorageProfile"),
    "in conflict": (FAILED, "ShardIdConflict"),
    "lost": (FAILED, "ShardLost"),
    "not found": (FAILED, "ShardNotFound"),
    "no schema": (FAILED, "InvalidSchema"),
    "another schema": (FAILED, "SchemaMismatch"),
    "gone back": (FAILED, "ShardLost"),
    "owned by none": (FAILED, "ShardUnowned"),
    "of another namespace": (FAILED, "ProfileNotAllowed"),
    "stores of its own, off": (FAILED, "InlineStorageOff"),
    "stores of its own, not allowed": (FAILED, "EndpointNotAllowed"),
    "a Secret, not allowed": (FAILED, "SecretNotAllowed"),
    "stores of its own, no such address": (FAILED, "InvalidStorage"),
    "a pod is to look": (IN_PROGRESS, "Inspecting"),
    "its pod does not start": (IN_PROGRESS, "ImagePullBackOff"),
    "its pod failed": (IN_PROGRESS, "InspectionFailed"),
    "its pods are long ago": (IN_PROGRESS, "InspectionOverdue"),
    "its pod is refused": (IN_PROGRESS, "ActionRefused"),
    "its pod is invalid": (FAILED, "ActionRefused"),
    "its pod says healthy": (CURRENT, "Healthy"),
    "its pod found another's": (FAILED, "ShardIdConflict"),
    "its pod's next is refused": (IN_PROGRESS, "ActionRefused"),
    "changed since": (IN_PROGRESS, "Healthy"),
    "deleting": ("Terminating", "Healthy"),
}
SINKS = {
    "no shard": (IN_PROGRESS, "ShardNotFound"),
    "shard not ready": (IN_PROGRESS, "ShardNotReady"),
    "shard stalled": (IN_PROGRESS, "ShardStalled"),
    "store down": (IN_PROGRESS, "StorageUnreachable"),
    "intended": (IN_PROGRESS, "Running"),
    "refused": (IN_PROGRESS, "ActionRefused"),
    "invalid": (FAILED, "ActionRefused"),
    "pending": (IN_PROGRESS, "Running"),
    "running": (IN_PROGRESS, "Running"),
    "completed": (CURRENT, "Completed"),
    "completed, suspended": (CURRENT, "Completed"),
    "completed, paused": (IN_PROGRESS, "Paused"),
    "completed, changed, suspended": (CURRENT, "Suspended"),
    "failed once": (IN_PROGRESS, "BackingOff"),
    "lost": (IN_PROGRESS, "BackingOff"),
    "failed for good": (FAILED, "FailuresExceeded"),
    "failed for good, suspended": (FAILED, "FailuresExceeded"),
    "misconfigured": (FAILED, "ConfigurationFailed"),
    "never retried": (FAILED, "ApplicationFailed"),
    "suspended": (CURRENT, "Suspended"),
    "being stopped": (IN_PROGRESS, "Stopping"),
    "stopped": (CURRENT, "Suspended"),
    "former driver leaving": (IN_PROGRESS, "Starting"),
    "waiting for its tick": (CURRENT, "Scheduled"),
    "after a tick": (CURRENT, "Succeeded"),
    "a tick is intended": (CURRENT, "Running"),
    "a tick is refused": (IN_PROGRESS, "ActionRefused"),
    "a tick runs": (CURRENT, "Running"),
    "a tick cannot start": (IN_PROGRESS, "DriverPending"),
    "a tick is tried again": (IN_PROGRESS, "BackingOff"),
    "a tick failed": (FAILED, "ApplicationFailed"),
    "no schedule": (FAILED, "InvalidSchedule"),
    "never": (FAILED, "InvalidSchedule"),
    "never, suspended": (FAILED, "InvalidSchedule"),
}


def shards(shard_resource, make_shard, make_inspection, make_own_reader, settings, now):
    """The resource in each of its phases, with the status that its plan writes."""

    def status_of(spec=None, observed=None, status=None, settings=settings, **metadata):
        shard = make_shard(spec, status=status, **metadata)
        plan = plan_shard(shard, observed or ShardObserved(), now_ms=now, settings=settings)
        return shard_resource(spec, status=plan.status, **metadata)

    def inspected(**changes):
        return ShardObserved(inspected=make_inspection(**changes), shard_id=SHARD_ID)

    known = status_of(observed=None)["status"]
    healthy = status_of(observed=inspected(), status=known)["status"]
    busy = Run(name="flights-compact-10", kind="compaction", phase=Phase.RUNNING, created_ms=now)
    debt = {"uncompacted_batches": 100, "compaction_bytes": 5}
    due = {
        "status": known,
        "observed": dataclasses.replace(inspected(**debt), failures={"StartMaintenance/compaction": REFUSED}),
    }
    never = {**due, "observed": dataclasses.replace(due["observed"], failures={"StartMaintenance/compaction": INVALID})}
    reader = ReaderInfo(
        id="r1", kind="leased", since=0, seqno=None, purpose="report", hostname="h", last_heartbeat_ms=None
    )
    down = StoreFailure(reason="StorageUnreachable", message="redis://r:1 did not answer")
    corrupt = StoreFailure(reason="CorruptState", message="v3 does not decode", permanent=True)
    unmade = ActionFailure(
        reason="Unavailable", message="the store went away", permanent=False, at_ms=now, generation=1
    )
    unlike = ActionFailure(reason="SchemaMismatch", message="differs", permanent=True, at_ms=now, generation=1)

    def missing(**more):
        return ShardObserved(inspected=ShardMissing(), shard_id=SHARD_ID, **more)

    return {
        "not inspected": status_of(status=known),
        "to be made": status_of(status=known, observed=missing()),
        "making failed": status_of(status=known, observed=missing(failures={"InitialiseShard": unmade})),
        "making refused": status_of(status=known, observed=missing(failures={"InitialiseShard": unlike})),
        "healthy": status_of(status=known, observed=inspected()),
        "suspended": status_of({"suspend": True}, status=known, observed=inspected(**debt)),
        "paused": paused(shard_resource(status=healthy), now),
        "paused while stalled": paused(status_of(status=healthy, observed=ShardObserved(inspected=corrupt)), now),
        "held by a reader": status_of(
            status=known, observed=inspected(upper=now, readers=(make_own_reader(0), reader), since=0)
        ),
        "in debt": status_of({"compaction": {"mode": "Manual"}}, status=known, observed=inspected(**debt)),
        "maintained": status_of(status=known, observed=dataclasses.replace(inspected(**debt), runs=(busy,))),
        "maintenance refused": status_of(**due),
        "maintenance invalid": status_of(**never),
        "store down": status_of(status=healthy, observed=ShardObserved(inspected=down)),
        "store corrupt": status_of(status=healthy, observed=ShardObserved(inspected=corrupt)),
        "no such profile": status_of({"storageProfile": "nowhere"}),
        "in conflict": status_of(
            status=known,
            observed=ShardObserved(inspected=NotOwned(shard_id=SHARD_ID, owner=Owner("other", "team", "theirs"))),
        ),
        "owned by none": status_of(
            status=known, observed=ShardObserved(inspected=NotOwned(shard_id=SHARD_ID, owner=None))
        ),
        "of another namespace": status_of(namespace="strangers"),
        "lost": status_of(status=healthy, observed=missing()),
        "not found": status_of({"schema": None, "shardId": SHARD_ID}, status=known, observed=missing()),
        "no schema": status_of({"schema": {"key": "id NONSENSE"}}, status=known, observed=missing()),
        "another schema": status_of({"schema": {"key": "other STRING"}}, status=known, observed=inspected()),
        "gone back": status_of(status=healthy, observed=inspected(seqno=3)),
        **inlines(status_of, inspected, settings, now),
        "changed since": shard_resource(status=healthy, generation=2),
        "deleting": shard_resource(status=healthy, deletionTimestamp="2026-11-20T00:00:00Z"),
    }


def inlines(status_of, inspected, settings, now):
    """Inline shards in their phases."""
    own = {"storage": {"blob": {"bucket": "bbb", "endpoint": "http://s3:9000"}, "consensus": {"address": "redis:6379"}}}
    open_ = InlineStorage(enabled=True, allowed_endpoints=("s3:9000",), allowed_consensus=("redis",))
    on = {"spec": own, "settings": dataclasses.replace(settings, inline_storage=open_)}
    first = status_of(**on)["status"]
    refused = {"StartInspection": dataclasses.replace(REFUSED, at_ms=now)}
    invalid = {"StartInspection": dataclasses.replace(INVALID, at_ms=now)}
    going = Run(name="flights-inspect-1", kind="inspection", phase=Phase.RUNNING, created_ms=now)
    theirs = NotOwned(shard_id=SHARD_ID, owner=Owner("other", "team", "theirs"))

    def after(answer, **more):
        return status_of(**on, status=first, observed=ShardObserved(inspected=answer, **more))

    def awaited(reason):
        return after(Awaited(reason=reason, message="why"), inspections=(going,))

    return {
        "stores of its own, off": status_of(own),
        "stores of its own, not allowed": status_of(
            own, settings=dataclasses.replace(settings, inline_storage=InlineStorage(enabled=True))
        ),
        "a Secret, not allowed": status_of(
            {"storage": {**own["storage"], "consensus": {**own["storage"]["consensus"], "authSecretName": "x"}}},
            settings=on["settings"],
        ),
        "stores of its own, no such address": status_of(
            {"storage": {**own["storage"], "consensus": {"address": "redis:99999"}}}, settings=on["settings"]
        ),
        "a pod is to look": awaited("Inspecting"),
        "its pod does not start": awaited("ImagePullBackOff"),
        "its pod failed": awaited("InspectionFailed"),
        "its pods are long ago": awaited("InspectionOverdue"),
        "its pod is refused": after(Awaited(reason="Inspecting", message="why"), failures=refused),
        "its pod is invalid": after(Awaited(reason="Inspecting", message="why"), failures=invalid),
        "its pod says healthy": after(inspected().inspected, shard_id=SHARD_ID, inspected_ms=now, inspections=(going,)),
        "its pod found another's": after(theirs, inspected_ms=now, inspections=(going,)),
        "its pod's next is refused": after(
            inspected().inspected, shard_id=SHARD_ID, inspected_ms=now, failures=refused
        ),
    }


def paused(resource, now):
    """The resource with the annotation and the status that it brings."""
    metadata = {**resource["metadata"], "annotations": {names.ANNOTATION_PAUSED: "true"}}
    return {
        **resource,
        "metadata": metadata,
        "status": pausing.paused_status({**resource, "metadata": metadata}, now_ms=now),
    }


class Sinks:
    """A sink that is planned step by step, with the drivers that the test gives."""

    def __init__(self, sink_resource, make_sink, view, settings, now):
        self.resource, self.make, self.view, self.settings, self.now = sink_resource, make_sink, view, settings, now

    def after(self, spec, *steps):
        """The resource after `steps`, each a dictionary: spec, shard, runs (a function of the driver's name), failures, after (ms)."""
        spec, status, now = dict(spec), {}, self.now
        born = times.to_text(now)
        for step in ({}, *steps):
            now += step.get("after", 1000)
            spec.update(step.get("spec", {}))
            name = status.get("driver", {}).get("podName", "")
            attempt = status.get("attempt", 0)
            revision = status.get("run", {}).get("revision", "")
            runs = tuple(
                Run(
                    **{
                        "name": name, "kind": "driver", "created_ms": now, "attempt": attempt, "run_number": 1,
                        "run_id": status["run"]["id"], "revision": revision, **run,
                    }
                )
                for run in step.get("runs", ())
            )  # fmt: skip
            observed = SinkObserved(shard=step.get("shard", self.view), runs=runs, failures=step.get("failures", {}))
            sink = self.make(spec, status=status, creationTimestamp=born)
            status = plan_sink(sink, observed, now_ms=now, settings=self.settings).status
        return self.resource(spec, status=status)


PENDING, RUNNING = {"runs": [{"phase": Phase.PENDING}]}, {"runs": [{"phase": Phase.RUNNING, "started_ms": 1}]}
ENDED = {"phase": Phase.FAILED, "exit_code": 1, "reason": "Error", "message": "boom"}
CRASHED, MISCONFIGURED = {"runs": [ENDED]}, {"runs": [{**ENDED, "exit_code": 72}]}
DONE = {"runs": [{"phase": Phase.SUCCEEDED, "exit_code": 0, "report": {"outcome": "Succeeded"}}]}
STUCK = {"runs": [{"phase": Phase.PENDING, "reason": "ImagePullBackOff", "message": "no such image"}]}
LEAVING = {"phase": Phase.RUNNING, "deleting": True}
OFF = {"spec": {"suspend": True}}
TICK = {"after": 600_000}
ONCE_ONLY = {"restart": {"policy": "Never"}}


def sinks(sink_resource, make_sink, usable_shard, settings, now):
    """The resource in each of its phases, with the status that its plan writes."""
    made = Sinks(sink_resource, make_sink, usable_shard, settings, now)

    def on(reason, **more):
        return {"shard": ShardView(**{"found": True, "reason": reason, "message": "why", **more})}

    other = {"spec": {"suspend": True, "envelope": {"type": "Mirror"}}}
    refused, invalid = (
        {"failures": {"StartDriver": dataclasses.replace(one, at_ms=now)}} for one in (REFUSED, INVALID)
    )
    few = {"restart": {"maxConsecutiveFailures": 1}}
    return {
        "no shard": made.after({}, on("ShardNotFound", found=False)),
        "shard not ready": made.after({}, on("ShardNotReady")),
        "shard stalled": made.after({}, on("ShardStalled")),
        "store down": made.after({}, on("StorageUnreachable")),
        "intended": made.after({}),
        "refused": made.after({}, refused),
        "invalid": made.after({}, invalid),
        "pending": made.after({}, PENDING),
        "running": made.after({}, RUNNING),
        "completed": made.after({}, RUNNING, DONE),
        "completed, suspended": made.after({}, RUNNING, DONE, OFF),
        "completed, paused": paused(made.after({}, RUNNING, DONE), now),
        "completed, changed, suspended": made.after({}, RUNNING, DONE, other),
        "failed once": made.after({}, RUNNING, CRASHED),
        "lost": made.after({}, RUNNING, {}),
        "failed for good": made.after(few, RUNNING, CRASHED),
        "failed for good, suspended": made.after(few, RUNNING, CRASHED, OFF),
        "misconfigured": made.after({}, RUNNING, MISCONFIGURED),
        "never retried": made.after(ONCE_ONLY, RUNNING, CRASHED),
        "suspended": made.after({"suspend": True}),
        "being stopped": made.after({}, RUNNING, {**RUNNING, **OFF}, {"runs": [LEAVING]}),
        "stopped": made.after({}, RUNNING, {**RUNNING, **OFF}, {}),
        "former driver leaving": made.after(
            {}, RUNNING, {**RUNNING, "spec": {"envelope": {"type": "Mirror"}}}, {"runs": [{**LEAVING, "name": "old"}]}
        ),
        "waiting for its tick": made.after(SCHEDULED),
        "after a tick": made.after(SCHEDULED, TICK, RUNNING, DONE),
        "a tick is intended": made.after(SCHEDULED, TICK),
        "a tick is refused": made.after(
            SCHEDULED, TICK, {"failures": {"StartDriver": dataclasses.replace(REFUSED, at_ms=now)}}
        ),
        "a tick runs": made.after(SCHEDULED, TICK, PENDING, RUNNING),
        "a tick cannot start": made.after(SCHEDULED, TICK, STUCK),
        "a tick is tried again": made.after(SCHEDULED, TICK, RUNNING, CRASHED),
        "a tick failed": made.after({**SCHEDULED, **ONCE_ONLY}, TICK, RUNNING, CRASHED),
        "no schedule": made.after({**SCHEDULED, "schedule": {"cron": "61 * * * *"}}),
        "never": made.after({**SCHEDULED, "schedule": {"cron": "0 0 31 2 *"}}),
        "never, suspended": made.after({**SCHEDULED, "schedule": {"cron": "0 0 31 2 *"}}, OFF),
    }


def broken(house, keys, shard_resource, sink_resource):
    """The resources after a reconcile that failed before its plan, for both kinds."""
    errors = {
        "refused look": ApiError("403 pods is forbidden: cannot list", status=403),
        "invalid": InvalidUsage("spec.x is not y"),
        "bug": KeyError("x"),
    }
    found = {}
    for key, make, kind, observed in (
        (keys[0], shard_resource, "shard", "Job"),
        (keys[1], sink_resource, "sink", "Pod"),
    ):
        for what, error in errors.items():
            name = f"{kind}{what[0]}"
            house.cluster.create(BY_KIND[key.kind], make(name=name, uid=name))
            if kind == "shard":
                house.look(Key(key.kind, "team", name))  # the first reconcile of a shard observes nothing
            house.cluster.deny["find", observed] = error
            with pytest.raises(type(error)):
                house.look(Key(key.kind, "team", name))
            house.cluster.deny.clear()
            found[kind, what] = house.resource(Key(key.kind, "team", name))
    return found


BROKEN = {
    "refused look": (IN_PROGRESS, "ObservationRefused"),
    "invalid": (FAILED, "InvalidSpec"),
    "bug": (FAILED, "InternalError"),
}
