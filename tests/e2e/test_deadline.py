"""A deadline for physical deletion, with proof: a row that was retracted is gone from S3 and Redis in time, on a shard without writers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

DEADLINE_S = 300
MARK = "a-person-to-be-forgotten"


@pytest.mark.wish(1)
def test_wish_what_was_retracted_is_gone_before_its_deadline_and_the_proof_says_so(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """Thresholds that make nothing else due: only the deadline does."""
    shard, shard_id = new_shard(
        "forgets",
        retention={"sinceLagSeconds": 5},
        compaction={"deadlineSeconds": DEADLINE_S, "maxUncompactedBatches": 1000},
        gc={"enabled": True, "intervalSeconds": 604800},
        rollup={"everySeqnos": 100000},
    )
    retracted_ms = programs.result("retract", shard_id, MARK, "2000")["retracted_ms"]
    assert programs.result("search", shard_id, MARK)["found"], "the row is there before it is deleted"

    cluster.wait(
        "nothing owed a deletion",
        lambda: (
            "deadlineTime" not in cluster.status("persistshard", shard).get("debt", {})
            and programs.result("search", shard_id, MARK)["found"] == []
        ),
        timeout_s=DEADLINE_S + retracted_ms / 1000 - time.time(),
        every_s=10,
    )
    found = programs.result("search", shard_id, MARK)
    assert found["found"] == []
    assert found["objects"] > 0
    before = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(retracted_ms // 1000))
    output = programs.finish(programs.start_cli("admin", "proof", shard_id, "--before", before, "--json"))
    assert json.loads(output[output.index("{") :])["remains"] == []
    contents = programs.result("content", shard_id)
    assert contents["rows"] == 2000
    conditions = {one["type"]: one["status"] for one in cluster.status("persistshard", shard)["conditions"]}
    assert (conditions["CompactionCurrent"], conditions["GarbageCollected"]) == ("True", "True")
