"""Structs, lists and maps through `persist read` into a file and from the file into a table."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.export import writing
from persist_engine.cli.tables.files import batches_of
from persist_engine.rows.ddl import parse_ddl
from persist_engine.rows.nested.values import array_of
from persist_kit.depth import draws

SCHEMA = parse_ddl(
    "id BIGINT, s STRUCT<a: INT, b: STRUCT<t: STRING, r: BINARY>>, l ARRAY<STRING>, "
    "d ARRAY<STRUCT<p: DECIMAL(9,2), at: TIMESTAMP, day: DATE, x: DOUBLE, ok: BOOLEAN>>, "
    "m MAP<STRING, ARRAY<INT>>, n MAP<DATE, STRING>, k MAP<BIGINT, DOUBLE>"
)
PLAIN = pa.schema([field for field in SCHEMA if not pa.types.is_map(field.type)])
TEXT = st.sampled_from(["", "null", "a,b", 'q"', "é\n", "{}", "[1]"])
WHOLE = st.integers(-(2**31), 2**31 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def maybe(strategy):
    return st.none() | strategy


DETAIL = st.fixed_dictionaries({
    "p": maybe(st.integers(-(10**8), 10**8).map(lambda cents: Decimal(cents).scaleb(-2))),
    "at": maybe(st.datetimes(min_value=datetime(1900, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.just(UTC))),  # noqa: DTZ001
    "day": maybe(st.dates(min_value=date(1, 1, 1))), "x": maybe(FINITE), "ok": maybe(st.booleans()),
})  # fmt: skip
ROW = st.fixed_dictionaries({
    "id": st.integers(0, 9),
    "s": maybe(st.fixed_dictionaries({
        "a": maybe(WHOLE), "b": maybe(st.fixed_dictionaries({"t": maybe(TEXT), "r": maybe(st.binary(max_size=3))}))})),
    "l": maybe(st.lists(maybe(TEXT), max_size=3)),
    "d": maybe(st.lists(maybe(DETAIL), max_size=2)),
    "m": maybe(st.dictionaries(TEXT, maybe(st.lists(maybe(WHOLE), max_size=2)), max_size=2)),
    "n": maybe(st.dictionaries(st.dates(), maybe(TEXT), max_size=2)),
    "k": maybe(st.dictionaries(WHOLE, maybe(FINITE), max_size=2)),
})  # fmt: skip


def there_and_back(rows, name, schema):
    columns = [array_of(field.name, [row[field.name] for row in rows], field.type) for field in schema]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{name}"
        with writing(name, path, schema) as write:
            write(batch)
        tables = list(batches_of([str(path)], None, schema, lambda *_: None))
    found = pa.concat_tables(tables).to_pylist() if tables else []
    assert repr(found) == repr(batch.to_pylist())


@settings(max_examples=draws(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROW, max_size=4), st.sampled_from(["csv", "jsonl"]))
def test_what_is_read_into_a_text_file_is_taken_back(rows, name):
    """A null struct is not a struct of nulls, and a list without elements is not null."""
    there_and_back(rows, name, SCHEMA)
    there_and_back(rows, name, PLAIN)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("[1", "l is ARRAY<STRING> as JSON"),
        ("5", r"rows.csv l is a int; expected a list"),
        ("[5]", r"l\[\] does not fit STRING"),
    ],
)
def test_a_cell_that_is_no_list_is_refused_by_its_column(tmp_path, cell, message):
    path = tmp_path / "rows.csv"
    path.write_text(f'id,l\n1,"{cell}"\n')
    with pytest.raises(InvalidUsage, match=message):
        list(batches_of([str(path)], None, SCHEMA, lambda *_: None))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"id": 1}\n\n[1]\n', "line 3 is not an object"),
        ('{"id": 1}\nnull\n', "line 2 is not an object"),
        ("null\n", "it begins with null"),
        ('{"id": 1', "line 1: Expecting"),
        ('{"id": 1, "id": 2}', "line 1: an object has the name 'id' more than once"),
        ('{"id": 1, "m": {"a": [1], "a": [2]}}', "line 1: an object has the name 'a' more than once"),
    ],
)
def test_a_line_that_is_no_object_is_refused_by_its_number(tmp_path, lines, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    with pytest.raises(InvalidUsage, match=f"rows.jsonl is not jsonl that the table accepts: {message}"):
        list(batches_of([str(path)], None, SCHEMA, lambda *_: None))


def test_a_file_that_begins_with_null_is_refused_without_maps_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff\n null\n")
    with pytest.raises(InvalidUsage, match="it begins with null"):
        list(batches_of([str(path)], None, PLAIN, lambda *_: None))


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ('{"id": 1}\nnull\n{"id": 3}\n', 2),
        ('{"id": 1}\n\n\tnull \n', 3),
        ('{"id": 1} null\n', 1),
        ('{"id": 1}\nnull', 2),
    ],
)
def test_null_in_place_of_an_object_is_no_row_of_nulls(tmp_path, lines, number):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    with pytest.raises(InvalidUsage, match=f"line {number} is null, which is not an object"):
        list(batches_of([str(path)], None, PLAIN, lambda *_: None))


@pytest.mark.parametrize("between", ["", " ", "\t"])
def test_two_objects_of_a_line_are_two_rows_or_refused_by_its_number(tmp_path, between):
    """Never one of them: Arrow takes both, and the reader of maps, which reads lines, neither."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"id": 1}}\n{{"id": 2}}{between}{{"id": 3}}\n{{"id": null}}\n')
    read = pa.concat_tables(batches_of([str(path)], None, PLAIN, lambda *_: None))
    assert read.column("id").to_pylist() == [1, 2, 3, None]
    with pytest.raises(InvalidUsage, match="line 2: Extra data"):
        list(batches_of([str(path)], None, SCHEMA, lambda *_: None))


