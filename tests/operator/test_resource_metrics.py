"""The series of resources beside their numbers: conditions, targets, times, generations, and what ended runs did."""

import os
from pathlib import Path

import pytest
from persist_operator.plan.observed import Phase, Run
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.resource_metrics import spec_of
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).resolve().parents[2]
NOW = 1_790_000_000_000
LONG_AGO = "2026-09-21T12:00:00Z"  # NOW is 2026-09-21T14:13:20Z
SHARD = {"namespace": "team", "name": "flights"}
SINK = {"namespace": "team", "name": "load"}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def whole(registry):
    return OperatorMetrics(registry)


@pytest.fixture
def metrics(whole):
    return whole.resources


def condition(kind, status, reason="Any", at=LONG_AGO):
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": at}


def shown(whole, registry, resource, status):
    prefix, labels = ("spark_sink", SINK)
    if resource["kind"] == "PersistShard":
        whole.set_shard("team", "flights", status, spec=spec_of(resource), now_ms=NOW)
        prefix, labels = ("persist_shard", SHARD)
    whole.resources.show(resource, status)
    return lambda name: registry.get_sample_value(f"{prefix}_{name}", labels)


@pytest.mark.parametrize(
    ("status", "name", "value"),
    [
        ({}, "plan_unapproved_seconds", 0),
        ({"plan": {"id": "a", "approved": True, "createdTime": LONG_AGO}}, "plan_unapproved_seconds", 0),
        ({"plan": {"id": "a", "approved": False, "createdTime": LONG_AGO}}, "plan_unapproved_seconds", 8000),
        ({}, "compaction_held", 0),
        ({"maintenance": {"compaction": {"waitReason": "WindowClosed"}}}, "compaction_held", 1),
        ({"maintenance": {"compaction": {"nextRunTime": LONG_AGO}}}, "compaction_held", 0),
        ({}, "rewritten_bytes", 0),
        (
            {"rewritten": [{"time": LONG_AGO, "bytes": 7}, {"time": "2026-09-20T00:00:00Z", "bytes": 9}]},
            "rewritten_bytes",
            7,
        ),
        ({}, "rewrite_budget_bytes", 1 << 30),
        ({}, "amplification_ratio", None),
        ({"storage": {"amplificationPercent": 250}}, "amplification_ratio", 2.5),
    ],
)
def test_a_shard_shows_what_its_plan_says(whole, registry, shard_resource, status, name, value):
    resource = shard_resource({"maintenance": {"maxRewriteBytesPerDay": "1Gi"}})
    assert shown(whole, registry, resource, status)(name) == value


@pytest.mark.parametrize(
    ("found", "name", "value"),
    [
        ([condition("StorageReachable", "True")], "storage_reachable", 1),
        ([condition("StorageReachable", "False")], "storage_reachable", 0),
        ([condition("StorageReachable", "Unknown")], "storage_reachable", None),
        ([], "storage_reachable", None),
        ([condition("CompactionCurrent", "False")], "compaction_current", 0),
        ([condition("GarbageCollected", "True")], "garbage_collected", 1),
        ([condition("Stalled", "True")], "stalled", 1),
        ([], "stalled", 0),
        ([condition("Suspended", "True")], "suspended", 1),
        ([], "since_lag_target_seconds", 3600),
        ([], "rollup_every_seqnos", 128),
    ],
)
def test_a_shard_shows_what_its_status_says(whole, registry, shard_resource, found, name, value):
    assert shown(whole, registry, shard_resource(), {"conditions": found})(name) == value


@pytest.mark.parametrize("transition", [LONG_AGO, "2026-09-20T00:00:00Z", "2026-09-21T14:13:19Z"])
@pytest.mark.parametrize(
    ("status", "reason", "held", "value"),
    [
        ("False", "HeldByReader", [LONG_AGO], 8000),
        ("False", "HeldByReader", ["2026-09-21T14:00:00Z", LONG_AGO], 8000),
        ("False", "HeldByReader", ["2026-09-21T14:13:00Z"], 20),
        ("False", "HeldByReader", ["nonsense"], 0),
        ("False", "StoreError", [LONG_AGO], 0),
        ("True", "Advancing", [LONG_AGO], 0),
        (None, None, [LONG_AGO], None),
    ],
)
def test_a_hold_lasts_from_its_own_beginning(whole, registry, shard_resource, status, reason, held, value, transition):
    """Whatever the condition was before: False for another cause, or not there while the stores did not answer."""
    found = [] if status is None else [condition("SinceAdvancing", status, reason, at=transition)]
    known = {"conditions": found, "holds": {"blocking": [{"id": "r", "heldFrom": at} for at in held]}}
    assert shown(whole, registry, shard_resource(), known)("reader_hold_seconds") == value


