"""The API server itself refuses broken resources, and says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600)]

CASES = yaml.safe_load((Path(__file__).resolve().parents[1] / "operator" / "crd_cases.yaml").read_text())


def resource(case: dict[str, Any], spec: dict[str, Any]) -> str:
    name = str(case.get("metadata_name", "case"))
    return yaml.safe_dump(
        {"apiVersion": "persistshard.io/v1alpha1", "kind": case["kind"], "metadata": {"name": name}, "spec": spec}
    )


@pytest.fixture(scope="module")
def case_namespace(cluster: Any) -> Iterator[str]:
    """A namespace without an operator: one at work gives a shard an id of its own, between two steps of a case or not."""
    cluster.scale_operator(0)
    cluster.run("kubectl", "create", "namespace", "persist-e2e-cases", check=False)
    yield "persist-e2e-cases"
    cluster.scale_operator(1)


@pytest.mark.parametrize("case", CASES, ids=[case["name"].replace(" ", "-") for case in CASES])
def test_the_api_server_accepts_and_refuses_as_the_cases_say(
    cluster: Any, case_namespace: str, case: dict[str, Any]
) -> None:
    """Creations by a dry run; updates against an object that is really there."""
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
                patch = yaml.safe_dump({"status": case["status"]})
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
