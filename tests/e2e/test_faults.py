"""Faults in drivers, the operator and the stores: no acknowledged update is lost, and nothing happens twice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from shard_runs import IDLE, outcomes, patch, runs
from sink_manifests import AIRLINES, FLIGHTS, airlines_sink, flights_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

STORES = "persist-stores"
#: How long stores are away in the test of their outage.
OUTAGE_S = float(os.environ.get("PERSIST_E2E_OUTAGE_S", "120"))
COMPACTING = {"compaction": {"mode": "Automatic", "maxUncompactedBatches": 2}}


def running_driver(cluster: Any, sink: str) -> dict[str, Any] | None:
    """The sink's driver pod, once the driver and at least one of its executors run."""
    name = cluster.status("sparksink", sink).get("driver", {}).get("podName")
    pod = cluster.get("pod", name) if name else None
    if pod is None or pod["status"].get("phase") != "Running":
        return None
    executors = cluster.items("pods", "spark-role=executor")
    mine = [
        one
        for one in executors
        if any(owner["uid"] == pod["metadata"]["uid"] for owner in one["metadata"].get("ownerReferences", []))
    ]
    return pod if any(one["status"].get("phase") == "Running" for one in mine) else None


@pytest.fixture
def assert_holds_the_flights(programs: Any, content: Any, source: Callable[[str], Any]) -> Callable[[str], None]:
    """The shard holds every flight of the source exactly once, unchanged."""

    def check(shard_id: str) -> None:
        read = programs.result("content", shard_id)
        assert (read["rows"], read["hash"]) == (336_776, content.content_hash(source("flights")))

    return check


def test_a_driver_killed_while_writing_is_retried_and_contents_are_exact(
    cluster: Any,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    assert_holds_the_flights: Callable[[str], None],
) -> None:
    """Kills between the first staged parts and the append, while this many tasks have not started."""
    shard, shard_id = new_shard("driver-kill", schema=FLIGHTS)
    sink = named("driver-kill")
    parts = programs.start("await_parts", shard_id, "2")

    def staged() -> int:
        lines = cluster.kubectl("logs", f"job/{parts}", "--tail=1", check=False).strip().splitlines()
        return int(json.loads(lines[-1])["parts"]) if lines else 0

    cluster.wait("the program that counts parts", lambda: cluster.status("job", parts).get("ready"), timeout_s=60)
    cluster.apply(flights_sink(sink, shard, write={"parallelism": 48}))
    cluster.wait("staged parts", staged, timeout_s=300, every_s=0.1)
    driver = running_driver(cluster, sink)
    assert driver is not None
    cluster.kill(driver["metadata"]["name"])
    left = programs.result("stored", shard_id)
    assert left["parts"] >= 2
    assert left["inspection"]["upper"] == 0, "the driver had appended before it was killed: nothing was tested"

    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    status = cluster.status("sparksink", sink)
    assert [attempt["outcome"] for attempt in status["history"]] == ["Succeeded", "Failed"]
    assert status["attempt"] == 2
    assert_holds_the_flights(shard_id)


def children(cluster: Any, sink: str) -> dict[str, set[str]]:
    """Uids of all objects that the operator made for a sink, by kind. Executors belong to the driver."""
    selector = f"persistshard.io/sink={sink},spark-role!=executor"
    return {
        kind: {one["metadata"]["uid"] for one in cluster.items(kind, selector)}
        for kind in ("pods", "services", "configmaps")
    }