@pytest.mark.parametrize(
    ("spec", "status", "name", "value"),
    [
        ({}, {"conditions": [condition("Running", "True")]}, "running", 1),
        ({}, {"driver": {"phase": "Pending"}}, "driver_pending", 1),
        ({}, {"driver": {"phase": "Running"}}, "driver_pending", 0),
        ({}, {"driver": {"phase": "Running"}}, "executors_wanted", 1),
        ({}, {"driver": {"phase": "Pending"}}, "executors_wanted", None),
        ({}, {"schedule": {"nextTime": "2026-09-21T14:13:20Z"}}, "next_run_timestamp_seconds", NOW / 1000),
        ({"suspend": True}, {"schedule": {"nextTime": LONG_AGO}}, "next_run_timestamp_seconds", None),
        ({"suspend": True}, {}, "suspended", 1),
        ({}, {}, "next_run_timestamp_seconds", None),
    ],
)
def test_a_sink_shows_what_its_status_says(whole, registry, sink_resource, spec, status, name, value):
    assert shown(whole, registry, sink_resource(spec), status)(name) == value


@pytest.mark.parametrize("deadline_seconds", [3600, 86_400, 30 * 86_400])
def test_the_age_of_what_is_owed_does_not_depend_on_a_deadline_that_was_changed(
    whole, registry, shard_resource, deadline_seconds
):
    """The status has the deadline of its numbers, which stay while the stores do not answer."""
    resource = shard_resource({"compaction": {"deadlineSeconds": deadline_seconds}})
    debt = {"oldestUncompactedSeconds": 600, "deadlineTime": "2026-09-22T11:50:00Z"}  # of a day
    status = {"frontiers": {"observedTime": LONG_AGO}, "debt": debt}
    assert shown(whole, registry, resource, status)("oldest_uncompacted_seconds") == 600 + 8000


@pytest.mark.parametrize(
    ("spec", "task"),
    [
        ({"suspend": True}, "rollup"),
        ({"gc": {"enabled": False}}, "gc"),
        ({"gc": {"orphans": {"mode": "Off"}}}, "orphanScan"),
        ({"verify": {"mode": "Off"}}, "verify"),
        ({"compaction": {"mode": "Manual"}}, "compaction"),
    ],
)
def test_work_that_is_off_is_not_said_to_fail(whole, registry, shard_resource, spec, task):
    """No run follows, so the count would stand for ever, and with it the alert that the operator tries again."""
    failing = {"maintenance": {task: {"consecutiveFailures": 4}}}

    def failures(spec):
        whole.set_shard("team", "flights", failing, spec=spec_of(shard_resource(spec)), now_ms=NOW)
        return registry.get_sample_value("persist_shard_consecutive_failures", {**SHARD, "task": task})

    assert (failures({}), failures(spec)) == (4, None)


def test_a_value_that_becomes_unknown_has_no_series_any_more(whole, registry, shard_resource):
    known = {"conditions": [condition("StorageReachable", "True")]}
    assert shown(whole, registry, shard_resource(), known)("storage_reachable") == 1
    assert shown(whole, registry, shard_resource(), {"conditions": []})("storage_reachable") is None


