"""Blobs that no version names, and blobs that are missing: reported first, deleted when the spec says so, and no live one is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shard_runs import IDLE, ask, patch, runs

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

BATCHES = 6


def audited(cluster: Any, shard: str, action: str, kind: str, token: str) -> dict[str, Any]:
    """The run that was asked for, once the status records it as succeeded."""
    before = len(runs(cluster, shard, kind))
    ask(cluster, action, shard, token=token)
    cluster.wait(f"a {kind}", lambda: len(runs(cluster, shard, kind)) > before, timeout_s=180)
    run = runs(cluster, shard, kind)[0]
    assert run["outcome"] == "Succeeded", run
    return run


@pytest.mark.wish(8)
def test_wish_orphans_are_reported_before_they_are_deleted_and_a_missing_blob_is_named(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """One orphan is four days old, one was staged just now, as by a writer that is about to link it."""
    shard, shard_id = new_shard("orphans", **IDLE)
    programs.result("write_batches", shard_id, str(BATCHES), "5000")
    before = programs.result("content", shard_id)
    left = programs.result("leave_orphans", shard_id, "4")

    def storage() -> dict[str, Any]:
        return dict(cluster.status("persistshard", shard)["storage"])

    audited(cluster, shard, "orphan-scan", "OrphanScan", "report")
    assert (storage()["orphanBlobs"], storage()["orphanBytes"]) == (1, left["bytes"])
    assert programs.result("stored", shard_id)["parts"] == BATCHES + 2, "nothing was deleted"

    patch(cluster, "persistshard", shard, {"gc": {"orphans": {"mode": "Delete"}}})
    run = audited(cluster, shard, "orphan-scan", "OrphanScan", "delete")
    assert run["blobsDeleted"] == 1
    assert storage()["orphanBlobs"] == 0
    keys = programs.result("search", shard_id, "row 17")["keys"]
    assert left["old"] not in keys
    assert left["young"] in keys
    assert programs.result("stored", shard_id)["parts"] == BATCHES + 1
    assert programs.result("content", shard_id)["hash"] == before["hash"]
    audited(cluster, shard, "verify", "Verify", "whole")
    cluster.wait_condition("persistshard", shard, "Verified")

    lost = programs.result("lose_part", shard_id)["key"]
    assert lost != left["young"], "the young one is of the newest time, and the first key is deleted"
    audited(cluster, shard, "verify", "Verify", "lost")
    found = cluster.wait_condition("persistshard", shard, "Verified", "False", reason="MissingBlobs")
    assert lost.removeprefix(f"{shard_id}/") in found["message"]
    assert "persist admin restore" in found["message"]
    assert storage()["missingBlobs"] == 1
    assert cluster.condition("persistshard", shard, "Ready")["status"] == "True"
