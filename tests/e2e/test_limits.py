"""Limits on what runs at once: what exceeds one waits, says so on its object, and starts in the order of deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from shard_runs import IDLE, ask, patch, runs
from sink_manifests import airlines_sink, numbers_stream

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]


@pytest.fixture
def one_place(cluster: Any) -> Iterator[None]:
    """An operator of which one pod runs at a time."""
    cluster.install("--set", "limits.total=1")
    yield
    cluster.install()


@pytest.mark.wish(13)
@pytest.mark.usefixtures("one_place")
def test_wish_what_exceeds_a_limit_on_the_cluster_waits_says_so_and_starts_by_deadline(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """A stream has the only place. A sink asks first, then a shard that has a day, then one whose deadline is near."""
    busy, _ = new_shard("busy", key="id BIGINT", value="number BIGINT", **IDLE)
    target, target_id = new_shard("waits", key="carrier STRING", value="name STRING", **IDLE)
    deadlines = {"near": 3600, "far": 86_400}
    shards = {}
    for name, seconds in deadlines.items():
        spec = {**IDLE, "compaction": {"mode": "Disabled", "deadlineSeconds": seconds}}
        shards[name], shard_id = new_shard(name, **{**spec, "retention": {"sinceLagSeconds": 1}})
        programs.result("retract", shard_id, "a-mark", "50")
        cluster.wait(
            "the deadline",
            lambda shard=shards[name]: cluster.status("persistshard", shard).get("debt", {}).get("deadlineTime"),
            timeout_s=120,
        )
    stream, sink = named("busy"), named("waits")
    cluster.apply(numbers_stream(stream, busy))
    cluster.wait_condition("sparksink", stream, "Running", timeout_s=300)

    cluster.apply(airlines_sink(sink, target, cleanup={"retainDriver": "Always"}))
    queued = cluster.wait_condition("sparksink", sink, "Reconciling", reason="Queued", timeout_s=120)
    for words in ("place 1 in the queue", "limits.total is reached"):
        assert words in queued["message"]
    for name in ("far", "near"):
        ask(cluster, "compact", shards[name])
        cluster.wait_condition("persistshard", shards[name], "CompactionCurrent", "False", reason="Queued")
        assert cluster.condition("persistshard", shards[name], "Ready")["status"] == "True"

    def places() -> list[str]:
        found = [cluster.condition("persistshard", shards[name], "CompactionCurrent") for name in ("near", "far")]
        found.append(cluster.condition("sparksink", sink, "Reconciling"))
        return [one.get("message", "").partition(" in the queue")[0].rpartition("place ")[2] for one in found]

    cluster.wait("the order of the queue", lambda: places() == ["1", "2", "3"], timeout_s=120)
    for name in shards.values():
        assert runs(cluster, name, "Compaction") == []
    assert cluster.items("pods", f"persistshard.io/sink={sink}") == []

    patch(cluster, "sparksink", stream, {"suspend": True})
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=400)
    (near,), (far,) = (runs(cluster, shards[name], "Compaction") for name in ("near", "far"))
    status = cluster.status("sparksink", sink)
    assert {near["outcome"], far["outcome"]} <= {"Succeeded", "Skipped"}, "a pod has looked; there is one run to merge"
    assert [one["outcome"] for one in status["history"]] == ["Succeeded"]
    # A run that waits begins with its intent. Its pod is made when there is room.
    (job,) = cluster.items("jobs", f"persistshard.io/shard={shards['far']}")
    pod = cluster.get("pod", status["driver"]["podName"])
    made = [one["metadata"]["creationTimestamp"] for one in (job, pod)]
    assert near["endTime"] <= made[0] <= far["endTime"] <= made[1]
    assert programs.result("content", target_id)["rows"] == 16
