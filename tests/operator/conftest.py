"""Resources and observations for the operator's tests, as factories."""

import copy

import kubernetes
import pytest
import yaml
from persist_engine.base.env import SeededEnv
from persist_engine.model.inspection import Inspection, ReaderInfo
from persist_engine.rows.schema import CODECS
from persist_kit.neighbours import neighbours
from persist_operator.api import conditions, names
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard, ShardSchema, StoreLocation
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge
from persist_operator.cluster.kube import KubeCluster, load_client
from persist_operator.cluster.port import PERSIST_SHARD
from persist_operator.plan.observed import ShardView
from persist_operator.settings import AllowedNamespaces, LoopSettings, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from prometheus_client import CollectorRegistry

# In the order of their imports: the API server's REST side stands on the cluster in memory.
fake_cluster, api_server, sink_world, *_ = neighbours(
    __file__,
    "fake_cluster",
    "api_server",
    "sink_world",
    "inline_house",
    "deadline_house",
    "reconcile_world",
    "replicas",
    "rollout_world",
    "shard_plans",
    "shards_house",
)

NOW = 1_790_000_000_000
LOCATION = StoreLocation(
    blob="s3://bucket/data", consensus="redis://redis:6379/0", secret_name="persist-store", profile="default"
)
TEAM = AllowedNamespaces(names=("team",))


@pytest.fixture
def now():
    return NOW


@pytest.fixture
def settings():
    profile = StorageProfile(
        blob=LOCATION.blob, consensus=LOCATION.consensus, secret_name=LOCATION.secret_name, allowed_namespaces=TEAM
    )
    return OperatorSettings(storage_profiles={"default": profile})


@pytest.fixture
def shard_resource():
    def make(spec=None, *, status=None, uid="uid-shard", name="flights", **metadata):
        made = {
            "apiVersion": names.API_VERSION,
            "kind": "PersistShard",
            "metadata": {
                "namespace": "team",
                "name": name,
                "uid": uid,
                "generation": 1,
                "creationTimestamp": "2026-09-20T00:00:00Z",
                **metadata,
            },
            "spec": {"schema": {"key": "id BIGINT"}, **(spec or {})},
        }
        made = load_schemas().default(made)
        return made if status is None else {**made, "status": copy.deepcopy(dict(status))}

    return make


@pytest.fixture
def make_shard(shard_resource):
    return lambda *args, **kwargs: Shard.of(shard_resource(*args, **kwargs))


@pytest.fixture
def sink_resource():
    def make(spec=None, *, status=None, uid="uid-sink", name="load", **metadata):
        made = {
            "apiVersion": names.API_VERSION,
            "kind": "SparkSink",
            "metadata": {
                "namespace": "team",
                "name": name,
                "uid": uid,
                "generation": 1,
                "creationTimestamp": "2026-09-20T00:00:00Z",
                **metadata,
            },
            "spec": {
                "shardRef": {"name": "flights"},
                "input": {"type": "Format", "format": {"name": "parquet", "options": {"path": "/data"}}},
                "envelope": {"type": "Append"},
                **(spec or {}),
            },
        }
        made = load_schemas().default(made)
        return made if status is None else {**made, "status": copy.deepcopy(dict(status))}

    return make


@pytest.fixture
def make_sink(sink_resource):
    return lambda *args, **kwargs: Sink.of(sink_resource(*args, **kwargs))


@pytest.fixture
def make_inspection():
    def make(**changes):
        values = {
            "shard_id": names.shard_id_of("uid-shard"),
            "seqno": 10,
            "seqno_since": 10,
            "applier_version": "0.1.0",
            "walltime_ms": NOW,
            "since": 0,
            "upper": 0,
            "key_schema": "id BIGINT",
            "val_schema": "",
            "codecs": CODECS,
            "batches": 1,
            "spine_batches": 1,
            "uncompacted_batches": 0,
            "runs": 1,
            "parts": 1,
            "updates": 10,
            "live_bytes": 1000,
            "inline_bytes": 0,
            "rollups": 1,
            "latest_rollup_seqno": 1,
            "latest_rollup_bytes": 100,
            "live_diffs": 10,
            "earliest_seqno": 1,
            "gc_seqnos": 0,
            "compaction_requests": 0,
            "compaction_bytes": 0,
            "waits_from_ms": None,
            "readers": (own_reader(0),),
            "writers": (),
            "progress": {},
            "is_tombstone": False,
            **changes,
        }
        return Inspection(**values)

    return make


