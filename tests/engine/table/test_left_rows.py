"""An overwrite that follows another reads nothing, and is as right as one that reads: beside other writers, times and schemas."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from persist_engine import Database, Schema, Settings, ShardId, Written, connect
from persist_engine.base.settings import BatchSettings
from persist_engine.table import readers
from persist_engine.table.corrections import LeftRows
from persist_kit.counted import CountedMetrics

IN_BLOBS = Settings(batch=BatchSettings(inline_part_bytes_max=0))


def frame(first: int, *, note: str = "a") -> list[dict[str, object]]:
    return [{"id": each, "note": note} for each in range(first, first + 50)]


@pytest.fixture
def metrics() -> CountedMetrics:
    return CountedMetrics()


@pytest.fixture
def db(tmp_path: Path, metrics: CountedMetrics) -> Iterator[Database]:
    with connect(tmp_path / "shop", maintain=False, settings=IN_BLOBS, metrics=metrics) as opened:
        opened.create("notes", key="id BIGINT", value="note STRING")
        yield opened


def test_the_third_overwrite_in_a_row_reads_nothing(db, metrics):
    notes = db["notes"]
    notes.overwrite(frame(0))
    notes.overwrite(frame(10))
    read = metrics.total("fetched_parts")
    assert notes.overwrite(frame(20)) == Written(notes.last_time, 10, 10)
    assert notes.overwrite(frame(20)) == Written(None)
    assert metrics.total("fetched_parts") == read > 0
    assert notes.to_pylist() == frame(20)


def test_rows_of_others_are_read(db, metrics, tmp_path):
    notes = db["notes"]
    for first in (0, 10):
        notes.overwrite(frame(first))
    with connect(tmp_path / "shop", maintain=False, settings=IN_BLOBS) as other:
        other["notes"].append(frame(500))
    read = metrics.total("fetched_parts")
    assert notes.overwrite(frame(10)).deleted == 50
    assert metrics.total("fetched_parts") > read
    assert notes.to_pylist() == frame(10)


def test_rows_of_the_same_table_are_read(db):
    notes = db["notes"]
    for first in (0, 10):
        notes.overwrite(frame(first))
    notes.upsert(frame(10, note="b"))
    notes.delete("id = 10")
    assert notes.overwrite(frame(10)).inserted == 50
    assert notes.to_pylist() == frame(10)


def test_a_row_that_is_there_twice(db):
    notes = db["notes"]
    for first in (0, 10):
        notes.overwrite(frame(first))
    assert notes.overwrite(frame(10) + frame(10)).inserted == 50
    assert notes.overwrite(frame(10) + frame(10)) == Written(None)
    assert notes.overwrite(frame(10)).deleted == 50
    assert notes.to_pylist() == frame(10)


def test_a_new_column_is_not_taken_for_the_old_rows(db):
    notes = db["notes"]
    for first in (0, 10):
        notes.overwrite(frame(first))
    notes.alter(add="stars INT")
    rows = [{**row, "stars": 1} for row in frame(10)]
    assert notes.overwrite(rows) == Written(notes.last_time, 50, 50)
    assert notes.to_pylist() == rows


def test_nan_and_both_zeros(db):
    measured = db.create("measured", key="id BIGINT", value="x DOUBLE")
    for x in (1.0, 2.0, math.nan):
        measured.overwrite([{"id": each, "x": x} for each in range(300)])
    assert measured.overwrite([{"id": each, "x": -math.nan} for each in range(300)]) == Written(None)
    assert measured.overwrite([{"id": each, "x": -0.0} for each in range(300)]).inserted == 300
    assert measured.overwrite([{"id": each, "x": 0.0} for each in range(300)]) == Written(None)


def test_a_frame_that_is_changed_in_place(db):
    """The arrays of a frame of pandas, polars or Arrow may be those that the caller writes into before the next overwrite."""
    measured = db.create("measured", key="id BIGINT", value="n BIGINT")
    ids, n = np.arange(300), np.zeros(300, np.int64)
    frame = pa.table({"id": ids, "n": pa.Array.from_buffers(pa.int64(), 300, [None, pa.py_buffer(n)])})
    for each in range(4):
        n[each] = 7
        assert measured.overwrite(frame).inserted == (1 if each else 300)
    assert measured.to_arrow()["n"].to_pylist() == [7] * 4 + [0] * 296


def test_a_frame_of_pandas_in_a_loop(db):
    prices = db.create("prices", key="id BIGINT", value="n BIGINT")
    frame = pd.DataFrame({"id": range(5), "n": [0] * 5})
    for each in range(5):
        frame.loc[each, "n"] = each + 1
        prices.overwrite(frame)
    assert prices.to_pandas()["n"].tolist() == [1, 2, 3, 4, 5]


def test_an_idle_table_keeps_no_rows(db, monkeypatch, metrics):
    monkeypatch.setattr(readers, "IDLE_S", 0.05)
    notes = db["notes"]
    for first in (0, 10, 20):
        notes.overwrite(frame(first))
    left = notes._writer._left
    until = time.monotonic() + 60
    while left.is_open and time.monotonic() < until:
        time.sleep(0.01)
    read = metrics.total("fetched_parts")
    assert notes.overwrite(frame(30)).inserted == 10
    assert metrics.total("fetched_parts") > read


def test_a_field_that_stayed_is_not_copied_again():
    """Each field has a buffer of its own, so that one that stayed keeps no other copy in memory."""
    schema = Schema.from_ddl("id BIGINT", "note STRING, n BIGINT")
    notes = pa.array([str(each) for each in range(300)])

    def rows(n: int) -> pa.Table:
        key = pa.StructArray.from_arrays([pa.array(np.arange(300))], fields=list(schema.key_type))
        val = pa.StructArray.from_arrays([notes, pa.array(np.full(300, n))], fields=list(schema.val_type))
        return pa.table([key, val, *[pa.array(np.full(300, 1))] * 2], schema=schema.updates_schema)

    def address(name: str) -> int:
        kept = left.at(time_, schema.updates_schema)
        assert kept is not None
        return kept.column("val").chunk(0).field(name).buffers()[1].address

    left = LeftRows(ShardId.new())
    found = []
    for time_ in range(3):
        left.keep(time_, rows(time_))
        assert left.at(time_, schema.updates_schema).equals(rows(time_))
        found.append((address("note"), address("n")))
    assert len({note for note, _ in found}) == 1
    assert len({n for _, n in found[:2]}) == 2
    assert notes.buffers()[1].address not in {note for note, _ in found}
    left.keep(3, rows(3).slice(0, 0))
    assert left.at(3, schema.updates_schema).num_rows == 0
