"""The commands against the API server: what they print, ask for, and end with."""

import contextlib
import json
import re
import threading
from pathlib import Path

import pytest
import yaml
from persist_engine import Location
from persist_operator.api import names, times
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD, SPARK_SINK, ApiError

pytestmark = pytest.mark.slow
REQUEST = names.REQUEST_PREFIX


def annotations(cluster, kind=PERSIST_SHARD, name="flights"):
    return cluster.get(kind, "team", name)["metadata"].get("annotations") or {}


def handles(cluster, verb, *blocks, kind=PERSIST_SHARD, name="flights"):
    """Plays the operator: as the annotation appears, writes these statuses one after another, each with the token."""
    edit, waiting = cluster.edit, list(blocks)

    def edited(kind_, namespace, name_, change):
        edit(kind_, namespace, name_, change)
        token = annotations(cluster, kind, name).get(f"{REQUEST}{verb}")
        if token and waiting:
            threading.Thread(target=play, args=(token,)).start()

    def play(token):
        while waiting:
            status = {**waiting.pop(0), "lastHandledRequests": {verb: token}}
            edit(kind, "team", name, lambda one, status=status: one.update(status={**one.get("status", {}), **status}))

    cluster.edit = edited


@pytest.mark.parametrize(
    ("arguments", "kind", "name", "verb"),
    [
        (["compact", "flights"], PERSIST_SHARD, "flights", "compact"),
        (["gc", "flights"], PERSIST_SHARD, "flights", "gc"),
        (["rollup", "flights"], PERSIST_SHARD, "flights", "rollup"),
        (["verify", "flights"], PERSIST_SHARD, "flights", "verify"),
        (["orphans", "flights"], PERSIST_SHARD, "flights", "orphan-scan"),
        (["accept-log", "flights"], PERSIST_SHARD, "flights", "accept-log"),
        (["restart", "load"], SPARK_SINK, "load", "restart"),
        (["promote", "load"], SPARK_SINK, "load", "promote"),
    ],
)
def test_a_request_is_one_annotation_and_nothing_else(plugin, team, server, arguments, kind, name, verb):
    cluster = team(sink_status={"rollout": {"state": "ReadyToPromote"}})
    before = cluster.get(kind, "team", name)
    assert plugin(*arguments, "-n", "team") == (0, f"{kind.kind.lower()}/{name} {verb} requested\n", "")
    after = cluster.get(kind, "team", name)
    assert list(after["metadata"].pop("annotations")) == [f"{REQUEST}{verb}"]
    assert (after["spec"], after["status"]) == (before["spec"], before["status"])
    (patch,) = [one for one in server.requests if one[0] == "PATCH"]
    assert patch[2] == {"fieldManager": "persist-requests"}, "Flux removes what kubectl... owns"


@pytest.mark.parametrize(("result", "code"), [("Succeeded", 0), ("Skipped", 0), ("Failed", 1)])
def test_wait_ends_with_the_run(plugin, team, result, code):
    cluster = team()
    block = {"jobName": "flights-gc-9"}
    ended = {**block, "settledJob": "flights-gc-9", "lastResult": result, "message": "no memory"}
    handles(cluster, "gc", {"maintenance": {"gc": block}}, {"maintenance": {"gc": ended}})
    found = plugin("gc", "flights", "-n", "team", "--wait", "--timeout", "60")
    assert found[0] == code
    assert found[1].splitlines()[-1] == f"persistshard/flights gc: flights-gc-9 {result}: no memory"


def test_wait_that_takes_too_long_says_what_it_waited_for(plugin, team):
    team(suspend=True)
    code, _, err = plugin("gc", "flights", "-n", "team", "--wait", "--timeout", "0.2")
    assert code == 2
    assert "note: it is suspended, so the operator handles it after `kubectl persist resume flights`" in err
    assert "error: the time ran out after 0.2 seconds: waits: the resource is suspended; the run may continue" in err


