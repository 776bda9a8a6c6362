"""Reads: scans in every form, the past, history, and the look after a table."""

from __future__ import annotations

import copy
import datetime as dt
import gc
import json
import pickle
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from persist_engine import Schema, ShardId, connect
from persist_engine.base.errors import InvalidUsage, InvariantViolated
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.closing import close_shard
from persist_kit.counted import CountedMetrics

ROWS = [{"id": number, "name": "abc"[number % 3], "price": Decimal(number)} for number in range(10)]
#: When the table `timed` begins.
START_MS = 1_800_000_000_000
HOUR = 3_600_000


def test_a_scan_in_every_form(orders):
    orders.append(ROWS)
    scan = orders.scan("price >= 5 AND name = 'a'", ["name", "id"])
    wanted = [{"name": "a", "id": 6}, {"name": "a", "id": 9}]
    assert scan.to_pylist() == scan.to_arrow().to_pylist() == scan.to_pandas().to_dict("records") == wanted
    assert scan.to_reader().read_all().to_pylist() == pa.table(scan).to_pylist() == wanted
    assert pa.RecordBatchReader.from_stream(orders).read_all().num_rows == 10
    assert (scan.count(), orders.count()) == (2, 10)
    assert scan.schema.names == ["name", "id"]
    assert "name" in repr(scan)
    assert orders.scan().scan("id = 3").to_pylist() == [ROWS[3]]
    with pytest.raises(InvalidUsage, match="table orders: this scan has its condition"):
        scan.scan("id = 3")


def test_a_nested_scan_in_every_form(orders, db):
    orders.append(ROWS)
    scan = orders.scan("price >= 5 AND name = 'a'", ["price", "id"], nested=True)
    wanted = [{"key": {"id": number}, "val": {"price": Decimal(number)}} for number in (6, 9)]
    assert scan.schema.names == ["key", "val"]
    assert scan.to_pylist() == scan.to_pandas().to_dict("records") == scan.to_polars().to_dicts() == wanted
    assert scan.to_reader().read_all().to_pylist() == pa.table(scan).to_pylist() == scan.head(9).to_pylist() == wanted
    assert scan.to_duckdb().aggregate("sum(val.price)").fetchall() == [(Decimal(15),)]
    assert (scan.count(), "<td>{&#x27;id&#x27;: 6}</td>" in scan._repr_html_()) == (2, True)
    assert orders.scan(pc.field("id") == 3, ["name"], nested=True, limit=1).to_pylist() == [{"val": {"name": "a"}}]
    past = orders.at(orders.last_time).scan("id = 1", nested=True)
    assert past.to_pylist() == [{"key": {"id": 1}, "val": {"name": "b", "price": Decimal(1)}}]
    assert orders.scan(nested=True).scan("id < 0").to_arrow() == past.schema.empty_table()
    both = db.create("both", key="id BIGINT", value="id BIGINT")
    both.append([{"key.id": 1, "val.id": 2}])
    assert both.scan(nested=True).to_pylist() == [{"key": {"id": 1}, "val": {"id": 2}}]
    assert db.create("keys", key="id BIGINT").scan(nested=True).to_arrow().column_names == ["key"]


def test_the_first_rows_of_a_scan(orders):
    orders.append(ROWS)
    assert orders.head().to_pylist() == ROWS[:5]
    assert orders.head(0).num_rows == 0
    assert orders.head(99).to_pylist() == ROWS
    scan = orders.scan("name = 'a'", ["id"], limit=3)
    assert scan.to_pylist() == scan.to_reader().read_all().to_pylist() == [{"id": 0}, {"id": 3}, {"id": 6}]
    assert (scan.count(), orders.scan(limit=99).count(), orders.scan(limit=0).count()) == (3, 10, 0)
    assert scan.head(2).num_rows == 2
    assert orders.scan(pc.field("id") > 6, limit=2).to_pylist() == ROWS[7:9]
    assert "limit 3" in repr(scan)
    for wrong in (-1, 1.0, True):
        with pytest.raises(InvalidUsage, match="table orders: a limit is a whole number of rows from 0 on"):
            orders.scan(limit=wrong)
    with pytest.raises(InvalidUsage, match="this scan has its condition"):
        scan.scan("id = 3")


