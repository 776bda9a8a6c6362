"""Two tenants on a real cluster: only namespaces that a profile selects by name or label can use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600), pytest.mark.usefixtures("operator_is_there")]

OTHER = "persist-e2e-other"
LABEL = "persist-tenant"
INLINE = {
    "blob": {
        "bucket": "persist",
        "prefix": "inline",
        "region": "us-east-1",
        "endpoint": "http://s3.persist-stores.svc:7070",
        "pathStyle": True,
        "auth": {"type": "Secret", "secretName": "persist-store"},
    },
    "consensus": {"address": "redis.persist-stores.svc:6379", "keyPrefix": "inline", "authSecretName": "persist-store"},
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
    cluster.apply(shard("theirs", storageProfile="other", shardId=shard_id))
    cluster.apply(shard("default", storageProfile="default"), namespace=other)
    try:
        refused = "ProfileNotAllowed"
        cluster.wait_condition("persistshard", "theirs", "Stalled", reason=refused)
        cluster.wait_condition("persistshard", "default", "Stalled", reason=refused, namespace=other)
        assert "frontiers" not in cluster.status("persistshard", "theirs")
    finally:
        cluster.delete("persistshard", "theirs")


def test_stores_that_a_resource_names_are_looked_after_by_pods_of_its_namespace(cluster: Any) -> None:
    elsewhere = {**INLINE, "consensus": {"address": "redis-cut.persist-stores.svc:6379"}}
    cluster.apply(shard("inline", storage=INLINE), shard("elsewhere", storage=elsewhere))
    try:
        cluster.wait_condition("persistshard", "inline", "Ready")
        assert cluster.status("persistshard", "inline")["frontiers"]["upper"] == "0"
        pods = cluster.items("pods", "persistshard.io/kind=inspection,persistshard.io/shard=inline")
        assert pods
        cluster.kubectl("annotate", "persistshard", "inline", "persistshard.io/request-gc=now")
        cluster.wait(
            "a garbage collection that ended well",
            lambda: (
                cluster.status("persistshard", "inline").get("maintenance", {}).get("gc", {}).get("lastSuccessTime")
            ),
        )
        found = cluster.wait_condition("persistshard", "elsewhere", "Stalled", reason="EndpointNotAllowed")
        assert "redis-cut.persist-stores.svc:6379" in found["message"]
        assert not cluster.items("pods", "persistshard.io/shard=elsewhere")
    finally:
        cluster.delete("persistshard", "inline", "elsewhere")


def test_a_label_that_is_taken_away_takes_the_stores_away(cluster: Any, other: str) -> None:
    cluster.apply(shard("labelled", storageProfile="other"), namespace=other)
    cluster.wait_condition("persistshard", "labelled", "Ready", namespace=other)
    cluster.run("kubectl", "label", "namespace", other, f"{LABEL}-")
    try:
        cluster.wait_condition("persistshard", "labelled", "Stalled", reason="ProfileNotAllowed", namespace=other)
    finally:
        cluster.run("kubectl", "label", "namespace", other, f"{LABEL}=other")