def failures(registry):
    name = "spark_sink_last_failure_timestamp_seconds"
    return {
        sample.labels["class"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_a_sink_has_one_series_of_its_last_failure(metrics, registry, sink_resource):
    for failure_class, at in (("Fenced", LONG_AGO), ("Storage", "2026-09-21T14:13:20Z")):
        metrics.show(sink_resource(), {"lastFailure": {"class": failure_class, "time": at}})
    assert failures(registry) == {"Storage": NOW / 1000}
    metrics.show(sink_resource(), {})
    assert failures(registry) == {}


def test_generations_that_the_stored_status_does_not_cover(metrics, registry, shard_resource):
    def behind():
        return registry.get_sample_value(
            "persist_resource_generations_behind", {"kind": "PersistShard", "namespace": "team", "name": "flights"}
        )

    resource = shard_resource(status={"observedGeneration": 2}, generation=5)
    metrics.show(resource, {"observedGeneration": 5})
    assert behind() == 3, "the new status is not stored yet"
    metrics.written(resource, {"observedGeneration": 5})
    assert behind() is None


def run(number, **fields):
    return {
        "id": f"gc-{number}",
        "type": "GC",
        "outcome": "Succeeded",
        "startTime": "2026-09-21T14:00:00Z",
        "endTime": "2026-09-21T14:00:07Z",
        **fields,
    }


def test_each_ended_run_is_counted_once(metrics, registry, shard_resource):
    first = {"history": [run(1, blobsDeleted=3)]}
    second = {
        "history": [
            run(2, outcome="Failed"),
            run(1, blobsDeleted=3),
            run(3, type="Compaction", runner="Spark", bytesRead=100, bytesWritten=40),
        ]
    }
    metrics.written(shard_resource(), first)
    metrics.written(shard_resource(status=first), first)
    metrics.written(shard_resource(status=first), second)

    def count(name, **labels):
        return registry.get_sample_value(f"persist_maintenance_{name}_total", labels)

    assert count("runs", type="GC", runner="Pod", outcome="Succeeded") == 1
    assert count("runs", type="GC", runner="Pod", outcome="Failed") == 1
    assert count("runs", type="Compaction", runner="Spark", outcome="Succeeded") == 1
    assert count("run_seconds", type="GC", runner="Pod") == 14
    assert count("deleted_blobs", type="GC") == 3
    assert (count("read_bytes", type="Compaction"), count("written_bytes", type="Compaction")) == (100, 40)


def test_runs_of_a_shard_without_a_history_are_counted_once(metrics, registry, shard_resource, now):
    def ran(number):
        report = {"outcome": "Succeeded", "blobs_deleted": number}
        return Run(
            name=f"gc-{number}", kind="gc", phase=Phase.SUCCEEDED, created_ms=now, finished_ms=now, report=report
        )

    def settled(number):
        return {"maintenance": {"gc": {"jobName": f"gc-{number}", "settledJob": f"gc-{number}"}}}

    metrics.written(shard_resource(), settled(1), [ran(1)])
    metrics.written(shard_resource(status=settled(1)), settled(1), [ran(1)])
    metrics.written(shard_resource(status=settled(1)), settled(2), [ran(1), ran(2)])
    labels = {"type": "GC", "runner": "Pod", "outcome": "Succeeded"}
    assert registry.get_sample_value("persist_maintenance_runs_total", labels) == 2
    assert registry.get_sample_value("persist_maintenance_deleted_blobs_total", {"type": "GC"}) == 3


def of_resources(registry):
    return {
        sample.name
        for family in registry.collect()
        for sample in family.samples
        if "namespace" in sample.labels and not sample.name.startswith("persist_maintenance")
    }


def test_series_end_with_the_resource(whole, registry, shard_resource, sink_resource):
    for resource in (shard_resource(), sink_resource()):
        status = {"lastFailure": {"class": "Fenced", "time": LONG_AGO}} if resource["kind"] == "SparkSink" else {}
        shown(whole, registry, resource, status)
        assert of_resources(registry)
        whole.forget(resource["kind"], "team", resource["metadata"]["name"])
        assert of_resources(registry) == set()


def test_a_resource_that_is_being_deleted_shows_only_since_when(metrics, registry, shard_resource):
    resource = shard_resource(deletionTimestamp=LONG_AGO)
    metrics.show(resource, {})
    metrics.deleting(resource)
    assert of_resources(registry) == {"persist_resource_deletion_timestamp_seconds"}
    metrics.forget("PersistShard", "team", "flights")
    assert of_resources(registry) == set()


def as_markdown():
    """docs/operator-metrics.md, from the registry of a new operator."""
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    lines = [
        "# Metrics of the operator",
        "",
        "Generated from the operator's registry; a test keeps this table and the code the same. The operator also serves",
        "[the metrics of the engine](metrics.md) for its own calls to stores, and those of its process (`process_*`, `python_*`).",
        "",
        "Only the leader exports series of resources. An unknown value has no series, and the series of a resource end with it.",
        "",
        "| name | kind | labels | what |",
        "|---|---|---|---|",
    ]
    collectors = {id(one): one for one in registry._collector_to_names}  # noqa: SLF001
    rows = []
    for collector in collectors.values():
        # A collector of many families describes itself by them.
        for family in collector.describe() if hasattr(collector, "_labelnames") else collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            names = collector._labelnames if hasattr(collector, "_labelnames") else family._labelnames
            labels = ", ".join(f"`{label}`" for label in names)
            rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join([*lines, *sorted(rows)]) + "\n"


def test_docs_show_the_series_of_the_operator():
    page = ROOT / "docs" / "operator-metrics.md"
    if os.environ.get("REWRITE"):
        page.write_text(as_markdown())
    assert page.read_text() == as_markdown(), "run: make test REWRITE=1"
