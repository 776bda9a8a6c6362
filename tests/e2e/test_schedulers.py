"""A sink in a queue of a real Volcano and of a real YuniKorn: their marks bring driver and executors into the queue, pods wait there while
it has no room, and the run ends as without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from sink_manifests import airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

OBJECTS = Path.home() / ".cache" / "persist-operator" / "schedulers"
IMAGE = "localhost/persist-schedulers:dev"
VOLCANO, YUNIKORN = "volcano-system", "yunikorn"
QUEUE = "e2e"
Manifest = dict[str, Any]


def objects(file: str, programs: Mapping[str, str]) -> list[Manifest]:
    """The objects of a scheduler from its own manifests, without what is not built. `programs`: what the container of a Deployment runs."""
    kept = []
    for one in yaml.safe_load_all((OBJECTS / file).read_text()):
        if not one or one["kind"] == "Service":
            continue
        if one["kind"] == "Deployment":
            pod = one["spec"]["template"]["spec"]
            container = pod["containers"][0]
            container |= {
                "image": IMAGE,
                "imagePullPolicy": "IfNotPresent",
                "command": [programs[one["metadata"]["name"]]],
            }
            container.pop("resources", None)  # the node has two cores
            pod["containers"] = [container]
            pod.pop("hostNetwork", None)
        kept.append(one)
    return kept


def installed(cluster: Any, namespace: str, manifests: list[Manifest]) -> Iterator[None]:
    """The objects of a scheduler in a namespace of its own. Afterwards nothing of it is left."""
    text = yaml.safe_dump_all(manifests)
    try:
        cluster.run("kubectl", "create", "namespace", namespace)
        for kind in ("CustomResourceDefinition", None):  # definitions first, so that their objects are known
            first = [one for one in manifests if kind is None or one["kind"] == kind]
            if first:
                words = ("apply", "--server-side", "--filename=-")
                cluster.kubectl(*words, namespace=namespace, given=yaml.safe_dump_all(first), timeout_s=180)
        for one in manifests:
            if one["kind"] == "Deployment":
                words = ("rollout", "status", f"deployment/{one['metadata']['name']}", "--timeout=180s")
                cluster.kubectl(*words, namespace=namespace, timeout_s=190)
        yield
    finally:
        words = ("delete", "--ignore-not-found", "--filename=-", "--timeout=150s")
        cluster.kubectl(*words, namespace=namespace, given=text, timeout_s=160, check=False)
        cluster.run("kubectl", "delete", "namespace", namespace, "--ignore-not-found", "--timeout=150s", timeout_s=160)


@pytest.fixture(scope="module", autouse=True)
def is_built() -> None:
    if not (OBJECTS / "versions").is_file():
        pytest.skip("Volcano and YuniKorn are not built: run `bash .ci/tools.sh schedulers`, then `make e2e`")


@pytest.fixture
def volcano(cluster: Any) -> Iterator[None]:
    programs = {"volcano-scheduler": "/volcano-scheduler", "volcano-controllers": "/volcano-controllers"}
    yield from installed(cluster, VOLCANO, objects("volcano.yaml", programs))


def volcano_queue(cpu: str) -> Manifest:
    """A queue with so much of the processor."""
    spec = {"weight": 1, "reclaimable": False, "capability": {"cpu": cpu}}
    return {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "Queue", "metadata": {"name": QUEUE}, "spec": spec}


@pytest.fixture
def yunikorn(cluster: Any) -> Iterator[None]:
    rights = objects("yunikorn-rbac.yaml", {})
    scheduler = objects("scheduler.yaml", {"yunikorn-scheduler": "/yunikorn-scheduler"})
    yield from installed(cluster, YUNIKORN, [*rights, yunikorn_queue("1m"), *scheduler])


def yunikorn_queue(vcore: str) -> Manifest:
    """The configuration with a queue that has so much of the processor."""
    leaf = {"name": QUEUE, "submitacl": "*", "resources": {"max": {"vcore": vcore}}}
    partition = {
        "name": "default",
        "placementrules": [{"name": "provided", "create": False}],
        "queues": [{"name": "root", "submitacl": "*", "queues": [leaf]}],
    }
    configuration = {"queues.yaml": yaml.safe_dump({"partitions": [partition]})}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "yunikorn-configs"}, "data": configuration}


def waiting_driver(cluster: Any, sink: str) -> Manifest:
    """The driver of a sink, once its scheduler has said that it has no room."""

    def found() -> Manifest | None:
        name = cluster.status("sparksink", sink).get("driver", {}).get("podName")
        pod = cluster.get("pod", name) if name else None
        return pod if pod is not None and said(cluster, pod) else None

    pod: Manifest = cluster.wait("a driver in a queue without room", found, timeout_s=180)
    assert pod["status"]["phase"] == "Pending"
    assert "nodeName" not in pod["spec"]
    cluster.wait_condition("sparksink", sink, "Ready", "False", reason="DriverPending", timeout_s=60)
    return pod


def said(cluster: Any, pod: Manifest) -> list[str]:
    """What the scheduler says of a pod in events and conditions."""
    events = [one for one in cluster.items("events") if one["involvedObject"].get("uid") == pod["metadata"]["uid"]]
    conditions = [one for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled"]
    return [one["message"] for one in events if one.get("message")] + [one.get("message", "") for one in conditions]


def has_run(cluster: Any, programs: Any, sink: str, shard_id: str) -> None:
    """The sink ended in one attempt, with the sixteen airlines."""
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    status = cluster.status("sparksink", sink)
    assert (status["attempt"], [one["outcome"] for one in status["history"]]) == (1, ["Succeeded"])
    assert programs.result("content", shard_id)["rows"] == 16


def queued_sink(name: str, shard: str, scheduler: str, queue: str) -> Manifest:
    spark = {"scheduler": {"name": scheduler, "queue": queue}, "executor": {"instances": 1}}
    return airlines_sink(name, shard, spark=spark, timeouts={"driverStartSeconds": 900})


@pytest.mark.usefixtures("volcano")
def test_volcano_starts_a_sink_once_its_queue_has_room(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    cluster.apply(volcano_queue("1m"))
    shard, shard_id = new_shard("volcano", key="carrier STRING", value="name STRING")
    sink = named("volcano")
    cluster.apply(queued_sink(sink, shard, "Volcano", QUEUE))
    driver = waiting_driver(cluster, sink)
    group = driver["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
    assert cluster.get("podgroups.scheduling.volcano.sh", group)["spec"]["queue"] == QUEUE
    with cluster.seen("pods", "spark-role=executor") as executors:
        cluster.apply(volcano_queue("8"))
        has_run(cluster, programs, sink, shard_id)
    assert executors.uids, "its executor ran"


@pytest.mark.usefixtures("yunikorn")
def test_yunikorn_starts_a_sink_once_its_queue_has_room(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("yunikorn", key="carrier STRING", value="name STRING")
    sink = named("yunikorn")
    cluster.apply(queued_sink(sink, shard, "YuniKorn", f"root.{QUEUE}"))
    driver = waiting_driver(cluster, sink)
    assert driver["metadata"]["labels"]["applicationId"] == driver["metadata"]["name"]
    cluster.apply(yunikorn_queue("8"), namespace=YUNIKORN)
    has_run(cluster, programs, sink, shard_id)
