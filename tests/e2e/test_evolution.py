"""A schema that grows with its resource: old rows are read with nulls, and a change that would lose something changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from shard_runs import IDLE, patch

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600), pytest.mark.usefixtures("operator_is_there")]

BEFORE = {"key": "id BIGINT", "value": "text STRING"}
AFTER = {"key": "id BIGINT", "value": "text STRING, more BIGINT"}


def test_a_schema_grows_through_the_resource_and_a_change_that_loses_a_field_is_refused(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("grows", schema=BEFORE, **IDLE)
    programs.result("write_batches", shard_id, "1", "3")
    patch(cluster, "persistshard", shard, {"schema": AFTER})
    cluster.wait(
        "the new schema", lambda: "more" in cluster.status("persistshard", shard)["schema"]["value"], timeout_s=60
    )
    cluster.wait_condition("persistshard", shard, "Ready")

    output = programs.finish(programs.start_cli("read", shard_id, "--format", "jsonl"))
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert sorted(row.get("key", row)["id"] for row in rows) == [0, 1, 2]
    assert {row.get("val", row)["more"] for row in rows} == {None}

    patch(cluster, "persistshard", shard, {"schema": {"value": "more BIGINT"}})
    refused = cluster.wait_condition("persistshard", shard, "Stalled", reason="SchemaRefused")
    assert "text" in refused["message"]
    assert "Nothing was changed" in refused["message"]
    assert "text" in cluster.status("persistshard", shard)["schema"]["value"]
    patch(cluster, "persistshard", shard, {"schema": AFTER})
    cluster.wait_condition("persistshard", shard, "Ready")
    assert cluster.condition("persistshard", shard, "Stalled").get("status") != "True"
