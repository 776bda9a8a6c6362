"""The metrics port, and that code, catalogue and documentation name the same metrics."""

import ast
import gc
import os
import threading
from pathlib import Path

import pytest
from persist_engine.base.metric_names import CATALOGUE, as_markdown
from persist_engine.base.metrics import PrometheusMetrics
from prometheus_client import CollectorRegistry, generate_latest

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"count": "counter", "gauge": "gauge", "observe_s": "histogram"}


class Owner:
    def __init__(self, upper):
        self.upper = upper


def read(owner):
    return {("state_upper", ""): owner.upper, ("state_spine_batches", "compact"): 2.0}


@pytest.fixture
def registry():
    return CollectorRegistry()


def shown(registry):
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


def test_counters_gauges_and_seconds_carry_prefix_suffix_and_help(registry):
    metrics = PrometheusMetrics(registry)
    metrics.count("gc_deleted_blobs", 3, kind="part")
    metrics.count("gc_deleted_blobs", 2, kind="part")
    metrics.gauge("gc_live_diffs", 7, shard="s1")
    metrics.observe_s("rollup", 0.2)
    text = generate_latest(registry).decode()
    assert 'persist_gc_deleted_blobs_total{kind="part"} 5.0' in text
    assert "# HELP persist_gc_deleted_blobs_total Blobs deleted by garbage collection." in text
    assert 'persist_gc_live_diffs{shard="s1"} 7.0' in text
    assert 'persist_rollup_seconds_bucket{le="0.25"} 1.0' in text


def test_a_name_without_a_line_in_the_catalogue_still_counts(registry):
    PrometheusMetrics(registry).count("of_tomorrow", how="well")
    assert 'persist_of_tomorrow_total{how="well"} 1.0' in shown(registry)


@pytest.mark.slow
def test_gauges_of_a_shard_are_read_when_asked_for_and_go_with_their_owner(registry):
    metrics = PrometheusMetrics(registry)
    owner = Owner(5.0)
    metrics.watch_shard("s1", owner, read)
    metrics.count("state_diff_bytes", 10, shard="s1")
    metrics.count("state_diff_bytes", 20, shard="s2")
    owner.upper = 6.0
    assert 'persist_state_upper{shard="s1"} 6.0' in shown(registry)
    assert 'persist_state_spine_batches{shard="s1",stage="compact"} 2.0' in shown(registry)
    del owner
    gc.collect()
    assert shown(registry) == ['persist_state_diff_bytes_total{shard="s2"} 20.0']
    metrics.count("state_diff_bytes", 1, shard="s1")
    assert 'persist_state_diff_bytes_total{shard="s1"} 1.0' in shown(registry), "it starts anew"


@pytest.mark.slow
def test_a_process_that_visits_many_shards_keeps_few_series_though_nothing_scrapes_it(registry):
    metrics, kept = PrometheusMetrics(registry), Owner(1.0)
    metrics.watch_shard("s-kept", kept, read)
    for number in range(2000):
        owner = Owner(float(number))
        metrics.watch_shard(f"s{number}", owner, read)
        metrics.count("shard_blob_gets", shard=f"s{number}")
        metrics.count("sink_lapses", handle="reader")
        del owner
    counted = [key for key in metrics._children if key[1] == "shard_blob_gets"]
    assert 0 < len(counted) <= 256
    lines = shown(registry)
    assert [line for line in lines if "shard_blob_gets" in line] == []
    assert any('persist_state_upper{shard="s-kept"}' in line for line in lines)
    assert 'persist_sink_lapses_total{handle="reader"} 2000.0' in lines


def test_series_of_many_shards_go_in_one_pass(registry):
    """With a pass for each shard, the first scrape of an operator with 5,000 shards took more than a minute."""
    metrics, passes = PrometheusMetrics(registry), []
    owners = [Owner(float(number)) for number in range(200)]
    for number, owner in enumerate(owners):
        metrics.watch_shard(f"s{number}", owner, read)
        metrics.count("shard_blob_gets", shard=f"s{number}")
    forget = metrics._forget
    metrics._forget = lambda shards: (passes.append(len(shards)), forget(shards))
    owners.clear()
    del owner
    assert [line for line in shown(registry) if "shard=" in line] == []
    assert passes == [200]


def test_of_two_owners_of_one_shard_one_speaks_until_both_are_gone(registry):
    metrics = PrometheusMetrics(registry)
    old, new = Owner(1.0), Owner(2.0)
    metrics.watch_shard("s1", old, read)
    metrics.watch_shard("s1", new, read)
    assert [line for line in shown(registry) if "upper" in line] == ['persist_state_upper{shard="s1"} 2.0']
    del new
    gc.collect()
    assert [line for line in shown(registry) if "upper" in line] == ['persist_state_upper{shard="s1"} 1.0']
    del old
    gc.collect()
    assert shown(registry) == []


