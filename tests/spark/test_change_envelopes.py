"""Debezium and Diff: events of real connectors and rows with multiplicities become the right contents, or are refused by name."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from persist_engine import Schema
from persist_spark.envelopes.debezium import debezium_commands
from persist_spark.failures import ExitCode, classify
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType

pytestmark = [pytest.mark.spark, pytest.mark.slow]
DEBEZIUM = Envelope(type=EnvelopeType.DEBEZIUM)
ROW = "STRUCT<id: INT, name: STRING, city: STRING>"
POSTGRES = (
    f"before {ROW}, after {ROW}, op STRING, ts_ms BIGINT, "
    "source STRUCT<version: STRING, connector: STRING, ts_ms: BIGINT, snapshot: STRING, db: STRING, txId: BIGINT, lsn: BIGINT>, "
    "transaction STRING"
)
MYSQL = (
    f"before {ROW}, after {ROW}, op STRING, ts_ms BIGINT, "
    "source STRUCT<connector: STRING, ts_ms: BIGINT, file: STRING, pos: BIGINT, row: INT, server_id: BIGINT>"
)


def row(id_: int | None, name: str | None = None) -> dict[str, Any]:
    return {"id": id_, "name": name, "city": "not in the shard"}


def postgres(op: str | None, lsn: int | None, before: Any = None, after: Any = None) -> dict[str, Any]:
    """An event as Postgres' connector writes it, without its schema."""
    source = {
        "version": "2.7",
        "connector": "postgresql",
        "ts_ms": 5,
        "snapshot": "false",
        "db": "d",
        "txId": 1,
        "lsn": lsn,
    }
    return {"before": before, "after": after, "op": op, "ts_ms": 9, "source": source, "transaction": None}


def mysql(op: str, at: tuple[str, int, int], before: Any = None, after: Any = None) -> dict[str, Any]:
    """The same of MySQL's connector. The file and the position in the binary log give the order; seconds do not."""
    file, pos, number = at
    source = {"connector": "mysql", "ts_ms": 1000, "file": file, "pos": pos, "row": number, "server_id": 1}
    return {"before": before, "after": after, "op": op, "ts_ms": 9, "source": source}


@pytest.fixture
def target(make_target: Any) -> Any:
    """A shard with one row at key 9."""
    made = make_target("id BIGINT", "name STRING")
    made.write({((9,), ("nine",)): 1})
    return made


def test_events_of_postgres(target: Any):
    events = [
        postgres("r", 10, None, row(1, "one")),
        postgres("r", 10, None, row(2, "two")),
        postgres("u", 30, None, row(1, "uno")),  # without its old values: replica identity default
        postgres("u", 20, row(1, "one"), row(1, "eins")),  # out of order
        postgres("c", 21, None, row(3, "three")),
        postgres("u", 40, {"id": 3, "name": None, "city": None}, row(4, "four")),  # another key
        postgres("d", 50, {"id": 2, "name": None, "city": None}),
        {"before": None, "after": None, "op": None},  # a tombstone
        postgres("c", 60, None, row(2, "zwei")),
        postgres("d", 70, row(9, "nine")),
        postgres("c", 5, None, row(8, None)),
    ]
    report = target.run(events[::-1] + events[:3], POSTGRES, DEBEZIUM)
    assert report.rows_read == len(events) + 2
    assert target.state() == {(1,): ("uno",), (2,): ("zwei",), (4,): ("four",), (8,): (None,)}
    assert target.run(events, POSTGRES, DEBEZIUM).updates_written == 0
    assert target.run([postgres("d", 1, row(1))], POSTGRES, DEBEZIUM).updates_written == 1, "a later run wins"


def test_events_of_mysql_are_ordered_by_file_position_and_row(target: Any):
    events = [
        mysql("c", ("bin.999999", 900, 0), None, row(1, "a")),
        mysql("u", ("bin.1000000", 4, 0), row(1, "a"), row(1, "b")),
        mysql("u", ("bin.1000000", 4, 1), row(1, "b"), row(1, "c")),
        mysql("c", ("bin.1000000", 20, 0), None, row(2, "x")),
        mysql("d", ("bin.1000000", 30, 0), row(2, "x")),
    ]
    target.run(events[::-1], MYSQL, DEBEZIUM)
    assert target.state() == {(1,): ("c",), (9,): ("nine",)}


def test_the_order_is_a_field_of_the_event(target: Any):
    events = [mysql("c", ("f", 1, 0), None, row(1, "last")), mysql("c", ("f", 2, 0), None, row(1, "first"))]
    for event, server in zip(events, (8, 7), strict=True):
        event["source"]["server_id"] = server
    target.run(events, MYSQL, Envelope(type=EnvelopeType.DEBEZIUM, order_column="source.server_id"))
    assert target.state()[(1,)] == ("last",)


NO_LSN = POSTGRES.replace("lsn: BIGINT", "lsn: STRING")
FAULTS = [
    (postgres("t", 1), r"op t \(truncate\).*exclude it with input\.format\.sql"),
    (postgres("m", 1, None, row(1)), "op m is none of c, r, u, d"),
    (postgres(None, 1, None, row(1)), "op is null in an event that is no tombstone"),
    (postgres("c", 1, row(1)), "after is null in an event with op c"),
    (postgres("d", 1), "before is null in a delete"),
    (postgres("d", 1, row(None, "a")), "before.id is null in a delete"),
    (postgres("u", 1, row(None, "a"), row(1, "b")), "before.id is null in an event of key"),
    (postgres("u", 1, None, row(5, "__debezium_unavailable_value")), r'after\.name was not logged .* key \{"id":5\}'),
]


