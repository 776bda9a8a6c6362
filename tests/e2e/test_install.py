"""The chart on a real cluster: its own test, its rights, and an uninstall that does not hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

GONE = "persist-e2e-gone"
SINK = {
    "apiVersion": "persistshard.io/v1alpha1",
    "kind": "SparkSink",
    "metadata": {"name": "leaving"},
    "spec": {
        "shardRef": {"name": "leaving"},
        "input": {
            "type": "Format",
            "format": {"name": "parquet", "options": {"path": "examples/flights/data/flights.parquet"}},
        },
        "envelope": {"type": "Append", "timestampColumn": "time_hour"},
    },
}
SHARD = {
    "apiVersion": "persistshard.io/v1alpha1",
    "kind": "PersistShard",
    "metadata": {"name": "leaving"},
    "spec": {
        "schema": {
            "key": "time_hour TIMESTAMP, carrier STRING, flight INT, origin STRING",
            "value": "dest STRING, tailnum STRING, year INT, month INT, day INT, hour INT, minute INT, "
            "sched_dep_time INT, dep_time INT, dep_delay INT, sched_arr_time INT, arr_time INT, "
            "arr_delay INT, air_time INT, distance INT",
        }
    },
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
    cluster.apply(SHARD, SINK, namespace=GONE)
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