def test_a_killed_operator_duplicates_nothing_and_loses_no_child(
    cluster: Any,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    assert_holds_the_flights: Callable[[str], None],
) -> None:
    """The operator is killed while a driver and a compaction run. It follows both to their end and creates neither again."""
    shard, shard_id = new_shard("operator-kill", schema=FLIGHTS)
    busy, busy_id = new_shard("operator-kill-busy", **IDLE)
    programs.result("write_batches", busy_id, "6", "100000", timeout_s=300)
    sink = named("operator-kill")
    cluster.apply(flights_sink(sink, shard))
    cluster.wait("a driver with an executor", lambda: running_driver(cluster, sink), timeout_s=300, every_s=0.2)
    patch(cluster, "persistshard", busy, COMPACTING)
    of_busy = f"persistshard.io/shard={busy}"
    cluster.wait("a maintenance Job", lambda: cluster.items("jobs", of_busy), timeout_s=60, every_s=0.1)
    before = children(cluster, sink)
    jobs = {one["metadata"]["uid"] for one in cluster.items("jobs", of_busy)}
    killed = cluster.operator_pod()
    cluster.kill(killed["metadata"]["name"], namespace="persist-system")

    seen = {kind: set(uids) for kind, uids in before.items()}

    def completed() -> bool:
        for kind, uids in children(cluster, sink).items():
            seen[kind] |= uids
        return bool(cluster.condition("sparksink", sink, "Ready").get("reason") == "Completed")

    cluster.wait("the sink to complete under another operator", completed, timeout_s=600)
    assert cluster.operator_pod()["metadata"]["uid"] != killed["metadata"]["uid"]
    assert {kind: len(uids) for kind, uids in before.items()} == {"pods": 1, "services": 1, "configmaps": 1}
    assert seen == before
    status = cluster.status("sparksink", sink)
    assert (status["attempt"], [one["outcome"] for one in status["history"]]) == (1, ["Succeeded"])
    assert_holds_the_flights(shard_id)

    cluster.wait("the compaction to be entered", lambda: runs(cluster, busy, "Compaction"), timeout_s=300)
    assert outcomes(cluster, busy, "Compaction") == ["Succeeded"]
    assert jobs <= {one["metadata"]["uid"] for one in cluster.items("jobs", of_busy)}
    assert len(cluster.items("jobs", f"{of_busy},persistshard.io/kind=compaction")) == 1
    assert programs.result("content", busy_id)["rows"] == 600_000


def test_a_mirror_puts_right_what_others_changed(
    cluster: Any,
    programs: Any,
    content: Any,
    source: Callable[[str], Any],
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
) -> None:
    """The shard keeps an hour of history: correct before the edit, wrong at the edit, correct again after the next run."""
    shard, shard_id = new_shard("mirror", schema=AIRLINES, retention={"sinceLagSeconds": 3600})
    sink = named("mirror")
    every_minute = {"mode": "Scheduled", "schedule": {"cron": "* * * * *"}, "restart": {"backoffSeconds": 1}}
    cluster.apply(airlines_sink(sink, shard, spark={"executor": {"instances": 2}}, **every_minute))
    right = (16, content.content_hash(source("airlines")))

    def last_success() -> str | None:
        found = cluster.status("sparksink", sink).get("schedule", {}).get("lastSuccessTime")
        return str(found) if found else None

    def holds(at: int | None = None) -> tuple[int, str]:
        read = programs.result("content", shard_id, *([] if at is None else [str(at)]))
        return read["rows"], read["hash"]

    cluster.wait("the mirror's first run", last_success, timeout_s=300)
    assert holds() == right

    edited_at = programs.result("edit", shard_id)["upper"] - 1
    assert holds(edited_at - 1) == right
    wrong = holds(edited_at)
    assert wrong[0] == 17

    def corrected() -> int | None:
        """The newest complete time, once a run that appended after the edit has succeeded."""
        upper = int(cluster.status("sparksink", sink)["progress"]["upper"])
        return upper - 1 if upper - 1 > edited_at else None

    again_at = cluster.wait("a run of the mirror after the edit", corrected, timeout_s=400, every_s=2)
    assert holds(again_at) == right
    assert holds(edited_at) == wrong