def test_regression_a_wait_shows_nothing_that_a_terminal_obeys(plugin, team, hostile):
    message = {"type": "Ready", "status": "False", "reason": "X", "message": f"{hostile}\r\nerror: none"}
    team({"conditions": [message]}, {"conditions": [message], "rollout": {"state": hostile}})
    for arguments in (["gc", "flights"], ["restart", "load"], ["promote", "load"]):
        code, out, err = plugin(*arguments, "-n", "team", "--wait", "--timeout", "0.1")
        assert code == 2
        assert all(line.isprintable() for line in (out + err).split("\n")), arguments
        assert len(err.splitlines()) == 2, err


def test_regression_a_status_of_no_known_form_is_one_line_and_no_traceback(plugin, team, monkeypatch):
    team({"history": [7]})
    code, out, err = plugin("history", "-n", "team")
    assert (code, out) == (1, "")
    assert re.fullmatch(
        r"error: AttributeError: .*; this is a bug of kubectl persist, PERSIST_TRACEBACK=1 shows where\n", err
    )
    monkeypatch.setenv("PERSIST_TRACEBACK", "1")
    with pytest.raises(AttributeError):
        plugin("history", "-n", "team")


def test_regression_an_output_that_takes_nothing_is_no_bug(plugin, team, monkeypatch):
    team()
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert plugin("status", "-n", "team")[::2] == (1, "error: No space left on device\n")
        with contextlib.suppress(OSError):
            full.close()
    monkeypatch.setattr("sys.stdout", None)
    assert plugin("status", "-n", "team")[::2] == (0, "")


def test_a_request_to_a_paused_resource_says_that_it_waits(plugin, team):
    cluster = team()
    cluster.edit(PERSIST_SHARD, "team", "flights", pause)
    code, _, err = plugin("gc", "flights", "-n", "team", "--wait", "--timeout", "0.2")
    assert code == 2
    assert "note: it is paused, so the operator handles it without the annotation persistshard.io/paused" in err
    assert "error: the time ran out after 0.2 seconds: waits: the resource is paused; the run may continue" in err
    code, out, _ = plugin("status", "flights", "-n", "team")
    assert (code, "(paused)" in out.splitlines()[0]) == (0, True)


def pause(resource):
    resource["metadata"].setdefault("annotations", {})[names.ANNOTATION_PAUSED] = "true"


def test_wait_ends_when_the_resource_is_deleted_or_replaced(plugin, team, shard_resource):
    cluster = team()
    edit = cluster.edit

    def edited(*arguments):
        edit(*arguments)
        threading.Timer(0.1, then).start()

    def then():
        cluster.delete(PERSIST_SHARD, "team", "flights")
        cluster.create(PERSIST_SHARD, shard_resource(uid="uid-of-the-next"))

    cluster.edit = edited
    code, out, _ = plugin("gc", "flights", "-n", "team", "--wait", "--timeout", "60")
    assert (code, out.splitlines()[-1]) == (1, "persistshard/flights gc: the resource is gone")


def test_a_request_to_a_real_operator_is_carried_out(plugin, server, operated, request):
    """The reconciler handles the annotation and makes a Job; the run ends; --wait sees it. The statuses are the operator's own."""
    place = f"mem:{request.node.name}"
    shard = operated(Location(blob=place, consensus=place))
    server.cluster = shard.cluster
    shard.settle(4)
    ended = threading.Event()

    def kubelet():
        while not ended.wait(0.02):
            with contextlib.suppress(
                ApiError
            ):  # the plugin changed the object meanwhile: the operator's queue tries again
                shard.settle(1)
            for job in shard.cluster.find(JOB, "team", {}):
                if not (job.get("status") or {}).get("conditions"):
                    finish(shard, job["metadata"]["name"])

    thread = threading.Thread(target=kubelet)
    thread.start()
    try:
        code, out, err = plugin("rollup", "flights", "-n", "team", "--wait", "--timeout", "60")
    finally:
        ended.set()
        thread.join()
    assert code == 0, out + err
    assert re.search(r"^persistshard/flights rollup: flights-rollup-\d+ Succeeded", out, re.MULTILINE)
    history = plugin("history", "flights", "-n", "team", "-o", "json")[1]
    # Each round of the kubelet takes minutes of the operator's clock, so checks of a day may run meanwhile.
    assert [one["outcome"] for one in json.loads(history)["items"] if one["type"] == "Rollup"] == ["Succeeded"]
    assert "is ready: Healthy" in plugin("status", "flights", "-n", "team")[1]


