"""A sink in a queue of a real Kueue: its pods wait until the queue has room, its status says so, and no limit of time runs meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shard_runs import ask, outcomes
from sink_manifests import airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1500), pytest.mark.usefixtures("operator_is_there")]

OBJECTS = Path.home() / ".cache" / "persist-operator" / "kueue" / "kueue.yaml"
SYSTEM = "kueue-system"
QUEUE = "e2e"
GATE = "kueue.x-k8s.io/admission"
#: Less than the driver waits in the queue.
START_S = 20


def queue(cpu: str) -> list[dict[str, Any]]:
    """A queue with one flavour and so much of the processor. Memory is no limit."""
    quotas = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "64Gi"}]
    flavours = [{"name": QUEUE, "resources": quotas}]
    groups = [{"coveredResources": ["cpu", "memory"], "flavors": flavours}]
    version = "kueue.x-k8s.io/v1beta2"
    cluster_queue = {"namespaceSelector": {}, "resourceGroups": groups}
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": QUEUE}, "spec": {}},
        {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": QUEUE}, "spec": cluster_queue},
        {"apiVersion": version, "kind": "LocalQueue", "metadata": {"name": QUEUE}, "spec": {"clusterQueue": QUEUE}},
    ]


@pytest.fixture
def kueue(cluster: Any) -> Iterator[None]:
    """Kueue runs, with an empty queue without room. Afterwards nothing of it is left."""
    if not OBJECTS.is_file():
        pytest.fail("Kueue is not built: run `bash .ci/tools.sh kueue`, or `make e2e`")
    try:
        cluster.run("kubectl", "apply", "--server-side", f"--filename={OBJECTS}", timeout_s=180)
        rollout = ("rollout", "status", "deployment/kueue-controller-manager", "--timeout=180s")
        cluster.kubectl(*rollout, namespace=SYSTEM, timeout_s=190)

        def taken() -> bool:
            listed = {"apiVersion": "v1", "kind": "List", "items": queue("0")}
            answer = cluster.run("kubectl", "-n", "persist-e2e", "apply", "-f-", given=json.dumps(listed), check=False)
            return answer.returncode == 0

        cluster.wait("the webhooks of Kueue", taken, timeout_s=120, every_s=2)
        yield
    finally:
        for kind in ("localqueue", "clusterqueue", "resourceflavor"):
            cluster.kubectl("delete", kind, QUEUE, "--ignore-not-found", "--timeout=60s", check=False)
        cluster.run("kubectl", "delete", "--ignore-not-found", f"--filename={OBJECTS}", "--timeout=150s", timeout_s=160)


def queued_sink(name: str, shard: str) -> dict[str, Any]:
    spark = {"scheduler": {"name": "Kueue", "queue": QUEUE}, "executor": {"instances": 1}}
    return airlines_sink(name, shard, spark=spark, timeouts={"driverStartSeconds": START_S})


def gates(pod: dict[str, Any]) -> list[str]:
    return [one["name"] for one in pod["spec"].get("schedulingGates", [])]


@pytest.mark.usefixtures("kueue")
def test_a_sink_waits_in_the_queue_and_runs_once_there_is_room(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("kueue", key="carrier STRING", value="name STRING")
    sink = named("kueue")
    cluster.apply(queued_sink(sink, shard))
    waiting = cluster.wait_condition("sparksink", sink, "Ready", "False", reason="Queued", timeout_s=120)
    assert "waits in the queue of its scheduler" in waiting["message"]
    ask(cluster, "verify", shard)
    cluster.wait("maintenance, which has no queue", lambda: outcomes(cluster, shard, "Verify"), timeout_s=120)
    assert outcomes(cluster, shard, "Verify") == ["Succeeded"]
    driver = cluster.status("sparksink", sink)["driver"]["podName"]
    pod = cluster.get("pod", driver)
    assert GATE in gates(pod)
    assert pod["status"]["phase"] == "Pending"
    uid = pod["metadata"]["uid"]
    began_s = time.monotonic()
    cluster.wait("more than a start may take", lambda: time.monotonic() - began_s > START_S + 15, timeout_s=60)
    assert cluster.get("pod", driver)["metadata"]["uid"] == uid, "the time in the queue is not that of a start"
    assert cluster.condition("sparksink", sink, "Ready")["reason"] == "Queued"

    cluster.apply(*queue("4"))
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    status = cluster.status("sparksink", sink)
    assert (status["attempt"], [one["outcome"] for one in status["history"]]) == (1, ["Succeeded"])
    assert programs.result("content", shard_id)["rows"] == 16
