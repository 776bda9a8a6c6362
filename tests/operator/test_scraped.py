"""A real Prometheus scrapes the registry of an operator: each query of a dashboard returns series, each rule finds what it reads."""

import re
from pathlib import Path

import pytest
import yaml
from fake_cluster import FakeCluster
from persist_engine.base.env import SeededEnv
from persist_engine.base.metrics import PrometheusMetrics
from persist_kit.prometheus import panel_queries, prometheus_server
from persist_operator.bridge import Bridge
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK
from persist_operator.handlers.probes import ProbeServer
from persist_operator.plan.observed import Phase, Run
from persist_operator.settings import AllowedNamespaces, OperatorSettings, StorageProfile
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler
from persist_operator.steps.resource_metrics import spec_of
from prometheus_client import CollectorRegistry, ProcessCollector

CHART = Path(__file__).resolve().parents[2] / "charts" / "persist-operator"
MONITORING = CHART / "files" / "monitoring"
#: Prometheus' own series of alerts that fire.
ALERTS = {"ALERTS"}
#: Series of the engine that no call of this test makes.
RARE = {"persist_forked_log_total"}
VALUES = {"$namespace": "team", "$shard": "busy", "$sink": "busy", "$__rate_interval": "10s"}
NAME = re.compile(r"\b((?:persist|spark_sink|process)_[a-z_0-9]+|ALERTS)\b")
WAIT_S = 30.0
AT = "2026-09-21T14:00:00Z"
#: A status with all numbers that a shard, or a sink, can have. The schema of the resource is asked whether it may look so.
BUSY_SHARD = {
    "observedGeneration": 1,
    "frontiers": {
        "since": "1789000000000",
        "upper": "1789999999000",
        "seqno": 900,
        "upperLagSeconds": 1,
        "sinceLagSeconds": 999999,
    },
    "storage": {
        "batches": 70,
        "liveBytes": 1000,
        "liveDiffs": 500,
        "latestRollupSeqno": 800,
        "missingBlobs": 0,
        "orphanBlobs": 1,
        "orphanBytes": 10,
    },
    "verification": {"verdict": "Verified", "mode": "Full", "time": AT, "errors": 0, "message": "all"},
    "holds": {"readers": 2, "writers": 1},
    "debt": {"compactionBytes": 5000, "oldestUncompactedSeconds": 77},
    "maintenance": {"gc": {"lastSuccessTime": AT, "consecutiveFailures": 1}},
    "history": [
        {
            "id": "compact-1",
            "type": "Compaction",
            "outcome": "Succeeded",
            "reason": "debt",
            "startTime": AT,
            "endTime": AT,
            "bytesRead": 10,
            "bytesWritten": 5,
            "blobsDeleted": 1,
        }
    ],
    "conditions": [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": "",
            "lastTransitionTime": AT,
            "observedGeneration": 1,
        }
        for kind, status, reason in (
            ("Ready", "True", "Healthy"),
            ("StorageReachable", "True", "Reachable"),
            ("CompactionCurrent", "False", "DebtExceeded"),
            ("GarbageCollected", "True", "Current"),
            ("SinceAdvancing", "False", "HeldByReader"),
        )
    ],
}
REPORT = {
    "type": "Compaction",
    "stores": {"consensus": {"compare_and_set": {"ok": 1, "error": 1, "seconds": 0.01}}, "commits": [0] * 20 + [1]},
}
SCHEDULED = {"mode": "Scheduled", "schedule": {"cron": "0 * * * *"}, "freshness": {"targetSeconds": 60}}
BUSY_SINK = {
    "observedGeneration": 1,
    "attempt": 4,
    "consecutiveFailures": 1,
    "driver": {"podName": "busy-4", "phase": "Running"},
    "executors": {"running": 1, "pending": 0, "failed": 0},
    "schedule": {"nextTime": AT},
    "freshness": {"time": AT},
    "lastFailure": {"class": "Fenced", "reason": "Fenced", "time": AT},
    "progress": {
        "rowsRead": 10,
        "errors": 0,
        "updatesWritten": 10,
        "missing": 0,
        "extra": 0,
        "running": {
            "stage": "Streaming",
            "rowsRead": 5,
            "errors": 0,
            "bytesRead": 50,
            "batches": 2,
            "taskSeconds": 9,
            "gcSeconds": 1,
            "shuffleBytes": 70,
            "lagSeconds": 3,
        },
    },
    "rollout": {"state": "CatchingUp", "lagSeconds": 1, "missing": 0, "extra": 0},
    "conditions": [
        {
            "type": kind,
            "status": "True",
            "reason": "Any",
            "message": "",
            "lastTransitionTime": AT,
            "observedGeneration": 1,
        }
        for kind in ("Ready", "Running", "Fresh")
    ],
}


