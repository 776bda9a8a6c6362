"""The admission policies on cases: each request is admitted or refused with the expected message. The CEL is evaluated as in the API
server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cel
import pytest
import yaml
from persist_operator.api import pod_template

Manifest = dict[str, Any]
CASES = yaml.load(Path(__file__).with_name("admission_cases.yaml").read_text(), yaml.CSafeLoader)
KINDS = {"SparkSink": "sinks", "PersistShard": "shards", "Pod": "executors", "Secret": "secrets"}
POD_NAME = "authentication.kubernetes.io/pod-name"
USERS = {
    "driver": "system:serviceaccount:red:persist-spark-driver",
    "operator": "system:serviceaccount:sys:persist-persist-operator",
}
VALUES: Manifest = {
    "storageProfiles": {"default": {"blob": "s3://b", "consensus": "redis://r", "secretName": "persist-store"}},
    "workload": {"namespaces": ["red"], "serviceAccounts": ["etl"], "allow": {"secrets": ["api-key"]}},
}


def policies(manifests: list[Manifest]) -> dict[str, Manifest]:
    found = [one for one in manifests if one["kind"] == "ValidatingAdmissionPolicy"]
    return {one["metadata"]["name"].rpartition("-")[2]: one["spec"] for one in found}


def refusal(policy: Manifest, case: Manifest) -> str:
    """The message with which `policy` refuses `case`; empty if it admits it."""
    user = USERS.get(case.get("as", ""), "ada")
    operation, shown = case.get("operation", "CREATE"), case["object"]
    known: Manifest = {
        "object": None if operation == "DELETE" else shown,
        "oldObject": shown if operation == "DELETE" else case.get("old"),
        "request": {
            "operation": operation,
            "namespace": shown.get("metadata", {}).get("namespace", ""),
            "name": shown.get("metadata", {}).get("name", ""),
            "userInfo": {"username": user, "extra": {POD_NAME: [case["pod"]]} if "pod" in case else {}},
        },
        "variables": {},
    }
    if not all(cel.evaluate(one["expression"], known) for one in policy["matchConditions"]):
        return ""
    for one in policy.get("variables", []):
        known["variables"][one["name"]] = cel.evaluate(one["expression"], known)
    for one in policy["validations"]:
        if cel.evaluate(one["expression"], known) is not True:
            named = ", ".join(map(str, known["variables"].get("refused", []))) if "messageExpression" in one else ""
            return f"{one['message']} {named}"
    return ""


@pytest.fixture(scope="module")
def shipped(template: Callable[..., list[Manifest]]) -> dict[str, Manifest]:
    return policies(template(VALUES))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_policy_answers_the_case_as_the_api_server_does(shipped: dict[str, Manifest], case: Manifest) -> None:
    message = refusal(shipped[case.get("policy") or KINDS[case["object"]["kind"]]], case)
    if case["want"] == "ok":
        assert message == ""
    else:
        # The API server puts the path before what is named; the CEL library has no `join`.
        wanted = case["want"].removeprefix("spec.spark.").removeprefix("spec.maintenance.template.")
        assert wanted in message


@pytest.mark.slow
def test_policies_and_operator_know_the_same_lists(template: Callable[..., list[Manifest]]) -> None:
    found = policies(template(VALUES))
    text = yaml.safe_dump(found)
    for name in (*pod_template.PLACEMENT, "priorityClassName", "volumes", "containers"):
        assert f'"{name}"' in text, name
    for name in pod_template.VOLUME_SOURCES:
        assert f'"{name}"' in text, name
    assert '"hostPath"' not in text
    opened = {**VALUES, "workload": {"allow": {"hostPath": True, "hostNetwork": True, "privileged": True}}}
    allowed = policies(template(opened))
    case = {
        "object": {
            "spec": {
                "spark": {
                    "driver": {"template": {"spec": {"hostNetwork": True, "volumes": [{"name": "h", "hostPath": {}}]}}}
                }
            }
        }
    }
    assert refusal(allowed["sinks"], case) == ""
    assert refusal(found["sinks"], case) != ""


@pytest.mark.slow
def test_policies_bind_where_the_release_watches(template: Callable[..., list[Manifest]]) -> None:
    def selectors(values: Manifest) -> list[Any]:
        found = [one["spec"] for one in template(values) if one["kind"] == "ValidatingAdmissionPolicyBinding"]
        assert all(one["validationActions"] == ["Deny"] for one in found)
        return [one.get("matchResources", {}).get("namespaceSelector") for one in found]

    def of(*namespaces: str) -> Manifest:
        expression = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [*namespaces]}
        return {"matchExpressions": [expression]}

    # The operator may create Secrets beside itself too.
    assert selectors(VALUES) == [of("red"), of("red"), of("red"), of("red", "sys"), of("red")]
    assert selectors({**VALUES, "watch": {"clusterWide": True}}) == [None] * 5
    assert selectors({"admissionPolicies": {"enabled": False}}) == []