def test_each_event_that_cannot_be_written_says_why(local_spark: Any, tmp_path: Any):
    fine = postgres("c", 0, None, row(6, "fine"))
    (tmp_path / "events.json").write_text(
        "".join(f"{json.dumps(event)}\n" for event in [fine, *(e for e, _ in FAULTS)])
    )
    frame = local_spark.read.schema(POSTGRES).json(str(tmp_path / "events.json"))
    commands = debezium_commands(frame, Schema.from_ddl("id BIGINT", "name STRING"), DEBEZIUM)
    none, *faults = dict.fromkeys(each["fault"] for each in commands.collect())  # a change of a key is two commands
    assert none is None
    assert len(faults) == len(FAULTS)
    assert [text for text, (_, message) in zip(faults, FAULTS, strict=True) if not re.search(message, text)] == []


#: As Postgres' connector writes each type of a large value that an update did not change (UnchangedToastedPlaceholder).
NOT_LOGGED: dict[str, Any] = {
    "STRING": "__debezium_unavailable_value",
    "BINARY": base64.b64encode(b"__debezium_unavailable_value").decode(),
    "ARRAY<STRING>": ["__debezium_unavailable_value"],
    "ARRAY<INT>": list(b"__debezium_unavailable_value"),
    "ARRAY<BIGINT>": list(b"__debezium_unavailable_value"),
}


@pytest.mark.parametrize("kind", NOT_LOGGED)
def test_a_value_that_was_not_logged_is_no_value_whatever_its_type(local_spark: Any, tmp_path: Any, kind: str):
    rows = [{"id": 1, "name": NOT_LOGGED[kind]}, {"id": 2, "name": None}]
    (tmp_path / "events.json").write_text("".join(f"{json.dumps(postgres('u', 1, None, one))}\n" for one in rows))
    frame = local_spark.read.schema(POSTGRES.replace("name: STRING", f"name: {kind}")).json(str(tmp_path))
    commands = debezium_commands(frame, Schema.from_ddl("id BIGINT", f"name {kind}"), DEBEZIUM)
    faults = {each["k0"]: each["fault"] for each in commands.collect()}
    assert faults == {1: 'after.name was not logged in an event of key {"id":1}', 2: None}


REFUSED: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "a fault": (
        POSTGRES,
        [postgres("c", 0, None, row(6, "fine")), FAULTS[0][0]],
        r"cannot be written: op t \(truncate\)",
    ),
    "equal orders": (POSTGRES, [postgres("c", 1, None, row(5, text)) for text in "ab"], r'several .* key \{"id":5\}'),
    "an order as text": (NO_LSN, [], r"source\.lsn is string, must be bigint"),
    "flattened": (
        "id BIGINT, name STRING, op STRING",
        [],
        "no column before, after.*write flattened rows with an Upsert",
    ),
    "with its schema": ("schema STRING, payload STRING", [], r"select payload\.\* with input\.format\.sql"),
    "no key": (POSTGRES.replace(ROW, "STRUCT<name: STRING>", 1), [], r"before has no field id \(key field\)"),
    "no value": (f"before {ROW}, after STRUCT<id: INT>, op STRING", [], r"after has no field name \(value field\)"),
    "before as a text": (POSTGRES.replace(ROW, "STRING", 1), [], "before is string, must be a struct; declare it"),
    "a wider key": (POSTGRES.replace("id: INT", "id: DOUBLE"), [], "before.id is double, which does not fit bigint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_events_that_cannot_be_written_are_refused_before_anything_is_written(target: Any, case: str):
    columns, events, message = REFUSED[case]
    before = target.footprint()
    with pytest.raises(ConfigurationError, match=message):
        target.run(events, columns, DEBEZIUM)
    assert target.footprint() == before


DIFF, COLUMNS = Envelope(type=EnvelopeType.DIFF, diff_column="n"), "id BIGINT, name STRING, n INT"


def diffs(*rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(("id", "name", "n", "t"), row, strict=False)) for row in rows]


def test_rows_are_added_as_often_as_their_diff_says(target: Any):
    report = target.run(diffs((9, "nine", -1), (1, "a", 3), (1, "a", -2), (2, "b", 0), (3, "c", 1)), COLUMNS, DIFF)
    assert (report.rows_read, report.updates_written) == (5, 3)
    assert target.state() == {(1,): ("a",), (3,): ("c",)}


def test_diffs_have_times_of_their_own(make_target: Any):
    target = make_target("id BIGINT", "name STRING")
    timed = Envelope(type=EnvelopeType.DIFF, diff_column="n", timestamp_column="t")
    target.run(diffs((1, "a", 1, 10), (1, "a", -1, 20), (1, "b", 1, 20)), f"{COLUMNS}, t BIGINT", timed)
    assert target.client.recent_upper(target.id).time == 21
    assert target.state() == {(1,): ("b",)}
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        assert reader.snapshot(15).to_table().column("val").to_pylist() == [{"name": "a"}]
    with pytest.raises(ConfigurationError, match="the envelope Diff cannot change written times"):
        target.run(diffs((1, "a", 1, 20)), f"{COLUMNS}, t BIGINT", timed)


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        (COLUMNS, diffs((1, "a", 1), (2, "b", None)), r'diffColumn: n is null in the row with key \{"id":2\}'),
        ("id BIGINT, name STRING, n DOUBLE", [], "diffColumn: n is double, must be a whole number"),
        ("id BIGINT, name STRING", [], r"missing: n \(diffColumn\)"),
    ],
)
def test_wrong_diffs_are_refused(target: Any, columns: str, rows: list[Any], message: str):
    before = target.footprint()
    with pytest.raises(Exception, match="diffColumn") as caught:
        target.run(rows, columns, DIFF)
    failure = classify(caught.value)
    assert failure.exit_code is ExitCode.CONFIGURATION
    assert re.search(message, failure.message)
    assert target.footprint() == before
