"""Faults between the operator and the API server, and of the operator itself: each run is made once, the conditions say what holds it up, and
everything goes on by itself.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sink_manifests import airlines_sink

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

SYSTEM = "persist-system"
NAMESPACE = "persist-e2e"
OPERATORS = "app.kubernetes.io/component=operator"
AIRLINES = {"key": "carrier STRING", "value": "name STRING"}
#: An address for documentation. The control plane swallows packets for it, so that a connection neither opens nor fails.
NOWHERE = "192.0.2.1"
#: Nothing is due by itself.
IDLE = {
    "compaction": {"mode": "Disabled"},
    "gc": {"enabled": False, "orphans": {"mode": "Off"}},
    "rollup": {"everySeqnos": 100_000},
    "verify": {"mode": "Off"},
}


def once(name: str, shard: str, **spec: Any) -> dict[str, Any]:
    return airlines_sink(name, shard, restart={"backoffSeconds": 1}, **spec)


def ask(cluster: Any, action: str, *shards: str, token: str = "once") -> None:
    cluster.kubectl("annotate", "persistshard", *shards, f"persistshard.io/request-{action}={token}", "--overwrite")


def runs(cluster: Any, shard: str, type_: str) -> list[str]:
    """The outcomes of the runs of this type that the status records."""
    return [one["outcome"] for one in cluster.status("persistshard", shard).get("history", []) if one["type"] == type_]


def operators(cluster: Any) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.items("pods", OPERATORS, SYSTEM)]


def leader(cluster: Any) -> str:
    """The pod that holds the Lease; empty if that pod is gone."""
    lease = cluster.get("lease", "persist-operator", SYSTEM) or {}
    named = str((lease.get("spec") or {}).get("holderIdentity", "")).partition("_")[0]
    return named if named in operators(cluster) else ""


def assert_once(cluster: Any, seen: Any, verified: list[str], sink: str) -> None:
    """Each verification and the sink had one run, by the status and by the pods."""
    for shard in verified:
        assert runs(cluster, shard, "Verify") == ["Succeeded"], shard
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
            cluster.wait("a leader", lambda: leader(cluster), timeout_s=90, every_s=0.2, namespace=SYSTEM)
            ask(cluster, "verify", *group)
            cluster.wait("a run to begin", lambda group=group: begun(group), timeout_s=90, every_s=0.05)
            for pod in operators(cluster):
                cluster.kill(pod, namespace=SYSTEM)
        cluster.wait(
            "all verifications to be recorded",
            lambda: all(runs(cluster, one, "Verify") for one in verified),
            timeout_s=300,
            every_s=3,
        )
        cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=600)
    assert_once(cluster, seen, verified, sink)
    assert programs.result("content", target_id)["rows"] == 16


@pytest.fixture
def unelected(cluster: Any) -> Iterator[None]:
    """Operators without leader election: as many as run act at once."""
    cluster.install("--set", "leaderElection.enabled=false")
    yield
    cluster.install()
    cluster.scale_operator(1)


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
            "all verifications", lambda: all(runs(cluster, one, "Verify") for one in verified), timeout_s=180, every_s=3
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
        cluster.wait("the verification", lambda: runs(cluster, shard, "Verify"), timeout_s=240)
        began_s, changes = time.monotonic(), seen.lines.count(shard)
        cluster.wait("two minutes", lambda: time.monotonic() - began_s > 120, timeout_s=150)
        changes = seen.lines.count(shard) - changes
    print(f"{changes} changes of the resource in two minutes")
    assert changes < 20
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=30)
    assert runs(cluster, shard, "Verify") == ["Succeeded"]
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


def test_a_sink_that_is_deleted_while_its_driver_starts_and_made_again_leaves_nothing_of_the_first(
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


@contextmanager
def applied(cluster: Any, *manifests: dict[str, Any]) -> Iterator[None]:
    """Objects of the whole cluster, for the duration of the block."""
    cluster.apply(*manifests)
    try:
        yield
    finally:
        for one in reversed(manifests):
            cluster.run("kubectl", "delete", one["kind"], one["metadata"]["name"], "--ignore-not-found")


def no_jobs(reason: str | None) -> list[dict[str, Any]]:
    """A policy that refuses every Job in the namespace. Without a reason, the API server takes Invalid, and answers 422."""
    version, name = "admissionregistration.k8s.io/v1", "e2e-no-jobs"
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    validation = {"expression": "false", "message": "no Jobs before noon", **({"reason": reason} if reason else {})}
    return [
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {"resourceRules": [rule], "namespaceSelector": here},
                "validations": [validation],
            },
        },
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def a_job(name: str) -> dict[str, Any]:
    container = {"name": "a", "image": "a"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }


@pytest.mark.parametrize("reason", [None, "Forbidden"], ids=["422", "403"])
def test_a_policy_that_refuses_jobs_for_a_minute_is_quoted_and_the_run_starts_after_it(
    cluster: Any, new_shard: Callable[..., tuple[str, str]], reason: str | None
) -> None:
    shard, _ = new_shard("policy", **IDLE)
    policy = no_jobs(reason)
    with applied(cluster, *policy):
        refused = ["kubectl", "-n", NAMESPACE, "create", "--dry-run=server", "-f", "-"]
        cluster.wait(
            "the policy to hold",
            lambda: (
                "no Jobs before noon" in cluster.run(*refused, given=json.dumps(a_job("probe")), check=False).stderr
            ),
            timeout_s=60,
        )
        ask(cluster, "verify", shard)
        found = cluster.wait_condition("persistshard", shard, "Ready", "False", reason="ActionRefused", timeout_s=60)
        assert "no Jobs before noon" in found["message"]
        assert cluster.condition("persistshard", shard, "Reconciling")["status"] == "True"
        assert cluster.figure("persist_operator_refusals_total", what="StartMaintenance") > 0
        first = cluster.figure("persist_operator_api_requests_total", verb="POST")
        began_s = time.monotonic()
        cluster.wait("a minute", lambda: time.monotonic() - began_s > 60, timeout_s=90)
        assert cluster.figure("persist_operator_api_requests_total", verb="POST") - first < 40
        assert cluster.items("jobs", f"persistshard.io/shard={shard}") == []
    cluster.wait("the verification", lambda: runs(cluster, shard, "Verify"), timeout_s=180)
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=60)
    assert runs(cluster, shard, "Verify") == ["Succeeded"]


def throttled(*resources: str) -> list[dict[str, Any]]:
    """Fair queueing that lets one creation or patch of these resources by the operator run at a time, and answers 429 to all others. And a
    webhook that never answers: a Job called `hold` occupies the one place for half a minute.
    """
    version, name = "flowcontrol.apiserver.k8s.io/v1", "e2e-throttled"
    limited = {
        "nominalConcurrencyShares": 0,
        "lendablePercent": 0,
        "borrowingLimitPercent": 0,
        "limitResponse": {"type": "Reject"},
    }
    account = {"name": "persist-operator", "namespace": SYSTEM}
    rule = {
        "verbs": ["create", "patch"],
        "apiGroups": ["batch", "persistshard.io"],
        "resources": list(resources),
        "namespaces": ["*"],
    }
    subjects = [{"kind": "ServiceAccount", "serviceAccount": account}]
    jobs = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}
    webhook = {
        "name": "hold.e2e.test",
        "clientConfig": {"url": f"https://{NOWHERE}/"},
        "rules": [jobs],
        "matchConditions": [{"name": "hold", "expression": "object.metadata.name == 'hold'"}],
        "timeoutSeconds": 30,
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return [
        {
            "apiVersion": version,
            "kind": "PriorityLevelConfiguration",
            "metadata": {"name": name},
            "spec": {"type": "Limited", "limited": limited},
        },
        {
            "apiVersion": version,
            "kind": "FlowSchema",
            "metadata": {"name": name},
            "spec": {
                "priorityLevelConfiguration": {"name": name},
                "matchingPrecedence": 2,
                "distinguisherMethod": {"type": "ByUser"},
                "rules": [{"subjects": subjects, "resourceRules": [rule]}],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [webhook],
        },
    ]


@contextmanager
def storm(cluster: Any, *resources: str) -> Iterator[None]:
    """For half a minute the API server answers 429 to what the operator creates and patches of these resources, among them Jobs."""
    (control,) = [one["metadata"]["name"] for one in cluster.items("nodes", "node-role.kubernetes.io/control-plane")]
    swallow = ["OUTPUT", "-d", NOWHERE, "-j", "DROP"]
    account = f"system:serviceaccount:{SYSTEM}:persist-operator"
    hold = ["kubectl", "-n", NAMESPACE, "create", "--dry-run=server", f"--as={account}", "-f", "-"]
    cluster.on_node(control, "iptables", "-w", "-I", *swallow)
    try:
        with applied(cluster, *throttled(*resources)):
            holding = 'apiserver_flowcontrol_current_executing_requests{flow_schema="e2e-throttled",priority_level="e2e-throttled"} 1'

            def holds() -> bool:
                return holding in cluster.run("kubectl", "get", "--raw", "/metrics").stdout

            held = subprocess.Popen(hold, stdin=subprocess.PIPE, text=True, env=cluster.environment)
            try:
                assert held.stdin is not None
                held.stdin.write(json.dumps(a_job("hold")))
                held.stdin.close()
                cluster.wait("the only place to be taken", holds, timeout_s=20, every_s=0.2)
                yield
                assert held.poll() is None, "the storm was over before it was looked at: nothing was tested"
            finally:
                held.kill()
                held.wait()
    finally:
        cluster.on_node(control, "iptables", "-w", "-D", *swallow)


def test_an_api_server_that_throttles_is_asked_seldom_and_everything_goes_on_afterwards(
    cluster: Any, named: Callable[[str], str], new_shards: Callable[..., dict[str, str]]
) -> None:
    """First Jobs alone: the conditions quote the server. Then statuses, too, which nothing can show but the metrics."""
    shards = list(new_shards("throttle", 6, **IDLE))

    def refusals() -> float:
        return float(cluster.figure("persist_operator_api_requests_total", code="429"))

    def quoted() -> bool:
        found = {one["metadata"]["name"]: one["status"]["conditions"] for one in cluster.items("persistshards")}
        shown = [{one["type"]: one for one in found[shard]} for shard in shards]
        return all(
            (one["Ready"]["reason"], one.get("Reconciling", {}).get("status")) == ("ActionRefused", "True")
            and "429 " in one["Ready"]["message"]
            and "by itself" in one["Ready"]["message"]
            for one in shown
        )

    with storm(cluster, "jobs"):
        ask(cluster, "verify", *shards)
        cluster.wait("conditions that quote the server", quoted, timeout_s=25, every_s=0.5)
        of_shards = f"persistshard.io/shard in ({','.join(shards)})"
        assert cluster.items("jobs", of_shards) == []
    cluster.wait("the verifications", lambda: all(runs(cluster, one, "Verify") for one in shards), timeout_s=240)
    assert [runs(cluster, one, "Verify") for one in shards] == [["Succeeded"]] * len(shards)
    cluster.wait("Ready", lambda: cluster.are(("persistshard", "Ready", "True"), *shards), timeout_s=60)

    fresh = [named("throttle-new") for _ in range(6)]
    with storm(cluster, "jobs", "persistshards/status"):
        before, began_s = refusals(), time.monotonic()
        head = {"apiVersion": "persistshard.io/v1alpha1", "kind": "PersistShard"}
        spec = {"schema": AIRLINES, **IDLE}
        cluster.apply(*({**head, "metadata": {"name": one}, "spec": spec} for one in fresh))
        cluster.wait("some seconds", lambda: time.monotonic() - began_s > 15)
        refused, seconds = refusals() - before, time.monotonic() - began_s
        print(f"{refused:.0f} refusals of {len(fresh)} shards in {seconds:.0f} s")
        # Each pause is at least the Retry-After of a second.
        assert len(fresh) <= refused < len(fresh) * seconds
        assert not any("conditions" in cluster.status("persistshard", one) for one in fresh[:2])
    cluster.wait("the new shards", lambda: cluster.are(("persistshard", "Ready", "True"), *fresh), timeout_s=180)


def test_a_client_that_changes_a_resource_all_the_time_holds_nothing_up(
    cluster: Any, new_shard: Callable[..., tuple[str, str]]
) -> None:
    """The API server answers 409 to a status for an older version. The operator reads and plans anew, and starts the run once."""
    import kubernetes

    shard, _ = new_shard("busy", **IDLE)
    client = kubernetes.config.new_client_from_config(cluster.environment["KUBECONFIG"])
    api, is_over, changes = kubernetes.client.CustomObjectsApi(client), threading.Event(), [0]
    where = ("persistshard.io", "v1alpha1", NAMESPACE, "persistshards", shard)

    def change() -> None:
        while not is_over.wait(0.02):
            changes[0] += 1
            api.patch_namespaced_custom_object(*where, {"metadata": {"annotations": {"e2e": str(changes[0])}}})

    thread = threading.Thread(target=change)
    thread.start()
    try:
        before = cluster.figure("persist_operator_api_requests_total", code="409")
        ask(cluster, "verify", shard)
        cluster.wait("the verification", lambda: runs(cluster, shard, "Verify"), timeout_s=180)
        cluster.wait_condition("persistshard", shard, "Ready")
        conflicts = cluster.figure("persist_operator_api_requests_total", code="409") - before
        print(f"{changes[0]} changes by another client, {conflicts:.0f} conflicts")
        assert changes[0] > 20
    finally:
        is_over.set()
        thread.join()
    assert runs(cluster, shard, "Verify") == ["Succeeded"]


def frozen(cluster: Any, pod: dict[str, Any]) -> list[list[str]]:
    """Rules for the node of a pod that swallow every packet of its open connections to the API server. New connections work."""
    address, node = pod["status"]["podIP"], pod["spec"]["nodeName"]
    listed = cluster.on_node(node, "conntrack", "-L", "-p", "tcp", "-s", address, "--dport", "443")
    ports = {
        word.removeprefix("sport=")
        for line in listed.splitlines()
        if "ESTABLISHED" in line
        for word in line.split()[:7]
        if word.startswith("sport=")
    }
    assert ports, listed
    rules = []
    for port in sorted(ports):
        rules.append(["PREROUTING", "-s", address, "-p", "tcp", "--sport", port, "-j", "DROP"])
        rules.append(["POSTROUTING", "-d", address, "-p", "tcp", "--dport", port, "-j", "DROP"])
    return rules


@contextmanager
def silence(cluster: Any) -> Iterator[None]:
    """The connections that the operator has to the API server now stay open and carry nothing more."""
    pod = cluster.operator_pod()
    node, rules = pod["spec"]["nodeName"], frozen(cluster, pod)
    for rule in rules:
        cluster.on_node(node, "iptables", "-w", "-t", "mangle", "-I", *rule)
    try:
        yield
    finally:
        for rule in rules:
            cluster.on_node(node, "iptables", "-w", "-t", "mangle", "-D", *rule)


def made_in_silence(cluster: Any, shard: str) -> float:
    """Makes a shard; the seconds until it is Ready."""
    began_s = time.monotonic()
    spec = {"schema": AIRLINES, **IDLE}
    head = {"apiVersion": "persistshard.io/v1alpha1", "kind": "PersistShard"}
    cluster.apply({**head, "metadata": {"name": shard}, "spec": spec})
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=200)
    return time.monotonic() - began_s


def test_an_operator_whose_connections_freeze_loses_its_lease_and_leads_again(
    cluster: Any, named: Callable[[str], str]
) -> None:
    with silence(cluster):
        seconds = made_in_silence(cluster, named("frozen"))
    print(f"Ready {seconds:.0f} s after the connections froze")


@pytest.mark.usefixtures("unelected")
def test_watches_that_fall_silent_are_noticed_without_a_restart(cluster: Any, named: Callable[[str], str]) -> None:
    """No Lease ends the process here. A watch that brings not even a bookmark for 70 s is opened again."""
    cluster.scale_operator(1)
    made_in_silence(cluster, named("heard"))
    before = cluster.operator_pod()
    with silence(cluster):
        seconds = made_in_silence(cluster, named("silent"))
    print(f"Ready {seconds:.0f} s after the watches fell silent")
    after = cluster.operator_pod()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert seconds < 150


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
    cluster.wait("the verification", lambda: runs(cluster, elder, "Verify"), timeout_s=120)
    cluster.wait_condition("sparksink", sink, "Ready", reason="Completed", timeout_s=300)

    cluster.install()
    cluster.wait("the right clock", lambda: ahead_s() < 60, timeout_s=60, namespace=SYSTEM)
    ask(cluster, "verify", elder, token="twice")
    cluster.wait("another verification", lambda: len(runs(cluster, elder, "Verify")) > 1, timeout_s=120)
    cluster.wait_condition("persistshard", elder, "Ready")
    assert runs(cluster, elder, "Verify") == ["Succeeded", "Succeeded"]
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