def test_an_unreachable_redis_shows_and_recovers_and_loses_nothing(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """The writer survives the outage without help, and the shard holds every acknowledged batch afterwards."""
    shard, shard_id = new_shard("outage", storageProfile="cut")
    writer = programs.start("write_batches", shard_id, "100", "50", "100", profile="cut")

    def acknowledged() -> int:
        lines = cluster.kubectl("logs", f"job/{writer}", "--tail=-1", check=False).strip().splitlines()
        return int(json.loads(lines[-1])["acknowledged"]) if lines else 0

    cluster.wait("the writer to be at work", lambda: acknowledged() > 5, timeout_s=60, every_s=0.3)
    with cluster.cut_off("redis-cut"):
        # Open connections survive a Service without endpoints. A restart ends them, and also tests the log on disk.
        cluster.kubectl(
            "exec",
            "deployment/redis",
            "--",
            "sh",
            "-c",
            'redis-cli -a "$REDIS_PASSWORD" --no-auth-warning shutdown nosave',
            namespace=STORES,
            check=False,
        )
        found = cluster.wait_condition("persistshard", shard, "StorageReachable", "False", timeout_s=90)
        assert "redis-cut.persist-stores.svc:6379" in found["message"]
    cluster.wait_condition("persistshard", shard, "StorageReachable", timeout_s=120)
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=120)
    programs.finish(writer, timeout_s=300)
    assert acknowledged() == 100
    read = programs.result("content", shard_id)
    assert read["rows"] == 100 * 50
    assert read["upper"] == 100


def test_an_unreachable_s3_shows_and_recovers(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("outage-s3", storageProfile="cut")
    programs.result("write_batches", shard_id, "4", "5000", profile="cut")
    before = programs.result("content", shard_id, profile="cut")
    with cluster.cut_off("s3-cut"):
        # The running operator may have the location open. A new one has to open it again.
        cluster.kill(cluster.operator_pod()["metadata"]["name"], namespace="persist-system")
        found = cluster.wait_condition("persistshard", shard, "StorageReachable", "False", timeout_s=180)
        assert "s3-cut.persist-stores.svc" in found["message"]
    cluster.wait_condition("persistshard", shard, "StorageReachable", timeout_s=120)
    assert programs.result("content", shard_id, profile="cut")["hash"] == before["hash"]


def test_a_missing_bucket_shows_and_recovers_when_it_is_made(
    cluster: Any, programs: Any, named: Callable[[str], str]
) -> None:
    # On a kept cluster, the test may have run before.
    programs.result("remove_bucket", profile="missing-bucket")
    shard = named("bucket")
    cluster.apply(
        {
            "apiVersion": "persistshard.io/v1alpha1",
            "kind": "PersistShard",
            "metadata": {"name": shard},
            "spec": {"schema": {"key": "id BIGINT", "value": "text STRING"}, "storageProfile": "missing-bucket"},
        }
    )
    found = cluster.wait_condition("persistshard", shard, "StorageReachable", "False", timeout_s=120)
    assert "not-yet" in found["message"]
    assert "s3.persist-stores.svc" in found["message"]
    programs.result("make_bucket", profile="missing-bucket")
    cluster.wait_condition("persistshard", shard, "StorageReachable", timeout_s=120)
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=60)