def finish(shard, name):
    now = times.to_text(shard.env.now_ms())
    job = shard.cluster.get(JOB, "team", name)
    labels = {**job["spec"]["template"]["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
    report = json.dumps({"outcome": "Succeeded", "message": ""})
    ended = {"terminated": {"exitCode": 0, "finishedAt": now, "message": report}}
    status = {"phase": "Succeeded", "containerStatuses": [{"name": "maintain", "state": ended}]}
    shard.cluster.create(
        POD, {"metadata": {"namespace": "team", "name": f"{name}-x", "labels": labels}, "status": status}
    )
    done = {"type": "Complete", "status": "True", "reason": "Completed", "lastTransitionTime": now}
    shard.cluster.edit(
        JOB,
        "team",
        name,
        lambda one: one.update(status={"startTime": now, "completionTime": now, "conditions": [done]}),
    )


PLAN = {
    "id": "4f2c",
    "type": "Compaction",
    "runner": "Pod",
    "estimatedBytes": 5000,
    "approved": False,
    "reason": "64 batches",
}


def test_an_approval_names_the_plan_that_waits(plugin, team):
    cluster = team({"plan": PLAN})
    code, _, err = plugin("approve", "flights", "-n", "team", "--id", "old")
    assert (code, "another plan by now: 4f2c" in err) == (64, True)
    assert annotations(cluster) == {}
    assert plugin("approve", "flights", "-n", "team", "--id", "4f2c")[0] == 0
    assert annotations(cluster) == {f"{REQUEST}approve": "4f2c"}
    table = plugin("plan", "-n", "team")[1].splitlines()
    assert re.fullmatch(r"flights +4f2c +Compaction +Pod +5.0 kB +waits +64 batches", table[1])


def test_without_a_plan_there_is_nothing_to_approve(plugin, team):
    team()
    code, _, err = plugin("approve", "flights", "-n", "team")
    assert (code, err) == (1, "error: persistshard/flights has no plan that waits for an approval\n")


def test_suspend_changes_one_field_and_names_the_tool_that_may_revert_it(plugin, team, server):
    cluster = team()
    managers = [{"manager": "kustomize-controller", "operation": "Apply", "fieldsV1": {"f:spec": {"f:suspend": {}}}}]
    cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(managedFields=managers))
    before = cluster.get(PERSIST_SHARD, "team", "flights")["spec"]
    code, out, err = plugin("suspend", "flights", "-n", "team")
    assert (code, out) == (0, "persistshard/flights suspended\n")
    assert err == "note: kustomize-controller owns fields of this spec and may revert it at its next sync\n"
    assert cluster.get(PERSIST_SHARD, "team", "flights")["spec"] == {**before, "suspend": True}
    assert plugin("suspend", "pshard/flights", "-n", "team")[1] == "persistshard/flights is suspended already\n"
    assert plugin("resume", "pshard/flights", "-n", "team")[1] == "persistshard/flights resumed\n"
    assert cluster.get(PERSIST_SHARD, "team", "flights")["spec"] == {**before, "suspend": False}
    patches = [one[2] for one in server.requests if one[0] == "PATCH"]
    assert patches == [{"fieldManager": "kubectl-persist"}] * 2, "Flux undoes what kubectl... owns"
    help_ = " ".join(plugin("suspend", "--help")[1].replace("│", " ").split())
    assert "A GitOps tool that owns the field reverts it" in help_


SHARD_ID = "s543c5f9a-6cf9-48f4-8225-f3e56d3c8a37"


def test_adopt_creates_a_resource_or_asks_to_take_over(plugin, team):
    cluster = team({"shardId": "s-other"})
    dry = plugin("adopt", "old", "-n", "team", "--shard-id", SHARD_ID, "--profile", "eu", "--dry-run")
    assert yaml.safe_load(dry[1])["spec"] == {"shardId": SHARD_ID, "storageProfile": "eu"}
    assert cluster.get(PERSIST_SHARD, "team", "old") is None
    assert plugin("adopt", "old", "-n", "team", "--shard-id", SHARD_ID)[0] == 0
    assert cluster.get(PERSIST_SHARD, "team", "old")["spec"] == {"shardId": SHARD_ID}
    assert annotations(cluster, name="old") == {}
    assert plugin("adopt", "old", "-n", "team", "--shard-id", SHARD_ID)[0] == 0
    assert annotations(cluster, name="old") == {names.ANNOTATION_TAKE_OVER: SHARD_ID}
    code, _, err = plugin("adopt", "flights", "-n", "team", "--shard-id", SHARD_ID)
    assert (code, "is for shard s-other" in err) == (64, True)


def test_names_that_do_not_exist_are_answered_with_those_that_do(plugin, team):
    team()
    found = plugin("status", "flight", "-n", "team")
    assert found == (1, "", "error: no PersistShard 'flight' in namespace team; there are: flights\n")
    found = plugin("suspend", "nothing", "-n", "team")
    assert found[2].endswith("in namespace team; there are: pshard/flights, ssink/load\n")
    assert "there are none; -n names another namespace" in plugin("gc", "flights", "-n", "other")[2]
    assert plugin("gc", "flights", "-A")[0] == 64


@pytest.mark.parametrize(
    ("denied", "arguments", "right"),
    [
        (
            ("patch", "PersistShard"),
            ["gc", "flights"],
            "patch persistshards.persistshard.io in namespace team is missing",
        ),
        (("find", "PersistShard"), ["status"], "list persistshards.persistshard.io in namespace team is missing"),
        (("find", "Pod"), ["status"], "list pods in namespace team is missing"),
        (("find", "SparkSink"), ["top", "-A"], "list sparksinks.persistshard.io in all namespaces is missing"),
    ],
)
def test_a_missing_right_is_named(plugin, team, denied, arguments, right):
    cluster = team()
    verb, kind = denied
    cluster.deny[denied] = ApiError(f'{kind} is forbidden: User "jane" cannot {verb} resource', status=403)
    place = [] if "-A" in arguments else ["-n", "team"]
    code, out, err = plugin(*arguments, *place)
    assert (code, out) == (1, "")
    assert f"the right to {right}" in err


def test_a_refusal_for_another_reason_keeps_its_words(plugin, team):
    cluster = team()
    cluster.deny["patch", "PersistShard"] = ApiError("admission webhook says no: frozen", status=403)
    assert "admission webhook says no: frozen" in plugin("gc", "flights", "-n", "team")[2]


@pytest.mark.parametrize("status", [409, 429, 503])
def test_a_passing_refusal_is_tried_again(plugin, team, server, status):
    cluster = team()
    server.refuse_next = [ApiError("not now", status=status)]
    assert plugin("gc", "flights", "-n", "team")[0] == 0
    assert list(annotations(cluster)) == [f"{REQUEST}gc"]


def test_output_for_programs_and_for_people(plugin, team, pod, hostile):
    reader = {"id": "r1", "purpose": hostile, "host": "h", "kind": "leased", "heldSeconds": 7300}
    run = {"id": "flights-gc-1", "type": "GC", "outcome": "Succeeded", "startTime": "2026-09-20T00:00:00Z"}
    run |= {"endTime": "2026-09-20T00:01:00Z", "bytesRead": 1000, "cpuSeconds": 2.5}
    team({"holds": {"readers": 1, "writers": 0, "blocking": [reader]}, "history": [run]})
    pod("load-1", sink="load", role="driver")
    table = plugin("holds", "-n", "team")[1]
    assert re.search(r"^flights +r1 .*rm -rf.* +h +leased +2h$", table, re.MULTILINE)
    for arguments in (["holds"], ["status"], ["top"], ["history"], ["uninstall-check"]):
        text = plugin(*arguments, "-n", "team")[1]
        assert all(line.isprintable() for line in text.splitlines()), arguments
        for output, load in (("json", json.loads), ("yaml", yaml.safe_load)):
            raw = plugin(*arguments, "-n", "team", "-o", output)[1]
            assert load(raw)["kind"] == "List", arguments
            assert all(line.isprintable() for line in raw.splitlines()), arguments
    assert json.loads(plugin("holds", "-n", "team", "-o", "json")[1])["items"][0]["purpose"] == hostile
    assert re.search(
        r"^persistshard/flights +GC Succeeded +60s +1.0 kB +2.5s$", plugin("top", "-n", "team")[1], re.MULTILINE
    )
    assert "load-1 (driver) Running" in plugin("status", "-A")[1]


def test_the_log_is_of_the_newest_driver_and_of_the_last_maintenance_pod(plugin, team, pod, server):
    cluster = team({"history": [{"outcome": "Failed", "endTime": "2026-09-20T00:00:00Z", "message": "no memory"}]})
    code, _, err = plugin("logs", "flights", "-n", "team")
    assert (code, "the last run Failed at 2026-09-20T00:00:00Z: no memory" in err) == (64, True)
    pod("load-2", sink="load", role="driver", created="2026-09-20T00:00:02Z")
    pod("load-10", sink="load", role="driver", created="2026-09-20T00:00:09Z")
    pod("load-10-exec", sink="load", role="executor", created="2026-09-20T00:00:10Z")
    beside = {"containers": [{"name": "istio-proxy"}, {"name": "maintain"}]}  # as admission adds one
    pod("flights-gc-1", shard="flights", kind="gc", spec=beside)
    cluster.log_texts |= {"team/load-10": "a\x1b[2Jb\n", "team/flights-gc-1": "collected\n"}
    assert plugin("logs", "load", "-n", "team", "-f")[1:] == ("a [2Jb\n", "pod/load-10\n")
    assert plugin("logs", "flights", "-n", "team", "--tail", "5")[1] == "collected\n"
    query = server.requests[-1][2]
    assert query == {"tailLines": "5", "container": "maintain"}
    assert plugin("logs", "pod/load-2", "-n", "team")[1] == "one\ntwo\n"
    assert plugin("logs", "pod/none", "-n", "team")[0] == 1


def test_an_uninstall_check_has_the_worst_as_its_exit_code(plugin, team):
    cluster = team({"shardId": "s1"})
    code, out, _ = plugin("uninstall-check", "-A")
    assert (code, out.count("stays  ")) == (1, 1)
    cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(finalizers=["persistshard.io/x"]))
    assert plugin("uninstall-check", "-A")[0] == 2
    cluster.edit(PERSIST_SHARD, "team", "flights", lambda one: one["metadata"].update(finalizers=[]))
    cluster.delete(PERSIST_SHARD, "team", "flights")
    assert plugin("uninstall-check", "-n", "team")[0] == 0


def test_usage(plugin, monkeypatch, tmp_path):
    assert plugin("status", "--bogus")[0] == 64
    assert plugin("status", "-n", "a", "-A")[0] == 64
    assert "no context 'x' in the kubeconfig; there are: c" in plugin("status", "--context", "x")[2]
    assert "no access to a cluster" in plugin("status", "--kubeconfig", tmp_path / "none")[2]
    assert plugin("--version")[0] == 0


@pytest.mark.parametrize(("name", "namespace"), [("", "team"), ("..", "team"), (".", "team"), ("flights", "..")])
def test_a_name_of_dots_or_of_nothing_is_refused(plugin, team, name, namespace):
    team()
    code, _, err = plugin("read", name, "-n", namespace)
    assert (code, "can be called" in err) == (64, True)
