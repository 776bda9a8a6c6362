"""Series of shards: their values, their bound, and the sums that count every shard."""

import pytest
from persist_operator.steps.shard_series import ShardSeries, TaskRuns
from prometheus_client import CollectorRegistry, generate_latest

OK = {"ready": 1, "live_bytes": 10, "debt_bytes": 2}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def series(registry):
    return ShardSeries(registry, shards_max=3)


def shown(registry):
    """Names of the shards that have series of their own."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line.split('name="')[1].split('"')[0] for line in lines if line.startswith("persist_shard_ready{"))


def test_a_shard_has_its_values_until_it_is_gone_and_none_for_what_is_unknown(series, registry):
    series.set(("team", "a"), {**OK, "seqno": None}, (TaskRuns("gc", 2, 5.0), TaskRuns("rollup", 0, None)))
    of_shard = {"namespace": "team", "name": "a"}
    value = registry.get_sample_value
    assert value("persist_shard_live_bytes", of_shard) == 10
    assert value("persist_shard_seqno", of_shard) is None
    assert value("persist_shard_consecutive_failures", {**of_shard, "task": "gc"}) == 2
    assert value("persist_shard_last_success_timestamp_seconds", {**of_shard, "task": "gc"}) == 5
    assert value("persist_shard_last_success_timestamp_seconds", {**of_shard, "task": "rollup"}) is None
    series.forget(("team", "a"))
    series.forget(("team", "a"))
    assert shown(registry) == []
    assert value("persist_shards", {"namespace": "team"}) is None


def test_of_too_many_shards_those_in_trouble_have_series_and_the_sums_count_all(series, registry):
    for number in range(50):
        series.set(("team", f"fine-{number}"), OK, ())
    assert len(shown(registry)) == 3
    series.set(("team", "down"), {**OK, "ready": 0}, ())
    series.set(("other", "failing"), OK, (TaskRuns("gc", 3, None),))
    series.set(("team", "indebted"), {**OK, "debt_bytes": 1000}, ())
    assert shown(registry) == ["down", "failing", "indebted"]
    sums = {
        name: registry.get_sample_value(name, {"namespace": "team"})
        for name in ("persist_shards", "persist_shards_ready", "persist_shards_failing", "persist_shards_live_bytes")
    }
    assert list(sums.values()) == [52, 51, 0, 520]
    assert registry.get_sample_value("persist_shards_failing", {"namespace": "other"}) == 1
    assert registry.get_sample_value("persist_shards_debt_bytes", {"namespace": "team"}) == 51 * 2 + 1000
