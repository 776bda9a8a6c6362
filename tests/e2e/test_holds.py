"""Readers that hold a shard up: the object names them, the plugin ends their holds, and what was retracted goes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

NAMESPACE = "persist-e2e"
PROGRAM = str(Path(sys.executable).parent / "kubectl-persist")
DEADLINE_S = 300
MARK, PURPOSE = "a-person-to-be-forgotten", "weekly report"


@pytest.mark.wish(3)
def test_wish_a_reader_that_keeps_a_shard_from_shrinking_is_named_and_its_hold_can_be_ended(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """The hold lasts until the deadline for a row that was retracted is missed. After its end the operator removes the row."""
    shard, shard_id = new_shard(
        "held",
        compaction={"deadlineSeconds": DEADLINE_S, "maxUncompactedBatches": 1000},
        gc={"intervalSeconds": 10},
        rollup={"everySeqnos": 100_000},
    )
    reader = programs.result("hold", shard_id, PURPOSE)["reader"]
    retracted_ms = programs.result("retract", shard_id, MARK, "500")["retracted_ms"]
    found = cluster.wait_condition("persistshard", shard, "SinceAdvancing", "False", reason="HeldByReader")
    for words in (reader, PURPOSE, "seen since", f"--expire {reader}"):
        assert words in found["message"]
    missed = cluster.wait_condition(
        "persistshard", shard, "CompactionCurrent", "False", reason="DeadlineMissed", timeout_s=DEADLINE_S + 120
    )
    assert reader in missed["message"]
    assert programs.result("search", shard_id, MARK)["found"], "the reader may still read the row"
    (hold,) = cluster.status("persistshard", shard)["holds"]["blocking"]
    assert (hold["id"], hold["purpose"], hold["kind"]) == (reader, PURPOSE, "critical")
    assert hold["host"].startswith("hold-"), "the pod of the program"
    assert hold["heldSeconds"] > 0
    assert int(hold["since"]) < retracted_ms

    # The pod of the second command is like that of the first one's run.
    for words in (("rollup", shard, "--wait"), ("holds", shard, "--expire", reader, "--pod", "--commit", "--force")):
        cluster.run(PROGRAM, *words, "-n", NAMESPACE, timeout_s=300)
    cluster.wait_condition("persistshard", shard, "SinceAdvancing")
    assert not cluster.status("persistshard", shard)["holds"].get("blocking")
    cluster.wait(
        "the row to be gone",
        lambda: programs.result("search", shard_id, MARK)["found"] == [],
        timeout_s=DEADLINE_S,
        every_s=10,
    )
    cluster.wait_condition("persistshard", shard, "CompactionCurrent")
    assert programs.result("content", shard_id)["rows"] == 500
