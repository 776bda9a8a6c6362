"""Tables and descriptions: columns from the CRDs, readable values, lines cut to the width of a terminal and never in a pipe."""

import json

import pytest
from persist_operator.api.schema_check import printer_columns
from persist_operator.api.times import to_text
from persist_operator.local import view
from persist_operator.local.processes import Child
from persist_operator.views import tables
from persist_operator.views.describe import description

NOW = 1_790_000_000_000


def condition(**fields):
    return {"status": "True", "reason": "Healthy", "message": "", "lastTransitionTime": to_text(NOW - 5000), **fields}


def shard(status=None, name="flights"):
    metadata = {"name": name, "generation": 2, "creationTimestamp": to_text(NOW - 180_000)}
    return {
        "kind": "PersistShard",
        "metadata": metadata,
        "spec": {"schema": {"key": "id STRING"}},
        "status": status or {},
    }


def sink(status=None):
    spec = {
        "shardRef": {"name": "flights"},
        "mode": "Once",
        "input": {"type": "Format", "format": {"name": "parquet", "options": {"path": "in.parquet"}}},
        "envelope": {"type": "Append", "timestampColumn": "at"},
    }
    metadata = {"name": "load", "generation": 1, "creationTimestamp": to_text(NOW - 1000)}
    return {"kind": "SparkSink", "metadata": metadata, "spec": spec, "status": status or {}}


def healthy():
    return {
        "shardId": "s1",
        "store": {"blob": "file:///b", "consensus": "sqlite:///c"},
        "schema": {"key": "id STRING", "value": ""},
        "conditions": [condition(type="Ready", message="all is well")],
        "frontiers": {"since": "0", "upper": "1388548800001", "seqno": 10},
        "storage": {
            "batches": 1,
            "runs": 2,
            "parts": 2,
            "updates": 336776,
            "liveBytes": 4 << 20,
            "liveDiffs": 4,
            "latestRollupSeqno": 7,
        },
        "holds": {"readers": 1, "writers": 0},
        "history": [
            {
                "id": "flights-gc-8",
                "type": "GC",
                "reason": "6 versions can be truncated",
                "startTime": to_text(NOW - 9000),
                "endTime": to_text(NOW - 5000),
                "outcome": "Succeeded",
                "blobsDeleted": 3,
                "diffsTruncated": 6,
                "bytesRead": 2048,
                "bytesWritten": 0,
                "message": "truncated to v7",
            }
        ],
    }


@pytest.mark.parametrize(
    ("json_path", "found"),
    [
        (".metadata.name", "flights"),
        (".status.frontiers.seqno", 10),
        (".status.conditions[?(@.type=='Ready')].reason", "Healthy"),
        (".status.conditions[?(@.type=='Stalled')].reason", None),
        (".status.nothing.here", None),
        (".metadata.name.deeper", None),
    ],
)
def test_lookup_follows_the_json_paths_of_printer_columns(json_path, found):
    assert tables.lookup(shard(healthy()), json_path) == found


@pytest.mark.parametrize(
    ("ago_ms", "text"),
    [
        (0, "0s"),
        (119_000, "119s"),
        (120_000, "2m"),
        (7_199_000, "119m"),
        (7_200_000, "2h"),
        (172_800_000, "2d"),
        (4711 * 86_400_000, "12y"),
        (-5, "0s"),
    ],
)
def test_an_age_is_shortened_as_in_kubectl(ago_ms, text):
    assert tables.age(NOW - ago_ms, NOW) == text


def test_the_age_of_no_time_is_empty():
    assert tables.age(None, NOW) == ""


@pytest.mark.parametrize(
    ("time", "text"),
    [
        ("1388548800001", "2014-01-01T04:00:00.001Z"),
        (1388548800000, "2014-01-01T04:00:00Z"),
        ("17", "17"),
        (2**63 - 1, str(2**63 - 1)),
        ("x", "x"),
    ],
)
def test_an_instant_is_shown_in_iso_beside_its_number(time, text):
    assert tables.instant(time, with_number=False) == text
    assert tables.instant(time) == (str(time) if text == str(time) else f"{time} ({text})")


def test_a_table_leaves_out_empty_columns_and_is_cut_to_the_width():
    rows = [["a", "", "a long\nmessage"], ["bbb", "", ""]]
    assert tables.text_table(["X", "Y", "Z"], rows, width=None) == ["X     Z", "a     a long message", "bbb"]
    assert tables.text_table(["X", "Y", "Z"], rows, width=12)[1] == "a     a lon…"


@pytest.mark.slow
def test_the_columns_of_a_shard_are_those_of_its_definition():
    lines = tables.resources_table(
        [shard(healthy())], printer_columns("PersistShard"), wide=False, now_ms=NOW, width=None
    )
    assert lines[0].split() == ["NAME", "READY", "STATUS", "UPPER", "BATCHES", "BYTES", "AGE"]
    assert lines[1].split()[:4] == ["flights", "True", "Healthy", "2014-01-01T04:00:00.001Z"]
    assert "4.2 MB" in lines[1]
    assert lines[1].endswith("3m")
    wide = tables.resources_table(
        [shard(healthy())], printer_columns("PersistShard"), wide=True, now_ms=NOW, width=None
    )
    assert {"SINCE", "SEQNO", "SHARD", "MESSAGE"} <= set(wide[0].split())
    assert "SINCE" not in lines[0]
    assert wide[1].endswith("all is well")


def test_a_resource_that_is_not_ready_shows_its_message():
    ready = condition(type="Ready", status="False", reason="StorageUnreachable", message="file:///b: no\nspace left")
    lines = tables.resources_table(
        [shard({"conditions": [ready]})], printer_columns("PersistShard"), wide=False, now_ms=NOW, width=None
    )
    assert lines[1].endswith("file:///b: no space left")


