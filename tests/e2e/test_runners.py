"""Where compactions run, and what the object keeps of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shard_runs import IDLE, outcomes, patch, runs

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

#: Between the debts of the two shards.
THRESHOLD = "100Ki"
AUTO = {"mode": "Automatic", "maxUncompactedBatches": 2, "runner": "Auto", "sparkThreshold": THRESHOLD}


@pytest.mark.wish(7)
@pytest.mark.wish(9)
def test_wish_a_small_debt_is_compacted_in_a_pod_and_a_large_one_on_spark_and_the_history_says_so(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shards = {}
    for runner, rows in (("Pod", "50"), ("Spark", "200000")):
        shard, shard_id = new_shard(f"debt-{runner.lower()}", **IDLE)
        programs.result("write_batches", shard_id, "6", rows, timeout_s=300)
        shards[runner] = shard, shard_id, programs.result("content", shard_id)
    small, large = (
        cluster.wait(
            "the debt on the status",
            lambda shard=shard: cluster.status("persistshard", shard).get("debt", {}).get("compactionBytes"),
            timeout_s=60,
        )
        for shard, *_ in shards.values()
    )
    print(f"debts of {small} and {large} bytes, threshold {THRESHOLD}")
    assert small < 100 << 10 <= large
    for shard, *_ in shards.values():
        patch(cluster, "persistshard", shard, {"compaction": {**AUTO, "sparkExecutors": 1}})
    for runner, (shard, shard_id, before) in shards.items():
        cluster.wait(
            f"a compaction by {runner}", lambda s=shard: outcomes(cluster, s, "Compaction"), timeout_s=600, every_s=2
        )
        run = runs(cluster, shard, "Compaction")[-1]
        assert (run["runner"], run["outcome"]) == (runner, "Succeeded"), run
        assert run["bytesRead"] > 0
        assert run["bytesWritten"] > 0
        assert run["cpuSeconds"] >= 0
        assert run["startTime"] <= run["endTime"]
        assert run["reason"]
        assert programs.result("content", shard_id)["hash"] == before["hash"]
