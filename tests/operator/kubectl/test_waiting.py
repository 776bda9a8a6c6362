"""Whether a request was carried out, from states of a resource as the operator writes them."""

import pytest
from persist_operator.kubectl.waiting import Request, seen

RUN = "flights-compact-120"


def shard(handled=None, block=None, history=(), spec=None, **status):
    requests = {} if handled is None else {"lastHandledRequests": handled}
    blocks = {} if block is None else {"maintenance": {"compaction": block}}
    return {
        "kind": "PersistShard",
        "spec": spec or {},
        "status": {**requests, **blocks, "history": list(history), **status},
    }


def not_ready(kind="Ready", status="False"):
    return [{"type": kind, "status": status, "reason": "Unreachable", "message": "the store is away"}]


COMPACT = Request(verb="compact", token="t1")
STARTED = Request(verb="compact", token="t1", run=RUN)


@pytest.mark.parametrize(
    ("document", "request_", "stage", "text"),
    [
        (None, COMPACT, "Gone", "the resource is gone"),
        ({"kind": "PersistShard", "spec": {}}, COMPACT, "Waiting", "waits for the operator"),
        (shard(handled={"compact": "t0"}), COMPACT, "Waiting", "waits for the operator"),
        (shard(spec={"suspend": True}), COMPACT, "Waiting", "waits: the resource is suspended"),
        (shard(conditions=not_ready()), COMPACT, "Waiting", "waits: Unreachable: the store is away"),
        (shard(conditions=not_ready("Stalled", "True")), COMPACT, "Waiting", "waits: Unreachable: the store is away"),
        (shard(conditions=not_ready("CompactionCurrent")), COMPACT, "Waiting", "waits: Unreachable: the store is away"),
        (shard(handled={"compact": "t1"}, block={"jobName": RUN}), COMPACT, "Running", f"{RUN} runs"),
        (
            shard(handled={"compact": "t1"}, block={"jobName": RUN, "settledJob": "flights-compact-90"}),
            COMPACT,
            "Running",
            f"{RUN} runs",
        ),
        (
            shard(handled={"compact": "t1"}, block={"jobName": RUN, "settledJob": RUN, "lastResult": "Succeeded"}),
            COMPACT,
            "Succeeded",
            f"{RUN} Succeeded",
        ),
        (
            shard(
                handled={"compact": "t1"},
                block={"jobName": RUN, "settledJob": RUN, "lastResult": "Failed", "message": "no memory\nmore"},
            ),
            COMPACT,
            "Failed",
            f"{RUN} Failed: no memory",
        ),
        # The next run began before this state was seen: the history has the one that was requested.
        (
            shard(
                handled={"compact": "t2"},
                block={"jobName": "flights-compact-130"},
                history=[{"id": RUN, "outcome": "Skipped", "message": "nothing to do"}],
            ),
            STARTED,
            "Succeeded",
            f"{RUN} Skipped: nothing to do",
        ),
        # A longer token than a status holds.
        (
            shard(handled={"compact": "t" * 64}, block={"jobName": RUN}),
            Request(verb="compact", token="t" * 80),
            "Running",
            f"{RUN} runs",
        ),
        (shard(handled={"accept-log": "t1"}), Request(verb="accept-log", token="t1"), "Succeeded", "done"),
    ],
)
def test_a_request_of_a_shard(document, request_, stage, text):
    found = seen(document, request_)
    assert (found.stage, found.text) == (stage, text)
    assert found.ended == (stage not in {"Waiting", "Running"})


def test_the_run_of_a_request_is_remembered_when_another_begins():
    first = seen(shard(handled={"compact": "t1"}, block={"jobName": RUN}), COMPACT)
    later = shard(
        handled={"compact": "t1"}, block={"jobName": "flights-compact-130", "settledJob": RUN, "lastResult": "Failed"}
    )
    assert seen(later, first.request).stage == "Failed"
    assert seen(later, COMPACT).stage == "Running", "without that, the next run would be taken for the one requested"


APPROVE = Request(verb="approve", token="4f2c", kind="Compaction", before=frozenset({"flights-compact-90"}))


@pytest.mark.parametrize(
    ("handled", "history", "stage"),
    [
        ({}, [], "Waiting"),
        ({"approve": "4f2c"}, [], "Running"),
        ({"approve": "4f2c"}, [{"id": "flights-compact-90", "type": "Compaction", "outcome": "Failed"}], "Running"),
        ({"approve": "4f2c"}, [{"id": "flights-gc-91", "type": "GC", "outcome": "Failed"}], "Running"),
        ({"approve": "4f2c"}, [{"id": RUN, "type": "Compaction", "outcome": "Succeeded"}], "Succeeded"),
        ({"approve": "4f2c"}, [{"id": RUN, "type": "Compaction", "outcome": "Conflict"}], "Failed"),
    ],
)
def test_an_approval_ends_with_the_run_of_its_plan(handled, history, stage):
    assert seen(shard(handled=handled, history=history), APPROVE).stage == stage


def sink(verb, mode="Once", **status):
    return {"kind": "SparkSink", "spec": {"mode": mode}, "status": {"lastHandledRequests": {verb: "t"}, **status}}


RUNNING = {"podName": "load-1", "phase": "Running"}


@pytest.mark.parametrize(
    ("document", "verb", "stage", "text"),
    [
        (
            sink("restart", run={"state": "Running"}, driver={"podName": "load-1", "phase": "Creating"}),
            "restart",
            "Running",
            "load-1 is creating",
        ),
        (sink("restart", run={"state": "Running"}, driver=RUNNING), "restart", "Running", "load-1 is running"),
        (
            sink("restart", "Streaming", run={"state": "Running"}, driver=RUNNING),
            "restart",
            "Succeeded",
            "load-1 runs",
        ),
        (sink("restart", run={"state": "Succeeded"}, driver=RUNNING), "restart", "Succeeded", "load-1 succeeded"),
        (
            sink("restart", run={"state": "Failed"}, driver=RUNNING, lastFailure={"message": "boom"}),
            "restart",
            "Failed",
            "load-1 failed: boom",
        ),
        (sink("promote", rollout={"state": "Promoting"}), "promote", "Running", "rollout: Promoting"),
        (sink("promote"), "promote", "Succeeded", "the new revision runs"),
        (
            sink("promote", rollout={"state": "RolledBack", "message": "it differs"}),
            "promote",
            "Failed",
            "the rollout was rolled back: it differs",
        ),
    ],
)
def test_a_request_of_a_sink(document, verb, stage, text):
    found = seen(document, Request(verb=verb, token="t"))
    assert (found.stage, found.text) == (stage, text)
