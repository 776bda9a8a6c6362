"""Values that Arrow reads from text without a word, and that are none of what the file says; and rows that are empty lines."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.export import writing
from persist_engine.cli.tables import files
from persist_engine.cli.tables.files import batches_of
from persist_engine.rows.ddl import parse_ddl
from persist_kit.depth import draws


def read(path: Path, ddl: str) -> list[dict[str, object]]:
    return pa.concat_tables(batches_of([str(path)], None, parse_ddl(ddl), lambda *_: None)).to_pylist()


def piped(text: str, ddl: str) -> list[dict[str, object]]:
    return pa.concat_tables(files._csv(io.BytesIO(text.encode()), parse_ddl(ddl))).to_pylist()


@pytest.mark.parametrize("number", ["1e400", "-1e400", " +1e400", '"1e400"'])
@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
def test_regression_a_number_of_csv_that_is_too_large_is_no_infinity(tmp_path, number, kind):
    text = f"y,x\n0.5,1\ninf,-inf\n0.1,{number}\n"
    path = tmp_path / "rows.csv"
    path.write_text(text)
    problem = rf"x is {kind}: [-+]?1e400 is larger than any number of that type"
    with pytest.raises(InvalidUsage, match=problem):
        read(path, f"x {kind}, y DOUBLE")
    with pytest.raises(InvalidUsage, match=problem):
        piped(text, f"x {kind}, y DOUBLE")


@pytest.mark.parametrize(
    ("ddl", "value"),
    [("x FLOAT", "1e39"), ("x STRUCT<a: FLOAT>", '{"a": -1e39}'), ("x ARRAY<FLOAT>", "[null, 0.1, 1e39]")],
)
@pytest.mark.parametrize("more", ["", ", m MAP<STRING, INT>"])
def test_regression_a_number_of_json_that_is_too_large_is_no_infinity(tmp_path, ddl, value, more):
    path = tmp_path / "rows.jsonl"
    of_map = ', "m": null' if more else ""
    path.write_text(f'{{"x": {value}{of_map}}}\n')
    with pytest.raises(InvalidUsage, match=r"x is .*: -?1e\+39 is larger than any number|x.* a value is too large"):
        read(path, f"{ddl}{more}")


def test_infinities_and_the_greatest_numbers_are_taken(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("f,d\n3.4028235e38,1.7976931348623157e308\ninf,-Infinity\n")
    inf, greatest = float("inf"), 3.4028234663852886e38
    expected = [{"f": greatest, "d": 1.7976931348623157e308}, {"f": inf, "d": -inf}]
    assert read(path, "f FLOAT, d DOUBLE") == expected
    assert piped(path.read_text(), "f FLOAT, d DOUBLE") == expected
    lines = tmp_path / "rows.jsonl"
    lines.write_text(f'{{"f": {greatest}, "l": [0.5, null]}}\n{{"f": Infinity, "l": null}}\n')
    assert read(lines, "f FLOAT, l ARRAY<FLOAT>") == [{"f": greatest, "l": [0.5, None]}, {"f": inf, "l": None}]


@settings(max_examples=draws(40), deadline=None)
@given(
    st.lists(st.sampled_from([None, "", "a", "\n", "\r\n", ' "', "\\N"]), max_size=9),
    st.sampled_from(["STRING", "BINARY"]),
    st.integers(6, 12),
)
def test_rows_of_one_column_are_taken_back(values, kind, piece):
    """Regression: a row whose only value is null is an empty line, which was no row, so an overwrite deleted it."""
    schema = parse_ddl(f"x {kind}")
    rows = pa.table([pa.array(values, pa.string()).cast(schema.field(0).type)], schema=schema)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with writing("csv", path, schema) as write:
            for batch in rows.to_batches():
                write(batch)
        assert read(path, f"x {kind}") == rows.to_pylist()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "_BLOCK_BYTES", piece)
            assert pa.concat_tables(files._csv(io.BytesIO(path.read_bytes()), schema)).to_pylist() == rows.to_pylist()


def test_an_empty_line_is_no_row_of_other_tables(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("\nx\n\na\n\n")
    assert read(path, "x STRING NOT NULL") == [{"x": "a"}] == piped(path.read_text(), "x STRING NOT NULL")
    path.write_text("x,y\n\na,1\n\n")
    assert read(path, "x STRING, y INT") == [{"x": "a", "y": 1}] == piped(path.read_text(), "x STRING, y INT")


@pytest.mark.parametrize("blank", ["\n", "\r\n\r\n", "\r", "\n\n\n"])
def test_empty_lines_before_the_names_name_nothing(tmp_path, blank):
    """An empty line is a row of such a table, and was taken for a column without a name."""
    path, text = tmp_path / "rows.csv", f"{blank}x\n\nb\n"
    path.write_bytes(text.encode())
    assert read(path, "x STRING") == [{"x": None}, {"x": "b"}] == piped(text, "x STRING")
    path.write_bytes(f"{blank}x\n1e400\n".encode())
    with pytest.raises(InvalidUsage, match="x is DOUBLE: 1e400 is larger than any number of that type"):
        read(path, "x DOUBLE")
    path.write_bytes(blank.encode())
    with pytest.raises(InvalidUsage, match="is empty: the first line of a CSV file names the columns"):
        read(path, "x STRING")


def test_regression_a_file_may_end_with_an_instant_that_python_has_not(tmp_path):
    """A look for quotes made a Python value of it, and said that it found a bug."""
    path = tmp_path / "rows.csv"
    path.write_text("x\n0000-01-01T00:00:00Z\n")
    (table,) = [
        each for each in batches_of([str(path)], None, parse_ddl("x TIMESTAMP"), lambda *_: None) if each.num_rows
    ]
    assert table.column("x").cast(pa.int64()).to_pylist() == [-62_167_219_200_000_000]


@pytest.mark.parametrize("end", ["", "\n"])
def test_regression_the_last_line_of_a_file_needs_no_end(tmp_path, end):
    """Arrow took an empty last cell for quoted, after a cell in quotes, and called a file that has only names empty."""
    path = tmp_path / "rows.csv"
    path.write_text(f'name,note,n\n"x",a,{end}')
    assert read(path, "name STRING, note STRING, n BIGINT") == [{"name": "x", "note": "a", "n": None}]
    path.write_text(f'name,note\n"x",{end}')
    assert read(path, "name STRING, note STRING") == [{"name": "x", "note": None}]
    path.write_text(f"\ufeffname,note{end}")
    assert read(path, "name STRING, note STRING") == []


def test_whole_records_end_at_the_last_line_end_outside_of_quotes():
    """The pattern against a plain scanner, on random texts of the characters that matter."""
    rng = random.Random(1)
    for _ in range(20_000):
        text = "".join(rng.choice('a",\n\r') for _ in range(rng.randrange(14)))
        found = files._WHOLE_RECORDS.match(text.encode())
        assert found is not None
        assert found.end() == whole_records(text), text


def whole_records(text):
    """Where the last record with a line end ends. A carriage return at the end may be half of a line end."""
    at, end, begins = 0, 0, True
    while at < len(text):
        if begins and text[at] == '"':
            at = closing_quote(text, at + 1) + 1
            begins = False
            continue
        line_end = re.compile(r"\r\n|\n|\r(?!\Z)").match(text, at)
        begins = line_end is not None or text[at] == ","
        at = at + 1 if line_end is None else line_end.end()
        end = end if line_end is None else at
    return end


def closing_quote(text, at):
    """The end of the quotes before `at`, or of the text. Two quotes stand for one."""
    while at < len(text):
        if text[at] == '"' and text[at + 1 : at + 2] != '"':
            return at
        at += 2 if text[at] == '"' else 1
    return at
