"""`onError: Collect`: a row that cannot be written becomes an error beside the rows, once, and costs no other row."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from envelope_run import Target
from persist_spark.inputs.format import read_input
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, OnError

pytestmark = [pytest.mark.spark, pytest.mark.slow]
KEY, VALUE = "id BIGINT, err STRING", "name STRING"


def collect(kind: EnvelopeType, **columns: str) -> Envelope:
    return Envelope(type=kind, on_error=OnError.COLLECT, **columns)


@pytest.fixture
def target(make_target: Any) -> Target:
    return make_target(KEY, VALUE)


def held(target: Target) -> Counter[tuple[Any, ...]]:
    """(id, err, name) with its diff."""
    upper = target.client.recent_upper(target.id).time
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        rows = reader.snapshot(upper - 1).to_table().to_pylist()
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        found[(*row["key"].values(), *row["val"].values())] += row["diff"]
    return found


def run_lines(target: Target, lines: list[str], columns: str, envelope: Envelope, **given: Any) -> Any:
    """Runs a sink over a file of these lines, which leaves it to the sink what becomes of a bad one."""
    path = target.folder / f"lines{target.runs}.json"
    path.write_text("".join(line + "\n" for line in lines))
    input_ = {"options": {"path": str(path)}, "keeps_malformed": True, **given}
    return target.run([], columns, envelope, input=input_)


def test_an_append_adds_a_row_for_each_good_record_and_an_error_for_each_bad_one(target):
    lines = ['{"id": 1, "name": "a"}', '{"id": 2, "na', '{"id": "x", "name": "b"}', '{"id": 3, "name": "c"}']
    report = run_lines(target, lines, "id BIGINT, name STRING", collect(EnvelopeType.APPEND))
    assert (report.rows_read, report.errors, report.updates_written) == (4, 2, 4)
    assert "2 of 4 rows are errors" in report.to_json(duration_ms=1)["message"]
    found = held(target)
    assert {row for row in found if row[1] is None} == {(1, None, "a"), (3, None, "c")}
    errors = sorted(err for _, err, _ in found if err)
    assert re.fullmatch(
        r'the json record does not parse: \{"id": "x", "name": "b"\} \(in file:.*/lines0.json\)', errors[0]
    )
    assert '{"id": 2, "na' in errors[1]


def test_sql_sees_the_records_that_parse_and_the_others_are_errors_all_the_same(target):
    """Spark decides by the columns that a query reads whether a record parses: both readings must decide alike."""
    lines = [
        '{"id": 1, "name": "a", "n": 1}',
        '{"id": 2, "name": "b", "n": "x"}',
        "[",
        '{"id": 3, "name": "c", "n": 0}',
    ]
    sql = "select id * 10 as id, name, case when id = 3 then 'three is bad' end as err from input where id > 0"
    report = run_lines(target, lines, "id BIGINT, name STRING, n INT", collect(EnvelopeType.APPEND), sql=sql)
    assert (report.rows_read, report.errors) == (4, 3)
    found = held(target)
    assert [row for row in found if row[1] is None] == [(10, None, "a")]
    assert {row[:1] + row[2:] for row in found if row[1]} == {(None, None)}
    assert "three is bad" in {row[1] for row in found}


def test_a_mirror_takes_the_error_away_with_the_bad_record(target):
    envelope = collect(EnvelopeType.MIRROR)
    columns = "id BIGINT, name STRING, err STRING"
    bad, good = {"id": 1, "name": "a", "err": "no"}, {"id": 1, "name": "a"}
    assert target.run([bad, bad, {"id": 2}], columns, envelope).errors == 2
    assert held(target) == {(None, "no", None): 2, (2, None, None): 1}
    again = target.run([bad, {"id": 2}, bad], columns, envelope)
    assert "unchanged" in target.events()
    assert (again.updates_written, again.errors) == (0, 2)
    assert target.run([good, bad, {"id": 2}], columns, envelope).errors == 1
    assert held(target) == {(None, "no", None): 1, (2, None, None): 1, (1, None, "a"): 1}
    target.run([good, {"id": 2}], columns, envelope)
    assert held(target) == {(2, None, None): 1, (1, None, "a"): 1}


def test_an_upsert_writes_an_error_once(target):
    envelope = collect(EnvelopeType.UPSERT, order_column="o", delete_column="gone")
    columns = "id BIGINT, name STRING, err STRING, o INT, gone BOOLEAN"
    rows = [
        {"id": 1, "name": "a", "o": 1},
        {"id": 1, "name": "b", "o": 2},
        {"id": 5, "name": "x", "err": "bad", "o": 9, "gone": True},
        {"id": 1, "name": "y", "err": "bad", "o": 8},
        {"name": "no key"},
    ]
    keyless = "the row has no key: every field of the key is null"
    assert target.run(rows, columns, envelope).errors == 3
    expected = {(1, None, "b"): 1, (None, "bad", None): 1, (None, keyless, None): 1}
    assert held(target) == expected
    again = target.run(rows, columns, envelope)
    assert (again.errors, again.updates_written) == (3, 0)
    target.run([{"id": 1, "gone": True}], columns, envelope)
    assert held(target) == {row: diff for row, diff in expected.items() if row[0] is None}


def test_an_upsert_finds_errors_in_parts_whose_statistics_exclude_its_keys(target):
    target.write({((None, "alone"), (None,)): 1})
    target.write({((None, "beside rows"), (None,)): 1, ((100, None), ("far",)): 1, ((200, None), ("far",)): 1})
    before = held(target)
    rows = [{"id": 5, "name": "a"}, {"err": "alone"}, {"id": 6, "err": "beside rows"}]
    report = target.run(rows, "id BIGINT, name STRING, err STRING", collect(EnvelopeType.UPSERT))
    assert (report.errors, report.updates_written) == (2, 1)
    assert held(target) == before + Counter({(5, None, "a"): 1})


def test_events_of_debezium_that_do_not_decode_are_errors(target):
    row = "STRUCT<id: BIGINT, name: STRING>"
    columns = f"before {row}, after {row}, op STRING, ts_ms BIGINT, err STRING"
    events = [
        {"after": {"id": 1, "name": "a"}, "op": "c", "ts_ms": 1},
        {"before": {"id": 1}, "after": {"id": 2, "name": "b"}, "op": "u", "ts_ms": 2},
        {"op": "d", "ts_ms": 3},
        {"op": "t", "ts_ms": 4},
        {"err": "offset 7: no event"},
        {"before": None, "after": None, "op": None},
        {"after": {"id": None, "name": "z"}, "op": "c", "ts_ms": 5},
    ]
    report = target.run(events, columns, collect(EnvelopeType.DEBEZIUM))
    assert report.errors == 4
    found = held(target)
    assert [row for row in found if row[1] is None] == [(2, None, "b")]
    errors = {row[1].split(";")[0] for row in found if row[1]}
    assert "offset 7: no event" in errors
    assert "before is null in a delete" in errors
    assert any(error.startswith("op t (truncate)") for error in errors)
    assert any(error.startswith("the row has no key") for error in errors)


def test_times_and_diffs_that_are_missing_are_errors(target):
    envelope = collect(EnvelopeType.DIFF, diff_column="d", timestamp_column="t")
    columns = "id BIGINT, name STRING, err STRING, d INT, t BIGINT"
    rows = [
        {"id": 1, "name": "a", "d": 2, "t": 100},
        {"id": 2, "name": "b", "d": None, "t": 100},
        {"id": 3, "name": "c", "d": 1, "t": None},
        {"err": "nothing decoded"},
    ]
    assert target.run(rows, columns, envelope).errors == 3
    assert target.client.recent_upper(target.id).time == 101
    text = "is null in the row with key"
    assert held(target) == {
        (1, None, "a"): 2,
        (None, f'envelope.diffColumn: d {text} {{"id":2}}', None): 1,
        (None, f'envelope.timestampColumn: t {text} {{"id":3}}', None): 1,
        (None, "nothing decoded", None): 1,
    }
    # Errors alone advance the shard, and their own times, which mean nothing, are not late.
    assert target.run([{"err": "late", "t": 5}], columns, envelope).errors == 1
    assert held(target)[(None, "late", None)] == 1
    for diff in (2, -2):
        assert target.run([{"err": "it comes and goes", "d": diff}], columns, envelope).errors == 1
        assert held(target)[(None, "it comes and goes", None)] == max(diff, 0)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("id BIGINT", "envelope.onError: the shard cannot hold errors: its key must end with the column err STRING"),
        ("id BIGINT NOT NULL, err STRING", "no column may be NOT NULL"),
    ],
)
def test_a_shard_that_cannot_hold_errors_is_refused_by_name(make_target, key, message):
    target = make_target(key, VALUE)
    with pytest.raises(ConfigurationError, match=message):
        target.run([{"id": 1}], "id BIGINT, name STRING", collect(EnvelopeType.APPEND))


@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT])
def test_a_value_with_a_column_of_the_name_of_reasons_is_refused(make_target, kind):
    target = make_target(KEY, "err STRING")
    with pytest.raises(ConfigurationError, match="the shard's value has a column err"):
        target.run([{"id": 1, "err": "what a user wrote"}], "id BIGINT, err STRING", collect(kind))


def test_the_reason_must_be_text_and_is_cut(target):
    with pytest.raises(ConfigurationError, match="the input's column err is bigint, must be string"):
        target.run([{"id": 1}], "id BIGINT, name STRING, err BIGINT", collect(EnvelopeType.APPEND))
    columns = "id BIGINT, name STRING, err STRING"
    target.run([{"err": "x" * 5000}], columns, collect(EnvelopeType.APPEND))
    assert list(held(target)) == [(None, "x" * 1000, None)]


@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.MIRROR, EnvelopeType.UPSERT])
def test_a_null_in_a_not_null_field_of_a_struct_is_an_error(make_target, kind):
    target = make_target(KEY, "p STRUCT<x: INT NOT NULL>")
    rows = [{"id": 1, "p": {"x": 1}}, {"id": 2, "p": {}}]
    assert target.run(rows, "id BIGINT, p STRUCT<x: INT>", collect(kind)).errors == 1
    upper = target.client.recent_upper(target.id).time
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        found = [(row["key"], row["val"]) for row in reader.snapshot(upper - 1).to_table().to_pylist()]
    assert len(found) == 2
    assert ({"id": 1, "err": None}, {"p": {"x": 1}}) in found
    reason = 'value field p.x is NOT NULL and null in a row with key {"id":2}'
    assert ({"id": None, "err": reason}, {"p": None}) in found


@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT])
def test_a_record_that_is_no_text_is_an_error_that_shows_what_can_be_shown(target, kind):
    path = target.folder / "bytes.json"
    path.write_bytes(b'{"id": 1, "name": "a"}\n{"id": 2, "name": "\xff"}\n')
    given = {"options": {"path": str(path)}, "keeps_malformed": True}
    assert target.run([], "id BIGINT, name STRING", collect(kind), input=given).errors == 1
    found = held(target)
    assert (1, None, "a") in found
    assert any('does not parse: {"id": 2, "name": "\ufffd"}' in err for _, err, _ in found if err)


def test_a_csv_file_with_a_header_and_records_of_another_width(target):
    spark = target.spark
    path = target.folder / "in.csv"
    path.write_text("id,name\n1,a\n2,b,c\nx,d\n4,\n")
    source = Input(format="csv", options={"path": str(path), "header": "true"}, keeps_malformed=True)
    for schema in ("id BIGINT, name STRING", None):
        given = {**({"schema": schema} if schema else {}), "options": {**source.options, "inferSchema": "false"}}
        rows = read_input(spark, Input(format="csv", keeps_malformed=True, **given)).collect()
        good = [(row["id"], row["name"]) for row in rows if row["err"] is None]
        assert len(rows) == 4
        assert [int(id_) for id_, _ in good if str(id_) != "x"] == [1, 4]
        sql = "select name from input"
        named = read_input(spark, Input(format="csv", keeps_malformed=True, sql=sql, **given)).collect()
        assert Counter(row["err"] for row in named) == Counter(row["err"] for row in rows)
        counted = read_input(spark, Input(format="csv", keeps_malformed=True, **given)).where("err is not null").count()
        assert counted == sum(row["err"] is not None for row in rows)
    lenient = Input(format="csv", schema="id BIGINT, name STRING", options={**source.options, "mode": "PERMISSIVE"})
    assert "err" not in read_input(spark, lenient).columns, "the user has decided"


@pytest.mark.parametrize("kind", [EnvelopeType.APPEND, EnvelopeType.UPSERT, EnvelopeType.MIRROR])
def test_random_records_in_random_runs_end_with_the_rows_and_errors_of_an_oracle(make_target, kind):
    draw = random.Random(kind)
    target = make_target(KEY, VALUE)
    envelope = collect(kind, **({"order_column": "o"} if kind is EnvelopeType.UPSERT else {}))
    columns = "id BIGINT, name STRING, err STRING" + (", o BIGINT" if kind is EnvelopeType.UPSERT else "")
    expected: Counter[tuple[Any, ...]] = Counter()
    order = 0
    for _ in range(4):
        rows: list[dict[str, Any]] = []
        for _ in range(draw.randrange(1, 30)):
            order += 1
            row: dict[str, Any] = {"id": draw.randrange(8), "name": draw.choice(["a", "b", "c"])}
            if draw.random() < 0.3:
                row["err"] = f"reason {draw.randrange(4)}"
            rows.append({**row, **({"o": order} if kind is EnvelopeType.UPSERT else {})})
        report = target.run(rows, columns, envelope, run_id=f"u-{order}")
        assert report.errors == sum("err" in row for row in rows)
        assert target.run(rows, columns, envelope, run_id=f"u-{order}").already_done
        as_held = [(None, row["err"], None) if "err" in row else (row["id"], None, row["name"]) for row in rows]
        if kind is EnvelopeType.UPSERT:
            by_key = {(id_, err): name for (id_, err, _), name in zip(expected, [k[2] for k in expected], strict=True)}
            by_key |= {(id_, err): name for id_, err, name in as_held}
            expected = Counter((id_, err, name) for (id_, err), name in by_key.items())
        else:
            expected = Counter(as_held) + (expected if kind is EnvelopeType.APPEND else Counter())
        assert held(target) == expected
