"""The exact rights of each account under the RBAC of the chart. A right that is added or dropped changes a golden file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
REQUESTS = yaml.safe_load(Path(__file__).with_name("asked.yaml").read_text())
#: `own`: the namespace of the release; `red`: listed, sinks may run; `blue`: listed; `other`: any other.
NAMESPACES = ["own", "red", "blue", "other"]
LISTED: Manifest = {"watch": {"namespaces": ["blue"]}, "workload": {"namespaces": ["red"]}}
CLUSTER_WIDE: Manifest = {"watch": {"clusterWide": True}, "workload": {"namespaces": ["red"]}}
ACCOUNTS = {
    "operator": "own/persist-persist-operator",
    "driver": "red/persist-spark-driver",
    "driver elsewhere": "other/persist-spark-driver",
    # The default account of executors and maintenance pods. It has no right.
    "executor and maintenance": "red/default",
}


def matrix(manifests: list[Manifest], accounts: list[str], namespaces: list[str]) -> Manifest:
    """All granted rights as `account -> namespace -> group/resource -> verbs`, with accounts as `namespace/name`. A verb that is granted
    for some objects only is followed by their names.
    """
    return {
        account: {namespace: found for namespace in namespaces if (found := _granted(manifests, account, namespace))}
        for account in accounts
    }


def _granted(manifests: list[Manifest], account: str, namespace: str) -> dict[str, str]:
    rules = [rule for role in _roles(manifests, account, namespace) for rule in role["rules"]]
    granted: dict[str, str] = {}
    for resource in REQUESTS["resources"]:
        group, _, name = resource.partition("/")
        words = []
        for verb in REQUESTS["verbs"]:
            found = [
                one for one in rules if group in one["apiGroups"] and name in one["resources"] and verb in one["verbs"]
            ]
            if any("resourceNames" not in one for one in found):
                words.append(verb)
            elif found:
                words.append(f"{verb}({','.join(sorted(each for one in found for each in one['resourceNames']))})")
        if words:
            granted[resource] = " ".join(words)
    return granted


def _roles(manifests: list[Manifest], account: str, namespace: str) -> list[Manifest]:
    """Roles that are bound to the account and apply in the namespace. No account is bound to aggregated roles, which are for users."""
    by_name = {
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one
        for one in manifests
        if "rules" in one
    }
    found = []
    for one in manifests:
        if one["kind"] not in {"RoleBinding", "ClusterRoleBinding"}:
            continue
        where = one["metadata"].get("namespace")
        subjects = {
            f"{subject['namespace']}/{subject['name']}"
            for subject in one["subjects"]
            if subject["kind"] == "ServiceAccount"
        }
        assert len(subjects) == len(one["subjects"]), "a binding for others than accounts"
        if account in subjects and where in {None, namespace}:
            role = one["roleRef"]
            found.append(by_name[role["kind"], where if role["kind"] == "Role" else None, role["name"]])
    return found


@pytest.fixture
def granted(template: Callable[..., list[Manifest]]) -> Callable[[Manifest], Manifest]:
    def make(values: Manifest) -> Manifest:
        found = matrix(template(values, namespace="own"), list(ACCOUNTS.values()), NAMESPACES)
        return {name: found[account] for name, account in ACCOUNTS.items()}

    return make


@pytest.mark.parametrize(
    ("values", "golden"),
    [(LISTED, "can-i-listed.yaml"), (CLUSTER_WIDE, "can-i-cluster-wide.yaml")],
    ids=["listed", "cluster"],
)
def test_the_rights_are_exactly_the_reviewed_ones(
    granted: Callable[[Manifest], Manifest], values: Manifest, golden: str
) -> None:
    assert granted(values) == yaml.safe_load((GOLDEN / golden).read_text())


@pytest.mark.parametrize("values", [{}, LISTED, CLUSTER_WIDE], ids=["none", "listed", "cluster"])
def test_no_account_gets_a_dangerous_right(granted: Callable[[Manifest], Manifest], values: Manifest) -> None:
    for account, spaces in granted(values).items():
        for namespace, found in spaces.items():
            for resource, verbs in found.items():
                words = set(verbs.split())
                assert resource.split("/", 1)[1] not in {
                    "pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "serviceaccounts/token", "nodes/proxy",
                }, (account, namespace)  # fmt: skip
                assert not resource.startswith(("rbac.", "admissionregistration.", "apiextensions.")), (
                    account,
                    namespace,
                )
                if resource == "/secrets":
                    assert words <= {"create", "delete"}, (account, namespace)
                if resource.startswith("persistshard.io/") and not resource.endswith("/status"):
                    # The admission policy `finalizers` limits the patch to the operator's own finalizer.
                    own = {"patch"} if (account, resource.endswith("/persistshards")) == ("operator", True) else set()
                    assert words <= {"get", "list", "watch"} | own, (account, namespace)


def test_nothing_is_granted_where_nothing_is_listed(granted: Callable[[Manifest], Manifest]) -> None:
    """The default is the namespace of the release and no other."""
    assert {account: set(spaces) for account, spaces in granted({}).items()} == {
        "operator": {"own"}, "driver": set(), "driver elsewhere": set(), "executor and maintenance": set(),
    }  # fmt: skip
    assert set(granted(LISTED)["operator"]) == {"own", "red", "blue"}


def test_no_cluster_wide_right_makes_a_pod_or_a_secret(granted: Callable[[Manifest], Manifest]) -> None:
    found = granted(CLUSTER_WIDE)["operator"]["other"]
    assert "/secrets" not in found
    assert found["/pods"] == "get list watch"


def test_view_edit_and_admin_aggregate_the_rights_on_the_resources(template: Callable[..., list[Manifest]]) -> None:
    """The cluster's roles view, edit and admin aggregate these. No account is bound to them."""
    kinds = ["persistshards", "sparksinks"]
    found = {one["metadata"]["name"]: one["rules"] for one in template(LISTED) if one["kind"] == "ClusterRole"}
    assert found == {
        "sys-persist-persist-operator-view": [
            {"apiGroups": ["persistshard.io"], "resources": kinds, "verbs": ["get", "list", "watch"]}
        ],
        "sys-persist-persist-operator-edit": [
            {
                "apiGroups": ["persistshard.io"],
                "resources": kinds,
                "verbs": ["create", "update", "patch", "delete", "deletecollection"],
            }
        ],
    }


