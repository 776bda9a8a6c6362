"""The API server refuses broken resources with its own message; the status of a shard shows why it refuses the pods of its Jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600)]

CASES = yaml.load((Path(__file__).resolve().parents[1] / "operator" / "crd_cases.yaml").read_text(), yaml.CSafeLoader)


@pytest.fixture
def watched(cluster: Any) -> Iterator[str]:
    """A namespace where the operator may create Jobs but no pods, and where no pod is admitted."""
    namespace, tenant = "persist-e2e-other", "persist-tenant"
    account = "--as=system:serviceaccount:persist-system:persist-operator"
    asked = cluster.run("kubectl", "auth", "can-i", "create", "pods", "--namespace", namespace, account, check=False)
    assert asked.stdout.strip() == "no"
    cluster.run("kubectl", "label", "--overwrite", "namespace", namespace, f"{tenant}=other")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    cluster.apply(quota, namespace=namespace)
    yield namespace
    cluster.delete("persistshard", "podless", namespace=namespace)
    cluster.delete("resourcequota", "none", namespace=namespace)
    cluster.run("kubectl", "label", "namespace", namespace, f"{tenant}-")


@pytest.mark.usefixtures("operator_is_there")
def test_the_status_quotes_the_server_on_a_refused_pod_where_the_operator_may_make_none(
    cluster: Any, watched: str
) -> None:
    """Only the Job's Events have the reason. Without them the status would say a minute later that there is no pod."""
    shard = {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "PersistShard",
        "metadata": {"name": "podless"},
        "spec": {"schema": {"key": "id BIGINT"}, "storageProfile": "other"},
    }
    cluster.apply(shard, namespace=watched)
    cluster.wait_condition("persistshard", "podless", "Ready", namespace=watched)
    cluster.wait("a quota that counts", lambda: cluster.status("resourcequota", "none", watched).get("hard"))
    cluster.kubectl("annotate", "persistshard", "podless", "persistshard.io/request-gc=now", namespace=watched)
    for type_, status in (("Ready", "False"), ("Reconciling", "True"), ("GarbageCollected", "False")):
        found = cluster.wait_condition(
            "persistshard", "podless", type_, status, reason="ActionRefused", timeout_s=30, namespace=watched
        )
        assert "exceeded quota: none" in found["message"]
    (job,) = cluster.items("jobs", "persistshard.io/shard=podless", watched)
    reported = cluster.condition("persistshard", "podless", "Ready", watched)["lastTransitionTime"]
    print(f"Job made {job['metadata']['creationTimestamp']}, its refusal reported {reported}")
    cluster.delete("resourcequota", "none", namespace=watched)
    cluster.wait_condition("persistshard", "podless", "Ready", timeout_s=180, namespace=watched)
    assert "exceeded quota" not in str(cluster.status("persistshard", "podless", watched)["conditions"])


def resource(case: dict[str, Any], spec: dict[str, Any]) -> str:
    name = str(case.get("metadata_name", "case"))
    # JSON, because kubectl takes a bare n or y in YAML for a boolean.
    return json.dumps(
        {"apiVersion": "persistshard.io/v1alpha1", "kind": case["kind"], "metadata": {"name": name}, "spec": spec}
    )


@pytest.fixture(scope="module")
def case_namespace(cluster: Any) -> Iterator[str]:
    """A namespace without an operator: a running one would give a shard an id at any time, perhaps between two steps of a case."""
    cluster.scale_operator(0)
    cluster.run("kubectl", "create", "namespace", "persist-e2e-cases", check=False)
    yield "persist-e2e-cases"
    cluster.scale_operator(1)


def test_the_api_server_selects_by_the_fields_of_the_definitions(cluster: Any, case_namespace: str) -> None:
    """Clients list the shards of a profile, or the sinks of a shard, without reading all of them."""
    head = {"apiVersion": "persistshard.io/v1alpha1"}
    sink = {
        "suspend": True,
        "mode": "Once",
        "shardRef": {"name": "chosen"},
        "input": {"type": "Format", "format": {"name": "csv"}},
        "envelope": {"type": "Append"},
    }
    specs = {
        ("PersistShard", "chosen"): {"schema": {"key": "id BIGINT"}, "suspend": True, "reclaimPolicy": "Tombstone"},
        ("PersistShard", "other"): {"schema": {"key": "id BIGINT"}, "suspend": True},
        ("SparkSink", "chosen"): sink,
        ("SparkSink", "other"): {**sink, "shardRef": {"name": "nowhere"}, "mode": "Streaming"},
    }
    selectors = {
        ("PersistShard", "spec.reclaimPolicy=Tombstone"): ["chosen"],
        ("PersistShard", "spec.reclaimPolicy=Retain"): ["other"],
        ("PersistShard", "spec.storageProfile=default"): [],
        ("PersistShard", "spec.storageProfile="): ["chosen", "other"],
        ("SparkSink", "spec.shardRef.name=chosen"): ["chosen"],
        ("SparkSink", "spec.mode=Streaming"): ["other"],
    }
    try:
        for (kind, name), spec in specs.items():
            metadata = {"name": name, "labels": {"case": "selected"}}
            cluster.apply({**head, "kind": kind, "metadata": metadata, "spec": spec}, namespace=case_namespace)
        for (kind, selector), wanted in selectors.items():
            listed = cluster.kubectl(
                "get", kind, "-l", "case=selected", "--field-selector", selector, "-o", "name", namespace=case_namespace
            )
            assert [one.rpartition("/")[2] for one in listed.split()] == wanted, selector
    finally:
        for kind, name in reversed(specs):
            cluster.delete(kind, name, namespace=case_namespace)


@pytest.mark.parametrize("case", CASES, ids=[case["name"].replace(" ", "-") for case in CASES])
def test_the_api_server_accepts_and_refuses_as_the_cases_say(
    cluster: Any, case_namespace: str, case: dict[str, Any]
) -> None:
    """Creations use a dry run; updates change an object that really exists."""
    if "old" not in case:
        done = cluster.run(
            "kubectl",
            "-n",
            case_namespace,
            "create",
            "--dry-run=server",
            "-f",
            "-",
            given=resource(case, case["new"]),
            check=False,
        )
    else:
        kind, name = case["kind"], str(case.get("metadata_name", "case"))
        cluster.kubectl("create", "-f", "-", namespace=case_namespace, given=resource(case, case["old"]))
        try:
            if "status" in case:
                patch = json.dumps({"status": case["status"]})
                cluster.kubectl(
                    "patch",
                    kind,
                    name,
                    "--subresource=status",
                    "--type=merge",
                    "--patch",
                    patch,
                    namespace=case_namespace,
                )
            done = cluster.run(
                "kubectl",
                "-n",
                case_namespace,
                "replace",
                "--dry-run=server",
                "-f",
                "-",
                given=resource(case, case["new"]),
                check=False,
            )
        finally:
            cluster.delete(kind, name, namespace=case_namespace)
    if case["want"] == "ok":
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert case["want"] in done.stderr
