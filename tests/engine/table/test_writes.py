"""Writes: which frames a table takes, what each call changes, and what is refused with nothing written."""

from __future__ import annotations

import datetime as dt
import math
import threading
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from persist_engine import Schema, Written, connect
from persist_engine.base.errors import Conflict, CorruptData, InvalidUsage, SchemaMismatch

ADA, LIN = {"id": 1, "name": "ada", "price": Decimal("1.50")}, {"id": 2, "name": "lin", "price": None}


class Stream:
    """What DuckDB, polars and others offer: Arrow's stream and nothing else."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


class One:
    def __init__(self, batch):
        self._batch = batch

    def __arrow_c_array__(self, requested_schema=None):
        return self._batch.__arrow_c_array__(requested_schema)


ARROW = pa.Table.from_pylist(
    [ADA, LIN], schema=pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.decimal128(10, 2))])
)
FRAMES = {
    "dicts": [ADA, LIN],
    "lists": {"price": [Decimal("1.5"), None], "id": [1, 2], "name": ["ada", "lin"]},
    "numpy": {"price": [1.5, None], "id": np.array([1, 2], np.int16), "name": np.array(["ada", "lin"])},
    "pandas": pd.DataFrame({"id": [1, 2], "name": ["ada", "lin"], "price": [1.5, math.nan]}),
    "an index that is a column": pd.DataFrame({"name": ["ada", "lin"], "price": [1.5, None]}, index=pd.Index([1, 2], name="id")),
    "an index of no name": pd.DataFrame({"id": [1.0, 2.0], "name": ["ada", "lin"], "price": [1.5, None]}, index=[7, 9]),
    "table": ARROW,
    "batch": ARROW.to_batches()[0],
    "reader": lambda: pa.RecordBatchReader.from_batches(ARROW.schema, ARROW.to_batches()),
    "stream": Stream(ARROW),
    "array": One(ARROW.to_batches()[0]),
    "other layouts": ARROW.set_column(1, "name", ARROW.column("name").cast(pa.large_string()).dictionary_encode()).set_column(0, "id", ARROW.column("id").cast(pa.uint8())),
    "chunks": pa.concat_tables([ARROW.slice(0, 1), ARROW.slice(1, 0), ARROW.slice(1)]),
}  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("call", ["append", "upsert", "overwrite"])
def test_frames_of_every_kind(orders, frame, call):
    done = getattr(orders, call)(frame() if callable(frame) else frame)
    assert (done.inserted, done.deleted) == (2, 0)
    assert orders.to_pylist() == [ADA, LIN]


def test_polars_frames(orders):
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"id": [1, 2], "name": ["ada", "lin"], "price": [1.5, None]})
    orders.append(frame)
    assert orders.to_pylist() == [ADA, LIN]
    assert orders.to_polars()["name"].to_list() == ["ada", "lin"]
    with pytest.raises(InvalidUsage, match=r"collect\(\) it first"):
        orders.append(frame.lazy())


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ({"id": [1], "name": ["a"]}, "price is missing"),
        ({"id": [1], "name": ["a"], "price": [None], "x": [1], "y": [2]}, "x is no column of the table; y is no column"),
        ({"id": ["1"], "name": [1], "price": [None]}, "id is STRING, the table's is BIGINT.*name is BIGINT, the table's is STRING"),
        ({"id": [1.5], "name": ["a"], "price": [None]}, "id is DOUBLE, the table's is BIGINT"),
        ({"id": [1], "name": ["a"], "price": [1.234]}, "price is DOUBLE, the table's is DECIMAL.*1.234 would change"),
        ({"id": [1], "name": ["a"], "price": [Decimal("1.234")]}, "price: "),
        ({"id": [2**63], "name": ["a"], "price": [None]}, "id: some numbers do not fit BIGINT"),
        ({"id": [1, 2], "name": ["a", 2], "price": [None, None]}, "name: values of int and str in one column"),
        (pd.DataFrame({"id": [1, 2], "name": ["a", 2], "price": [None, None]}), "name: values of int and str in one column"),
        ({"id": [1, 2], "name": ["a"], "price": [None, None]}, "different lengths"),
        ({"id": 1, "name": "a", "price": None}, "id: it is a int, not a list"),
        ([{"id": 1, "name": "a", "price": None, "late": 1}, ADA], "late is no column"),
        (pa.table([[1], [1], ["a"], [None]], names=["id", "id", "name", "price"]), "id is there 2 times"),
        (pd.DataFrame([[1, 1, "a", None]], columns=["id", "id", "name", "price"]), "columns id are there more than once"),
        (pd.DataFrame([[1, "a", None]]), "names that are no text"),
        (pd.DataFrame({"id": [1, "x"], "name": ["a", "b"], "price": [None, None]}), "id: "),
        ([], None),
        ("orders.parquet", "read the file first"),
        (7, "the rows are a int"),
        (None, "the rows are a NoneType"),
        ([1, 2], "the rows are a list"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["append", "upsert", "overwrite"])
def test_misfits_are_named_and_nothing_is_written(orders, frame, text, call):
    orders.append([ADA])
    before = orders.last_time
    if text is None:
        assert getattr(orders, call)(frame).inserted == 0
        assert orders.count() == (0 if call == "overwrite" else 1)
        return
    with pytest.raises(InvalidUsage, match=f"^table orders: .*{text}"):
        getattr(orders, call)(frame)
    assert (orders.to_pylist(), orders.last_time) == ([ADA], before)


def test_nulls_where_there_must_be_none(db):
    table = db.create("t", key="id BIGINT NOT NULL", value="name STRING NOT NULL")
    with pytest.raises(
        SchemaMismatch, match="id is NOT NULL, and null in 2 rows; name is NOT NULL, and null in 1 rows"
    ):
        table.append({"id": [None, None], "name": [None, "a"]})


def test_instants_of_every_unit_and_no_loss(db):
    table = db.create("t", key="id BIGINT", value="at TIMESTAMP, local TIMESTAMP_NTZ, day DATE")
    at = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
    frame = pd.DataFrame(
        {"id": [1], "at": [pd.Timestamp(at)], "local": [pd.Timestamp("2026-11-21")], "day": [at.date()]}
    )
    rows = [{"id": 1, "at": at, "local": dt.datetime(2026, 11, 21), "day": at.date()}]
    for unit in ("s", "ms", "us"):
        table.overwrite([])
        table.append(frame.assign(at=frame["at"].dt.as_unit(unit), local=frame["local"].dt.as_unit("s")))
        assert table.to_pylist() == rows
    with pytest.raises(SchemaMismatch, match=r"times have no zone: .*tz_localize\('UTC'\)"):
        table.append(frame.assign(at=frame["local"]), coerce="us")
    with pytest.raises(SchemaMismatch, match="times have a zone"):
        table.append(frame.assign(local=frame["at"]), coerce="us")


def test_appends_add_and_upserts_replace(orders):
    orders.append([ADA, ADA, LIN])
    assert orders.to_pylist() == [ADA, ADA, LIN]
    done = orders.upsert([ADA | {"name": "grace"}])
    assert (done.inserted, done.deleted) == (1, 2)
    assert orders.to_pylist() == [ADA | {"name": "grace"}, LIN]
    assert orders.upsert([LIN]) == Written(None)
    assert orders.upsert([]) == Written(None)


def test_what_a_write_says(orders):
    assert (
        repr(Written(1_800_000_000_000, 2, 1))
        == "Written(at 1800000000000 (2027-01-15T08:00:00Z), inserted=2, deleted=1)"
    )
    assert repr(Written(None)) == "Written(nothing, inserted=0, deleted=0)"
    assert "committed before" in repr(Written(None, is_repeat=True))


def test_several_rows_of_a_key(orders):
    rows = [ADA, ADA | {"name": "b"}, LIN]
    with pytest.raises(
        InvalidUsage, match=r"table orders: no row .* of 1 key with different rows, such as \(id=1\).*order_by=COLUMN"
    ):
        orders.upsert(rows)
    assert orders.count() == 0
    assert orders.upsert([ADA, LIN, ADA]).inserted == 2, "rows that are equal are one"
    orders.upsert(rows, order_by="name")
    assert orders.to_pylist() == [rows[1], LIN]
    extra = [row | {"seen": seen} for row, seen in zip([*rows, ADA], [2, 1, 1, None], strict=True)]
    orders.upsert(extra[::-1], order_by="seen")
    assert orders.to_pylist() == [ADA, LIN], "null is before all"
    tied = [row | {"seen": 2} for row in rows]
    with pytest.raises(
        InvalidUsage, match=r"of 1 key with different rows of the greatest seen, such as \(id=1\): leave one"
    ):
        orders.upsert(tied, order_by="seen")
    with pytest.raises(InvalidUsage, match="order_by: there is no column later"):
        orders.upsert([ADA], order_by="later")
    with pytest.raises(SchemaMismatch, match="seen is no column"):
        orders.upsert(extra[:1])
    for nothing in ([], iter([]), pa.Table.from_pylist(extra).slice(0, 0)):
        assert orders.upsert(nothing, order_by="seen") == Written(None), "no rows need no column"


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
def test_zeros_and_nan_are_one_key_each(db, kind):
    table = db.create("t", key=f"x {kind}", value="n BIGINT")
    table.upsert({"x": [0.0, math.nan, None], "n": [1, 2, 3]})
    done = table.upsert({"x": pa.array([-0.0, math.nan], pa.float64()), "n": [10, 20]})
    assert (done.inserted, done.deleted) == (2, 2)
    assert [row["n"] for row in table.to_pylist()] == [10, 20, 3]
    for twice in ([0.0, -0.0], [math.nan, math.nan], [None, None]):
        with pytest.raises(InvalidUsage, match="1 key with different rows"):
            table.upsert({"x": pa.array(twice, pa.float64()), "n": [1, 2]})


def test_deletes(orders):
    orders.append([ADA, ADA, LIN])
    assert orders.delete("price > 1").deleted == 2
    assert orders.delete("price > 1") == Written(None)
    assert orders.delete(pc.field("name") == "lin").deleted == 1
    assert orders.count() == 0
    for where, text in [
        (None, "delete needs a condition"),
        ("prise > 1", "prise"),
        ("price >", "filter"),
        (7, "where is a builtins.int"),
    ]:
        with pytest.raises(InvalidUsage, match=f"table orders: .*{text}"):
            orders.delete(where)


def test_overwrites_write_the_difference(orders):
    rows = [{"id": number, "name": "n", "price": None} for number in range(1000)]
    orders.overwrite(rows)
    rows[7]["name"] = "changed"
    done = orders.overwrite(rows)
    assert (done.inserted, done.deleted) == (1, 1)
    assert orders.overwrite(rows) == Written(None)
    assert orders.overwrite([]).deleted == 1000


def test_contents_that_were_expected(orders):
    orders.append([ADA])
    seen = orders.last_time
    assert orders.scan().time == seen
    orders.append([LIN])
    with pytest.raises(
        Conflict, match=rf"was last written at {orders.last_time}, and not at {seen}; nothing was written now"
    ):
        orders.overwrite([], expected=seen)
    assert orders.count() == 2
    assert orders.overwrite([], expected=orders.last_time).deleted == 2


def test_a_table_that_was_expected_to_have_no_write(orders):
    """What `last_time` and `Scan.time` say of such a table, also after a correction has made its first time readable."""
    orders.delete("id = 1")
    assert orders.last_time is orders.scan().time is None
    with pytest.raises(Conflict, match="was last written never, and not at 7;"):
        orders.overwrite([ADA], expected=7)
    assert orders.overwrite([ADA], expected=orders.last_time).inserted == 1
    with pytest.raises(Conflict, match=r"was last written at \d+, and not never;"):
        orders.overwrite([LIN], expected=None)
    assert orders.overwrite([LIN]).inserted == 1


@pytest.mark.parametrize("call", ["append", "upsert", "overwrite"])
def test_a_transaction_happens_once(orders, call):
    write = getattr(orders, call)
    assert write([ADA], txn=("load", 7)).inserted == 1
    for version in (7, 6, 0):
        assert write([LIN], txn=("load", version)).is_repeat
    assert orders.to_pylist() == [ADA]
    assert not write([LIN], txn=("other", 0)).is_repeat
    assert write([], txn=("load", 9)) in {Written(None), Written(orders.last_time, deleted=1)}
    assert write([LIN], txn=("load", 8)).is_repeat, "also a transaction without rows was committed"
    assert orders.delete("id = 1", txn=("load", 9)).is_repeat
    for txn in ("load", ("load",), ("", 1), ("load", -1), ("load", 1.0), ("load", True)):
        with pytest.raises(InvalidUsage, match="txn must be"):
            write([ADA], txn=txn)


def test_a_transaction_in_the_bytes_of_today(orders):
    """Other releases must read the same number in the same place."""
    orders.append([ADA], txn=("load", 7))
    assert orders._client.progress(orders.id, "txn:load").token == b"7"
    with orders._client.open_writer(
        orders.id, Schema.from_ddl("id BIGINT", "name STRING, price DECIMAL(10,2)"), purpose="t"
    ) as writer:
        upper = writer.fetch_recent_upper()
        writer.compare_and_append([], expected_upper=upper, new_upper=upper, progress=("txn:bad", b"x"))
    with pytest.raises(CorruptData):
        orders.append([ADA], txn=("bad", 1))


def test_lost_races_are_retried(orders, db):
    """Another process commits between the look and the commit of each write."""
    orders.append([ADA])
    writer = orders._writer._current()[0]
    swap = writer.compare_and_append_batch
    names = iter("bcdefghij")

    def raced(*args, **more):
        name = next(names, None)
        if name in {"b", "c", "e", "g", "i"}:
            with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as other:
                other["orders"].append([{"id": ord(name), "name": name, "price": None}])
        return swap(*args, **more)

    writer.compare_and_append_batch = raced
    orders.append([LIN])
    assert orders.upsert([ADA | {"name": "A"}]).deleted == 1
    assert orders.delete("name = 'e' OR name = 'A'").deleted == 2
    rows = orders.to_pylist()
    assert [row["name"] for row in rows] == ["lin", "b", "c", "g"]
    assert orders.overwrite([LIN]).deleted == 4
    assert orders.to_pylist() == [LIN]


def test_an_append_that_never_wins(orders, monkeypatch):
    monkeypatch.setattr("persist_engine.table.writing.ATTEMPTS_MAX", 0)
    for call in (lambda: orders.append([ADA]), lambda: orders.upsert([ADA])):
        with pytest.raises(Conflict, match="nothing was written"):
            call()
    assert orders.count() == 0


def test_a_stream_that_breaks_writes_nothing(orders, tmp_path):
    def batches():
        yield from ARROW.to_batches()
        raise OSError("the source is gone")

    for call in (orders.append, orders.overwrite, orders.upsert):
        with pytest.raises(OSError, match="the source is gone"):
            call(pa.RecordBatchReader.from_batches(ARROW.schema, batches()))
    assert (orders.count(), orders.last_time) == (0, None)


def test_times_rise_when_the_clock_does_not(tmp_path):
    from persist_engine import SeededEnv

    env = SeededEnv(start_ms=1_800_000_000_000)
    with connect(tmp_path, env=env, maintain=False) as db:
        table = db.create("t", key="id BIGINT")
        first = table.append([{"id": 1}]).time
        second = table.append([{"id": 2}]).time
        env.advance_ms(-1_000_000)
        third = table.upsert([{"id": 3}]).time
        assert first == 1_800_000_000_000
        assert first < second < third


def test_threads_write_beside_each_other(orders):
    """Every acknowledged row is there, once."""
    errors = []

    def work(number):
        try:
            for turn in range(5):
                row = number * 100 + turn
                orders.append([{"id": row, "name": "a", "price": None}])
                orders.upsert([{"id": row, "name": "u", "price": None}])
                orders.delete(f"id = {row} AND name = 'a'")
                if turn == number:
                    orders.optimize()
                    orders.vacuum()
                orders.count()
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {row["id"] for row in orders.to_pylist()} == {n * 100 + t for n in range(4) for t in range(5)}
    assert {row["name"] for row in orders.to_pylist()} == {"u"}
    assert orders.count() == 20


def test_a_schema_that_grows(orders, db):
    orders.append([ADA])
    with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as other:
        other["orders"].alter(add="note STRING")
    for call in (orders.upsert, orders.overwrite):
        with pytest.raises(SchemaMismatch, match="note is missing"):
            call([ADA])
    orders.alter(add="more BIGINT")
    assert orders.to_pylist() == [ADA | {"note": None, "more": None}]
    orders.upsert([ADA | {"note": "x", "more": 1}])
    assert orders.to_pylist() == [ADA | {"note": "x", "more": 1}]
    small = db.create("small", key="id BIGINT", value="n INT")
    small.append([{"id": 1, "n": 1}])
    small.alter(widen={"n": "BIGINT"}, retain="1h")
    small.append([{"id": 2, "n": 2**40}])
    assert [row["n"] for row in small.to_pylist()] == [1, 2**40]
    assert small.describe().retain == "1h"
    for change, text in [
        ({"add": "id BIGINT"}, "there is a column id already"),
        ({"add": "x BIGINT NOT NULL"}, "x is new and NOT NULL"),
        ({"widen": {"n": "INT"}}, "cannot become"),
        ({"widen": {"id": "BIGINT"}}, "id is no column of the value"),
        ({"add": 7}, "add must be DDL"),
    ]:
        with pytest.raises(InvalidUsage, match=f"table small: .*{text}"):
            small.alter(**change)


@pytest.mark.parametrize(
    "refused", [{"retain": "bogus"}, {"bloom": ["nope"]}, {"add": "name STRING"}, {"widen": {"id": "INT"}}]
)
def test_an_alteration_of_which_a_piece_is_refused_changes_nothing(orders, refused):
    """Regression: a column was added, and then the retention refused."""
    before = orders.describe()
    with pytest.raises(InvalidUsage):
        orders.alter(**{"add": "note STRING", "retain": "9 days", "bloom": ["name"]} | refused)
    assert orders.describe() == before


def test_bloom_filters_of_a_column_that_is_added_beside(orders):
    orders.alter(add="note STRING", bloom=["note"])
    assert orders.describe().bloom == "note"


def test_later_upserts_read_nothing(orders, monkeypatch):
    """They keep the values of the keys in memory, as long as each key has one, and let go of them when the table is idle."""
    for name in "abcd":
        done = orders.upsert([ADA | {"name": name}])
    assert (done.inserted, done.deleted, done.time) == (1, 1, orders.last_time)
    assert orders.upsert([ADA | {"name": "d"}]) == Written(None)
    assert orders._writer._upsert.is_open
    monkeypatch.setattr("persist_engine.table.readers.IDLE_S", 0.2)
    orders._writer._upsert._start_timer(0)  # the one that runs was started with the usual time
    wait = threading.Event()
    for _ in range(600):
        if not orders._writer._upsert.is_open:
            break
        wait.wait(0.1)
    assert not orders._writer._upsert.is_open
    orders.append([ADA])
    assert orders.upsert([LIN], txn=("a", 1)).inserted == 1, "one key has two rows now"
    assert not orders._writer._upsert.is_open
    assert orders.upsert([ADA, LIN], txn=("a", 2)).deleted == 1
    assert orders.to_pylist() == [ADA, LIN]


def test_upserts_see_the_writes_of_others(orders, db):
    orders.upsert([ADA])
    orders.upsert([LIN])
    with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as other:
        other["orders"].delete("id = 2")
        other["orders"].upsert([ADA | {"name": "b"}])
    assert orders.upsert([LIN, ADA | {"name": "b"}]).inserted == 1
    orders.alter(add="note STRING")
    assert orders.upsert([ADA | {"note": "x"}]).deleted == 1
    assert [row["note"] for row in orders.to_pylist()] == ["x", None]


@pytest.mark.parametrize("bytes_max", [0, 5000])
def test_overwrites_of_what_does_not_fit_in_memory(orders, monkeypatch, bytes_max):
    monkeypatch.setattr("persist_engine.table.writing.COMPARED_BYTES_MAX", bytes_max)
    rows = [{"id": number % 90, "name": str(number), "price": None} for number in range(100)]
    orders.overwrite(rows)
    assert (orders.overwrite(rows[5:] + [ADA]).inserted, orders.count()) == (1, 96)
    assert orders.overwrite(rows[5:] + [ADA]) == Written(None)
    assert sorted(row["name"] for row in orders.to_pylist()) == sorted([*map(str, range(5, 100)), "ada"])


def test_counters_of_several_processes_lose_nothing(db):
    """Read, change and write with `expected`, over two connections: every increment that was acknowledged counts."""
    db.create("counters", key="name STRING", value="n BIGINT").append({"name": ["a"], "n": [0]})
    conflicts, errors = [], []

    def work():
        try:
            with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as own:
                table, done = own["counters"], 0
                while done < 5:
                    scan = table.scan()
                    (row,) = scan.to_pylist()
                    try:
                        table.overwrite([row | {"n": row["n"] + 1}], expected=scan.time)
                    except Conflict as conflict:
                        conflicts.append(conflict)
                    else:
                        done += 1
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert db["counters"].to_pylist() == [{"name": "a", "n": 15}]
    assert [change.after["n"] for change in db["counters"].changes("start")] == list(range(16))


def test_a_map_with_a_key_twice_is_named_by_its_column_alone(db):
    """Its type is that of the table."""
    scored = db.create("scored", key="id BIGINT", value="scores MAP<STRING, DOUBLE>")
    with pytest.raises(InvalidUsage, match="^table scored: scores: a map has the key 'x' more than once"):
        scored.append([{"id": 1, "scores": [("x", 1.0), ("x", 2.0)]}])
