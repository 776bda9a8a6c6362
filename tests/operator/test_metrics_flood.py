"""A flood of 10,000 shards, and of pods that report what they like, leaves a scrape bounded in series and bytes."""

from collections import Counter

import pytest
from persist_engine.base.metrics import PrometheusMetrics
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.resource_metrics import spec_of
from persist_operator.steps.shard_series import SHARDS_MAX
from persist_operator.steps.sink_series import OF_SINK, SINKS_MAX
from prometheus_client import CollectorRegistry, generate_latest

SHARDS, NAMESPACES = 10_000, 10
#: Of one shard with all that its status can have.
SERIES_OF_SHARD = 40
#: Of one scrape: what Prometheus takes by default without a limit, and what one process writes in a second or two.
SERIES_MAX, BYTES_MAX = 80_000, 8_000_000
STATUS = {
    "observedGeneration": 1,
    "shardId": "s11111111-2222-4333-8444-555555555555",
    "frontiers": {"since": "1", "upper": "2", "seqno": 9, "upperLagSeconds": 1, "sinceLagSeconds": 1},
    "storage": {
        "batches": 1,
        "liveBytes": 1,
        "liveDiffs": 1,
        "latestRollupSeqno": 1,
        "missingBlobs": 0,
        "orphanBytes": 1,
    },
    "holds": {"readers": 2, "writers": 1},
    "debt": {"compactionBytes": 5, "oldestUncompactedSeconds": 7},
    "verification": {"verdict": "Verified"},
    "maintenance": {
        task: {"lastSuccessTime": "2026-09-21T14:00:00Z", "consecutiveFailures": 0}
        for task in ("gc", "rollup", "compaction", "verify", "orphans")
    },
    "conditions": [
        {"type": kind, "status": "True", "reason": "Any", "lastTransitionTime": "2026-09-21T14:00:00Z"}
        for kind in ("Ready", "StorageReachable", "CompactionCurrent", "GarbageCollected", "SinceAdvancing", "Stalled")
    ],
}


@pytest.mark.slow
def test_ten_thousand_shards_leave_a_scrape_bounded(now, shard_resource):
    registry = CollectorRegistry()
    metrics, engine = OperatorMetrics(registry), PrometheusMetrics(registry)
    one = shard_resource({"maintenance": {"maxRewriteBytesPerDay": "1Gi"}})
    for number in range(SHARDS):
        namespace, name = f"team-{number % NAMESPACES}", f"shard-{number:05}"
        ready = [{"type": "Ready", "status": "False", "reason": "Any"}] if number == 7777 else []
        status = STATUS if not ready else {**STATUS, "conditions": ready}
        metrics.set_shard(namespace, name, status, spec=spec_of(one), now_ms=now)
        head = {**one["metadata"], "namespace": namespace, "name": name}
        metrics.resources.show({**one, "metadata": head, "status": STATUS}, STATUS)
        report = {"type": f"Type{number}", "stores": {"blob": {f"verb{number}": {"ok": 1, "bytes": 1, "seconds": 1}}}}
        history = [{"id": f"run-{number}", "type": "GC", "outcome": "Succeeded", "runner": "Pod"}]
        run = type("Reported", (), {"name": f"run-{number}", "report": report})
        metrics.resources.written({**one, "metadata": head, "status": {}}, {"history": history}, [run])
        engine.count("blob_calls", verb="get", outcome="ok")
    text = generate_latest(registry)
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    of_shards = Counter(line.partition("{")[0] for line in lines if line.startswith("persist_shard_"))
    assert max(of_shards.values()) <= SHARDS_MAX * len(STATUS["maintenance"])
    assert of_shards["persist_shard_ready"] == SHARDS_MAX
    assert sum(of_shards.values()) <= SHARDS_MAX * SERIES_OF_SHARD
    assert len(lines) < SERIES_MAX
    assert len(text) < BYTES_MAX
    assert [line for line in lines if line.startswith("persist_shards{")] == [
        f'persist_shards{{namespace="team-{number}"}} 1000.0' for number in range(NAMESPACES)
    ], "the sums count every shard"
    assert 'persist_shard_ready{name="shard-07777",namespace="team-7"} 0.0' in lines or (
        'persist_shard_ready{namespace="team-7",name="shard-07777"} 0.0' in lines
    ), "the one in trouble is shown"
    behind = [line for line in lines if line.startswith("persist_resource_generations_behind")]
    assert len(behind) == SHARDS_MAX, "no status was written"
    reported = [line for line in lines if line.startswith("persist_run_") and "_created" not in line]
    assert len(reported) < 10, "whatever pods report"


def test_many_sinks_leave_a_scrape_bounded_and_those_in_trouble_in_it(now, sink_resource):
    registry = CollectorRegistry()
    metrics, one = OperatorMetrics(registry), sink_resource()
    failed = {"lastFailure": {"time": "2026-09-21T14:00:00Z", "class": "UserError"}, "consecutiveFailures": 1}
    for number in range(SINKS_MAX + 500):
        name, is_ready = f"sink-{number:05}", number != SINKS_MAX + 400
        status = {"conditions": [{"type": "Ready", "status": str(is_ready), "reason": "Any"}], "attempt": 1, **failed}
        metrics.set_sink("team", name, status)
        metrics.resources.show({**one, "metadata": {**one["metadata"], "name": name}, "status": status}, status)
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("spark_sink_")]
    found = Counter(line.partition("{")[0] for line in lines)
    assert found["spark_sink_ready"] == found["spark_sink_last_failure_timestamp_seconds"] == SINKS_MAX
    assert max(found.values()) <= SINKS_MAX
    assert set(found) <= {f"spark_sink_{series}" for series in (*OF_SINK, "last_failure_timestamp_seconds")}
    in_trouble = [line for line in lines if f"sink-{SINKS_MAX + 400:05}" in line]
    assert any(line.startswith("spark_sink_ready{") and line.endswith(" 0.0") for line in in_trouble)
    for number in range(SINKS_MAX + 500):
        metrics.forget("SparkSink", "team", f"sink-{number:05}")
    assert "sink-0" not in generate_latest(registry).decode()
