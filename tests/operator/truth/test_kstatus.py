"""Every phase of both kinds, evaluated by kstatus itself, and by the Lua for Argo CD: a wait (Flux, `kubectl wait`, Argo CD) lasts exactly as
long as the resource is in progress.
"""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import cel
import pytest
import yaml
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.inspection import ReaderInfo
from persist_engine.model.ownership import Owner
from persist_operator.api import conditions, names, times
from persist_operator.cluster.port import BY_KIND, PERSIST_SHARD, SPARK_SINK, ApiError
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
    "a tick cannot start": (IN_PROGRESS, "Running"),
    "a tick is tried again": (IN_PROGRESS, "BackingOff"),
    "a tick failed": (FAILED, "ApplicationFailed"),
    "no schedule": (FAILED, "InvalidSchedule"),
    "never": (FAILED, "InvalidSchedule"),
    "never, suspended": (FAILED, "InvalidSchedule"),
}


@pytest.fixture
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
    unmade = ActionFailure(reason="Unavailable", message="the store went away", permanent=False, at_ms=now)
    unlike = ActionFailure(reason="SchemaMismatch", message="differs", permanent=True, at_ms=now)

    def missing(**more):
        return ShardObserved(inspected=ShardMissing(), shard_id=SHARD_ID, **more)

    return {
        "not inspected": status_of(status=known),
        "to be made": status_of(status=known, observed=missing()),
        "making failed": status_of(status=known, observed=missing(failures={"InitialiseShard": unmade})),
        "making refused": status_of(status=known, observed=missing(failures={"InitialiseShard": unlike})),
        "healthy": status_of(status=known, observed=inspected()),
        "suspended": status_of({"suspend": True}, status=known, observed=inspected(**debt)),
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


@pytest.fixture
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


@pytest.fixture
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


def ready_reasons(resources):
    return {what: conditions.find(one["status"], "Ready")["reason"] for what, one in resources.items()}


@pytest.mark.slow
def test_kstatus_computes_the_expected_status_in_every_phase(shards, sinks, broken, kstatus, kstatus_twin, refused):
    expected = {("shard", what): one for what, one in SHARDS.items()}
    expected |= {("sink", what): one for what, one in SINKS.items()}
    expected |= {(kind, what): one for kind in ("shard", "sink") for what, one in BROKEN.items()}
    resources = {("shard", what): one for what, one in shards.items()} | {
        ("sink", what): one for what, one in sinks.items()
    }
    resources |= broken
    assert resources.keys() == expected.keys()
    computed = dict(zip(resources, kstatus(resources.values()), strict=True))
    reasons = ready_reasons(resources)
    assert {what: (computed[what], reasons[what]) for what in resources} == expected
    assert {what: kstatus_twin(one) for what, one in resources.items()} == computed
    assert {what: found for what, one in resources.items() if (found := outside(one))} == {}
    fitting = {what: one for what, one in resources.items() if what != ("shard", "not found")}
    assert {what: errors for what, one in fitting.items() if (errors := refused(one, one["status"]))} == {}


def test_a_resource_that_no_operator_has_seen_is_in_progress(
    shard_resource, sink_resource, kstatus, kstatus_twin, argo, tmp_path
):
    """By the status that its definition gives it. Without one, kstatus would take it for Current."""
    new = [shard_resource(), sink_resource()]
    assert [one["status"] for one in new] == [{"observedGeneration": 0}] * 2
    assert kstatus(new) == [kstatus_twin(one) for one in new] == [IN_PROGRESS] * 2
    shown = [argo("health", customizations()["health", one["kind"]], [one], tmp_path)[0] for one in new]
    assert [one["status"] for one in shown] == ["Progressing"] * 2


def customizations():
    """The Lua of the ConfigMap that users merge into Argo CD's: (health or actions, kind) -> script, or discovery and actions."""
    text = (Path(__file__).parents[3] / "examples/gitops/argocd/argocd-cm.yaml").read_text()
    data = {tuple(key.split(".", 2)[2].split(".", 1)): value for key, value in yaml.safe_load(text)["data"].items()}
    return {(part, kind.partition("_")[2]): value for (part, kind), value in data.items()}


#: What Argo CD shows of what kstatus computes. Suspended comes first: it is an order, not a fault.
HEALTH = {CURRENT: "Healthy", IN_PROGRESS: "Progressing", FAILED: "Degraded", "Terminating": "Progressing"}


@pytest.mark.slow
def test_argo_shows_what_kstatus_computes_in_every_phase(shards, sinks, broken, argo, kstatus, tmp_path):
    kinds = {"PersistShard": shards, "SparkSink": sinks}
    for kind, resources in kinds.items():
        every = [*resources.values(), *(one for (_, _), one in broken.items() if one["kind"] == kind)]
        script = customizations()["health", kind]
        shown = argo("health", script, every, tmp_path)
        for resource, health, computed in zip(every, shown, kstatus(every), strict=True):
            is_suspended = computed != IN_PROGRESS and conditions.is_true(resource["status"], "Suspended")
            assert health["status"] == ("Suspended" if is_suspended else HEALTH[computed]), (resource, health)
            assert health["message"]
        assert argo("health", script, [{**every[0], "status": {}}], tmp_path)[0]["status"] == "Progressing"
        without = {key: value for key, value in every[0].items() if key != "status"}
        assert argo("health", script, [without], tmp_path)[0]["status"] == "Progressing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spec", "status", "enabled"),
    [
        ("PersistShard", {}, {}, {"compact", "gc", "rollup", "verify", "orphan-scan"}),
        ("PersistShard", {"suspend": True}, {}, set()),
        (
            "PersistShard",
            {"suspend": True},
            {"plan": {"id": "4f2c", "approved": False}},
            {"approve"},
        ),
        ("SparkSink", {}, {}, {"restart"}),
        ("SparkSink", {}, {"rollout": {"state": "ReadyToPromote"}}, {"restart", "promote"}),
        ("SparkSink", {}, {"rollout": {"state": "RolledBack"}}, {"restart"}),
        ("SparkSink", {"suspend": True}, {"rollout": {"state": "ReadyToPromote"}}, set()),
    ],
)
def test_argo_offers_the_requests_that_can_have_an_effect(kind, spec, status, enabled, argo, tmp_path):
    resource = {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {"name": "x"},
        "spec": spec,
        "status": status,
    }
    actions = yaml.safe_load(customizations()["actions", kind])
    (offered,) = argo("discovery", actions["discovery.lua"], [resource], tmp_path)
    assert {name for name, one in offered.items() if not one["disabled"]} == enabled
    scripts = {one["name"]: one["action.lua"] for one in actions["definitions"]}
    assert scripts.keys() == offered.keys()
    for name in enabled:
        (changed,) = argo("action", scripts[name], [resource], tmp_path)
        (annotation,) = changed["metadata"].pop("annotations").items()
        assert annotation[0] == f"{names.REQUEST_PREFIX}{name}"
        is_time = re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", annotation[1])
        assert annotation[1] == "4f2c" if name == "approve" else is_time
        assert {**changed, "spec": spec, "status": status} == resource, "nothing else is changed"


