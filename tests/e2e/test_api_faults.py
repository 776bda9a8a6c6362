"""Faults between the operator and the API server: it refuses, throttles, conflicts and falls silent. The conditions say what holds a run up, each
run is made once, and everything goes on by itself.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from shard_runs import IDLE, ask, outcomes
from sink_manifests import AIRLINES

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900), pytest.mark.usefixtures("operator_is_there")]

SYSTEM = "persist-system"
NAMESPACE = "persist-e2e"
#: An address for documentation. The control plane swallows packets for it, so that a connection neither opens nor fails.
NOWHERE = "192.0.2.1"


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
    cluster.wait("the verification", lambda: outcomes(cluster, shard, "Verify"), timeout_s=180)
    cluster.wait_condition("persistshard", shard, "Ready", timeout_s=60)
    assert outcomes(cluster, shard, "Verify") == ["Succeeded"]


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
        found = {one["metadata"]["name"]: one.get("status", {}) for one in cluster.items("persistshards")}
        shown = [{one["type"]: one for one in found[shard]["conditions"]} for shard in shards]
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
    cluster.wait("the verifications", lambda: all(outcomes(cluster, one, "Verify") for one in shards), timeout_s=240)
    assert [outcomes(cluster, one, "Verify") for one in shards] == [["Succeeded"]] * len(shards)
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
        cluster.wait("the verification", lambda: outcomes(cluster, shard, "Verify"), timeout_s=180)
        cluster.wait_condition("persistshard", shard, "Ready")
        conflicts = cluster.figure("persist_operator_api_requests_total", code="409") - before
        print(f"{changes[0]} changes by another client, {conflicts:.0f} conflicts")
        assert changes[0] > 20
    finally:
        is_over.set()
        thread.join()
    assert outcomes(cluster, shard, "Verify") == ["Succeeded"]


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