def own_reader(since, uid="uid-shard"):
    return ReaderInfo(
        id=names.critical_id_of(names.shard_id_of(uid)),
        kind="critical",
        since=since,
        seqno=None,
        purpose=names.critical_purpose("default", "flights"),
        hostname="operator",
        last_heartbeat_ms=None,
    )


@pytest.fixture
def make_own_reader():
    return own_reader


@pytest.fixture
def usable_shard():
    return ShardView(
        found=True,
        reason="Resolved",
        message="",
        shard_id=names.shard_id_of("uid-shard"),
        schema=ShardSchema(key="id BIGINT", value=""),
        location=LOCATION,
    )


@pytest.fixture
def refused():
    """Returns the schema errors of a resource with this status. A status that a plan writes must fit the CRD."""
    return lambda resource, status: load_schemas().check({**resource, "status": copy.deepcopy(dict(status))})


@pytest.fixture
def world(make_sink, sink_resource, usable_shard, settings, now):
    """Makes a World: a sink with this spec over time."""
    return lambda spec=None: sink_world.World(make_sink, sink_resource, usable_shard, settings, now, spec or {})


@pytest.fixture
def server():
    made = api_server.ApiServer()
    yield made
    made.stop()


@pytest.fixture
def kubeconfig(server, tmp_path, monkeypatch):
    path = tmp_path / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "the-token"}}],
    }
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    return path


@pytest.fixture
def kube(kubeconfig):
    return KubeCluster(load_client())


class OperatedShard:
    """One PersistShard, `flights`, under an operator on real stores. `restart` replaces the operator and keeps API server and stores."""

    key = Key("PersistShard", "team", "flights")

    def __init__(self, location, now, resource):
        self.env = SeededEnv(start_ms=now)
        self.cluster = fake_cluster.FakeCluster(now_ms=self.env.now_ms)
        profile = StorageProfile(blob=location.blob, consensus=location.consensus, allowed_namespaces=TEAM)
        loop = LoopSettings(store_deadline_seconds=5, store_breaker_seconds=5)
        self._settings = OperatorSettings(storage_profiles={"default": profile}, loop=loop)
        self._bridge = None
        self.cluster.create(PERSIST_SHARD, resource)
        self.restart()

    def stop(self):
        if self._bridge is not None:
            self._bridge.close()
        self._bridge = None

    def restart(self):
        self.stop()
        self._bridge = Bridge(self._settings, env=self.env)
        # The engine gives up a failing store before. A busy machine may take longer for a right answer.
        self._bridge._deadline_s = 60
        metrics = OperatorMetrics(CollectorRegistry())
        self._reconciler = Reconciler(self.cluster, self._bridge, self._settings, self.env, metrics)

    def settle(self, times=3):
        """Advance the clock and reconcile until everything that fell due is done. Returns the status."""
        self.env.advance_ms(400_000)
        for _ in range(times):
            self.env.advance_ms(6000)
            self._reconciler.reconcile(self.key)
        return self.status

    @property
    def status(self):
        return self.cluster.get(PERSIST_SHARD, "team", "flights").get("status") or {}

    def condition(self, kind="Ready"):
        return conditions.find(self.status, kind)


@pytest.fixture
def operated(now, shard_resource):
    """Makes OperatedShards and stops them after the test."""
    made = []

    def make(location, **changes):
        made.append(OperatedShard(location, now, shard_resource(**changes)))
        return made[-1]

    yield make
    for each in made:
        each.stop()