def test_of_two_resources_that_claim_one_shard_the_younger_stalls(
    cluster: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    elder, shard_id = new_shard("claim")
    younger = named("claim")
    cluster.apply(
        {
            "apiVersion": "persistshard.io/v1alpha1",
            "kind": "PersistShard",
            "metadata": {"name": younger},
            "spec": {"shardId": shard_id},
        }
    )
    found = cluster.wait_condition("persistshard", younger, "Stalled", reason="ShardIdConflict")
    assert elder in found["message"]
    assert cluster.condition("persistshard", elder, "Ready")["status"] == "True"


@pytest.fixture
def stores_return(cluster: Any) -> Iterator[Callable[..., None]]:
    """Scales stores. Afterwards both run."""

    def scale(replicas: int, *names: str) -> None:
        for name in names:
            cluster.kubectl("scale", "deployment", name, f"--replicas={replicas}", namespace=STORES)
            cluster.wait(
                f"{replicas} pods of {name}",
                lambda name=name: len(cluster.items("pods", f"app={name}", STORES)) == replicas,
                namespace=STORES,
            )

    yield scale
    scale(1, "redis", "s3")
    for name in ("redis", "s3"):
        cluster.kubectl("rollout", "status", f"deployment/{name}", "--timeout=120s", namespace=STORES, timeout_s=130)


def test_stores_that_are_away_for_minutes_come_back_with_their_disks_and_all_goes_on(
    cluster: Any,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    stores_return: Callable[..., None],
    assert_holds_the_flights: Callable[[str], None],
) -> None:
    """Redis is away for the first two thirds of the outage, S3 for the last two, so for one third both are. A writer and a driver are at work."""
    written, written_id = new_shard("away", **IDLE)
    shard, shard_id = new_shard("away-sink", schema=FLIGHTS)
    sink = named("away")
    cluster.apply(flights_sink(sink, shard, write={"parallelism": 16}))
    cluster.wait("a driver with an executor", lambda: running_driver(cluster, sink), timeout_s=300, every_s=0.2)
    writer = programs.start("write_batches", written_id, "60", "50", "500")

    def acknowledged() -> int:
        # After minutes without Redis the engine also logs that it tries again.
        log = cluster.kubectl("logs", f"job/{writer}", "--tail=-1", check=False)
        lines = [line for line in log.splitlines() if line.startswith("{")]
        return int(json.loads(lines[-1])["acknowledged"]) if lines else 0

    cluster.wait("the writer to be at work", lambda: acknowledged() > 3, timeout_s=60, every_s=0.3)
    began_s = time.monotonic()

    def until(share: float) -> None:
        left_s = began_s + share * OUTAGE_S - time.monotonic()
        cluster.wait(
            "a part of the outage", lambda: time.monotonic() - began_s > share * OUTAGE_S, timeout_s=left_s + 60
        )

    def unreachable(what: str) -> None:
        found = cluster.wait_condition("persistshard", written, "StorageReachable", "False", timeout_s=90)
        assert what in found["message"]

    stores_return(0, "redis")
    unreachable("redis.persist-stores.svc")
    before = acknowledged()
    until(1 / 3)
    stores_return(0, "s3")
    until(2 / 3)
    assert acknowledged() == before < 60, "the writer went on without Redis, or was done before: nothing was tested"
    assert cluster.figure("persist_shard_storage_reachable", namespace="persist-e2e", name=written) == 0
    stores_return(1, "redis")
    until(1)
    assert cluster.operator_pod()["status"]["containerStatuses"][0]["restartCount"] == 0
    stores_return(1, "s3")

    for name in (written, shard):
        cluster.wait_condition("persistshard", name, "StorageReachable", timeout_s=120)
        cluster.wait_condition("persistshard", name, "Ready", timeout_s=120)
    programs.finish(writer, timeout_s=300)
    assert acknowledged() == 60
    assert programs.result("content", written_id)["rows"] == 60 * 50
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    assert_holds_the_flights(shard_id)
    assert cluster.figure("persist_shard_storage_reachable", namespace="persist-e2e", name=written) == 1


@pytest.fixture
def worker(cluster: Any) -> Iterator[str]:
    """A node without the control plane, the stores and the operator. Afterwards it runs, and takes pods."""
    nodes = [
        one["metadata"]["name"]
        for one in cluster.items("nodes")
        if "node-role.kubernetes.io/control-plane" not in one["metadata"]["labels"]
    ]
    if not nodes:
        pytest.skip("the cluster has one node: PERSIST_WORKERS=1 makes another")
    name = str(nodes[0])
    cluster.run("kubectl", "cordon", name)
    for namespace, selector in (
        ("persist-system", "app.kubernetes.io/component=operator"),
        ("kube-system", "k8s-app=kube-dns"),
    ):
        for pod in cluster.items("pods", selector, namespace):
            if pod["spec"].get("nodeName") == name:
                cluster.kubectl("delete", "pod", pod["metadata"]["name"], namespace=namespace)
    cluster.wait("an operator elsewhere", cluster.operator_pod, timeout_s=120, namespace="persist-system")
    cluster.kubectl("rollout", "status", "deployment/coredns", "--timeout=120s", namespace="kube-system", timeout_s=130)
    cluster.run("kubectl", "uncordon", name)
    yield name
    cluster.node("unpause", name, check=False)
    cluster.run("kubectl", "uncordon", name)
    cluster.run("kubectl", "wait", "--for=condition=Ready", f"node/{name}", "--timeout=180s", timeout_s=190)


def test_a_driver_whose_node_falls_silent_is_replaced_and_its_return_writes_nothing(
    cluster: Any,
    programs: Any,
    worker: str,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    assert_holds_the_flights: Callable[[str], None],
) -> None:
    """All processes of the node stand still, with parts staged. Later they go on, and the first driver tries to append."""
    shard, shard_id = new_shard("node", schema=FLIGHTS)
    sink = named("node")
    wanted = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [worker]}]}
    affinity = {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": wanted}]}
    }
    tolerated = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for key in ("unreachable", "not-ready")
    ]
    template = {"spec": {"affinity": affinity, "tolerations": tolerated}}
    spark = {"driver": {"template": template}, "executor": {"instances": 1, "template": template}}
    parts = programs.start("await_parts", shard_id, "2")

    def staged() -> int:
        lines = cluster.kubectl("logs", f"job/{parts}", "--tail=1", check=False).strip().splitlines()
        return int(json.loads(lines[-1])["parts"]) if lines else 0

    cluster.wait("the program that counts parts", lambda: cluster.status("job", parts).get("ready"), timeout_s=60)
    cluster.apply(
        # So many tasks go on for longer than it takes to pause the node.
        flights_sink(sink, shard, write={"parallelism": 120}, spark=spark, timeouts={"terminationGraceSeconds": 5})
    )
    cluster.wait("staged parts", staged, timeout_s=300, every_s=0.1)
    first = running_driver(cluster, sink)
    assert first is not None
    assert first["spec"]["nodeName"] == worker
    cluster.node("pause", worker)
    cluster.run(
        "kubectl", "cordon", worker
    )  # its silence is noticed within a minute; the programs of this test need a node now
    try:
        assert programs.result("stored", shard_id)["inspection"]["upper"] == 0, (
            "the driver had appended: nothing was tested"
        )
        cluster.wait_condition("sparksink", sink, "Running", "Unknown", reason="DriverEnding", timeout_s=180)
        cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
        status = cluster.status("sparksink", sink)
        assert [one["outcome"] for one in status["history"]] == ["Succeeded", "Failed"]
        assert status["lastFailure"]["class"] == "Infrastructure"
        assert status["attempt"] == 2
        upper = programs.result("stored", shard_id)["inspection"]["upper"]
    finally:
        cluster.node("unpause", worker)
    cluster.run("kubectl", "wait", "--for=condition=Ready", f"node/{worker}", "--timeout=180s", timeout_s=190)
    cluster.wait(
        "the pods of the first attempt to be gone",
        lambda: (
            not [
                one
                for one in cluster.items("pods", f"persistshard.io/sink={sink}")
                if one["spec"].get("nodeName") == worker and one["metadata"].get("deletionTimestamp")
            ]
        ),
        timeout_s=120,
    )
    assert programs.result("stored", shard_id)["inspection"]["upper"] == upper
    assert_holds_the_flights(shard_id)
    assert cluster.status("sparksink", sink)["attempt"] == 2
