"""A schema that another process made: rows and conditions with its columns are accepted without opening the table again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from persist_engine import Database, Table, connect
from persist_engine.base.errors import InvalidUsage, SchemaMismatch

ROW = {"id": 2, "name": "bob", "note": "new"}
FITTED = [{"id": 1, "name": "ada", "note": None}, ROW]


@pytest.fixture
def altered(tmp_path: Path) -> Iterator[Table]:
    """A table with one row. Another database, as another process has one, has added the column `note` since."""
    with connect(tmp_path / "shop", maintain=False) as ours, connect(tmp_path / "shop", maintain=False) as theirs:
        ours.create("orders", key="id BIGINT", value="name STRING")
        table = theirs.table("orders")
        table.append([{"id": 1, "name": "ada"}])
        ours.table("orders").alter(add="note STRING")
        assert table.schema.names == ["id", "name"], "it has not heard of it"
        yield table


def _streamed() -> pa.RecordBatchReader:
    return pa.Table.from_pylist([ROW]).to_reader()


@pytest.mark.parametrize(
    "rows",
    [lambda: [ROW], lambda: pa.Table.from_pylist([ROW]), _streamed, lambda: iter([pa.Table.from_pylist([ROW])])],
    ids=["dicts", "table", "reader", "iterator"],
)
@pytest.mark.parametrize("write", ["append", "upsert"])
def test_rows_with_the_new_column_are_accepted(altered: Table, rows, write: str) -> None:
    """Each of them once, also those of a stream, which cannot be read again."""
    assert getattr(altered, write)(rows()).inserted == 1
    assert altered.to_pylist() == FITTED


def test_an_overwrite_with_the_new_column_is_accepted(altered: Table) -> None:
    """Its rows are all that is left."""
    altered.overwrite([ROW])
    assert altered.to_pylist() == [ROW]


def test_a_widened_column_takes_what_did_not_fit(db: Database, tmp_path: Path) -> None:
    """Names alone do not show that."""
    ours = db.create("counts", key="id BIGINT", value="n INT")
    with connect(tmp_path / "shop", maintain=False) as theirs:
        table = theirs.table("counts")
        ours.alter(widen={"n": "BIGINT"})
        table.append([{"id": 1, "n": 1 << 40}])
    assert ours.to_pylist() == [{"id": 1, "n": 1 << 40}]


def test_a_condition_on_the_new_column_deletes(altered: Table) -> None:
    """Without a write in between that would have shown the column."""
    assert altered.delete("note IS NULL").deleted == 1
    assert altered.count() == 0


def test_what_the_newest_schema_refuses_is_refused_in_its_words(altered: Table) -> None:
    """And nothing is written."""
    with pytest.raises(SchemaMismatch, match="hint is no column of the table. The table has id, name, note"):
        altered.append([{**ROW, "hint": 1}])
    assert altered.count() == 1


@pytest.mark.parametrize("first", ["note STRING", "hint STRING"])
def test_regression_alters_of_two_processes_at_once_are_both_there(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The later one was refused, because it would drop the column that the other had added."""
    ours = db.create("orders", key="id BIGINT", value="n INT")
    with connect(tmp_path / "shop", maintain=False) as theirs:
        table, client = theirs.table("orders"), theirs.client
        evolve = client.evolve_schema

        def later(*wanted: Any) -> Any:
            monkeypatch.undo()
            ours.alter(add=first)
            return evolve(*wanted)

        monkeypatch.setattr(client, "evolve_schema", later)
        if first == "hint STRING":
            with pytest.raises(InvalidUsage, match=r"^table orders: add: there is a column hint already$"):
                table.alter(add="hint INT", retain="2 days")
            assert table.describe().retain == "7d"
            return
        table.alter(add="hint INT", widen={"n": "BIGINT"}, retain="2 days", bloom=["hint"])
        assert table.schema.names == ["id", "n", "note", "hint"]
        assert table.schema.field("n").type == pa.int64()
        assert (table.describe().retain, table.describe().bloom) == ("2d", "hint")


def test_a_stream_in_the_midst_of_which_the_schema_evolves_is_refused(db: Database, tmp_path: Path) -> None:
    """Its first rows lack the column. Nothing is written, and the message says to call again."""
    ours = db.create("orders", key="id BIGINT", value="name STRING")
    with connect(tmp_path / "shop", maintain=False) as theirs:
        table = theirs.table("orders")

        def rows() -> Iterator[pa.Table]:
            yield pa.Table.from_pylist([{"id": 1, "name": "ada"}])
            ours.alter(add="note STRING")
            yield pa.Table.from_pylist([ROW])

        with pytest.raises(SchemaMismatch, match="table orders: the schema has evolved during the call; nothing was"):
            table.append(rows())
    assert ours.count() == 0