def test_a_map_in_a_cell_with_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('id,m\n1,"{""a"": [1], ""a"": [2]}"\n')
    with pytest.raises(
        InvalidUsage, match="m is MAP<STRING, ARRAY<INT>> as JSON: an object has the name 'a' more than once"
    ):
        list(batches_of([str(path)], None, SCHEMA, lambda *_: None))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": 2', "line 3: Expecting ',' delimiter"),
        (b'{"id": "\xff"}', "line 3: 'utf-8' codec"),
        (b"[" * 100_000, "line 3: "),
        (b'{"id": 2, "k": {"1": "x"}}', r"k\[\].value does not fit DOUBLE"),
        (b'{"id": 99999999999999999999}', "id does not fit BIGINT"),
        (b'{"id": 2, "k": [[1, 2]]}', r"k\[\].key does not fit STRING"),
    ],
)
def test_a_line_that_is_no_row_with_maps_is_refused_by_its_number(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n\n' + line + b"\n")
    with pytest.raises(InvalidUsage, match=f"rows.jsonl .*{message}"):
        list(batches_of([str(path)], None, SCHEMA, lambda *_: None))


def test_a_blank_line_is_no_row_with_maps_or_without(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n\n \n{"id": 2}\r\n\n')
    for schema in (SCHEMA, PLAIN):
        (table,) = batches_of([str(path)], None, schema, lambda *_: None)
        assert table.column("id").to_pylist() == [1, 2]


def test_json_has_no_nan_so_it_is_null():
    kind = pa.schema([("l", pa.list_(pa.field("element", pa.float64())))])
    batch = pa.RecordBatch.from_arrays([pa.array([[math.nan, 1.5]], kind.field(0).type)], schema=kind)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with writing("csv", path, kind) as write:
            write(batch)
        assert path.read_text() == '"l"\n"[null, 1.5]"\n'


@pytest.mark.parametrize(
    "number", ["0.1", "1.234567890123456789", "12345678901234567890", "-1e3", '"0.10"', "9007199254740993.0", "null"]
)
@pytest.mark.parametrize("more", ["", ", m MAP<STRING, INT>"])
def test_a_decimal_keeps_the_digits_of_the_file(tmp_path, number, more):
    """As numbers they went through floats: 0.1 became 0.100000000000000006."""
    schema = parse_ddl(f"x DECIMAL(38,18), s STRUCT<x: DECIMAL(38,18)>, l ARRAY<DECIMAL(38,18)>{more}")
    of_map = ', "m": {}' if more else ""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f'{{"x": {number}, "s": {{"x": {number}}}, "l": [{number}]{of_map}}}\n{{"x": 1, "s": null, "l": []{of_map}}}\n'
    )
    (table,) = batches_of([str(path)], None, schema, lambda *_: None)
    expected = None if number == "null" else Decimal(number.strip('"'))
    first, second = table.select(["x", "s", "l"]).to_pylist()
    assert first == {"x": expected, "s": {"x": expected}, "l": [expected]}
    assert second == {"x": 1, "s": None, "l": []}


def test_a_number_in_a_cell_keeps_its_digits(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('x,s,l\n0.1,"{""x"": 1.234567890123456789}","[0.1, ""2"", 3]"\n')
    schema = parse_ddl("x DECIMAL(38,18), s STRUCT<x: DECIMAL(38,18)>, l ARRAY<DECIMAL(38,18)>")
    table = pa.concat_tables(batches_of([str(path)], None, schema, lambda *_: None))
    exact = Decimal("1.234567890123456789")
    assert table.to_pylist() == [{"x": Decimal("0.1"), "s": {"x": exact}, "l": [Decimal("0.1"), 2, 3]}]


@pytest.mark.parametrize("number", ["1.25", "12345.0", '"1.25"', "NaN", "true", "[1]"])
@pytest.mark.parametrize("more", ["", ", m MAP<STRING, INT>"])
def test_a_number_that_is_not_the_decimal_is_refused(tmp_path, number, more):
    path = tmp_path / "rows.jsonl"
    of_map = ', "m": {}' if more else ""
    path.write_text(f'{{"x": {number}{of_map}}}\n')
    with pytest.raises(InvalidUsage, match="is not jsonl that the table accepts|does not fit"):
        list(batches_of([str(path)], None, parse_ddl(f"x DECIMAL(5,1){more}"), lambda *_: None))


def test_a_column_of_nulls_beside_decimals_in_both_forms(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": 1, "y": null}\n{"x": "2.5", "y": null}\n')
    (table,) = batches_of([str(path)], None, parse_ddl("x DECIMAL(5,1), y STRING, z STRING"), lambda *_: None)
    assert table.to_pylist() == [{"x": 1, "y": None}, {"x": Decimal("2.5"), "y": None}]


@pytest.mark.parametrize("more", ["", ", m MAP<STRING, INT>"])
@pytest.mark.parametrize(
    ("ddl", "value", "problem"),
    [
        ("v TIMESTAMP", '"2026-01-02T03:04:05"', "expected a zone offset"),
        ("v TIMESTAMP", '"2026-01-02"', "expected a zone offset"),
        ("v TIMESTAMP_NTZ", '"2026-01-02T03:04:05Z"', "expected no zone offset"),
        ("v STRUCT<at: TIMESTAMP>", '{"at": "2026-01-02 03:04:05"}', "expected a zone offset"),
        ("v ARRAY<TIMESTAMP>", '["2026-01-02T03:04:05"]', "expected a zone offset"),
        ("v DOUBLE", "1e999", "too big|larger than any number"),
    ],
)
def test_a_value_that_would_change_is_refused_with_maps_and_without(tmp_path, ddl, value, problem, more):
    """Regression: a time of JSON without a zone was taken for UTC."""
    path = tmp_path / "rows.jsonl"
    of_map = ', "m": {}' if more else ""
    path.write_text(f'{{"v": {value}{of_map}}}\n')
    with pytest.raises(InvalidUsage, match=problem):
        list(batches_of([str(path)], None, parse_ddl(f"{ddl}{more}"), lambda *_: None))


def test_instants_of_lines_keep_their_zones(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"at": "2026-01-02T03:04:05.000006+02:00", "l": ["2026-01-02 03:04:05Z", null], "n": "2026-01-02T03:04:05"}\n'
    )
    (table,) = batches_of(
        [str(path)], None, parse_ddl("at TIMESTAMP, l ARRAY<TIMESTAMP>, n TIMESTAMP_NTZ"), lambda *_: None
    )
    (found,) = table.to_pylist()
    assert found["at"] == datetime(2026, 1, 2, 1, 4, 5, 6, tzinfo=UTC)
    assert found["l"] == [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), None]
    assert found["n"] == datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001


@pytest.mark.parametrize("us", [2**62, -(2**62), 2_071_000_000_000_000_000, 971_890_963_200_000_000])
def test_an_instant_in_a_year_without_text_is_never_written_with_another_year(tmp_path, us):
    """Regression: 2,071,000,000,000,000,000 microseconds after 1970 became a time in 2061, which the next table took."""
    schema = parse_ddl("v TIMESTAMP, m MAP<TIMESTAMP, INT>")
    far = pa.array([us], schema.field("v").type)
    near = pa.array([0], far.type)
    maps = [pa.array([[(instants[0].value, 1)]], schema.field("m").type) for instants in (far, near)]
    with (
        pytest.raises(InvalidUsage, match=f"v holds the time {us:,} microseconds after 1970, .* write parquet"),
        writing("csv", tmp_path / "rows.csv", schema) as write,
    ):
        write(pa.RecordBatch.from_arrays([far, maps[1]], schema=schema))
    assert list(tmp_path.iterdir()) == []
    for name in ("csv", "jsonl"):
        path = tmp_path / f"rows.{name}"
        with writing(name, path, schema) as write:
            write(pa.RecordBatch.from_arrays([near, maps[0]], schema=schema))
        assert f"value out of range: {us}" in path.read_text()
        with pytest.raises(InvalidUsage, match=f"rows.{name} .*value out of range"):
            list(batches_of([str(path)], None, schema, lambda *_: None))