@pytest.fixture
def scraped(tmp_path, now, shard_resource, sink_resource, refused):
    """An operator with a shard and a sink that it reconciles on real stores, and with a busy one of each, behind a real Prometheus."""
    registry, env = CollectorRegistry(), SeededEnv(start_ms=now)
    ProcessCollector(registry=registry)
    metrics, engine = OperatorMetrics(registry), PrometheusMetrics(registry)
    cluster = FakeCluster(now_ms=env.now_ms)
    stores = StorageProfile(
        blob=f"file://{tmp_path}/b",
        consensus=f"sqlite://{tmp_path}/c.db",
        allowed_namespaces=AllowedNamespaces(names=("team",)),
    )
    settings = OperatorSettings(storage_profiles={"default": stores})
    bridge = Bridge(settings, env=env, metrics=engine)
    reconciler = Reconciler(cluster, bridge, settings, env, metrics)
    for kind, made in ((PERSIST_SHARD, shard_resource()), (SPARK_SINK, sink_resource())):
        cluster.create(kind, made)
        for _ in range(6):
            env.advance_ms(20_000)
            reconciler.reconcile(Key(made["kind"], "team", made["metadata"]["name"]))
            metrics.reconciles.labels(kind=made["kind"], result="ok").inc()
            metrics.reconcile_seconds.labels(kind=made["kind"]).observe(0.1)
    shard = shard_resource({"maintenance": {"maxRewriteBytesPerDay": "10Gi"}}, name="busy")
    busy = [(shard, BUSY_SHARD), (sink_resource(SCHEDULED, name="busy"), BUSY_SINK)]
    run = Run(name="compact-1", kind="compaction", phase=Phase.SUCCEEDED, created_ms=now, report=REPORT)
    for resource, status in busy:
        assert not refused(resource, status)
        metrics.resources.show(resource, status)
        metrics.resources.written(resource, status, [run])
    metrics.resources.show(shard_resource(name="behind"), {})  # its stored status covers no generation
    metrics.set_shard("team", "busy", BUSY_SHARD, spec=spec_of(shard), now_ms=now)
    metrics.set_sink("team", "busy", BUSY_SINK)
    cluster.create(SPARK_SINK, sink_resource(name="gone", uid="uid-gone"))
    reconciler.reconcile(Key("SparkSink", "team", "gone"))
    cluster.edit(SPARK_SINK, "team", "gone", lambda one: one["metadata"].update(deletionTimestamp=AT))
    reconciler.reconcile(Key("SparkSink", "team", "gone"))
    # A wider schema is a commit of the operator's own.
    wider = {"key": "id BIGINT", "value": "more STRING"}
    cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["spec"].update(schema=wider))
    assert cluster.get(PERSIST_SHARD, "team", "flights")["metadata"]["generation"] == 2
    for _ in range(2):
        reconciler.reconcile(Key("PersistShard", "team", "flights"))
        env.advance_ms(20_000)
    metrics.leader.set(1)
    metrics.leaked_pods.set(0)
    metrics.canary_success.labels("sys", "canary").set(env.now_ms() / 1000)
    metrics.canary_seconds.labels("sys", "canary").observe(0.1)
    metrics.api_requests.labels(verb="GET", code="429").inc()
    metrics.refusals.labels(what="plan").inc()
    for port, verb in (("blob", "get"), ("consensus", "head")):
        engine.count(f"{port}_calls", 1, verb=verb, outcome="Indeterminate")
    server = ProbeServer(
        0,
        registry=registry,
        sick_of=lambda: None,
        waits_for=lambda: None,
        refresh=lambda: None,
        host="127.0.0.1",
    )
    server.start()
    try:
        with prometheus_server({f"127.0.0.1:{server.port}": {"namespace": "sys", "pod": "persist-0"}}) as prometheus:
            # A counter grows only between two scrapes.
            assert prometheus.without_series({"first": "persist_run_commit_seconds_count"}, within_s=WAIT_S) == {}
            metrics.resources.written(shard, BUSY_SHARD, [run])
            metrics.canary_seconds.labels("sys", "canary").observe(0.1)
            yield prometheus, (lambda: reconciler.reconcile(Key("PersistShard", "team", "flights"))), cluster
    finally:
        server.stop()
        bridge.close()


def rule_expressions():
    thresholds = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]["thresholds"]
    found = {}
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            found[rule["alert"]] = re.sub(r"@(\w+)@", lambda match: str(thresholds[match[1]]), rule["expr"])
    return found


@pytest.mark.slow
def test_every_query_and_rule_runs_on_what_the_operator_exports(scraped):
    prometheus, reconcile, cluster = scraped
    queries, rules = panel_queries(MONITORING / "dashboards", VALUES), rule_expressions()
    assert len(queries) > 60
    expected = {name: text for name, text in queries.items() if not set(NAME.findall(text)) & ALERTS}
    assert prometheus.without_series(expected, within_s=WAIT_S) == {}

    read = {name for text in rules.values() for name in NAME.findall(text)} - ALERTS - RARE
    assert prometheus.without_series({name: f"count({name})" for name in read}, within_s=WAIT_S) == {}
    firing = {name: prometheus.query(text) for name, text in rules.items()}
    assert firing["PersistShardReaderHold"] == [], "held for 800 s only"
    assert firing["PersistOperatorDown"] == []
    (near,) = firing["PersistShardCompactionBehind"]
    assert (near["metric"]["namespace"], near["metric"]["name"]) == ("team", "busy"), (
        "of the resource, not of the operator"
    )
    (blocked,) = firing["PersistDeletionBlocked"]
    assert (blocked["metric"]["kind"], blocked["metric"]["name"]) == ("SparkSink", "gone")

    ready = prometheus.query('persist_shard_ready{name="flights"}')
    assert [one["value"][1] for one in ready] == ["1"], "the operator has reconciled it"
    reachable = prometheus.query('persist_shard_storage_reachable{name="flights"}')
    assert [one["value"][1] for one in reachable] == ["1"]
    behind = prometheus.query('persist_resource_generations_behind{name="flights"}')
    assert behind == [], "and has stored its status"
    assert prometheus.query('{name="gone",__name__!="persist_resource_deletion_timestamp_seconds"}') == []
    cluster.delete(PERSIST_SHARD, "team", "flights")
    reconcile()
    assert prometheus.without_series({"gone": 'absent(persist_shard_ready{name="flights"})'}, within_s=WAIT_S) == {}
