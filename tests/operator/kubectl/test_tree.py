"""The tree of a shard, its figures, and what an uninstallation finds: pure."""

import json

import pytest
from persist_operator.api.times import to_text
from persist_operator.cluster.port import SPARK_SINK
from persist_operator.kubectl import figures, tree
from persist_operator.kubectl.uninstall import findings

NOW = 1_790_000_000_000


def condition(kind, status, reason, message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def shard(status=None, name="flights", spec=None, **metadata):
    return {
        "kind": "PersistShard",
        "metadata": {"namespace": "team", "name": name, "uid": f"uid-{name}", **metadata},
        "spec": spec or {},
        "status": status or {},
    }


def sink(status=None, name="load", shard_name="flights", namespace="team"):
    return {
        "kind": "SparkSink",
        "metadata": {"namespace": namespace, "name": name, "uid": f"uid-{name}"},
        "spec": {"shardRef": {"name": shard_name}, "mode": "Once"},
        "status": status or {},
    }


def pod(name, status=None, namespace="team", **labels):
    return {
        "kind": "Pod",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {f"persistshard.io/{key}": value for key, value in labels.items()},
        },
        "status": status or {"phase": "Running"},
    }


def busy():
    return {
        "shardId": "s1",
        "conditions": [
            condition("Ready", "True", "Healthy"),
            condition("CompactionCurrent", "False", "ActionRefused", "quota small is exceeded"),
            condition("Suspended", "False", "NotSuspended"),
        ],
        "frontiers": {"upper": "1789999815000", "seqno": 120, "upperLagSeconds": 185},
        "storage": {"batches": 12, "uncompactedBatches": 3, "liveBytes": 4_200_000},
        "debt": {"compactionBytes": 1_200_000, "gcSeqnos": 7, "deadlineTime": to_text(NOW + 4 * 3_600_000)},
        "holds": {
            "readers": 2,
            "writers": 1,
            "blocking": [{"id": "r1", "purpose": "report", "host": "laptop", "kind": "leased", "heldSeconds": 7300}],
        },
        "plan": {
            "id": "4f2c",
            "type": "Compaction",
            "runner": "Spark",
            "estimatedBytes": 9_000_000,
            "estimatedSeconds": 180,
            "approved": False,
            "reason": "64 batches",
        },
        "maintenance": {
            "gc": {"jobName": "flights-gc-110", "settledJob": "flights-gc-110", "nextRunTime": to_text(NOW + 60_000)},
            "compaction": {"jobName": "flights-compact-120", "waitReason": "AwaitingApproval"},
        },
    }


def test_a_tree_shows_what_a_person_asks_first():
    failing = {
        "conditions": [condition("Ready", "False", "DriverFailed", "boom")],
        "lastFailure": {"class": "Application", "time": "2026-09-20T00:00:00Z", "message": "boom\nmore"},
        "schedule": {"nextTime": "2026-09-22T00:00:00Z"},
    }
    pods = [
        pod("load-1", sink="load", role="driver"),
        pod("load-1-exec-1", {"phase": "Pending", "reason": "Evicted"}, sink="load", role="executor"),
        pod("flights-compact-120-x", shard="flights", kind="compaction"),
        pod("of-another", namespace="other", shard="flights", kind="gc"),
    ]
    sinks = [sink(failing), sink(name="second"), sink(name="far", namespace="other"), sink(name="x", shard_name="y")]
    node = tree.shard_node(shard(busy()), sinks, pods, now_ms=NOW)
    assert tree.lines(node) == [
        "PersistShard/flights is ready: Healthy",
        "│  written up to 2026-09-21T14:10:15Z, lag 3m, 12 batches, 4.2 MB, v120",
        "│  owes 3 uncompacted batches, 1.2 MB to compact, 7 versions to collect, deadline 2026-09-21T18:13:20Z (in 4h)",
        "│  used by 2 readers, 1 writer",
        "│  since is held back by r1 `report` on laptop for 2h (leased)",
        "│  plan 4f2c Compaction on Spark, about 9.0 MB, about 3m, waits for approval: 64 batches",
        "│  runs flights-compact-120",
        "│  next compaction (AwaitingApproval), gc not before 2026-09-21T14:14:20Z",
        "│  CompactionCurrent is False: ActionRefused: quota small is exceeded",
        "├─ SparkSink/load is not ready: DriverFailed",
        "│  │  boom",
        "│  │  last failure 2026-09-20T00:00:00Z Application: boom",
        "│  │  next run not before 2026-09-22T00:00:00Z",
        "│  ├─ Pod/load-1 (driver) Running",
        "│  └─ Pod/load-1-exec-1 (executor) Pending: Evicted",
        "├─ SparkSink/second is not known yet: Pending",
        "│     not reconciled yet",
        "└─ Pod/flights-compact-120-x (compaction) Running",
    ]
    assert json.loads(json.dumps(node)) == node, "programs get plain values"


def test_a_resource_that_no_operator_has_seen_is_a_tree_too():
    node = tree.shard_node(shard(), [], [], now_ms=NOW)
    assert tree.lines(node) == ["PersistShard/flights is not known yet: Pending", "   not reconciled yet"]


