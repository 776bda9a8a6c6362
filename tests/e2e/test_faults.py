"""Drivers, the operator and the stores break: nothing acknowledged is lost, nothing happens twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_there")]

STORES = "persist-stores"
#: As examples/flights declares them.
FLIGHTS = {
    "key": "time_hour TIMESTAMP, carrier STRING, flight INT, origin STRING",
    "value": "dest STRING, tailnum STRING, year INT, month INT, day INT, hour INT, minute INT, sched_dep_time INT, "
    "dep_time INT, dep_delay INT, sched_arr_time INT, arr_time INT, arr_delay INT, air_time INT, distance INT",
}
AIRLINES = {"key": "carrier STRING", "value": "name STRING"}


def sink_manifest(
    name: str, shard: str, input_format: dict[str, Any], envelope: dict[str, Any], **spec: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "SparkSink",
        "metadata": {"name": name},
        "spec": {
            "shardRef": {"name": shard},
            "input": {"type": "Format", "format": input_format},
            "envelope": envelope,
            "spark": {"executor": {"instances": 2}},
            "restart": {"backoffSeconds": 1},
            **spec,
        },
    }


def flights_sink(name: str, shard: str) -> dict[str, Any]:
    path = "examples/flights/data/flights.parquet"
    return sink_manifest(
        name, shard, {"name": "parquet", "options": {"path": path}}, {"type": "Append", "timestampColumn": "time_hour"}
    )


def airlines_sink(name: str, shard: str) -> dict[str, Any]:
    options = {"path": "examples/flights/data/airlines.csv", "header": "true"}
    source = {"name": "csv", "schema": "carrier STRING, name STRING", "options": options}
    return sink_manifest(name, shard, source, {"type": "Mirror"}, mode="Scheduled", schedule={"cron": "* * * * *"})


def running_driver(cluster: Any, sink: str) -> dict[str, Any] | None:
    """The sink's driver pod, once it runs and at least one of its executors does."""
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


def assert_holds_the_flights(cluster: Any, programs: Any, shard_id: str) -> None:
    """Every flight once; and what an undisturbed sink wrote, where the examples have been applied."""
    read = programs.result("content", shard_id)
    assert read["rows"] == 336_776
    undisturbed = cluster.status("persistshard", "flights").get("shardId")
    if undisturbed:
        assert read["hash"] == programs.result("content", undisturbed)["hash"]


@contextmanager
def cut_off(cluster: Any, service: str) -> Iterator[None]:
    """Nobody answers at `service` for as long as the block lasts."""
    app = service.removesuffix("-cut")
    patch = '{{"spec": {{"selector": {{"app": "{}"}}}}}}'
    cluster.kubectl("patch", "service", service, "--patch", patch.format("nobody"), namespace=STORES)
    try:
        yield
    finally:
        cluster.kubectl("patch", "service", service, "--patch", patch.format(app), namespace=STORES)


def test_a_killed_driver_is_retried_and_contents_are_exact(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("driver-kill", schema=FLIGHTS)
    sink = named("driver-kill")
    cluster.apply(flights_sink(sink, shard))
    driver = cluster.wait(
        "a driver with an executor", lambda: running_driver(cluster, sink), timeout_s=300, every_s=0.2
    )
    cluster.kill(driver["metadata"]["name"])
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    assert cluster.status("sparksink", sink)["attempt"] >= 2
    assert_holds_the_flights(cluster, programs, shard_id)


def test_a_killed_operator_duplicates_nothing_and_loses_no_child(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("operator-kill", schema=FLIGHTS)
    sink = named("operator-kill")
    cluster.apply(flights_sink(sink, shard))
    driver = cluster.wait(
        "a driver with an executor", lambda: running_driver(cluster, sink), timeout_s=300, every_s=0.2
    )
    killed = cluster.operator_pod()
    cluster.kill(killed["metadata"]["name"], namespace="persist-system")

    drivers: set[str] = set()

    def completed() -> bool:
        for pod in cluster.items("pods", f"persistshard.io/sink={sink}"):
            if pod["metadata"].get("labels", {}).get("spark-role") != "executor":
                drivers.add(pod["metadata"]["uid"])
        return bool(cluster.condition("sparksink", sink, "Ready").get("reason") == "Completed")

    cluster.wait("the sink to complete under another operator", completed, timeout_s=600)
    replaced = cluster.operator_pod()
    assert replaced["metadata"]["uid"] != killed["metadata"]["uid"]
    assert drivers == {driver["metadata"]["uid"]}
    assert cluster.status("sparksink", sink)["attempt"] == 1
    assert_holds_the_flights(cluster, programs, shard_id)


def test_a_mirror_puts_right_what_others_changed(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    shard, shard_id = new_shard("mirror", schema=AIRLINES)
    sink = named("mirror")
    cluster.apply(airlines_sink(sink, shard))

    def last_success() -> str | None:
        found = cluster.status("sparksink", sink).get("schedule", {}).get("lastSuccessTime")
        return str(found) if found else None

    first = cluster.wait("the mirror's first run", last_success, timeout_s=300)
    right = programs.result("content", shard_id)
    assert right["rows"] == 16

    programs.result("edit", shard_id)
    wrong = programs.result("content", shard_id)
    edited_at = wrong["as_of"]

    def corrected() -> bool:
        """A later run succeeded, and the shard has moved past the edit."""
        upper = cluster.status("persistshard", shard).get("frontiers", {}).get("upper")
        return (
            last_success() != first and upper is not None and programs.result("content", shard_id)["as_of"] > edited_at
        )

    cluster.wait("the mirror's next run", corrected, timeout_s=400, every_s=5)
    again = programs.result("content", shard_id)
    assert (again["rows"], again["hash"]) == (right["rows"], right["hash"])
    assert wrong["hash"] != right["hash"] or wrong["as_of"] > edited_at


def test_an_unreachable_redis_shows_and_recovers_and_loses_nothing(
    cluster: Any, programs: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """The writer goes on through the outage by itself; what it was told is committed is there afterwards."""
    shard, shard_id = new_shard("outage", storageProfile="cut")
    writer = programs.start("write_batches", shard_id, "100", "50", "100", profile="cut")

    def acknowledged() -> int:
        lines = cluster.kubectl("logs", f"job/{writer}", "--tail=-1", check=False).strip().splitlines()
        return int(json.loads(lines[-1])["acknowledged"]) if lines else 0

    cluster.wait("the writer to be at work", lambda: acknowledged() > 5, timeout_s=60, every_s=0.3)
    with cut_off(cluster, "redis-cut"):
        # Open connections survive a Service without endpoints: a restart ends them, and tests the log on disk as well.
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
    programs.result("write_batches", shard_id, "4", "2000", profile="cut")
    before = programs.result("content", shard_id, profile="cut")
    with cut_off(cluster, "s3-cut"):
        # The running operator may hold what it needs: another one has to open the location anew.
        cluster.kill(cluster.operator_pod()["metadata"]["name"], namespace="persist-system")
        found = cluster.wait_condition("persistshard", shard, "StorageReachable", "False", timeout_s=180)
        assert "s3-cut.persist-stores.svc" in found["message"]
    cluster.wait_condition("persistshard", shard, "StorageReachable", timeout_s=120)
    assert programs.result("content", shard_id, profile="cut")["hash"] == before["hash"]


def test_a_missing_bucket_shows_and_recovers_when_it_is_made(
    cluster: Any, programs: Any, named: Callable[[str], str]
) -> None:
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
