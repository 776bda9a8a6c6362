"""`writeMode: ReadOnly`: a run says how the shard differs from what it would make of it, and changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from envelope_run import Target
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, OnError, WriteMode

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MIRROR = Envelope(type=EnvelopeType.MIRROR)
COLUMNS = "id BIGINT, name STRING, x DOUBLE"


@pytest.fixture
def target(make_target: Any) -> Target:
    return make_target("id BIGINT", "name STRING, x DOUBLE")


def compare(
    target: Target, rows: Any, envelope: Envelope = MIRROR, columns: str = COLUMNS, **given: Any
) -> tuple[int, int]:
    """(missing, extra) of a run that leaves all as it was, apart from its lease."""
    upper, _, readers, writers, progress, parts = target.footprint()
    report = target.run(rows, columns, envelope, write_mode=WriteMode.READ_ONLY, **given)
    assert target.footprint() == (upper, target.client.inspect(target.id).updates, readers, writers, progress, parts)
    assert (report.updates_written, report.upper) == (0, upper)
    return report.missing, report.extra


def test_a_mirror_counts_each_row_that_it_would_write(target):
    rows = [
        {"id": 1, "name": "a", "x": 1.5},
        {"id": 1, "name": "a", "x": 1.5},
        {"id": 2, "name": None, "x": -0.0},
        {"id": 3},
    ]
    assert compare(target, rows) == (4, 0), "the shard is empty"
    target.run(rows, COLUMNS, MIRROR)
    assert compare(target, rows[::-1]) == (0, 0)
    assert compare(target, [{"id": 1, "name": "a", "x": 1.5}, {"id": 2, "x": 0}, {"id": 3, "name": "c"}]) == (1, 2)
    report = target.run(rows[:1], COLUMNS, MIRROR, write_mode=WriteMode.READ_ONLY)
    message = report.to_json(duration_ms=1)["message"]
    assert message == f"compared with the shard up to {report.upper}: rows missing in the shard: 0, rows too many: 3"
    assert target.run(rows, COLUMNS, MIRROR).updates_written == 0, "the comparison left the sink as it was"


def test_an_upsert_counts_what_it_would_write_for_its_keys(target):
    envelope = Envelope(type=EnvelopeType.UPSERT, delete_column="gone")
    columns = COLUMNS + ", gone BOOLEAN"
    rows = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "gone": True}]
    assert compare(target, rows, envelope, columns) == (2, 0)
    target.run(rows, columns, envelope)
    assert compare(target, rows, envelope, columns) == (0, 0)
    changed = [{"id": 1, "name": "z"}, {"id": 2, "gone": True}, {"id": 4, "name": "d"}]
    assert compare(target, changed, envelope, columns) == (2, 2)
    target.write({((1,), ("second", 0.0)): 1})
    with pytest.raises(ConfigurationError, match="cannot be compared: the shard holds 2 values of key"):
        compare(target, changed, envelope, columns)


def test_an_empty_input_is_an_error_unless_it_is_allowed(target):
    target.write({((1,), ("a", 0.0)): 2})
    with pytest.raises(ConfigurationError, match="input is empty"):
        compare(target, [])
    assert compare(
        target, [], input={"allow_empty": True, "options": {"path": str(target.folder / "input1.json")}}
    ) == (0, 2)


@pytest.mark.parametrize("envelope", [MIRROR, Envelope(type=EnvelopeType.UPSERT)])
def test_a_shard_of_which_no_complete_time_is_readable_is_not_compared(target, envelope):
    """A run that writes first completes the time of since. One that only compares says what to do, and not that a lease expired."""
    target.write({((1,), ("a", 0.0)): 1})
    with target.client.open_leased_reader(target.id, purpose="test") as reader:
        reader.downgrade_since(target.client.recent_upper(target.id))
    with pytest.raises(ConfigurationError, match=r"since is .*1.*the last complete time is .*0.*write to it first"):
        compare(target, [{"id": 1}], envelope)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_null_that_a_run_could_not_write_is_an_error(make_target, is_empty):
    target = make_target("id BIGINT NOT NULL", "name STRING")
    if not is_empty:
        target.run([{"id": 1}], "id BIGINT, name STRING", MIRROR)
    with pytest.raises(
        ConfigurationError, match="the input cannot be written: key field id is NOT NULL and null in a row"
    ):
        compare(target, [{"id": 1}, {"name": "a"}], columns="id BIGINT, name STRING")


@pytest.mark.parametrize("kind", [EnvelopeType.MIRROR, EnvelopeType.UPSERT])
def test_a_null_within_a_struct_that_a_run_could_not_write_is_an_error(make_target, kind):
    target = make_target("id BIGINT", "p STRUCT<x: INT NOT NULL, q: STRUCT<y: INT NOT NULL>>")
    columns = "id BIGINT, p STRUCT<x: INT, q: STRUCT<y: INT>>"
    good = [{"id": 1}, {"id": 2, "p": {"x": 1}}, {"id": 3, "p": {"x": 1, "q": {"y": 2}}}]
    envelope = Envelope(type=kind)
    target.run(good, columns, envelope)
    assert compare(target, good, envelope, columns) == (0, 0), "a null struct lacks none of its fields"
    for struct, name in (({"q": None}, "x"), ({"x": 1, "q": {}}, "q.y")):
        with pytest.raises(ConfigurationError, match=rf"value field p\.{name} is NOT NULL and null in a row"):
            compare(target, [*good, {"id": 4, "p": struct}], envelope, columns)


def test_errors_are_compared_as_rows(make_target):
    target = make_target("id BIGINT, err STRING", "name STRING")
    envelope = Envelope(type=EnvelopeType.MIRROR, on_error=OnError.COLLECT)
    columns = "id BIGINT, name STRING, err STRING"
    rows = [{"id": 1, "name": "a"}, {"err": "bad"}]
    target.run(rows, columns, envelope)
    assert compare(target, rows, envelope, columns) == (0, 0)
    assert compare(target, [rows[0], {"err": "worse"}], envelope, columns) == (1, 1)


def test_what_is_compared_equals_what_a_run_then_writes(target):
    draw = random.Random(7)
    for _ in range(6):
        drawn = {
            (draw.randrange(5), draw.choice(["a", None]), draw.choice([0.0, 1e300, None]))
            for _ in range(draw.randrange(1, 12))
        }
        rows = [dict(zip(("id", "name", "x"), row, strict=True)) for row in drawn]
        missing, extra = compare(target, rows)
        assert target.run(rows, COLUMNS, MIRROR).updates_written == missing + extra
        assert compare(target, rows) == (0, 0)
