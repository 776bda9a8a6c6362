"""Faults of the operator itself: it is killed, there are two of it, its clock is wrong, a sink goes while it acts. Each run is made once, and
everything goes on by itself.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from shard_runs import IDLE, ask, outcomes
from sink_manifests import AIRLINES, airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

SYSTEM = "persist-system"


def once(name: str, shard: str, **spec: Any) -> dict[str, Any]:
    return airlines_sink(name, shard, restart={"backoffSeconds": 1}, **spec)


def assert_once(cluster: Any, seen: Any, verified: list[str], sink: str) -> None:
    """Each verification and the sink had one run, by the status and by the pods."""
    for shard in verified:
        assert outcomes(cluster, shard, "Verify") == ["Succeeded"], shard
        assert len({name for name in seen.uids if name.startswith(f"{shard}-verify-")}) == 1, seen.uids
    status = cluster.status("sparksink", sink)
    assert (status["attempt"], [one["outcome"] for one in status["history"]]) == (1, ["Succeeded"])
    drivers = [name for name in seen.uids if name.startswith(f"{sink}-") and "-exec-" not in name]
    assert len(drivers) == 1, seen.uids
    assert {name for name, uids in seen.uids.items() if len(uids) > 1} == set()


def test_an_operator_that_is_killed_again_and_again_starts_each_of_twenty_runs_once(
    cluster: Any,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    new_shards: Callable[..., dict[str, str]],
) -> None:
    """Each operator is killed as soon as it has begun something: while intents stand on statuses whose Jobs do not exist yet."""
    verified = list(new_shards("kill", 19, **IDLE))
    target, target_id = new_shard("kill-sink", schema=AIRLINES, **IDLE)
    sink = named("kill")
    groups = [verified[at::6] for at in range(6)]

    def begun(shards: list[str]) -> bool:
        statuses = {one["metadata"]["name"]: one.get("status", {}) for one in cluster.items("persistshards")}
        return any("verify" in statuses[one].get("lastHandledRequests", {}) for one in shards)

    with cluster.seen("pods") as seen:
        cluster.apply(once(sink, target))
        for group in groups:
            cluster.wait("a leader", cluster.leader, timeout_s=90, every_s=0.2, namespace=SYSTEM)
            ask(cluster, "verify", *group)
            cluster.wait("a run to begin", lambda group=group: begun(group), timeout_s=90, every_s=0.05)
            for pod in cluster.operators():
                cluster.kill(pod, namespace=SYSTEM)
        cluster.wait(
            "all verifications to be recorded",
            lambda: all(outcomes(cluster, one, "Verify") for one in verified),
            timeout_s=300,
            every_s=3,
        )
        cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    assert_once(cluster, seen, verified, sink)
    assert programs.result("content", target_id)["rows"] == 16


@pytest.mark.usefixtures("unelected")
def test_two_operators_that_act_at_once_start_nothing_twice(
    cluster: Any,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    new_shards: Callable[..., dict[str, str]],
) -> None:
    cluster.scale_operator(2)
    verified = list(new_shards("two", 8, **IDLE))
    target, target_id = new_shard("two-sink", schema=AIRLINES, **IDLE)
    sink = named("two")
    with cluster.seen("pods") as seen:
        cluster.apply(once(sink, target))
        ask(cluster, "verify", *verified)
        cluster.wait(
            "all verifications",
            lambda: all(outcomes(cluster, one, "Verify") for one in verified),
            timeout_s=180,
            every_s=3,
        )
        cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    assert_once(cluster, seen, verified, sink)
    assert programs.result("content", target_id)["rows"] == 16


RIVAL = "persist-e2e-rival"


@pytest.fixture
def rival(cluster: Any) -> Iterator[None]:
    """Another release of the chart that watches the same namespaces, with another id."""
    chart, values = Path(__file__).parents[2] / "charts" / "persist-operator", Path(__file__).parent / "values.yaml"
    off = ["crds.enabled", "workload.serviceAccount.create", "admissionPolicies.enabled", "console.enabled"]
    cluster.run("kubectl", "create", "namespace", RIVAL)
    try:
        secret = cluster.get("secret", "persist-store", "persist-stores")
        cluster.apply({**secret, "metadata": {"name": "persist-store"}}, namespace=RIVAL)
        words = ["--set", ",".join(f"{one}=false" for one in off), "--wait", "--timeout=180s"]
        cluster.run("helm", "install", "rival", str(chart), "-n", RIVAL, "--values", str(values), *words, timeout_s=200)
        yield
    finally:
        cluster.run("helm", "uninstall", "rival", "-n", RIVAL, "--wait", check=False, timeout_s=120)
        cluster.run("kubectl", "delete", "namespace", RIVAL, timeout_s=120)


def test_two_releases_that_watch_one_namespace_do_not_fight_over_its_statuses(
    cluster: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    request: pytest.FixtureRequest,
) -> None:
    """The first release owns the shard. The other one says so once, is overruled, and writes seldom."""
    shard, _ = new_shard("rivals", **IDLE)
    request.getfixturevalue("rival")

    with cluster.seen("persistshards") as seen:
        ask(cluster, "verify", shard)
        cluster.wait("the verification", lambda: outcomes(cluster, shard, "Verify"), timeout_s=240)
        began_s, changes = time.monotonic(), seen.lines.count(shard)
        cluster.wait("two minutes", lambda: time.monotonic() - began_s > 120, timeout_s=150)
        changes = seen.lines.count(shard) - changes
    print(f"{changes} changes of the resource in two minutes")
    assert changes < 20
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=30)
    assert outcomes(cluster, shard, "Verify") == ["Succeeded"]
    logs = cluster.kubectl("logs", "deployment/rival-persist-operator", "--tail=-1", namespace=RIVAL)
    assert "let only one release watch the namespace" in logs


def children(cluster: Any, sink: str) -> dict[str, set[str]]:
    """The uids of the owners of all objects of a sink, by kind."""
    return {
        kind: {
            one["metadata"]["labels"].get("persistshard.io/owner-uid", "none")
            for one in cluster.items(kind, f"persistshard.io/sink={sink}")
        }
        for kind in ("pods", "services", "configmaps", "secrets")
    }


@pytest.mark.wish(4)
def test_wish_a_sink_that_is_deleted_while_its_driver_starts_and_made_again_leaks_no_pod(
    cluster: Any, programs: Any, named: Callable[[str], str], new_shard: Callable[..., tuple[str, str]]
) -> None:
    """At three moments: when the status has the intent, when the pod exists, and when an executor exists. The name is the same each time."""
    shard, shard_id = new_shard("again", schema=AIRLINES, **IDLE)
    sink = named("again")
    manifest = once(sink, shard)
    of_sink = f"persistshard.io/sink={sink}"
    moments: dict[str, Callable[[], object]] = {
        "the intent": lambda: cluster.status("sparksink", sink).get("driver", {}).get("podName"),
        "the pod": lambda: cluster.items("pods", of_sink),
        "an executor": lambda: cluster.items("pods", f"{of_sink},spark-role=executor"),
    }
    for moment, probe in moments.items():
        cluster.apply(manifest)
        uid = cluster.get("sparksink", sink)["metadata"]["uid"]
        cluster.wait(moment, probe, timeout_s=180, every_s=0.05)
        cluster.kubectl("delete", "sparksink", sink, "--wait=false")
    cluster.apply(manifest)
    last = cluster.get("sparksink", sink)["metadata"]["uid"]
    assert last != uid
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=300)
    assert cluster.status("sparksink", sink)["attempt"] == 1
    cluster.wait(
        "all objects of the earlier sinks to be gone",
        lambda: all(owners <= {last} for owners in children(cluster, sink).values()),
        timeout_s=60,
    )
    assert programs.result("content", shard_id)["rows"] == 16
    cluster.delete("sparksink", sink)
    cluster.wait("nothing to be left", lambda: not any(children(cluster, sink).values()), timeout_s=60)


@pytest.fixture(scope="session")
def faketime(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The library that changes the clock of one process, from the package of this machine's distribution."""
    folder = tmp_path_factory.mktemp("faketime")
    apt = ["apt-get", "download", "-qq", "libfaketime"]
    done = subprocess.run(apt, cwd=folder, capture_output=True, text=True, check=False) if _has_apt() else None
    packages = sorted(folder.glob("*.deb"))
    if not packages:
        pytest.skip(f"libfaketime cannot be had from apt: {done.stderr[-200:] if done else 'there is no apt-get'}")
    subprocess.run(["dpkg", "-x", packages[0], folder], check=True, capture_output=True)
    (library,) = folder.glob("usr/lib/*/faketime/libfaketimeMT.so.1")
    return library.read_bytes()