def test_a_sink_shows_its_rows_and_updates():
    status = {"progress": {"rowsRead": 336776, "updatesWritten": 336770}, "attempt": 1, "executors": {"running": 0}}
    lines = tables.resources_table([sink(status)], printer_columns("SparkSink"), wide=False, now_ms=NOW, width=None)
    assert {"ROWS", "WRITTEN"} <= set(lines[0].split())
    assert "EXECUTORS" not in lines[0]
    assert {"336,776", "336,770"} <= set(lines[1].split())


def child(tmp_path, *, log="", kind="driver", exit_code=None, name="load-abc-1", owner="SparkSink/load"):
    (tmp_path / "log").write_text(log)
    return Child(
        name=name,
        owner=owner,
        labels={"kind": kind, "reason": "it is due"},
        started_ms=NOW - 7000,
        ended_ms=None,
        exit_code=exit_code,
        report=None,
        log=tmp_path / "log",
    )


def test_runs_are_shown_in_the_order_they_began_with_running_ones_last(tmp_path):
    attempt = {
        "attempt": 2,
        "revision": "0123456789",
        "startTime": to_text(NOW - 60_000),
        "endTime": to_text(NOW - 30_000),
        "outcome": "Failed",
        "message": "x",
    }
    documents = [shard(healthy()), sink({"history": [attempt]})]
    children = [child(tmp_path), child(tmp_path, exit_code=0, name="ended")]
    lines = tables.runs_table(documents, children, wide=True, now_ms=NOW, width=None)
    assert [line.split()[0] for line in lines] == ["NAME", "load-01234567-2", "flights-gc-8", "load-abc-1"]
    assert lines[2].split()[1:6] == ["GC", "Succeeded", "4s", "2.0", "kB"]
    assert "6 versions can be truncated" in lines[2]
    assert lines[3].split()[1:4] == ["Sink", "Running", "7s"]
    narrow = tables.runs_table(documents, children, wide=False, now_ms=NOW, width=None)
    assert "WHY" not in narrow[0]
    assert "WRITTEN" not in narrow[0]
    found = tables.runs(documents, children)
    assert [(one["name"], one["outcome"]) for one in found] == [
        ("flights-gc-8", "Succeeded"),
        ("load-01234567-2", "Failed"),
        ("load-abc-1", "Running"),
    ]


def test_progress_shows_what_runs_and_what_waits_only(tmp_path):
    log = "not json\n" + json.dumps({"event": "stage", "stage": 4, "done": 1, "tasks": 2}) + "\nWARN\n[1]\n"
    waiting = sink({"driver": {"phase": "Creating"}}) | {"metadata": {"name": "other"}}
    lines = view.progress([shard(healthy()), sink(), waiting], [child(tmp_path, log=log)], now_ms=NOW, width=100)
    assert [" ".join(line.split()) for line in lines] == [
        "load-abc-1 sink 7s stage 4: 1 of 2 tasks",
        "SparkSink/other waits for a free place",
    ]


def test_a_shard_is_described():
    text = "\n".join(description(shard(healthy()), now_ms=NOW, width=None))
    assert text.startswith("PersistShard/flights is ready: Healthy\n  all is well\n")
    assert "336,776 updates in 1 batch (2 runs, 2 parts, 4.2 MB)" in text
    assert "v10, 4 versions in the log, newest rollup at v7" in text
    assert "2014-01-01T04:00:00.001Z" in text
    assert "flights-gc-8" in text
    assert "key: id STRING" in text


def test_a_shard_shows_what_is_next_and_how_much_a_merge_would_free():
    status = healthy()
    plain = "\n".join(description(shard(status), now_ms=NOW, width=None))
    assert "Amplification" not in plain
    assert "Next" not in plain
    status["storage"] |= {"amplificationPercent": 250}
    status["plan"] = {
        "id": "compact-1", "type": "Compaction", "reason": "70 uncompacted batches", "runner": "Pod", "approved": False,
        "estimatedBytes": 4 << 20, "estimatedSeconds": 600,
    }  # fmt: skip
    text = "\n".join(description(shard(status), now_ms=NOW, width=None))
    assert "250% of the updates that a merge would leave" in text
    assert "Compaction compact-1: 70 uncompacted batches, 4.2 MB, about 10m; waits for an approval" in text
    wide = tables.resources_table([shard(status)], printer_columns("PersistShard"), wide=True, now_ms=NOW, width=None)
    assert "AMP%" in wide[0].split()


def test_a_failed_sink_is_described_with_its_failure():
    failure = {
        "time": to_text(NOW),
        "podName": "load-abc-1",
        "class": "Configuration",
        "message": "input is missing\nlast log lines",
    }
    status = {
        "conditions": [condition(type="Ready", status="False", reason="ConfigurationFailed")],
        "lastFailure": failure,
    }
    lines = description(sink(status), now_ms=NOW, width=60)
    assert lines[0] == "SparkSink/load is not ready: ConfigurationFailed"
    text = "\n".join(lines)
    assert "parquet in.parquet" in text
    assert "Append to PersistShard/flights at the times in at, once" in text
    assert "load-abc-1 Configuration: input is missing\n" in text


def test_a_resource_without_status_is_described_as_pending():
    assert "is not known yet: Pending" in description(shard(), now_ms=NOW, width=None)[0]


def test_a_description_obeys_no_name_of_a_column():
    status = healthy() | {"schema": {"key": "`a\x1b[2J` INT", "value": "`b\nREADY` INT, `c\u202ed` INT"}}
    lines = description(shard(status), now_ms=NOW, width=None)
    assert {"Key             `a [2J` INT", "Value           `b READY` INT, `cd` INT"} <= set(lines)
