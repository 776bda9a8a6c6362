"""Rights and admission on a real API server, with the matrix and the cases of tests/charts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.kind, pytest.mark.timeout(300)]

CHARTS = Path(__file__).resolve().parents[1] / "charts"
ASKED = yaml.load((CHARTS / "asked.yaml").read_text(), yaml.CSafeLoader)
GOLDEN = yaml.load((CHARTS / "golden" / "can-i-listed.yaml").read_text(), yaml.CSafeLoader)
CASES = yaml.load((CHARTS / "admission_cases.yaml").read_text(), yaml.CSafeLoader)
SYSTEM, WORKLOAD, OTHER = "persist-system", "persist-e2e", "persist-stores"
WATCHED = "persist-e2e-other"
OPERATOR, DRIVER, REST = f"{SYSTEM}:persist-operator", f"{WORKLOAD}:persist-spark-driver", f"{WORKLOAD}:default"
Manifest = dict[str, Any]


def granted(cluster: Any, account: str, namespace: str) -> dict[str, str]:
    """`group/resource -> verbs`, each checked by a SubjectAccessReview."""
    asked = [(resource, verb) for resource in ASKED["resources"] for verb in ASKED["verbs"]]
    reviews = []
    for resource, verb in asked:
        group, kind, *sub = resource.split("/")
        attributes = {
            "namespace": namespace,
            "verb": verb,
            "group": group,
            "resource": kind,
            "subresource": "".join(sub),
        }
        spec = {
            "user": f"system:serviceaccount:{account}",
            "groups": ["system:serviceaccounts"],
            "resourceAttributes": attributes,
        }
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    answers = cluster.kubectl("create", "-f", "-", "-o", "json", given=given, namespace="", timeout_s=200)
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(answers):
        one, end = decoder.raw_decode(answers, at)
        found += one.get("items", [one])
        at = end + len(answers[end:]) - len(answers[end:].lstrip())
    result: dict[str, str] = {}
    for (resource, verb), answer in zip(asked, found, strict=True):
        if answer["status"]["allowed"]:
            result[resource] = f"{result[resource]} {verb}" if resource in result else verb
    return result


@pytest.mark.parametrize(
    ("account", "namespace", "golden"),
    [
        (OPERATOR, WORKLOAD, ("operator", "red")),
        (OPERATOR, WATCHED, ("operator", "blue")),
        (OPERATOR, OTHER, None),
        (DRIVER, WORKLOAD, ("driver", "red")),
        (DRIVER, SYSTEM, None),
        (REST, WORKLOAD, None),
    ],
)
def test_the_api_server_grants_what_the_golden_matrix_says(
    cluster: Any, account: str, namespace: str, golden: tuple[str, str] | None
) -> None:
    assert granted(cluster, account, namespace) == ({} if golden is None else GOLDEN[golden[0]][golden[1]])


@pytest.fixture(scope="module")
def accounts(cluster: Any) -> Iterator[None]:
    """The account that some cases name. Without it the API server refuses the pod before it evaluates the policies."""
    cluster.kubectl("create", "serviceaccount", "etl")
    yield
    cluster.kubectl("delete", "serviceaccount", "etl")


@pytest.mark.usefixtures("accounts")
@pytest.mark.parametrize(
    "case",
    [one for one in CASES if "operation" not in one],
    ids=[one["name"] for one in CASES if "operation" not in one],
)
def test_the_api_server_admits_what_the_policies_admit(cluster: Any, case: Manifest) -> None:
    shown = json.loads(json.dumps(case["object"]))
    namespace = SYSTEM if shown["metadata"]["namespace"] == "sys" else WORKLOAD
    shown["metadata"]["namespace"] = namespace
    # The release of the cases is `persist`.
    shown["metadata"]["name"] = shown["metadata"]["name"].replace("persist-persist-operator", "persist-operator")
    if shown["kind"] != "Secret":
        shown["metadata"]["name"] = f"case-{abs(hash(case['name'])) % 10**8}"
    account = {"driver": DRIVER, "operator": OPERATOR}.get(case.get("as", ""))
    identity = [] if account is None else [f"--as=system:serviceaccount:{account}"]
    words = ["kubectl", "--namespace", namespace, "create", "--dry-run=server", "-f", "-", *identity]
    done = cluster.run(*words, given=json.dumps(shown), check=False)
    if case["want"] == "ok":
        # The namespace is restricted by itself, so Pod Security may refuse what these policies allow.
        assert done.returncode == 0 or "violates PodSecurity" in done.stderr or "already exists" in done.stderr, (
            done.stderr
        )
    else:
        assert done.returncode != 0
        # Both are in force, and either may refuse a pod first.
        assert case["want"] in done.stderr or "violates PodSecurity" in done.stderr, done.stderr


def test_a_driver_deletes_and_changes_executors_only(cluster: Any) -> None:
    pod = next(one["object"] for one in CASES if one["name"] == "an executor")
    made = json.loads(json.dumps(pod))
    made["metadata"].update(namespace=WORKLOAD, name="case-foreign", labels={"app": "foreign"})
    made["spec"]["volumes"] = []
    cluster.kubectl("create", "-f", "-", given=json.dumps(made))
    try:
        identity = f"--as=system:serviceaccount:{DRIVER}"
        for words in (
            ("delete", "pod", "case-foreign"),
            ("delete", "pods", "--selector", "app=foreign"),
            ("label", "pod", "case-foreign", "persistshard.io/role=executor", "app.kubernetes.io/component=sink"),
            ("set", "image", "pod/case-foreign", "executor=evil"),
        ):
            done = cluster.run("kubectl", "--namespace", WORKLOAD, *words, identity, check=False)
            assert "executors and no other pods" in done.stderr, (words, done.stderr)
        assert cluster.get("pod", "case-foreign")["metadata"]["labels"] == {"app": "foreign"}
    finally:
        cluster.kubectl("delete", "pod", "case-foreign", "--grace-period=0", "--force")


def test_the_release_says_what_it_watches(cluster: Any) -> None:
    said = cluster.helm("get", "notes", "persist-operator")
    assert f"watches the namespaces {WORKLOAD}" in said
    assert f"Sinks may run in: {WORKLOAD}" in said
