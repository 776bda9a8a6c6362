"""Plans on the live cluster: what waits for a person or a window, approved by the plugin."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_runs import outcomes, patch, runs

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

NAMESPACE = "persist-e2e"
PROGRAM = str(Path(sys.executable).parent / "kubectl-persist")
QUIET = {"gc": {"enabled": False}, "rollup": {"everySeqnos": 1000}}


def far_window() -> dict[str, Any]:
    """A window that opens in twelve hours."""
    hour = (time.gmtime().tm_hour + 12) % 24
    return {"schedule": f"0 {hour} * * *", "durationSeconds": 600, "timeZone": "Etc/UTC"}


@pytest.mark.wish(6)
def test_wish_a_compaction_waits_for_its_window_and_for_an_approval_of_its_plan(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    spec = {"compaction": {"maxUncompactedBatches": 2}, "maintenance": {"windows": [far_window()]}}
    shard, shard_id = new_shard("plans", **QUIET, **spec)
    programs.result("write_batches", shard_id, "12", "50")
    before = programs.result("content", shard_id)
    closed = cluster.wait_condition(
        "persistshard", shard, "CompactionCurrent", "False", reason="WindowClosed", timeout_s=90
    )
    assert "the next window opens at" in closed["message"]

    patch(cluster, "persistshard", shard, {"maintenance": {"windows": None, "approval": "Required"}})
    waiting = cluster.wait_condition(
        "persistshard", shard, "CompactionCurrent", "False", reason="AwaitingApproval", timeout_s=90
    )
    plan = cluster.status("persistshard", shard)["plan"]
    assert plan["id"] in waiting["message"]
    assert (plan["type"], plan["approved"]) == ("Compaction", False)
    assert outcomes(cluster, shard, "Compaction") == []
    wrong = cluster.run(PROGRAM, "approve", shard, "--id", "another", "-n", NAMESPACE, check=False)
    assert wrong.returncode == 64
    assert plan["id"] in wrong.stderr

    done = cluster.run(
        PROGRAM, "approve", shard, "--id", plan["id"], "--wait", "-n", NAMESPACE, timeout_s=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(cluster, shard, "Compaction") == ["Succeeded"]
    (run,) = runs(cluster, shard, "Compaction")
    assert run["cpuSeconds"] >= 0
    assert programs.result("content", shard_id)["hash"] == before["hash"]
