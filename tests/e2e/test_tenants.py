"""Two tenants on a real cluster: a profile is for the namespaces that it names or whose labels it asks for, and for no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600), pytest.mark.usefixtures("operator_is_there")]

OTHER = "persist-e2e-other"
LABEL = "persist-tenant"
INLINE = {
    "blob": {"bucket": "persist"},
    "consensus": {"address": "redis.persist-stores.svc:6379"},
    "secretName": "persist-store",
}


def shard(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "PersistShard",
        "metadata": {"name": name},
        "spec": {"schema": {"key": "id BIGINT"}, **spec},
    }


@pytest.fixture(scope="module")
def other(cluster: Any) -> Iterator[str]:
    """The other tenant's namespace, with its label."""
    cluster.run("kubectl", "label", "--overwrite", "namespace", OTHER, f"{LABEL}=other")
    yield OTHER
    cluster.delete("persistshard", "own", "labelled", "default", namespace=OTHER)
    cluster.run("kubectl", "label", "namespace", OTHER, f"{LABEL}-")


def test_each_tenant_reaches_its_own_stores_only(cluster: Any, other: str) -> None:
    cluster.apply(shard("own", storageProfile="other"), namespace=other)
    cluster.wait_condition("persistshard", "own", "Ready", namespace=other)
    shard_id = cluster.status("persistshard", "own", other)["shardId"]
    cluster.apply(shard("theirs", storageProfile="other", shardId=shard_id), shard("inline", storage=INLINE))
    cluster.apply(shard("default", storageProfile="default"), namespace=other)
    try:
        refused = "ProfileNotAllowed"
        cluster.wait_condition("persistshard", "theirs", "Stalled", reason=refused)
        cluster.wait_condition("persistshard", "inline", "Stalled", reason="InlineStorageOff")
        cluster.wait_condition("persistshard", "default", "Stalled", reason=refused, namespace=other)
        assert "frontiers" not in cluster.status("persistshard", "theirs")
    finally:
        cluster.delete("persistshard", "theirs", "inline")


def test_a_label_that_is_taken_away_takes_the_stores_away(cluster: Any, other: str) -> None:
    cluster.apply(shard("labelled", storageProfile="other"), namespace=other)
    cluster.wait_condition("persistshard", "labelled", "Ready", namespace=other)
    cluster.run("kubectl", "label", "namespace", other, f"{LABEL}-")
    try:
        cluster.wait_condition("persistshard", "labelled", "Stalled", reason="ProfileNotAllowed", namespace=other)
    finally:
        cluster.run("kubectl", "label", "namespace", other, f"{LABEL}=other")