def test_the_first_rows_need_few_parts(tmp_path):
    metrics = CountedMetrics()
    settings = Settings(batch=BatchSettings(target_part_bytes=1 << 20, inline_part_bytes_max=0))
    with connect(tmp_path / "parts", maintain=False, settings=settings, metrics=metrics) as db:
        table = db.create("t", key="id BIGINT", value="raw BINARY")
        noise = np.random.default_rng(1).bytes(24 << 20)
        rows = pa.table({"id": range(24 << 10), "raw": [noise[at : at + 1024] for at in range(0, len(noise), 1024)]})
        table.append(rows)
        parts = table.describe().parts
        assert parts > 20
        assert table.head(3).column("id").to_pylist() == [0, 1, 2]
        taken = [
            metrics.total("prefetch_parts", outcome=outcome) for outcome in ("ready", "waited", "skipped", "wasted")
        ]
        assert 0 < sum(taken) < parts / 2


@pytest.mark.parametrize(
    "where",
    [
        "name = 'a' OR id = 1",
        [[("name", "=", "a")], [("id", "=", 1)]],
        [[("name", "=", np.str_("a"))], [("id", "=", np.int64(1))]],
        [("id", "in", np.array([0, 1, 3, 6, 9], np.uint8)), ("id", "<", np.float32(9.5))],
        (pc.field("name") == "a") | (pc.field("id") == 1),
        pc.is_in(pc.field("id"), pa.array([0, 1, 3, 6, 9])),
    ],
)
def test_conditions_in_every_form(orders, where):
    orders.append(ROWS)
    found = orders.scan(where)
    assert [row["id"] for row in found.to_pylist()] == [0, 1, 3, 6, 9]
    assert found.count() == 5
    assert [row["name"] for row in orders.scan(where, ["name"]).to_pylist()] == ["a", "b", "a", "a", "a"]


@pytest.mark.parametrize("where", ["key.id = 2", [("key.id", "=", 2)], "id > 0 AND NOT `key.id` <> 2", "key.id IN (2)"])
@pytest.mark.parametrize("value", ["key STRUCT<id: BIGINT>", "`key.id` BIGINT"])
def test_a_name_that_may_be_a_side_and_a_column_chooses_no_rows(db, where, value):
    """It chose those of the side, and a delete removed other rows than it named."""
    table = db.create("t", key="id BIGINT", value=value)
    inner = [2, 1] if value.startswith("`") else [{"id": 2}, {"id": 1}]
    rows = [{"id": id_, table.schema.names[1]: each} for id_, each in zip((1, 2), inner, strict=True)]
    table.append(rows)
    for use in (table.scan, table.delete):
        with pytest.raises(InvalidUsage, match=r"column key.id may be the field id of the key, or a column .*write id"):
            use(where)
    assert table.scan("id = 2").to_pylist() == rows[1:]
    assert table.delete("val.key.id = 2").deleted == 1
    assert table.to_pylist() == rows[1:]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            "upper(name) = 'A'",
            r"a filter cannot express 'UPPER\(name\)' where a column is expected; a filter compares a column with a value by "
            "=, !=, <, <=, >, >=, IN, BETWEEN, LIKE, .*functions, arithmetic, RLIKE and ILIKE are not allowed",
        ),
        ("prise = 1", "prise"),
        (pc.field("prise") == 1, "does not fit the table: .*prise.*the columns are id, name, price"),
        (pc.field("name") > 1, "does not fit the table"),
        ([("name", "~", "a")], "is none of"),
        ({"name": "a"}, "where is a builtins.dict; it must be SQL text"),
        (lambda row: True, "where is a builtins.function"),
        ("", "the filter is empty"),
    ],
)
def test_what_is_no_condition(orders, where, text):
    with pytest.raises(InvalidUsage, match=f"table orders: .*{text}"):
        orders.scan(where)


