"""Maintenance in pods: rollup, compaction and collection run when they are due, and change no contents."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from shard_runs import IDLE, outcomes, patch, runs, succeeded

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

EAGER = {
    "compaction": {"mode": "Automatic", "maxUncompactedBatches": 2},
    "gc": {"enabled": True, "intervalSeconds": 30},
    "rollup": {"everySeqnos": 4},
}
KINDS = {"Rollup": "rollup", "Compaction": "compaction", "GC": "gc"}


@pytest.mark.wish(2)
def test_wish_maintenance_of_a_shard_without_writers_runs_in_pods_and_changes_no_contents(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """Writes thirty batches while no maintenance is due, then lowers the thresholds; the operator does all three kinds."""
    shard, shard_id = new_shard("upkeep", **IDLE)
    programs.result("write_batches", shard_id, "30", "5000")
    before = programs.result("stored", shard_id)
    contents = programs.result("content", shard_id)
    assert contents["rows"] == 150_000
    assert before["inspection"]["earliest_seqno"] == 1
    assert before["parts"] >= 30
    assert not succeeded(cluster, shard)

    patch(cluster, "persistshard", shard, EAGER)
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
        assert container["resources"]["limits"]["memory"]
        assert job["metadata"]["ownerReferences"][0]["kind"] == "PersistShard"

    after: dict[str, Any] = {}

    def cleaned() -> bool:
        """No part is left that the state does not name, and no version that the newest collection could have truncated.

        Rollups are not compared: the next collection deletes those that this one removed from state.
        """
        after.update(programs.result("stored", shard_id))
        inspection = after["inspection"]
        return after["parts"] == inspection["parts"] and inspection["gc_seqnos"] == 0 and inspection["live_diffs"] < 10

    cluster.wait("consensus to be truncated and dead blobs to be deleted", cleaned, timeout_s=240, every_s=5)
    assert after["inspection"]["earliest_seqno"] > before["inspection"]["seqno"]
    assert after["inspection"]["live_diffs"] < before["inspection"]["live_diffs"]
    assert after["inspection"]["batches"] < before["inspection"]["batches"]
    assert after["parts"] < before["parts"]
    collected = [run for run in cluster.status("persistshard", shard)["history"] if run["type"] == "GC"]
    assert sum(run.get("blobsDeleted", 0) for run in collected) >= before["parts"] - after["parts"]
    assert sum(run.get("diffsTruncated", 0) for run in collected) == after["inspection"]["earliest_seqno"] - 1
    read = programs.result("content", shard_id)
    assert (read["rows"], read["hash"]) == (contents["rows"], contents["hash"])


def test_a_shard_without_writers_comes_to_rest(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """With the lowest thresholds, maintenance adds versions and batches, but does not cause maintenance without end.

    At rest means: for a minute, in which a collection would be due twice, nothing starts and the object is not written.
    """
    shard, shard_id = new_shard(
        "rest", compaction={"maxUncompactedBatches": 1}, gc={"intervalSeconds": 10}, rollup={"everySeqnos": 4}
    )
    programs.result("write_batches", shard_id, "10", "5000")
    cluster.wait("a garbage collection", lambda: "GC" in succeeded(cluster, shard), timeout_s=240)

    def at_work() -> tuple[str, frozenset[str]]:
        jobs = cluster.items("jobs", f"persistshard.io/shard={shard}")
        version = cluster.get("persistshard", shard)["metadata"]["resourceVersion"]
        return version, frozenset(one["metadata"]["name"] for one in jobs)

    last, since_s = at_work(), time.monotonic()

    def at_rest() -> bool:
        nonlocal last, since_s
        now = at_work()
        if now != last:
            last, since_s = now, time.monotonic()
        return time.monotonic() - since_s > 60

    cluster.wait("a minute without maintenance and without a write to the object", at_rest, timeout_s=400, every_s=5)
    condition = cluster.condition("persistshard", shard, "CompactionCurrent")
    assert (condition["status"], condition["reason"]) == ("True", "Current")
    assert programs.result("content", shard_id)["rows"] == 50_000


@pytest.mark.wish(2)
def test_wish_a_compaction_goes_on_after_the_loss_of_its_driver_and_changes_no_contents(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """With real executors. Chunks that the killed driver swapped in stay; the next Job goes on."""
    shard, shard_id = new_shard("sparky", **IDLE)
    programs.result("write_batches", shard_id, "12", "400000", timeout_s=300)
    contents = programs.result("content", shard_id)
    patch(
        cluster, "persistshard", shard, {"compaction": {**EAGER["compaction"], "runner": "Spark", "sparkExecutors": 1}}
    )

    def pods(role: str) -> list[str]:
        found = cluster.items("pods", f"persistshard.io/shard={shard},persistshard.io/role={role}")
        return [pod["metadata"]["name"] for pod in found if pod["status"].get("phase") == "Running"]

    cluster.wait("an executor of the compaction", lambda: pods("executor"), timeout_s=400, every_s=0.5)
    (driver,) = pods("driver")
    cluster.kill(driver)

    cluster.wait(
        "a compaction on Spark that succeeds after the killed one",
        lambda: "Succeeded" in outcomes(cluster, shard, "Compaction"),
        timeout_s=600,
    )
    assert {run["runner"] for run in runs(cluster, shard, "Compaction")} == {"Spark"}
    assert "Failed" in outcomes(cluster, shard, "Compaction")
    read = programs.result("content", shard_id)
    assert (read["rows"], read["hash"]) == (contents["rows"], contents["hash"])
    inspection = programs.result("stored", shard_id)["inspection"]
    assert inspection["uncompacted_batches"] < 2
    cluster.wait("the executors to be gone", lambda: not pods("executor"), timeout_s=120)


def test_a_killed_maintenance_pod_is_repeated(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("killed", storageProfile="cut", **IDLE)
    programs.result("write_batches", shard_id, "12", "5000", profile="cut")
    contents = programs.result("content", shard_id, profile="cut")

    def compacting(*phases: str) -> str | None:
        for pod in cluster.items("pods", f"persistshard.io/shard={shard}"):
            if "-compact-" in pod["metadata"]["name"] and pod["status"].get("phase") in phases:
                return str(pod["metadata"]["name"])
        return None

    patch(cluster, "persistshard", shard, {"compaction": EAGER["compaction"]})
    cluster.wait("a compaction pod", lambda: compacting("Pending", "Running"), timeout_s=120, every_s=0.05)
    with cluster.cut_off("s3-cut"):  # so that no pod is fast enough to be done before it dies
        pod = cluster.wait("the pod to run", lambda: compacting("Running"), timeout_s=120, every_s=0.1)
        cluster.kill(pod)
        cluster.wait("the failed run", lambda: "Failed" in outcomes(cluster, shard, "Compaction"), timeout_s=120)
    left = programs.result("stored", shard_id, profile="cut")["inspection"]
    assert left["uncompacted_batches"] >= 2, "the pod was done before it was killed: nothing was tested"
    cluster.wait(
        "a compaction that succeeds after the killed one",
        lambda: "Compaction" in succeeded(cluster, shard),
        timeout_s=300,
    )
    read = programs.result("content", shard_id, profile="cut")
    assert (read["rows"], read["hash"]) == (contents["rows"], contents["hash"])
