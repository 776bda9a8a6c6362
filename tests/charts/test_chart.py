"""The chart as helm renders it: valid, restricted, least-privileged, and repeatable for GitOps."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_values import CHART, FULL, ROOT, SETS, Manifest, of_kind, operator_config, pod_specs
from persist_operator.api.schema_check import load_schemas


@pytest.mark.slow
@SETS
def test_lint_is_clean(run_helm: Callable[..., Any], values: Manifest) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@SETS
def test_every_pod_is_restricted(template: Callable[..., list[Manifest]], values: Manifest) -> None:
    """The rules of the restricted pod security standard, and a read-only root file system."""
    pods = list(pod_specs(template(values)))
    assert len(pods) == (4 if values.get("rbac", {}).get("create", True) else 3)
    for name, spec in pods:
        for banned in ("hostNetwork", "hostPID", "hostIPC"):
            assert not spec.get(banned), name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert all({"configMap", "emptyDir", "secret"} & set(volume) for volume in spec.get("volumes", []))
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


@SETS
def test_selectors_find_the_operator_and_nothing_else(
    template: Callable[..., list[Manifest]], values: Manifest
) -> None:
    manifests = template(values)
    (deployment,) = of_kind(manifests, "Deployment")
    test_pods = of_kind(manifests, "Pod")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        *(one["spec"]["selector"] for one in of_kind(manifests, "Service")),
    ]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(manifests, "PodDisruptionBudget")]
    for selector in selectors:
        assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        assert not [pod for pod in test_pods if selector.items() <= pod["metadata"]["labels"].items()]


def test_one_leader_may_update_its_own_lease_only(template: Callable[..., list[Manifest]]) -> None:
    (role,) = [one for one in of_kind(template({}), "Role") if one["metadata"]["name"].endswith("-leader")]
    unnamed = {verb for rule in role["rules"] if not rule.get("resourceNames") for verb in rule["verbs"]}
    assert unnamed == {"create"}


@SETS
def test_no_secret_is_read_and_no_wildcards(template: Callable[..., list[Manifest]], values: Manifest) -> None:
    manifests = template(values)
    for role in of_kind(manifests, "Role") + of_kind(manifests, "ClusterRole"):
        for rule in role["rules"]:
            assert "secrets" not in rule["resources"] or set(rule["verbs"]) <= {"create", "delete"}
            assert "*" not in [*rule["resources"], *rule["verbs"], *rule["apiGroups"]]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_watching_some_namespaces_needs_nothing_cluster_wide(template: Callable[..., list[Manifest]]) -> None:
    manifests = template({**FULL, "rbac": {"aggregate": False}})
    assert not of_kind(manifests, "ClusterRole")
    assert not of_kind(manifests, "ClusterRoleBinding")
    assert {role["metadata"]["namespace"] for role in of_kind(manifests, "Role")} == {"red", "blue", "sys"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"sys"}),
        ({"watch": {"namespaces": ["red", "blue"]}}, {"red", "blue"}),
        ({"workload": {"namespaces": ["green"]}}, {"green"}),
    ],
)
def test_drivers_get_an_account_in_each_workload_namespace(
    template: Callable[..., list[Manifest]], values: Manifest, expected: set[str]
) -> None:
    accounts = [
        one for one in of_kind(template(values), "ServiceAccount") if one["metadata"]["name"] == "persist-spark-driver"
    ]
    assert {one["metadata"]["namespace"] for one in accounts} == expected


@pytest.mark.slow
def test_crds_are_those_of_the_repository_and_are_kept(template: Callable[..., list[Manifest]]) -> None:
    source = {
        document["metadata"]["name"]: document
        for path in (ROOT / "crds").glob("*.yaml")
        for document in [yaml.safe_load(path.read_text())]
    }
    assert source.keys() == {"persistshards.persistshard.io", "sparksinks.persistshard.io"}
    for keep in (True, False):
        rendered = {
            one["metadata"]["name"]: one
            for one in of_kind(template({"crds": {"keep": keep}}), "CustomResourceDefinition")
        }
        assert rendered.keys() == source.keys()
        for name, crd in rendered.items():
            assert crd["metadata"].get("annotations", {}).pop("helm.sh/resource-policy", None) == (
                "keep" if keep else None
            )
            assert crd["spec"] == source[name]["spec"]


@pytest.mark.slow
def test_rendering_is_repeatable_and_reads_nothing_from_the_cluster(run_helm: Callable[..., Any]) -> None:
    """GitOps renders repeatedly and without a cluster: no lookup, nothing random, no hooks except the tests."""
    once, again = (
        run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=FULL).stdout for _ in range(2)
    )
    assert "kind: Deployment" in once
    assert once == again
    text = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    assert not re.search(
        r"\b(lookup|randAlphaNum|randAlpha|genCA|genSelfSignedCert|uuidv4|now)\b",
        re.sub(r"{{-? ?/\*.*?\*/", "", text, flags=re.DOTALL),
    )
    assert set(re.findall(r"helm\.sh/hook: (\S+)", text)) == {"test"}


def test_each_namespaced_object_says_its_namespace(template: Callable[..., list[Manifest]]) -> None:
    cluster_wide = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    cluster_wide |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    for one in template(FULL):
        assert ("namespace" in one["metadata"]) == (one["kind"] not in cluster_wide), one["kind"]


def test_sync_crds_finds_a_stale_copy(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sync_crds", ROOT / "charts" / "sync_crds.py")
    assert spec is not None
    assert spec.loader is not None
    sync = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sync)
    source, chart = tmp_path / "crds", tmp_path / "chart"
    source.mkdir()
    (source / "a.yaml").write_text("a: 1\n")
    assert sync.differences(source, chart) == ["a.yaml"]
    sync.copy(source, chart)
    assert sync.differences(source, chart) == []
    (source / "a.yaml").write_text("a: 2\n")
    (chart / "left-over.yaml").write_text("b: 1\n")
    assert sync.differences(source, chart) == ["a.yaml", "left-over.yaml"]
    sync.copy(source, chart)
    assert sync.differences(source, chart) == []


def test_crds_have_a_chart_of_their_own(run_helm: Callable[..., Any], template: Callable[..., list[Manifest]]) -> None:
    done = run_helm("template", "crds", str(ROOT / "charts" / "persist-operator-crds"), "--kube-version", "1.34.0")
    assert done.returncode == 0, done.stderr
    alone = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert alone == of_kind(template({}), "CustomResourceDefinition")
    assert run_helm(
        "lint", "--strict", str(ROOT / "charts" / "persist-operator-crds"), values={"kept": True}
    ).returncode


def test_the_table_of_values_has_every_value_and_the_examples_are_valid(
    template: Callable[..., list[Manifest]],
) -> None:
    spec = importlib.util.spec_from_file_location("values_table", ROOT / "charts" / "values_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0
    text = '# Of a.\na:\n  # Of b.\n  b: 1   # more\n\n  c: "#"\n#  d: 2\ne: {}   # x | <y>\n'
    assert module.comments(text) == {"a": "Of a.", "a.b": "Of b. more", "e": "x | <y>"}
    assert module.table(text).splitlines()[6:] == [
        "| `a` |  | Of a. |",
        "| `a.b` | `1` | Of b. more |",
        "| `a.c` | `'#'` |  |",
        "| `e` | `{}` | x \\| &lt;y> |",
    ]
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    for example in yaml.safe_load(annotations["artifacthub.io/crdsExamples"]):
        assert load_schemas().check(example) == []


def test_the_page_of_the_chart_names_the_images_that_it_installs(template: Callable[..., list[Manifest]]) -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    named = {one["image"] for one in yaml.safe_load(annotations["artifacthub.io/images"])}
    manifests = template({})
    rendered = {container["image"] for _, spec in pod_specs(manifests) for container in spec["containers"]}
    images = operator_config(manifests)["images"]
    assert named == {*rendered, images["engine"], images["spark"]}
    assert {one["kind"] for one in yaml.safe_load(annotations["artifacthub.io/changes"])} <= {
        "added",
        "changed",
        "fixed",
    }