def _has_apt() -> bool:
    return Path("/usr/bin/apt-get").exists()


@pytest.fixture
def skewed(cluster: Any, faketime: bytes) -> Iterator[Callable[[str], None]]:
    """Starts the operator with a clock that differs, such as `+10m`."""
    data = {"faketime.so": base64.b64encode(faketime).decode()}
    library = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "faketime"}, "binaryData": data}
    cluster.kubectl("replace", "--force", "-f", "-", namespace=SYSTEM, given=json.dumps(library))

    def skew(offset: str) -> None:
        values = {
            "extraEnv": [
                {"name": "LD_PRELOAD", "value": "/faketime/faketime.so"},
                {"name": "FAKETIME", "value": offset},
                {"name": "FAKETIME_DONT_FAKE_MONOTONIC", "value": "1"},
            ],
            "extraVolumes": [{"name": "faketime", "configMap": {"name": "faketime"}}],
            "extraVolumeMounts": [{"name": "faketime", "mountPath": "/faketime", "readOnly": True}],
        }
        words = [word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]
        cluster.install(*words)

    yield skew
    cluster.install()
    cluster.delete("configmap", "faketime", namespace=SYSTEM)


def test_an_operator_whose_clock_is_ahead_and_then_right_again_repeats_nothing(
    cluster: Any,
    programs: Any,
    named: Callable[[str], str],
    new_shard: Callable[..., tuple[str, str]],
    skewed: Callable[[str], None],
) -> None:
    """Ten minutes. S3 refuses the requests of a clock that is off by more than fifteen."""
    elder, elder_id = new_shard("skew", **IDLE)
    programs.result("write_batches", elder_id, "6", "1000")
    skewed("+10m")

    def ahead_s() -> float:
        renewed = cluster.get("lease", "persist-operator", SYSTEM)["spec"]["renewTime"]
        return datetime.fromisoformat(renewed).timestamp() - time.time()

    cluster.wait("a Lease of the clock that is ahead", lambda: ahead_s() > 500, timeout_s=60, namespace=SYSTEM)
    target, target_id = new_shard("skew-new", schema=AIRLINES, **IDLE)
    sink = named("skew")
    cluster.apply(once(sink, target))
    ask(cluster, "verify", elder)
    cluster.wait("the verification", lambda: outcomes(cluster, elder, "Verify"), timeout_s=120)
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=300)

    cluster.install()
    cluster.wait("the right clock", lambda: ahead_s() < 60, timeout_s=60, namespace=SYSTEM)
    ask(cluster, "verify", elder, token="twice")
    cluster.wait("another verification", lambda: len(outcomes(cluster, elder, "Verify")) > 1, timeout_s=120)
    cluster.wait_condition("persistshard", elder, "Ready")
    assert outcomes(cluster, elder, "Verify") == ["Succeeded", "Succeeded"]
    status = cluster.status("sparksink", sink)
    assert (status["attempt"], [one["outcome"] for one in status["history"]]) == (1, ["Succeeded"])
    assert programs.result("content", elder_id)["rows"] == 6000
    assert programs.result("content", target_id)["rows"] == 16


