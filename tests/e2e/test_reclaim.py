"""Deletion of a shard with its resource on the live cluster: a sink holds it up by name, then nothing of the rows is left, and the name is free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from shard_runs import patch
from sink_manifests import airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

FINALIZER = "persistshard.io/cleanup"
PURGE = {"reclaimPolicy": "Purge", "deletionConfirmation": "purge-this-shard"}


def test_a_purged_shard_leaves_no_row_and_waits_for_its_sinks(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("purge")
    programs.result("write_batches", shard_id, "4", "2000")
    mark = "row 17"
    assert programs.result("search", shard_id, mark)["found"], "the mark is in the rows"
    refused = cluster.run(
        "kubectl", "-n", "persist-e2e", "patch", "persistshard", shard, "--type=merge", "--patch",
        json.dumps({"spec": {"reclaimPolicy": "Purge"}}), check=False,
    )  # fmt: skip
    assert refused.returncode
    assert "deletionConfirmation" in refused.stderr
    patch(cluster, "persistshard", shard, PURGE)
    cluster.wait(
        "the finalizer",
        lambda: FINALIZER in cluster.get("persistshard", shard)["metadata"].get("finalizers", []),
        timeout_s=60,
    )
    sink = named("sink")
    cluster.apply(airlines_sink(sink, shard, suspend=True))
    cluster.kubectl("delete", "persistshard", shard, "--wait=false")
    blocked = cluster.wait_condition("persistshard", shard, "DeletionBlocked", reason="SinksAttached", timeout_s=90)
    assert sink in blocked["message"]
    assert programs.result("search", shard_id, mark)["found"], "nothing was deleted yet"

    cluster.kubectl("delete", "sparksink", sink, "--wait=false")
    cluster.wait("the resource to go", lambda: cluster.get("persistshard", shard) is None, timeout_s=240)
    left = programs.result("search", shard_id, mark)
    assert left["found"] == []
    assert left["objects"] == len(left["keys"]) <= 6
    keys = [key.removeprefix(f"{shard_id}/") for key in left["keys"]]
    # The tombstone is a state in a rollup; the records of what was deleted stay.
    assert [one for one in keys if not re.match(r"created$|v\d+/r|d\d+/d", one)] == []
    assert any(one.startswith("d") for one in keys)