@pytest.mark.parametrize("columns", [["x"], [], ["id", "id"], "id", 7])
def test_what_are_no_columns(orders, columns):
    with pytest.raises(InvalidUsage, match="table orders: "):
        orders.scan(columns=columns)


def test_names_that_key_and_value_share(db):
    table = db.create("t", key="id BIGINT", value="id STRING, key BIGINT")
    table.append([{"key.id": 1, "val.id": "a", "key": 2}])
    assert table.to_pylist() == [{"key.id": 1, "val.id": "a", "key": 2}]
    assert table.scan(columns=["val.id"]).to_pylist() == [{"val.id": "a"}]
    assert table.scan("key.id = 1").count() == 1


def test_an_empty_table(orders):
    assert orders.to_arrow().schema == orders.schema == orders.to_reader().schema
    assert (orders.count(), orders.last_time, orders.scan().time, orders.to_pylist()) == (0, None, None, [])
    assert list(orders.changes("start")) == list(orders.changes("-1h")) == []
    with pytest.raises(InvalidUsage, match="since .* is in the future: nothing was written yet"):
        orders.changes("2099-01-01T00:00:00Z")
    assert orders.history().num_rows == 0
    assert (orders.describe().last_write, orders.describe().in_words()["last_write"]) == (None, "never")
    assert "nothing was written yet" in orders._repr_html_()
    with pytest.raises(InvalidUsage, match="at .* is in the future: nothing was written yet"):
        orders.at(2**62)


@pytest.mark.parametrize("clock", ["ms", "counter"])
@pytest.mark.parametrize(
    "write",
    [lambda table: table.delete("id = 1"), lambda table: table.overwrite([]), lambda table: table.upsert([])],
    ids=["delete", "overwrite", "upsert"],
)
def test_a_table_that_only_calls_without_rows_have_met_is_empty_still(db, persist, clock, write):
    """They make its first time readable, which is no write: everything says None, and nothing shows 1970."""
    table = db.create("t", key="id BIGINT", value="name STRING", clock=clock, retain=None)
    assert write(table).time is None
    info = table.describe()
    assert (table.last_time, table.scan().time, table.timeline().last, info.last_write) == (None, None, None, None)
    assert info.in_words()["last_write"] == "never"
    assert info.clock.startswith("counter" if clock == "counter" else "wall clock")
    assert table.history().num_rows == 0
    assert table.to_pylist() == list(table.changes("start")) == table.at(0).to_pylist() == []
    if clock == "ms":
        assert table.at("-1h").to_pylist() == list(table.changes("-1h")) == []
    stores = ["--blob", db.location.blob, "--consensus", db.location.consensus, "--json"]
    (listed,) = json.loads(persist("ls", "--long", *stores)[1])
    described = json.loads(persist("describe", "t", *stores)[1])
    assert (listed["last_write"], described["last_write"]) == (None, None)
    written = table.append([{"id": 1, "name": "ada"}])
    assert table.last_time == table.describe().last_write == written.time


def test_a_closed_table_has_no_last_time(db, orders):
    """As `describe` says."""
    orders.append([{"id": 1, "name": "ada", "price": None}])
    close_shard(db.client, orders.id)
    assert (orders.last_time, orders.describe().last_write, orders.describe().since) == (None, None, None)


def test_nested_fields(db):
    table = db.create("t", key="id BIGINT", value="place STRUCT<x: DOUBLE, y: DOUBLE>")
    rows = [{"id": 1, "place": {"x": 1.0, "y": None}}, {"id": 2, "place": None}]
    table.upsert(rows)
    assert table.to_pylist() == rows
    assert table.scan("place.x = 1").to_pylist() == rows[:1]