def calls():
    """(place, kind, name, labels) of every call on something called metrics, in the engine."""
    for path in sorted((ROOT / "engine" / "persist_engine").rglob("*.py")):
        if path.parent.name == "testing" or path.name == "metrics.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS):
                continue
            owner = ast.unparse(node.func.value)
            if not owner.rpartition(".")[2].lstrip("_").endswith("metrics"):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield place, KINDS[node.func.attr], node.args[0], {keyword.arg for keyword in node.keywords}


def names_in(node):
    """The texts a name may be: f-strings over the two ports are written out."""
    if isinstance(node, ast.JoinedStr):
        tail = node.values[-1].value
        return [f"blob{tail}", f"consensus{tail}"]
    if isinstance(node, ast.Constant):
        return [node.value]
    return ["blob", "consensus"] if ast.unparse(node) == "self._port" else [f"not a text: {ast.unparse(node)}"]


@pytest.mark.slow
def test_code_counts_only_what_the_catalogue_names_with_its_labels():
    bad = []
    for place, kind, node, labels in calls():
        for name in names_in(node):
            metric = CATALOGUE.get((kind, name))
            if metric is None:
                bad.append(f"{place}: no {kind} {name!r} in base/metric_names.py")
            elif None not in labels and labels != set(metric.labels):
                bad.append(f"{place}: {name} is counted with {sorted(labels)}, its labels are {sorted(metric.labels)}")
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_every_metric_of_the_catalogue_is_counted_somewhere():
    """A metric that no code counts is a lie in the documentation."""
    counted = {(kind, name) for _, kind, node, _ in calls() for name in names_in(node)}
    read_when_asked = (ROOT / "engine/persist_engine/shard/gauges.py").read_text()
    missing = [
        key for key in CATALOGUE if key not in counted and not (key[0] == "gauge" and f'"{key[1]}"' in read_when_asked)
    ]
    assert missing == []


def test_docs_show_the_catalogue():
    page = ROOT / "docs" / "metrics.md"
    if os.environ.get("REWRITE"):
        page.write_text(as_markdown())
    assert page.read_text() == as_markdown(), "run: make test REWRITE=1"


def test_names_are_unique_and_end_in_their_unit():
    full = [metric.full_name for metric in CATALOGUE.values()]
    assert len(set(full)) == len(full)
    assert not [name for name in full if any(unit in name for unit in ("_ms", "_kb", "_mib", "milli"))]


class Collecting(CollectorRegistry):
    """The garbage collector runs while something is registered."""

    def register(self, collector):
        gc.collect()
        super().register(collector)


@pytest.mark.slow
def test_regression_a_read_that_the_garbage_collector_ends_may_count_whatever_is_being_counted():
    """The thread waited for a lock that it had itself, and all others with it."""
    registry = Collecting()
    metrics = PrometheusMetrics(registry)
    ended = []

    def reading():
        try:
            yield
        finally:
            metrics.count("prefetch_parts", 1, path="snapshot", outcome="wasted")
            ended.append(True)

    gc.disable()  # until its time has come
    try:
        abandoned = [reading()]
        next(abandoned[0])
        abandoned.append(abandoned)
        del abandoned
        counting = threading.Thread(target=lambda: metrics.count("gc_deleted_blobs", 3, kind="part"), daemon=True)
        counting.start()
        counting.join(60)
    finally:
        gc.enable()
    assert not counting.is_alive()
    assert ended
    metrics.count("prefetch_parts", 1, path="snapshot", outcome="wasted")
    assert 'persist_gc_deleted_blobs_total{kind="part"} 3.0' in shown(registry)
    assert 'persist_prefetch_parts_total{outcome="wasted",path="snapshot"} 1.0' in shown(registry)


def test_regression_it_may_also_run_as_the_lock_is_taken():
    """From Python 3.12 on it runs after any call: there the thread waited for itself all the same."""
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    lock, ended = metrics._lock, []

    class Taken:
        def __enter__(self):
            lock.acquire()
            if not ended:
                ended.append(True)
                metrics.count("prefetch_parts", 1, path="snapshot", outcome="wasted")

        def __exit__(self, *_):
            lock.release()

    metrics._lock = Taken()
    counting = threading.Thread(target=lambda: metrics.count("gc_deleted_blobs", 3, kind="part"), daemon=True)
    counting.start()
    counting.join(60)
    assert not counting.is_alive()
    assert 'persist_gc_deleted_blobs_total{kind="part"} 3.0' in shown(registry)
    assert 'persist_prefetch_parts_total{outcome="wasted",path="snapshot"} 1.0' in shown(registry)
