"""The chart on a real cluster: its own test, its rights, and an uninstall that does not hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sink_manifests import FLIGHTS, flights_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

ROOT = Path(__file__).resolve().parents[2]
GONE = "persist-e2e-gone"
FIND_JAVA = ("python3", "-c", "import shutil; print(shutil.which('java') or 'none')")
SHARD = {
    "apiVersion": "persistshard.io/v1alpha1",
    "kind": "PersistShard",
    "metadata": {"name": "leaving"},
    "spec": {"schema": FLIGHTS},
}


def test_helm_test_passes(cluster: Any) -> None:
    assert "Succeeded" in cluster.helm("test", "persist-operator", "--timeout", "120s")


@pytest.mark.parametrize("verb", ["get", "list", "watch"])
def test_the_operator_may_not_read_secrets(cluster: Any, verb: str) -> None:
    account = "--as=system:serviceaccount:persist-system:persist-operator"
    assert cluster.kubectl("auth", "can-i", verb, "secrets", account, check=False).strip() == "no"
    assert cluster.kubectl("auth", "can-i", verb, "persistshards", account, check=False).strip() == "yes"


def test_a_driver_may_do_nothing_outside_its_namespace(cluster: Any) -> None:
    account = "--as=system:serviceaccount:persist-e2e:persist-spark-driver"
    assert cluster.kubectl("auth", "can-i", "create", "pods", account, check=False).strip() == "yes"
    assert (
        cluster.kubectl("auth", "can-i", "create", "pods", account, namespace="persist-system", check=False).strip()
        == "no"
    )


@pytest.mark.wish(4)
def test_wish_drivers_start_without_a_jvm_in_the_operator_and_without_a_webhook(cluster: Any) -> None:
    """The rest of this wish is in test_chaos.py: no leaked pod, and a true status."""
    java = cluster.kubectl("exec", "deployment/persist-operator", "--", *FIND_JAVA, namespace="persist-system")
    assert java.strip() == "none"
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        hooks = cluster.items(kind)
        assert "persist" not in json.dumps([one.get("webhooks") for one in hooks])


@pytest.fixture
def provisioned(cluster: Any) -> Iterator[None]:
    """The release has its files for Grafana."""
    runbooks = 'prometheusRule.runbookUrl="https://docs.test/{alert}.html"'
    cluster.install("--set", "grafana.alerts.enabled=true,grafana.dashboards.enabled=true", "--set-json", runbooks)
    yield
    cluster.install()


@pytest.mark.wish(15)
@pytest.mark.usefixtures("provisioned")
def test_wish_alert_rules_for_grafana_stand_in_the_cluster_beside_those_of_prometheus(cluster: Any) -> None:
    """What the sidecar of Grafana's chart finds by its labels: a rule for each alert of Prometheus, with the same name and a runbook."""
    files = ROOT / "charts" / "persist-operator" / "files" / "monitoring"
    groups = yaml.safe_load((files / "alerts.yaml").read_text())["groups"]
    (alerts,) = cluster.items("configmaps", "grafana_alert=1", "persist-system")
    rules = [
        rule for group in yaml.safe_load(alerts["data"]["persist-alerts.yaml"])["groups"] for rule in group["rules"]
    ]
    assert {rule["title"] for rule in rules} == {rule["alert"] for group in groups for rule in group["rules"]}
    assert len({rule["uid"] for rule in rules}) == len(rules) > 30
    pages = {rule["annotations"]["runbook_url"].removeprefix("https://docs.test/") for rule in rules}
    assert pages <= {f"{page.stem}.html" for page in (ROOT / "docs" / "runbooks").glob("*.md")}
    boards = cluster.items("configmaps", "grafana_dashboard=1", "persist-system")
    uids = {json.loads(text)["uid"] for one in boards for text in one["data"].values()}
    assert len(uids) == len(list((files / "dashboards").glob("*.json"))) == 4


@pytest.fixture
def everything_back(cluster: Any) -> Iterator[None]:
    """Restores the namespace with its Secret, and the chart, after the test."""
    yield
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": GONE, "labels": labels}})
    secret = cluster.get("secret", "persist-store", "persist-stores")
    secret["metadata"] = {"name": "persist-store"}
    cluster.kubectl("apply", "-f", "-", namespace=GONE, given=json.dumps(secret))
    cluster.install()


@pytest.mark.parametrize("first", ["uninstall", "namespace"])
@pytest.mark.usefixtures("everything_back")
def test_uninstall_and_namespace_deletion_do_not_hang(cluster: Any, programs: Any, first: str) -> None:
    """Deletes at the worst moment, while a driver runs, with and without a running operator. The CRDs and the data of every
    shard remain.
    """
    cluster.apply(SHARD, flights_sink("leaving", "leaving"), namespace=GONE)
    cluster.wait_condition("persistshard", "leaving", "Ready", namespace=GONE)
    shard_id = cluster.status("persistshard", "leaving", GONE)["shardId"]

    def driver_runs() -> bool:
        name = cluster.status("sparksink", "leaving", GONE).get("driver", {}).get("podName")
        pod = cluster.get("pod", name, GONE) if name else None
        return pod is not None and pod["status"].get("phase") == "Running"

    cluster.wait("a running driver", driver_runs, timeout_s=300, namespace=GONE)
    steps = [
        lambda: cluster.helm("uninstall", "persist-operator", "--wait", "--timeout", "120s"),
        lambda: cluster.run("kubectl", "delete", "namespace", GONE, "--timeout=120s", timeout_s=130),
    ]
    for step in steps if first == "uninstall" else reversed(steps):
        step()
    assert cluster.run("kubectl", "get", "namespace", GONE, check=False).returncode != 0
    left = "app.kubernetes.io/name=persist-operator"
    cluster.wait(
        "the operator to end", lambda: not cluster.items("deployments,pods", left, "persist-system"), timeout_s=60
    )
    assert cluster.run("kubectl", "get", "crd", "persistshards.persistshard.io", check=False).returncode == 0
    assert programs.result("stored", shard_id)["inspection"]["shard_id"] == shard_id