def test_argo_reads_what_the_lua_says():
    command = [sys.executable, Path(__file__).parents[3] / "examples/gitops/argocd/build.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def outside(resource):
    """The true outcome conditions, if they are not exactly one of Ready, Reconciling and Stalled. kstatus would have to guess then."""
    status = resource["status"]
    found = [one for one in ("Ready", "Reconciling", "Stalled") if conditions.is_true(status, one)]
    return found if len(found) != 1 else None


def test_the_first_status_is_in_progress_because_none_counts_as_current(
    shard_resource, sink_resource, kstatus, house, keys
):
    """Under a definition that gives a new resource no status."""
    new = [
        {name: one for name, one in made.items() if name != "status"} for made in (shard_resource(), sink_resource())
    ]
    assert kstatus(new) == [CURRENT, CURRENT]
    requests = house.cluster.record()
    for key, kind, made in zip(keys, (PERSIST_SHARD, SPARK_SINK), new, strict=True):
        house.cluster.create(kind, made)
        house.look(key)
        first = next(one.arguments[3] for one in requests if one.verb == "apply_status")
        assert kstatus([{**made, "status": first}]) == [IN_PROGRESS]
        requests.clear()


def test_every_reason_of_ready_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    reasons = {reason for _, reason in [*SHARDS.values(), *SINKS.values(), *BROKEN.values()]}
    known = set(re.findall(r"\b[A-Z][A-Za-z]+\b", text))
    # The reason of a failed end is derived from the class of the failure.
    assert {one for one in reasons if one not in known} == set()


def expressions():
    """The health checks of the Kustomization that users copy, by kind."""
    text = (Path(__file__).parents[3] / "examples/gitops/flux/shards.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load(text)["spec"]["healthCheckExprs"]}


def by_expressions(resource):
    """As Flux evaluates them (fluxcd/pkg/runtime/cel): the first that is true, in this order; otherwise in progress."""
    context = {"status": resource["status"], "metadata": resource["metadata"]}
    checks = expressions()[resource["kind"]]
    order = {"inProgress": IN_PROGRESS, "failed": FAILED, "current": CURRENT}
    return next((status for name, status in order.items() if cel.evaluate(checks[name], context)), IN_PROGRESS)


def test_the_expressions_for_flux_agree_with_kstatus_in_every_phase(shards, sinks, broken, kstatus_twin):
    for resource in (*shards.values(), *sinks.values(), *broken.values()):
        if not resource["metadata"].get("deletionTimestamp"):
            assert by_expressions(resource) == kstatus_twin(resource), resource["status"]["conditions"]
    for resource in (shards["healthy"], sinks["completed"]):
        assert by_expressions({**resource, "status": {}}) == IN_PROGRESS
