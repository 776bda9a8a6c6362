"""Ways out of a table for other engines: a dataset over its files, DuckDB, and a stream that does not hold the rows in memory."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from persist_engine import Settings, connect
from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.base.settings import BatchSettings

FLAT = {name: ds.field(side, name) for side, name in (("key", "id"), ("val", "name"), ("val", "price"))}


def rows(start, count):
    return pa.table(
        {"id": range(start, start + count), "name": [f"n{i}" for i in range(start, start + count)]}
    ).append_column("price", pa.array([None] * count, pa.decimal128(10, 2)))


@pytest.fixture
def stored(tmp_path):
    """A table whose rows are in files, however few."""
    with connect(
        tmp_path / "shop", maintain=False, settings=Settings(batch=BatchSettings(inline_part_bytes_max=0))
    ) as db:
        yield db.create(
            "orders", key="id BIGINT", value="name STRING, price DECIMAL(10,2)", retain=timedelta(milliseconds=1)
        )


@pytest.mark.parametrize("table", ["stored", "orders"])
def test_a_dataset_has_the_rows_of_files_and_of_the_log(table, request):
    table = request.getfixturevalue(table)
    assert table.to_dataset().count_rows() == 0
    table.append(rows(0, 50))
    table.append(rows(50, 50))
    dataset = table.to_dataset()
    assert dataset.schema.names == ["key", "val", "time", "diff"]
    found = dataset.to_table(columns=FLAT).sort_by("id")
    assert found == table.to_arrow().cast(found.schema)
    some = dataset.to_table(columns=FLAT, filter=pc.field("key", "id") == 70)
    assert some.column("name").to_pylist() == ["n70"]
    polars = pl.scan_pyarrow_dataset(dataset).select(pl.col("key").struct.field("id").sum()).collect()
    assert polars.item() == sum(range(100))


def test_a_file_that_is_damaged_or_in_the_place_of_another_one_is_an_error(stored, tmp_path):
    stored.append(rows(0, 5000))
    stored.append(rows(5000, 5000))
    first, second = sorted((tmp_path / "shop" / "blobs" / stored.id).glob("n*/p*"))
    good = first.read_bytes()
    names = pq.read_metadata(first).row_group(0).column(1)
    for at in (names.data_page_offset + names.total_compressed_size // 2, len(good) - 9):
        first.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises((CorruptData, OSError), match="CRC checksum verification|the checksum of its footer"):
            stored.to_dataset().to_table()
    first.write_bytes(second.read_bytes())
    for read in (lambda: stored.to_dataset().to_table(), lambda: stored.to_dataset().count_rows()):
        with pytest.raises(CorruptData, match=f"{first.name}: the checksum of its footer is .*, state says"):
            read()
    first.write_bytes(good)
    assert stored.to_dataset().count_rows() == 10_000


def test_files_with_more_than_the_rows_are_refused_until_they_are_optimized(stored):
    stored.append(rows(0, 10))
    deleted = stored.delete("id < 5")
    with pytest.raises(InvalidUsage, match=r"table orders: its files hold rows that were changed .*call optimize\(\)"):
        stored.to_dataset()
    extra = 0
    while stored.scan().time <= deleted.time + 1:  # until retention has passed the deletion
        extra += stored.append(rows(100 + extra, 1)).inserted
    stored.optimize()
    assert stored.to_dataset().count_rows() == 5 + extra
    stored.append(rows(5, 1))
    stored.append(rows(5, 1))
    stored.optimize()  # equal rows become one with the diff 3
    assert stored.count() == 7 + extra
    with pytest.raises(InvalidUsage, match="come several times"):
        stored.to_dataset()


@pytest.mark.parametrize("table", ["stored", "orders"])
def test_the_sum_of_diffs_alone_proves_nothing(table, request):
    """One row retracted and another one three times there: two updates whose sum is two."""
    table = request.getfixturevalue(table)
    table.append(rows(0, 1))
    table.overwrite(pa.concat_tables([rows(1, 1)] * 3))
    parts = table._client.metadata(table.id, "parts").to_pylist()
    assert any(part["rows"] == part["diffs_sum"] == 2 for part in parts)
    with pytest.raises(InvalidUsage, match="changed or deleted"):
        table.to_dataset()


def test_older_columns_are_refused_until_they_are_optimized(stored):
    """An optimization writes the newest columns among the rows that it merges, so there must be rows with the new ones."""
    stored.append(rows(0, 3))
    stored.alter(add="note STRING")
    stored.optimize()
    with pytest.raises(
        InvalidUsage, match=r"before alter\(\): optimize\(\) gives them the new ones once rows were written"
    ):
        stored.to_dataset()
    stored.append([{"id": 9, "name": "nine", "price": None, "note": "new"}])
    stored.optimize()
    assert stored.to_dataset().count_rows() == 4


def test_a_file_that_maintenance_deleted_is_an_error_and_no_missing_rows(stored):
    stored.append(rows(0, 3))
    dataset = stored.to_dataset()
    stored.overwrite([])
    stored.optimize()
    stored.vacuum()
    with pytest.raises(FileNotFoundError, match="call to_dataset"):
        dataset.to_table()


def test_duckdb_reads_a_relation_again_and_again(orders):
    orders.append(rows(0, 3))
    relation = orders.to_duckdb()
    for _ in range(2):
        assert relation.aggregate("sum(id)").fetchall() == [(3,)]
    with duckdb.connect() as connection:
        assert orders.scan("id > 0").to_duckdb(connection).filter("id < 2").fetchall() == [(1, "n1", None)]


STREAMED = """
import resource, sys
import pyarrow as pa
from persist_engine import connect
with connect(sys.argv[1], maintain=False) as db:
    table = db["big"]
    most = rows = 0
    for batch in table.to_reader():
        rows += batch.num_rows
        most = max(most, pa.total_allocated_bytes())
    print(rows, most)
"""


@pytest.mark.slow
def test_a_reader_never_holds_all_rows(tmp_path):
    """430 MiB of rows, 256 MiB of memory: measured in Arrow's own pool, in a process that does nothing else."""
    count, rows, text = 30, 1000, "x" * 15_000
    with connect(tmp_path / "shop", maintain=False) as db:
        table = db.create("big", key="id BIGINT", value="text STRING")
        for start in range(count):
            ids = range(start * rows, (start + 1) * rows)
            table.append(pa.table({"id": ids, "text": pa.array([text]).take(pa.array([0] * rows))}))
    ran = subprocess.run(
        [sys.executable, "-c", STREAMED, (tmp_path / "shop").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, most = map(int, ran.stdout.split())
    assert found == count * rows
    assert 0 < most < 300 << 20
