"""Maintenance as pods: rollup, compaction and collection happen when they are due, and change no contents."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

IDLE = {"compaction": {"mode": "Disabled"}, "gc": {"enabled": False}, "rollup": {"everySeqnos": 1000}}
EAGER = {
    "compaction": {"mode": "Automatic", "maxUncompactedBatches": 2},
    "gc": {"enabled": True, "intervalSeconds": 30},
    "rollup": {"everySeqnos": 4},
}
KINDS = {"Rollup": "rollup", "Compaction": "compaction", "GC": "gc"}


def patch(cluster: Any, shard: str, spec: dict[str, Any]) -> None:
    cluster.kubectl("patch", "persistshard", shard, "--type=merge", "--patch", json.dumps({"spec": spec}))


def succeeded(cluster: Any, shard: str) -> set[str]:
    return {
        run["type"]
        for run in cluster.status("persistshard", shard).get("history", [])
        if run.get("outcome") == "Succeeded"
    }


def test_maintenance_runs_as_pods_and_changes_no_contents(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """Thirty batches are written while nothing is due; then the thresholds drop, and the operator does all three."""
    shard, shard_id = new_shard("upkeep", **IDLE)
    programs.result("write_batches", shard_id, "30", "2000")
    before = programs.result("stored", shard_id)
    contents = programs.result("content", shard_id)
    assert contents["rows"] == 60_000
    assert before["inspection"]["earliest_seqno"] == 1
    assert before["parts"] >= 30
    assert not succeeded(cluster, shard)

    patch(cluster, shard, EAGER)
    cluster.wait(
        "a rollup, a compaction and a garbage collection",
        lambda: succeeded(cluster, shard) >= KINDS.keys(),
        timeout_s=400,
    )
    for kind in KINDS.values():
        job = cluster.get("job", cluster.status("persistshard", shard)["maintenance"][kind]["jobName"])
        assert job is not None
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["image"].startswith("localhost/persist-engine")
        assert job["metadata"]["ownerReferences"][0]["kind"] == "PersistShard"

    after: dict[str, Any] = {}

    def cleaned() -> bool:
        after.update(programs.result("stored", shard_id))
        return after["inspection"]["earliest_seqno"] > 1 and after["parts"] < before["parts"]

    cluster.wait("consensus to be truncated and dead blobs to be deleted", cleaned, timeout_s=240, every_s=5)
    assert after["inspection"]["batches"] < before["inspection"]["batches"]
    read = programs.result("content", shard_id)
    assert (read["rows"], read["hash"]) == (contents["rows"], contents["hash"])


def test_a_killed_maintenance_pod_is_repeated(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("killed", **IDLE)
    programs.result("write_batches", shard_id, "12", "100000", timeout_s=300)
    contents = programs.result("content", shard_id)
    patch(cluster, shard, {"compaction": EAGER["compaction"]})

    def running() -> str | None:
        for pod in cluster.items("pods", f"persistshard.io/shard={shard}"):
            if pod["status"].get("phase") == "Running" and "-compact-" in pod["metadata"]["name"]:
                return str(pod["metadata"]["name"])
        return None

    pod = cluster.wait("a compaction pod", running, timeout_s=120, every_s=0.1)
    cluster.kill(pod)
    cluster.wait(
        "a compaction that succeeds after the killed one",
        lambda: "Compaction" in succeeded(cluster, shard),
        timeout_s=300,
    )
    outcomes = [
        run["outcome"] for run in cluster.status("persistshard", shard)["history"] if run["type"] == "Compaction"
    ]
    assert "Failed" in outcomes, "the pod was done before it was killed: nothing was tested"
    read = programs.result("content", shard_id)
    assert (read["rows"], read["hash"]) == (contents["rows"], contents["hash"])
