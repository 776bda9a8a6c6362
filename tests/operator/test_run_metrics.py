"""What the reports of pods say of their stores becomes series, and nothing that a pod reports makes many."""

from typing import get_args

import pytest
from persist_engine.base.tally import StoreTally
from persist_operator.api.shard_status import RunType
from persist_operator.steps.run_metrics import TYPES, RunMetrics
from prometheus_client import CollectorRegistry, generate_latest


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def runs(registry):
    return RunMetrics(registry)


def series(registry):
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def report_of(kind, *commits_s):
    tally = StoreTally()
    for seconds in commits_s:
        tally.observe_s("consensus", seconds, verb="compare_and_set")
        tally.count("consensus_calls", verb="compare_and_set", outcome="ok")
    tally.count("blob_calls", 3, verb="get", outcome="Unavailable")
    tally.count("blob_bytes", 70, verb="get")
    return {"type": kind, "outcome": "Succeeded", "stores": tally.to_json()}


def test_the_tallies_of_runs_add_up_by_type(runs, registry):
    runs.count(report_of("GC", 0.02, 0.02))
    runs.count(report_of("GC", 700.0))
    runs.count(report_of("Rollup", 0.02))

    def value(name, **labels):
        return registry.get_sample_value(f"persist_run_{name}", labels)

    gets = {"type": "GC", "store": "blob", "verb": "get"}
    assert value("store_calls_total", **gets, outcome="error") == 6
    assert value("store_bytes_total", **gets) == 140
    commits = {"type": "GC", "store": "consensus", "verb": "compare_and_set"}
    assert value("store_calls_total", **commits, outcome="ok") == 3
    assert value("store_seconds_total", **commits) == pytest.approx(700.04)
    assert [value("commit_seconds_bucket", type="GC", le=bound) for bound in ("0.01", "0.025", "600.0", "+Inf")] == [
        0,
        2,
        2,
        3,
    ]
    assert value("commit_seconds_count", type="GC") == 3
    assert value("commit_seconds_sum", type="GC") == pytest.approx(700.04)
    assert value("commit_seconds_count", type="Rollup") == 1


@pytest.mark.parametrize(
    "report",
    [
        None,
        {},
        {"type": "GC"},
        {"type": "GC", "stores": None},
        {"type": "GC", "stores": [1]},
        {"type": "GC", "stores": {"blob": 7, "consensus": "x", "commits": [1, 2]}},
        {"type": "GC", "stores": {"blob": {"get": 7}}},
        {"type": "GC", "stores": {"blob": {"get": {"ok": -1, "bytes": "many", "seconds": float("nan")}}}},
        {"type": "GC", "stores": {"blob": {"get": {"ok": True, "bytes": 1e400, "seconds": 1e30}}}},
    ],
)
def test_a_report_that_says_nothing_usable_adds_nothing(runs, registry, report):
    runs.count(report)
    assert series(registry) == []


def test_a_pod_cannot_make_many_series(runs, registry):
    for number in range(300):
        words = {f"verb-{number}": {"ok": 1, f"outcome-{number}": 1, "bytes": 1, "seconds": 1}}
        stores = {"blob": words, "consensus": words, f"store-{number}": words, "commits": [1] * 21}
        runs.count({"type": f"kind-{number}", "stores": stores})
    assert len(series(registry)) < 40
    assert registry.get_sample_value("persist_run_commit_seconds_count", {"type": "other"}) == 300 * 21


def test_the_types_are_those_of_the_history_and_the_drivers():
    assert {*get_args(RunType), "Sink"} == TYPES