def test_the_past_in_every_form(timed):
    def at(time):
        return [row["name"] for row in timed.at(time).to_pylist()]

    a, c = START_MS, START_MS + 2 * HOUR
    when = dt.datetime.fromtimestamp(a / 1000, dt.UTC)
    assert at(a) == at("-3h") == at("- 3 hours") == at(when) == at(when.isoformat()) == at("-180 min") == ["a"]
    assert at(dt.timedelta(hours=-2)) == at("-2h") == at(a + HOUR) == ["b"]
    assert at("-1h") == at(c) == at("-1 minute") == at("-1ms") == ["c"], "after the last write nothing changed"
    assert at(a - 1) == []
    assert timed.scan("name = 'b'", at="-2h").count() == 1


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (START_MS + 4 * HOUR, "is in the future: the last write was at"),
        ("2099-01-01T00:00:00Z", "is in the future"),
        ("2026-11-21T12:00:00", "has no time zone"),
        (dt.datetime(2026, 1, 1), "has no time zone"),
        ("yesterday", "at must be a whole number"),
        ("-1 fortnight", "a time ago such as"),
        ("123", "at must be"),
        (1.5, "at must be"),
        (-5, "at must be a time"),
        (True, "at must be"),
    ],
)
def test_what_is_no_time_of_the_past(timed, time, text):
    with pytest.raises(InvalidUsage, match=f"table timed: .*{text}"):
        timed.at(time)


def test_times_that_are_gone(timed, clock):
    early = timed.at("-3h")
    assert early.count() == 1
    timed.alter(retain="90m")
    timed.close()  # its reader held the times that it could read
    timed.append([{"id": 2, "name": "d"}])
    for call in (early.to_arrow, lambda: list(early.to_reader()), lambda: list(timed.changes(START_MS))):
        with pytest.raises(InvalidUsage, match="can no longer be read; the earliest time is .*Z.*retain"):
            call()
    assert timed.at("-1h").count() == 1


def test_retractions_of_rows_that_never_were(orders):
    upper = orders._client.recent_upper(orders.id).time
    with orders._client.open_writer(orders.id, orders._client.schema(orders.id), purpose="t") as writer:
        writer.compare_and_append([(((1,), ("a", None)), upper, -1)], expected_upper=upper, new_upper=upper + 1)
    with pytest.raises(InvariantViolated, match="table orders: the table holds a row -1 times.*'id': 1"):
        orders.to_arrow()


def test_history(orders):
    orders.append(ROWS)
    orders.upsert(ROWS[:1], txn=("load", 3))
    orders.upsert([ROWS[0] | {"name": "z"}], txn=("load", 4))
    orders.alter(add="note STRING", retain="1d")
    orders.optimize()
    found = orders.history().to_pylist()
    assert [row["operation"] for row in found if row["operation"] != "compaction"][:2] == ["retention", "schema"]
    writes = [(row["updates"], row["txn"]) for row in found if row["operation"] in {"append", "upsert"}]
    assert writes[:3] == [(2, "load 4"), (0, "load 3"), (10, None)]
    assert [row["version"] for row in found] == sorted((row["version"] for row in found), reverse=True)
    assert orders.history(1).num_rows == 1
    for limit in (0, -1, True, "1"):
        with pytest.raises(InvalidUsage, match="limit must be"):
            orders.history(limit)


def test_it_is_looked_after(orders):
    for row in ROWS:
        orders.append([row])
    before = orders.to_arrow()
    orders.optimize()
    assert orders.describe().batches < 10
    orders.vacuum()
    assert orders.to_arrow() == before
    checked = orders.verify()
    assert (checked.is_corrupt, checked.rows) == (False, 10)
    assert "retention" in orders.holds().column("kind").to_pylist()
    info = orders.describe()
    assert (info.name, info.key, info.retain, info.owner) == ("orders", "id BIGINT", "7d", "sql/default/orders")
    assert info.clock.startswith("wall clock")
    assert orders.at(info.last_write).count() == orders.count()
    assert f"{info.last_write} (" in repr(info)
    assert "<td>orders</td>" in info._repr_html_()


