"""The views as functions: resources in, texts out."""

import pytest
from persist_operator.api import names
from persist_operator.console.fleet import Query, fleet
from persist_operator.console.holds import holds_page
from persist_operator.console.port import Event, Log, Unseen
from persist_operator.console.shard import shard_page
from persist_operator.console.sink import sink_page
from persist_operator.console.texts import ago, due, instant, number, seconds, span

NOW = 1_790_000_000_000
NOTHING = Unseen("not read")


def shard(name="orders", namespace="team", **status):
    return {"kind": "PersistShard", "metadata": {"namespace": namespace, "name": name}, "spec": {}, "status": status}


def ready(status="True", reason="Healthy", message=""):
    return [{"type": "Ready", "status": status, "reason": reason, "message": message}]


FLEET = [
    shard(
        "a",
        frontiers={"upper": "5", "upperLagSeconds": 90},
        storage={"liveBytes": 10, "batches": 3},
        conditions=ready(),
    ),
    shard(
        "b",
        frontiers={"upper": ""},
        storage={"liveBytes": 2000, "batches": 1},
        conditions=ready("False", "NoStore", "Down"),
    ),
    shard("c", "other", debt={"deadlineTime": "2026-09-21T14:00:00Z"}),
]


def page(**query):
    return fleet(FLEET, [], Query.of(query), now_ms=NOW)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, "cab"),
        ({"q": "nostore"}, "b"),
        ({"q": "team down"}, "b"),
        ({"q": "team absent"}, ""),
        ({"namespace": "other"}, "c"),
        ({"ready": "False"}, "b"),
        ({"ready": "Unknown"}, "c"),
        ({"ready": "nonsense"}, "cab"),
        ({"shards": "bytes"}, "abc"),
        ({"shards": "-bytes"}, "bac"),
        ({"shards": "-name"}, "bac"),
        ({"shards": "-lag"}, "acb"),
        ({"shards": "nonsense"}, "cab"),
        ({"shards": "deadline"}, "cab"),
    ],
    ids=str,
)
def test_the_query_filters_and_sorts_the_fleet(query, names):
    assert "".join(row.name for row in page(**query).shards) == names


def test_rows_show_what_the_status_has():
    c, a, b = page().shards
    assert (a.upper, a.lag, a.batches, a.bytes, a.ready.word) == ("5", "90s", "3", "10 B", "Ready")
    assert (b.upper, b.ready.word, b.ready.tone) == ("closed", "Not ready", "bad")
    assert (c.upper, c.ready.word, c.ready.reason, c.is_late) == ("", "Unknown", "Pending", True)
    assert dict(page().counts) == {"shards": 3, "sinks": 0, "ready": 1, "not ready": 1, "unknown": 1}


@pytest.mark.parametrize(("order", "names"), [("run", "ba"), ("-run", "ba"), ("mode", "ab")])
def test_a_sink_without_a_value_comes_last_in_both_directions(order, names):
    sinks = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}, "status": {"run": {"state": "Succeeded"}}}]
    assert "".join(row.name for row in fleet([], sinks, Query.of({"sinks": order}), now_ms=NOW).sinks) == names


def test_a_heading_sorts_by_its_column_and_then_the_other_way_and_keeps_the_filter():
    def heading(title, **query):
        return next(one for one in page(**query).shard_headings if one.title == title)

    assert heading("Bytes", q="a b").href == "/?q=a+b&shards=-bytes"
    assert heading("Bytes", shards="-bytes").href == "/?shards=bytes"
    assert heading("Bytes", shards="-bytes").order == "descending"
    assert heading("Shard").order == "ascending"
    assert heading("Shard").href == "/?shards=-name"


def made(resource, **changes):
    given = {"sinks": [], "running": [], "why_not": "", "now_ms": NOW, **changes}
    return shard_page(resource, given.pop("engine", NOTHING), given.pop("events", []), **given)


@pytest.mark.parametrize("broken", [None, 7, "text", [], [7], {"a": 1}], ids=str)
@pytest.mark.parametrize(
    "field",
    [
        "frontiers",
        "storage",
        "holds",
        "debt",
        "maintenance",
        "history",
        "conditions",
        "plan",
        "store",
        "schema",
        "progress",
        "run",
    ],
)
def test_a_page_of_a_status_of_another_shape_is_still_a_page(field, broken):
    resource = shard(**{field: broken})
    assert made(resource).name == "orders"
    assert sink_page(resource, Log("", ""), [], now_ms=NOW).name == "orders"
    assert len(fleet([resource], [resource], Query(), now_ms=NOW).shards) == 1
    assert holds_page([(resource, NOTHING)], now_ms=NOW).shards == 1


HELD = {"id": "r1", "purpose": "report", "since": "5", "host": "pod-1", "heldSeconds": 130}


def test_without_stores_the_page_draws_what_the_status_has_and_says_why_there_is_no_more():
    seen = made(
        shard(
            frontiers={"since": "5", "upper": "9"},
            holds={"blocking": [HELD]},
        )
    )
    assert seen.timeline is not None
    assert [lane.label for lane in seen.timeline.lanes] == ["shard", "report"]
    assert (seen.spine, seen.versions, seen.unseen) == (None, (), "not read")
    assert [(row.purpose, row.hostname, row.age) for row in seen.holds] == [("report", "pod-1", "over 2m")]
    assert made(shard()).timeline is None