def test_network_policies_close_sinks_and_maintenance(template: Callable[..., list[Manifest]]) -> None:
    policies = [one for one in template(LISTED, namespace="own") if one["kind"] == "NetworkPolicy"]
    assert {one["metadata"]["namespace"] for one in policies} == {"red", "blue"}
    for policy in policies:
        spec, component = policy["spec"], policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        assert spec["policyTypes"] == ["Ingress"]
        assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/managed-by"] == "persist-operator"
        of_spark = spec["podSelector"].get("matchExpressions")
        if component == "maintenance" and not of_spark:
            assert not spec.get("ingress")
            continue
        if component == "maintenance":
            assert of_spark == [{"key": "persistshard.io/role", "operator": "In", "values": ["driver", "executor"]}]
        rule, *stops = spec["ingress"]
        operator = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "own"}},
            "podSelector": {
                "matchLabels": {
                    "app.kubernetes.io/name": "persist-operator",
                    "app.kubernetes.io/instance": "persist",
                    "app.kubernetes.io/component": "operator",
                }
            },
        }
        asks = {"from": [operator], "ports": [{"protocol": "TCP", "port": 7080}]}
        assert stops == ([asks] if component == "sink" else [])
        assert rule["from"] == [{"podSelector": spec["podSelector"]}]
        assert {one["port"] for one in rule["ports"]} == {7078, 7079}
    assert len(policies) == 2 * 3
    assert not [one for one in template({"networkPolicies": {"enabled": False}}) if one["kind"] == "NetworkPolicy"]