@pytest.mark.parametrize("retain", ["7 days", None])
def test_what_is_optimized_is_optimized_by_a_look(db, retain):
    table = db.create("t", key="id BIGINT", value="n BIGINT", retain=retain)
    assert table.optimize() == []
    for number in range(4):
        table.upsert([{"id": 1, "n": number}])
    assert table.optimize()
    assert table.describe().batches == 1
    table.optimize()  # the last commit of the first one may have left another merge
    assert table.to_pylist() == [{"id": 1, "n": 3}]
    version = table.describe().version
    assert table.optimize() == []
    assert table.describe().version == version, "its reader stays, and nothing was committed"
    table.append([{"id": 2, "n": 0}])
    assert table.optimize()


def test_what_a_notebook_shows(orders):
    orders.append([{"id": number, "name": "<b>&", "price": None} for number in range(1234)])
    html = orders._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "<b>&" not in html
    assert "the first 10 rows" in html
    assert html.count("<tr>") == 11
    assert f"orders at {orders.last_time} (20" in html
    assert "the first" not in orders.scan("id < 3")._repr_html_()


def test_what_a_notebook_shows_of_history_changes_and_holds(orders):
    first = orders.append([{"id": 1, "name": "<b>", "price": None}], commit_info={"why": "<i>"})
    orders.upsert([{"id": 1, "name": "ada", "price": None}])
    history = orders.history()
    html = history._repr_html_()
    assert "history of orders" in html
    assert f"<td>{first.time} (20" in html
    assert "&lt;i&gt;" in html
    assert "<i>" not in html
    assert repr(history).splitlines()[0] == "history of orders: 2 rows"
    assert f"  append     {first.time} (20" in repr(history)
    feed = orders.changes("start")
    html = feed._repr_html_()
    assert f"<td>{first.time} (20" in html
    assert "&lt;b&gt;" in html
    assert "from the start up to now" in html
    with orders.changes("start", follow=True) as endless:
        assert endless._repr_html_() == "<div>ChangeFeed(orders from the start on)</div>"
    held = orders.holds()
    assert "<td>retention</td>" in held._repr_html_()
    assert "holds of orders" in repr(held)


def test_a_listing_is_as_good_as_a_table(orders):
    orders.append(ROWS)
    orders.delete("id = 1")
    history = orders.history()
    table = history.to_arrow()
    assert pa.table(history) == table == history
    assert (history.num_rows, len(history), history.column_names) == (2, 2, table.column_names)
    assert history["time"] == history.column("time") == table.column("time")
    assert history.to_pylist() == table.to_pylist() == history.to_polars().to_dicts()
    assert history.to_pandas()["operation"].tolist() == ["delete", "append"]
    assert history.filter(pc.field("operation") == "append").num_rows == 1
    assert history != orders.history(1)
    with pytest.raises(AttributeError, match="nothing"):
        history.nothing  # noqa: B018


def test_maintenance_goes_on_behind_the_writes(tmp_path):
    with connect(tmp_path, maintain=True) as db:
        table = db.create("t", key="id BIGINT", value="n BIGINT", retain=None)
        for number in range(300):
            table.append([{"id": number, "n": number}])
        assert db._background.drain(30)
        assert table.describe().batches < 150
        assert table.count() == 300