def test_two_hundred_shards_at_once_are_ready_and_leave_nothing(cluster: Any) -> None:
    names = [f"fleet-{at:03d}" for at in range(200)]
    head = {"apiVersion": "persistshard.io/v1alpha1", "kind": "PersistShard"}
    labels = {"e2e": "fleet"}
    spec = {"schema": AIRLINES, **IDLE}

    def requests() -> float:
        return float(cluster.figure("persist_operator_api_requests_total"))

    before, began_s = requests(), time.monotonic()
    try:
        cluster.apply(*({**head, "metadata": {"name": one, "labels": labels}, "spec": spec} for one in names))
        applied_s = time.monotonic() - began_s
        cluster.wait(
            "200 shards", lambda: cluster.are(("persistshard", "Ready", "True"), *names), timeout_s=300, every_s=2
        )
        ready_s, asked = time.monotonic() - began_s, requests() - before
        print(f"200 applied in {applied_s:.0f} s, Ready after {ready_s:.0f} s, {asked / 200:.1f} API requests a shard")
        ids = {one["status"]["shardId"] for one in cluster.items("persistshards", "e2e=fleet")}
        assert len(ids) == 200
        # Two statuses, and some that were older than another write.
        assert asked < 200 * 6
    finally:
        began_s = time.monotonic()
        cluster.kubectl("delete", "persistshard", "-l", "e2e=fleet", "--wait=true", timeout_s=180)
    print(f"deleted in {time.monotonic() - began_s:.0f} s")
    cluster.wait(
        "their series to be gone",
        lambda: not any(cluster.figure("persist_shard_ready", name=one) for one in names[::20]),
        timeout_s=60,
    )
    for kind in ("pods", "jobs", "configmaps", "secrets"):
        assert not [one for one in cluster.items(kind) if one["metadata"]["name"].startswith("fleet-")]