def test_the_page_shows_what_audits_found():
    seen = made(
        shard(
            storage={"missingBlobs": 2, "orphanBlobs": 3, "orphanBytes": 4000},
            verification={"verdict": "MissingBlobs", "time": "2026-09-21T14:03:20Z", "message": "p1 is not stored"},
            maintenance={"orphanScan": {"lastResult": "Succeeded"}},
        )
    )
    assert dict(seen.debt) == {
        "Missing blobs": "2",
        "Orphans": "3 (4.0 kB)",
        "Verified": "MissingBlobs 10m ago, p1 is not stored",
    }
    assert [(row.kind, row.tone) for row in seen.upkeep] == [("Orphan scan", "good")]


@pytest.mark.parametrize(
    ("plan", "shown"),
    [
        ({"id": "p1", "type": "Compaction", "estimatedBytes": 2000, "estimatedSeconds": 90}, True),
        ({"id": ""}, False),
        ({"id": 7}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_plan_is_shown_when_it_has_an_id(plan, shown):
    seen = made(shard(plan=plan), why_not="no right").plan
    assert (seen is not None) == shown
    if seen is not None:
        assert dict(seen.facts) == {"What": "Compaction", "Reads about": "2.0 kB", "Takes about": "90s"}
        assert (seen.approved, seen.why_not) == (False, "no right")


def test_the_page_of_a_shard_names_the_sinks_that_write_it():
    def sink(name, namespace, of):
        return {"metadata": {"namespace": namespace, "name": name}, "spec": {"shardRef": {"name": of}}}

    sinks = [sink("x", "team", "orders"), sink("y", "other", "orders"), sink("z", "team", "else")]
    assert made(shard(), sinks=sinks).sinks == ("x",)


def test_a_secret_in_a_log_is_on_no_page():
    resource = {"metadata": {"namespace": "team", "name": "load"}, "spec": {}, "status": {}}
    log = Log("load-1", "one\npassword=hunter2\nredis://u:hunter2@h/0\n\ttwo")
    assert sink_page(resource, log, [], now_ms=NOW).log.text == "one\npassword=***\nredis://***@h/0\n\ttwo"


def test_the_page_of_a_sink_shows_progress_failure_and_rollout():
    resource = {
        "metadata": {"namespace": "team", "name": "load"},
        "spec": {
            "shardRef": {"name": "orders"},
            "mode": "Streaming",
            "input": {"type": "Shard", "shard": {"name": "raw"}},
        },
        "status": {
            "progress": {
                "upper": "",
                "rowsRead": 1234,
                "running": {"stage": "Reading", "tasks": 8, "tasksDone": 3, "lagSeconds": 0},
            },
            "lastFailure": {"class": "OutOfMemory", "exitCode": 137, "message": "killed"},
            "rollout": {"state": "Standby", "from": "a1", "to": "b2"},
            "history": [
                {
                    "attempt": 1,
                    "outcome": "Failed",
                    "startTime": "2026-09-20T00:00:00Z",
                    "endTime": "2026-09-20T00:01:30Z",
                }
            ],
        },
    }
    seen = sink_page(
        resource, Log("load-1", "line"), [Event(time="now", warning=True, reason="R", message="m")], now_ms=NOW
    )
    assert dict(seen.progress) == {"Written up to": "closed", "Rows read": "1,234"}
    assert dict(seen.running) == {"Stage": "Reading", "Tasks": "3 of 8", "Lag": "0s"}
    assert (seen.done, seen.tasks) == (3, 8)
    assert dict(seen.failure) == {"Cause": "OutOfMemory", "Exit code": "137"}
    assert dict(seen.rollout)["Revisions"] == "a1 → b2"
    assert [(row.outcome, row.took) for row in seen.history] == [("Failed", "90s")]
    assert dict(seen.facts)["Reads"] == "shard raw"
    assert "Paused" not in dict(seen.facts)


@pytest.mark.parametrize(("value", "shown"), [("true", "yes"), ("yes", "yes"), ("false", None), (None, None)])
def test_the_pages_show_a_pause(value, shown):
    annotations = {} if value is None else {"annotations": {names.ANNOTATION_PAUSED: value}}
    metadata = {"namespace": "team", "name": "a", **annotations}
    sink = sink_page({"metadata": metadata, "spec": {}, "status": {}}, Log("load-1", "line"), [], now_ms=NOW)
    assert dict(sink.facts).get("Paused") == shown
    shard = made({"metadata": metadata, "spec": {}, "status": {}})
    assert dict(shard.facts).get("Paused") == shown


@pytest.mark.parametrize(
    ("made_text", "expected"),
    [
        (span(850), "850 ms"),
        (span(119_000), "119s"),
        (span(120_000), "2m"),
        (span(3 * 86_400_000), "3d"),
        (span(729 * 86_400_000), "729d"),
        (seconds(4711 * 86_400), "12y"),
        (seconds(0), "0s"),
        (seconds(None), ""),
        (ago("2026-09-21T14:13:20Z", NOW), "0 ms ago"),
        (ago("2026-09-21T14:23:20Z", NOW), "in 10m"),
        (ago("nonsense", NOW), ""),
        (due("2026-09-21T14:12:20Z", NOW), "due since 60s"),
        (due("2026-09-21T14:23:20Z", NOW), "in 10m"),
        (due(None, NOW), ""),
        (instant(None), "closed"),
        (instant("41"), "41"),
        (instant("12345"), "12345"),
        (instant("1790000000000"), "2026-09-21T14:13:20Z"),
        (number("9" * 40), None),
        (number(True), None),
    ],
)
def test_texts(made_text, expected):
    assert made_text == expected