def test_other_libraries_read_a_scan(orders):
    """Through Arrow's stream, without a word of ours."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    orders.append(ROWS)
    scan = orders.scan("id >= 5")
    assert duckdb.sql("select sum(id), count(*) from scan").fetchall() == [(35, 5)]
    assert polars.DataFrame(scan)["id"].sum() == 35
    assert duckdb.sql("select count(*) from orders").fetchall() == [(10,)]
    relation = duckdb.sql("select id + 100 as id, name, price from orders")
    assert orders.append(relation).inserted == 10
    assert orders.count() == 20


def test_an_iterator_of_arrow_tables(orders):
    table = pa.Table.from_pylist(ROWS, schema=orders.schema)
    assert orders.append(table.slice(start, 4) for start in range(0, 10, 4)).inserted == 10
    assert orders.upsert(iter(table.to_batches())).deleted == 0
    assert orders.overwrite(iter([table.slice(0, 0)])).deleted == 10
    with pytest.raises(InvalidUsage, match="an iterator of rows gave a dict"):
        orders.append(iter(ROWS))


@pytest.mark.parametrize("used_up", [iter([]), (each for each in ())], ids=["iterator", "generator"])
def test_an_iterator_that_gives_no_table_is_no_order_to_remove_all_rows(orders, used_up):
    """A generator that an earlier loop used up gave nothing, and overwrite removed all rows."""
    before = orders.count()
    with pytest.raises(InvalidUsage, match="gave no table, .* would remove all rows: .*, pass an empty table"):
        orders.overwrite(used_up)
    assert orders.count() == before
    empty = orders.schema.empty_table()
    for nothing in ([], empty, pa.RecordBatchReader.from_batches(empty.schema, []), iter([empty])):
        orders.append(ROWS[:1])
        assert orders.overwrite(nothing).deleted > 0
        assert orders.count() == 0


def test_a_table_that_retains_nothing_keeps_only_its_newest_rows(db):
    """Once optimize has merged its times; what a reader still reads stays until then."""
    table = db.create("newest", key="id BIGINT", value="n BIGINT", retain=None)
    times = [table.upsert([{"id": 1, "n": n}]).time for n in range(4)]
    reading = table.at(times[1]).to_reader()
    assert reading.read_next_batch().to_pylist() == [{"id": 1, "n": 1}]
    table.optimize()
    assert table.at(times[1]).to_pylist() == [{"id": 1, "n": 1}], "it is being read"
    reading.close()
    del reading
    gc.collect()
    table.optimize()
    with pytest.raises(InvalidUsage, match="can no longer be read"):
        table.at(times[2]).to_pylist()
    assert table.describe().updates == 1
    assert table.to_pylist() == [{"id": 1, "n": 3}]
    table.upsert([{"id": 1, "n": 4}])
    assert table.to_pylist() == [{"id": 1, "n": 4}]


def test_a_shard_that_no_table_call_created_keeps_its_times(db):
    schema = Schema.from_ddl("id BIGINT", "n BIGINT")
    shard = ShardId.new()
    db.client.initialise(shard, schema, retain_ms=0)
    table = db.table(str(shard))
    first = table.append([{"id": 1, "n": 1}]).time
    table.append([{"id": 2, "n": 2}])
    table.optimize()
    assert table.at(first).count() == 1


@pytest.mark.parametrize("days", [-719_163 - 400, 2_932_897])
def test_a_year_that_python_does_not_have_is_named_and_arrow_has_it(db, days):
    far = pa.table({"id": [1], "day": pa.array([days], pa.int32()).cast(pa.date32())})
    table = db.create("far", key="id BIGINT", value="day DATE")
    table.append(far)
    with pytest.raises(InvalidUsage, match=r"table far: column day has a date .* after 9999.*to_arrow"):
        table.to_pylist()
    with pytest.raises(InvalidUsage, match="table far: column _after has a date"):
        list(table.changes("start"))
    assert table.scan(columns=["id"]).to_pylist() == [{"id": 1}]
    assert table.to_arrow().column("day").cast(pa.int32()).to_pylist() == [days]


def test_what_has_connections_says_what_to_do_in_another_process(db, orders):
    for each, way in (
        (db, "connect again"),
        (orders, "connect again and take the table by its name"),
        (orders.scan(), "send its rows"),
        (orders.changes("start"), "ask for the same changes"),
        (db.client, "PersistClient.open"),
    ):
        for act in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(
                InvalidUsage, match=f"{type(each).__name__}: it has connections of this process.* {way}"
            ):
                act(each)