@pytest.mark.parametrize("place", ["message", "purpose", "plan", "failure"])
def test_no_line_of_a_tree_holds_what_a_terminal_would_obey_or_a_secret(hostile, place):
    text = f"{hostile}\npassword=hunter2"
    status = busy()
    status["conditions"][0] = condition("Ready", "False", "Bad", text if place == "message" else "")
    status["holds"]["blocking"][0]["purpose"] = text if place == "purpose" else ""
    status["plan"]["reason"] = text if place == "plan" else ""
    failure = {"lastFailure": {"message": text if place == "failure" else ""}}
    lines = tree.lines(tree.shard_node(shard(status), [sink(failure)], [], now_ms=NOW))
    assert any("rm -rf" in line for line in lines)
    assert not [line for line in lines if not line.isprintable() or "hunter2" in line]


@pytest.mark.parametrize(
    ("pod_status", "phase", "reason"),
    [
        ({}, "Unknown", ""),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, "Running", ""),
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "Pending",
            "ImagePullBackOff",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
            },
            "Failed",
            "OOMKilled",
        ),
        (
            {
                "phase": "Succeeded",
                "containerStatuses": [{"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}],
            },
            "Succeeded",
            "",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
            },
            "Pending",
            "Unschedulable",
        ),
    ],
)
def test_the_reason_of_a_pod_that_does_not_run(pod_status, phase, reason):
    found = figures.pod_facts({"metadata": {"name": "p"}, "status": pod_status})
    assert (found["phase"], found["reason"]) == (phase, reason)


def test_a_deadline_that_was_missed_says_by_how_much():
    late = shard({"debt": {"deadlineTime": to_text(NOW - 7_200_000)}})
    assert figures.debt(late, NOW).endswith("(missed by 2h)")
    assert figures.debt(shard({"debt": {"compactionBytes": 0, "gcSeqnos": 0}}), NOW) == ""


@pytest.mark.parametrize(
    ("hold", "text"),
    [
        ({"id": "r1"}, "r1"),
        ({"id": "r1", "hostname": "h", "since": "1789990000000"}, "r1 on h"),
        ({"id": "r1", "host": "h", "since": to_text(NOW - 60_000 * 5)}, "r1 on h for 5m"),
    ],
)
def test_a_hold_of_an_operator_of_any_version(hold, text):
    """Today a hold has a hostname and a frontier as its since; a time and its age come beside them."""
    assert figures.hold_line(hold, NOW) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, ""), (True, ""), (1.25, "1.2s"), (0, "0.0s"), (180, "3m")])
def test_cpu_time(seconds, text):
    assert figures.cpu(seconds) == text


FINALIZER = ["persistshard.io/cleanup"]


@pytest.mark.parametrize(
    ("resource", "verdicts"),
    [
        (shard(), ["goes"]),
        (shard({"shardId": "s1"}), ["stays"]),
        (shard({"shardId": "s1"}, spec={"reclaimPolicy": "Purge"}, finalizers=FINALIZER), ["hangs"]),
        (shard({"shardId": "s1"}, finalizers=FINALIZER), ["hangs", "stays"]),
        (shard({"shardId": "s1"}, finalizers=["foregroundDeletion"]), ["hangs", "stays"]),
        (shard({"shardId": "s1"}, deletionTimestamp="2026-09-20T00:00:00Z", finalizers=FINALIZER), ["hangs"]),
        (sink(), ["goes"]),
    ],
)
def test_what_becomes_of_a_resource(resource, verdicts):
    assert [one.verdict for one in findings([resource], [])] == verdicts


def test_children_without_an_owner_stay():
    owned = pod("load-1", sink="load")
    owned["metadata"]["ownerReferences"] = [{"uid": "uid-load"}]
    of_a_job = pod("flights-gc-1-x", shard="flights", **{"owner-uid": "uid-flights"})
    of_a_job["metadata"]["ownerReferences"] = [{"uid": "uid-of-the-job"}]
    found = findings([sink()], [owned, pod("lost", sink="load")])
    assert [(one.verdict, one.object) for one in found] == [
        ("stays", "pod/lost"),
        ("goes", "pod/load-1"),
        ("goes", "sparksink/load"),
    ]
    assert [one.verdict for one in findings([shard()], [of_a_job])] == ["goes", "goes"]
    assert findings([], [of_a_job]) == [], "what another resource owns is not judged"


@pytest.mark.slow
def test_the_tree_of_one_shard_asks_for_its_sinks_only(plugin, team, server, sink_resource):
    cluster = team()
    cluster.create(SPARK_SINK, sink_resource({"shardRef": {"name": "other"}}, name="elsewhere"))
    code, out, _ = plugin("status", "flights", "-n", "team", "-o", "json")
    (node,) = json.loads(out)["items"]
    assert (code, [one["name"] for one in node["sinks"]]) == (0, ["load"])
    (query,) = [query for _, path, query, _ in server.requests if path.endswith("/sparksinks")]
    assert query["fieldSelector"] == "spec.shardRef.name=flights"
    code, out, _ = plugin("status", "-n", "team", "-o", "json")
    assert [one["name"] for one in json.loads(out)["items"]] == ["flights", "elsewhere"]
