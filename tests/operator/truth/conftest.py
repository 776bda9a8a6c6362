"""One operator with API server and stores in memory, which reconciles as its queue would; and kstatus."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from persist_engine import Appended, Location, PersistClient, ShardId
from persist_engine.base.env import SeededEnv
from persist_kit.neighbours import neighbours
from persist_operator.api import conditions, times
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import BY_KIND, POD, ApiError
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

(phases,) = neighbours(__file__, "phases")

ANY_NAMESPACE = AllowedNamespaces(names=("*",))

SHARD, SINK = Key("PersistShard", "team", "flights"), Key("SparkSink", "team", "load")
QUOTA = (
    'POST /api/v1/namespaces/team/pods: 403 pods "load-1" is forbidden: exceeded quota: small, requested: pods=1, used: pods=3, '
    "limited: pods=3"
)


class House:
    """`look` reconciles once. `live` lets time pass and reconciles when the previous reconcile requested it, as the queue does."""

    def __init__(self, now, name):
        self.env = SeededEnv(start_ms=now)
        self.cluster = FakeCluster(now_ms=self.env.now_ms)
        self.location = Location(blob=f"mem:{name}", consensus=f"mem:{name}")
        profile = StorageProfile(
            allowed_namespaces=ANY_NAMESPACE, blob=self.location.blob, consensus=self.location.consensus
        )
        loop = LoopSettings(store_deadline_seconds=20)
        self.settings = OperatorSettings(storage_profiles={"default": profile}, loop=loop)
        self.bridge = Bridge(self.settings, env=self.env)
        self.restart()

    def restart(self):
        """Another process: the memory of the former one is gone."""
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(self.cluster, self.bridge, self.settings, self.env, self.metrics)

    def look(self, key):
        return self.reconciler.reconcile(key)

    def live(self, key, seconds):
        """Reconcile at each requested time for `seconds`; repeat after a second what raised. Returns the status."""
        until_ms = self.env.now_ms() + 1000 * seconds
        while True:
            try:
                after_s = self.look(key)
            except Exception:  # noqa: BLE001 - as the controller does
                after_s = 1.0
            if after_s is None or self.env.now_ms() + 1000 * after_s > until_ms:
                self.env.advance_ms(max(0, until_ms - self.env.now_ms()))
                return self.status(key)
            self.env.advance_ms(max(1, round(1000 * after_s)))

    def resource(self, key):
        return self.cluster.get(BY_KIND[key.kind], key.namespace, key.name)

    def status(self, key):
        return (self.resource(key) or {}).get("status") or {}

    def condition(self, key, condition_type="Ready"):
        found = conditions.find(self.status(key), condition_type)
        return None if found is None else (found["status"], found["reason"])

    def words(self, key, condition_type="Ready"):
        return conditions.find(self.status(key), condition_type)["message"]

    def make_rollup_due(self, key):
        """Commit more versions to the shard than its spec allows without a rollup."""
        self.cluster.edit(
            BY_KIND[key.kind], key.namespace, key.name, lambda one: one["spec"].update(rollup={"everySeqnos": 4})
        )
        shard_id = ShardId(self.status(key)["shardId"])
        with (
            PersistClient.open(self.location) as client,
            client.open_writer(shard_id, client.schema(shard_id), purpose="test") as writer,
        ):
            for time in range(6):
                assert isinstance(writer.compare_and_append([], expected_upper=time, new_upper=time + 1), Appended)

    def pod_runs(self, name):
        state = {"running": {"startedAt": times.to_text(self.env.now_ms())}}
        status = {"phase": "Running", "containerStatuses": [{"name": "driver", "state": state}]}
        self.cluster.edit(POD, "team", name, lambda pod: pod.update(status=status))


@pytest.fixture
def house(now, request):
    made = House(now, request.node.name)
    yield made
    made.bridge.close()


@pytest.fixture
def keys():
    return SHARD, SINK


@pytest.fixture
def quota():
    return ApiError(QUOTA, status=403)


def twin(resource):
    """The rule of kstatus for a custom resource, in Python (cli-utils, pkg/kstatus/status: generic.go, then its Ready fallback)."""
    status, metadata = resource.get("status") or {}, resource["metadata"]
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != metadata.get("generation"):
        return "InProgress"
    found = status.get("conditions", ())
    for one in found:
        if one["status"] == "True" and one["type"] in {"Reconciling", "Stalled"}:
            return "InProgress" if one["type"] == "Reconciling" else "Failed"
    ready = next((one["status"] for one in found if one["type"] == "Ready"), "True")
    return "Current" if ready == "True" else "InProgress"


@pytest.fixture(scope="session")
def kstatus_twin():
    return twin


def program(name):
    folders = [os.environ.get("PERSIST_TOOLS"), str(Path.home() / ".cache/persist-operator/bin")]
    return next((found for path in (None, *folders) if (found := shutil.which(name, path=path))), None)


def answers(arguments, resources):
    """What the program writes, a line for each resource."""
    text = "\n".join(json.dumps(one) for one in resources)
    run = subprocess.run(arguments, input=text, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="session")
def kstatus():
    """Computes the status of resources with kstatus itself, in one run of the program that `make setup` builds from kstatus/."""
    found = program("persist-kstatus")
    assert found, "no persist-kstatus on PATH or in ~/.cache/persist-operator/bin: run `make setup`"
    return lambda resources: [one["status"] for one in answers([found], resources)]


@pytest.fixture(scope="session", params=["persist-lua", "persist-argo"])
def argo(request):
    """Runs a script of Argo CD's kind over resources: with the runner of lua/, and with Argo CD's own code where `make argo` built it."""
    found = program(request.param)
    if found is None and request.param == "persist-argo":
        pytest.skip("Argo CD's own code is not built: make argo")
    assert found, "no persist-lua on PATH or in ~/.cache/persist-operator/bin: run `make setup`"

    def run(mode, script, resources, folder):
        file = folder / "script.lua"
        file.write_text(script)
        return answers([found, mode, str(file)], resources)

    return run


@pytest.fixture
def shards(shard_resource, make_shard, make_inspection, make_own_reader, settings, now):
    return phases.shards(shard_resource, make_shard, make_inspection, make_own_reader, settings, now)


@pytest.fixture
def sinks(sink_resource, make_sink, usable_shard, settings, now):
    return phases.sinks(sink_resource, make_sink, usable_shard, settings, now)


@pytest.fixture
def broken(house, keys, shard_resource, sink_resource):
    return phases.broken(house, keys, shard_resource, sink_resource)
