"""One operator on the in-memory API server and the real engine on files, for tests of whole reconciles."""

import hashlib
import json

import pytest
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions, names, times
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD, SPARK_SINK, ApiError
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

TEAM = AllowedNamespaces(names=("team",))
WRITES = {"create", "replace", "delete", "apply_status"}
SHARD, SINK = Key("PersistShard", "team", "flights"), Key("SparkSink", "team", "load")


class World:
    """One operator. After `restart`, as after a crash, only the API server and the stores remain."""

    def __init__(self, folder, now):
        self.stops = None
        self.env = SeededEnv(start_ms=now)
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        self.location = Location(blob=f"file://{folder}/blob", consensus=f"sqlite://{folder}/consensus.db")
        self.settings = OperatorSettings(
            storage_profiles={
                "default": StorageProfile(
                    blob=self.location.blob, consensus=self.location.consensus, allowed_namespaces=TEAM
                ),
                "dead": StorageProfile(
                    blob=self.location.blob, consensus="redis://127.0.0.1:1/0", allowed_namespaces=TEAM
                ),
            },
            loop=LoopSettings(store_deadline_seconds=2, store_breaker_seconds=5),
        )
        self.bridge = None
        self.restart()

    def restart(self, open_client=None):
        self.close()
        self.bridge = Bridge(self.settings, env=self.env, open_client=open_client)
        # The engine gives up a dead store before. A busy machine may take longer for a right answer.
        self.bridge._deadline_s = 60
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, self.metrics, stops=self.stops)

    def close(self):
        if self.bridge is not None:
            self.bridge.close()

    def go(self, key, times_=4):
        for _ in range(times_):
            self.env.advance_ms(6000)
            self.reconciler.reconcile(key)
        return self.status(key)

    def status(self, key):
        kind = PERSIST_SHARD if key.kind == "PersistShard" else SPARK_SINK
        found = self.cluster.get(kind, key.namespace, key.name)
        return (found or {}).get("status") or {}

    def ready(self, key):
        found = conditions.find(self.status(key), "Ready")
        return (found["status"], found["reason"])

    def pod_phase(self, name, phase, **terminated):
        def change(pod):
            state = {"running": {"startedAt": times.to_text(self.env.now_ms())}}
            if terminated:
                state = {"terminated": {"finishedAt": times.to_text(self.env.now_ms()), **terminated}}
            pod["status"] = {"phase": phase, "containerStatuses": [{"name": "driver", "state": state}]}

        self.cluster.edit(POD, "team", name, change)


class FakeStops:
    """Drivers that accept a stop as long as `accepts` is true. `asked` has the address, uid and name of each."""

    def __init__(self):
        self.accepts, self.asked = True, []

    def digest(self, uid, pod):
        return hashlib.sha256(f"{uid}/{pod}".encode()).hexdigest()

    def ask(self, host, port, *, uid, pod):
        self.asked.append((host, port, uid, pod))
        return self.accepts


def append(world, shard_id, count):
    schema = Schema.from_ddl("id BIGINT")
    with (
        PersistClient.open(world.location) as client,
        client.open_writer(ShardId(shard_id), schema, purpose="test") as writer,
    ):
        for _ in range(count):
            upper = writer.fetch_recent_upper().time
            updates = [(((upper,), ()), upper, 1)]
            writer.compare_and_append(updates, expected_upper=Antichain.of(upper), new_upper=Antichain.of(upper + 1))


def finish_job(world, name, **report):
    def end(job):
        now = times.to_text(world.env.now_ms())
        failed = report.get("outcome") == "Failed"
        ended = "Failed" if failed else "Complete"
        reason = "BackoffLimitExceeded" if failed else "Completed"
        job["status"] = {
            "startTime": now,
            "completionTime": None if failed else now,
            "conditions": [{"type": ended, "status": "True", "reason": reason, "lastTransitionTime": now}],
        }

    job = world.cluster.get(JOB, "team", name)
    labels = {**job["spec"]["template"]["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
    pod = {"metadata": {"namespace": "team", "name": f"{name}-x", "labels": labels}}
    world.cluster.create(POD, pod)
    world.pod_phase(f"{name}-x", "Succeeded", exitCode=0, message=json.dumps(report))
    world.cluster.edit(JOB, "team", name, end)


def calls_reported(world, kind, store, verb):
    labels = {"type": kind, "store": store, "verb": verb, "outcome": "ok"}
    return world.metrics.registry.get_sample_value("persist_run_store_calls_total", labels)


def reports(world, name, **reported):
    """The driver runs and reports this."""
    world.pod_phase(name, "Running")
    note = {names.ANNOTATION_PROGRESS: json.dumps(reported)}
    world.cluster.edit(POD, "team", name, lambda pod: pod["metadata"].setdefault("annotations", {}).update(note))


def reconciled_behind(world, key, happens, *, after, nth=1):
    """Reconcile as an operator that slept before its write: `happens` runs after the answer to its nth request of the verb `after`."""
    following, left = world.cluster.intercept, [nth]

    def sleep(request):
        answer = request.send()
        left[0] -= request.verb == after
        if left[0] == 0:
            world.cluster.intercept = following
            happens()
        return answer

    world.cluster.intercept = sleep
    with pytest.raises(ApiError, match="modified"):
        world.reconciler.reconcile(key)
