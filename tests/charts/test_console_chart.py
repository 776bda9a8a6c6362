"""The console's Deployment: off by default, restricted, with exactly the rights that it needs, and with arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from persist_operator.console.commands import app

CHART = Path(__file__).resolve().parents[2] / "charts" / "persist-operator"
Manifest = dict[str, Any]
NAME = "persist-persist-operator-console"
ON: Manifest = {"console": {"enabled": True}, "rbac": {"aggregate": False}, "watch": {"namespaces": ["red", "blue"]}}
READS = [
    {"apiGroups": ["persistshard.io"], "resources": ["persistshards", "sparksinks"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
]
REVIEWS = [
    {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
    {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
]


def consoles(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind and "console" in one["metadata"]["name"]]


def parsed(manifests: list[Manifest]) -> dict[str, Any]:
    """What the command line makes of the container's arguments."""
    (deployment,) = consoles(manifests, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "ui"
    return typer.main.get_command(app).make_context("ui", container["args"][1:]).params


def test_it_is_off_by_default(template: Callable[..., list[Manifest]]) -> None:
    assert not [one for one in template({}) if "console" in one["metadata"]["name"]]


def test_the_rights_are_to_read_and_to_review(template: Callable[..., list[Manifest]]) -> None:
    listed = template(ON)
    assert {one["metadata"]["namespace"]: one["rules"] for one in consoles(listed, "Role")} == {
        "red": READS,
        "blue": READS,
    }
    assert [one["rules"] for one in consoles(listed, "ClusterRole")] == [REVIEWS]
    wide = template({**ON, "watch": {"clusterWide": True}})
    assert [one["rules"] for one in consoles(wide, "ClusterRole")] == [[*REVIEWS, *READS]]
    assert not consoles(wide, "Role")
    bound = [
        *consoles(listed, "RoleBinding"),
        *consoles(listed, "ClusterRoleBinding"),
        *consoles(wide, "ClusterRoleBinding"),
    ]
    subjects = [{"kind": "ServiceAccount", "name": NAME, "namespace": "sys"}]
    assert [one["subjects"] for one in bound] == [subjects] * 4


def test_the_pod_is_restricted_and_mounts_no_secret(template: Callable[..., list[Manifest]]) -> None:
    stores = {"blob": "s3://b", "consensus": "redis://r:6379/0", "secretName": "persist-store"}
    (deployment,) = consoles(template({**ON, "storageProfiles": {"default": stores}}), "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == NAME
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}}]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert "env" not in container


def test_its_labels_are_its_own(template: Callable[..., list[Manifest]]) -> None:
    """Neither the operator's Service nor its disruption budget may find the console's pod."""
    manifests = template({**ON, "replicas": 2})
    (deployment,) = consoles(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (service,) = consoles(manifests, "Service")
    assert service["spec"]["selector"].items() <= labels.items()
    others = [one["spec"]["selector"] for one in manifests if one["kind"] == "Service" and one is not service]
    others += [one["spec"]["selector"]["matchLabels"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    assert len(others) == 2
    assert not [one for one in others if one.items() <= labels.items()]


def test_the_command_line_takes_the_arguments(template: Callable[..., list[Manifest]]) -> None:
    proxy = {"networks": ["10.0.0.7/32"], "userHeader": "X-User", "groupsHeader": "X-Groups"}
    values = {**ON, "console": {"enabled": True, "port": 9000, "hostNames": ["persist.example.com"], "proxy": proxy}}
    seen = parsed(template(values))
    assert (seen["in_cluster"], seen["address"], seen["port"]) == (True, "0.0.0.0", 9000)
    assert list(seen["namespaces"]) == ["red", "blue"]
    assert {NAME, f"{NAME}.sys.svc", "persist.example.com"} <= set(seen["host_names"])
    assert list(seen["trust_proxy"]) == ["10.0.0.7/32"]
    assert (seen["trust_user_header"], seen["trust_groups_header"]) == ("X-User", "X-Groups")
    assert not parsed(template({**ON, "watch": {"clusterWide": True}}))["namespaces"]


def test_only_pods_of_the_namespace_connect_unless_others_are_allowed(template: Callable[..., list[Manifest]]) -> None:
    (policy,) = consoles(template(ON), "NetworkPolicy")
    ports = [{"protocol": "TCP", "port": "http"}]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {}}], "ports": ports}]
    allowed = [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]
    (other,) = consoles(template({**ON, "console": {"enabled": True, "allowFrom": allowed}}), "NetworkPolicy")
    assert other["spec"]["ingress"][0]["from"] == allowed
    assert not consoles(template({**ON, "networkPolicies": {"enabled": False}}), "NetworkPolicy")


@pytest.mark.parametrize(
    ("console", "says"),
    [
        ({"port": 80}, "port"),
        ({"hostNames": ["a b"]}, "hostNames"),
        ({"proxy": {"networks": ["everywhere"]}}, "networks"),
        ({"proxy": {"networks": ["10.0.0.1"]}}, "go together"),
        ({"proxy": {"userHeader": "X-User"}}, "go together"),
        ({"proxy": {"userHeader": "X User", "networks": ["10.0.0.1"]}}, "userHeader"),
        ({"enable": True}, "enable"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(run_helm: Callable[..., Any], console: Manifest, says: str) -> None:
    values = {"console": {"enabled": True, **console}}
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert says in done.stderr
