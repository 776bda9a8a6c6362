"""Names of tables: created, found from everywhere, renamed and dropped; interrupted halfway and completed."""

from __future__ import annotations

from contextlib import contextmanager

import pyarrow as pa
import pytest
from persist_engine import Location, PersistClient, Schema, SeededEnv, ShardId, connect
from persist_engine.base.errors import (
    FinalizationError,
    Indeterminate,
    InvalidUsage,
    NoStore,
    SchemaMismatch,
    ShardNotFound,
    Unavailable,
)
from persist_engine.codec.registry import IDENTITY_KEY
from persist_engine.model.ownership import Adopted, Owner
from persist_engine.table.connect import CONNECT_S, _saying, location_of
from persist_kit.servers import free_port

ID = "s0c1789f1-b8a6-7201-a3a0-cbc1fbffad8f"


def test_one_url_is_a_whole_store(tmp_path):
    with connect(f"file://{tmp_path}/a shop") as db:
        db.create("orders", key="id BIGINT").append([{"id": 1}])
    with connect(tmp_path / "a shop") as db:
        assert db["orders"].to_pylist() == [{"id": 1}]


@pytest.mark.parametrize(
    ("given", "environ", "blob", "consensus"),
    [
        (("file:///d",), {}, "file:///d/blobs", "sqlite:///d/consensus.db"),
        (("s3://b/p", "redis://h:1/0"), {}, "s3://b/p", "redis://h:1/0"),
        (("mem:x",), {}, "mem:x", "mem:x"),
        ((None,), {"PERSIST_BLOB": "file:///e", "PERSIST_CONSENSUS": "redis://h"}, "file:///e", "redis://h"),
        ((None,), {"PERSIST_BLOB": "file:///e"}, "file:///e/blobs", "sqlite:///e/consensus.db"),
    ],
)
def test_where_the_stores_are(given, environ, blob, consensus):
    assert location_of(given[0], given[1] if len(given) > 1 else None, environ) == Location(
        blob=blob, consensus=consensus
    )


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (None, "no store given"),
        ("s3://bucket/p", "has no log: give the second URL"),
        ("production", "is not a URL"),
        (7, "a store is a URL"),
    ],
)
def test_what_is_no_store(url, text):
    with pytest.raises(InvalidUsage, match=text):
        location_of(url, None, {})


def test_names_lead_to_one_table(db):
    made = db.create("sales.orders", key="id BIGINT")
    db.create("customers", key="id BIGINT")
    assert made.name == "sales.orders"
    for name in ("sales.orders", "sql.sales.orders", "sql/sales/orders", "orders", made.id, str(made.id)):
        assert db[name].id == made.id
    assert db.tables() == ["customers", "sales.orders"]
    assert db.tables("sales") == ["sales.orders"]
    assert "orders" in db
    assert "nothing" not in db
    assert 7 not in db


def test_a_table_is_what_the_sql_catalog_would_create(db):
    """Spark's catalog looks for `sql/NAMESPACE/NAME`, and finds tables of operators by the same registry."""
    made = db.create("sales.orders", key="id BIGINT")
    assert db.client.owner_of(made.id) == Owner("sql", "sales", "orders")
    assert db.client.registered(Owner("sql", "default", "plain")) is None
    assert db.client.registered(Owner("sql", "default", "plain")) is None
    assert db.create("plain", key="id BIGINT").id == db.client.registered(Owner("sql", "default", "plain"))


def test_tables_of_others_are_found_and_not_dropped(db):
    flights = Owner("op", "demo", "flights")
    adopted = db.client.adopt(flights, None, ShardId.new())
    assert isinstance(adopted, Adopted)
    db.client.initialise(adopted.shard_id, Schema.from_ddl("id BIGINT"))
    table = db["flights"]
    assert (table.id, table.name, db["demo.flights"].id) == (adopted.shard_id, "op.demo.flights", adopted.shard_id)
    assert db[table.name].id == table.id
    table.append([{"id": 1}])
    for call in (lambda: db.drop("flights"), lambda: db.rename("flights", "mine")):
        with pytest.raises(InvalidUsage, match="table flights: it has the owner op/demo/flights"):
            call()


@pytest.mark.parametrize(
    "name", ["", "a..b", "a.b.c.d", "a/b", " a", "a\n", "x" * 300, 7, None, "s0c1789f1-b8a6-7201-a3a0-cbc1fbffad8f"]
)
def test_what_is_no_name(db, name):
    with pytest.raises(InvalidUsage):
        db.create(name, key="id BIGINT")
    assert db.tables() == []


def test_a_name_that_is_taken(db, orders):
    with pytest.raises(InvalidUsage, match=r"table orders: the name is taken: open it with db\.table\('orders'\)"):
        db.create("orders", key="id BIGINT")
    with pytest.raises(SchemaMismatch, match="table orders: it exists with other columns"):
        db.create("orders", key="id STRING", exist_ok=True)
    again = db.create("orders", key="id BIGINT", value="name STRING, price DECIMAL(10,2)", exist_ok=True)
    assert again is orders


def test_a_creation_that_was_interrupted_is_completed(db):
    adopted = db.client.adopt(Owner("sql", "default", "half"), None, ShardId.new())
    assert db.create("half", key="id BIGINT").id == adopted.shard_id


def test_a_creation_that_was_interrupted_before_its_bloom_filters_is_completed(db, monkeypatch):
    made = {"key": "id BIGINT", "value": "email STRING", "bloom": ["email"], "exist_ok": True}
    with monkeypatch.context() as dying:
        dying.setattr(db.client, "set_filtered", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            db.create("half", **made)
    half = db.create("half", **made)
    assert db.client.machine(half.id).filtered == ("val.email",)
    half.alter(bloom=["id"])
    assert db.client.machine(db.create("half", **made).id).filtered == ("key.id",)


def test_a_table_that_is_not_there(db, orders):
    with pytest.raises(
        ShardNotFound, match=r"there is no table order.*near names are orders; create it with `db\.create"
    ):
        db["order"]
    with pytest.raises(ShardNotFound, match=r"there is no table nothing; there are orders; create"):
        db["nothing"]
    with pytest.raises(
        ShardNotFound, match=r"there is no table default\.order; near names are default\.orders; create"
    ):
        db["default.order"]
    assert list(db) == ["orders"]
    with pytest.raises(ShardNotFound, match="does not exist"):
        db[ShardId.new()]


def test_dropped_rows_stay_under_their_id(db, orders):
    orders.append([{"id": 1, "name": "ada", "price": None}])
    kept = db.drop("orders")
    assert kept == orders.id
    assert db.tables() == []
    assert db[kept].count() == 1
    db.create("orders", key="id BIGINT")
    assert db["orders"].count() == 0


def test_purged_rows_are_gone(db, orders, tmp_path):
    orders.append([{"id": 1, "name": "ada", "price": None}])
    for confirm in (None, "order"):
        with pytest.raises(InvalidUsage, match="repeat the name"):
            db.drop("orders", purge=True, confirm=confirm)
    with pytest.raises(InvalidUsage, match="without it the rows stay"):
        db.drop("orders", confirm="orders")
    with (
        db.client.open_leased_reader(orders.id, purpose="a report"),
        pytest.raises(FinalizationError, match="table orders: .*a report"),
    ):
        db.drop("orders", purge=True, confirm="orders")
    assert orders.count() == 1
    gone = db.drop("orders", purge=True, confirm="orders")
    assert db.client.is_finalized(gone)
    assert "orders" not in db


@pytest.mark.parametrize("purge", [False, True])
def test_a_drop_that_was_interrupted_is_completed_by_name(db, orders, purge):
    """The name leads nowhere already, and the shard still has its owner."""
    orders.append([{"id": 1, "name": "ada", "price": None}])
    how = {"purge": True, "confirm": "orders"} if purge else {}
    with dying_after(db, 1):
        db.drop("orders", **how)
    assert "orders" not in db
    assert db.drop("orders", **how) == orders.id
    assert db.client.owner_of(orders.id) is None
    assert db.client.is_finalized(orders.id) == purge
    for name in ("orders", "a.b.c", "sql/default/orders"):
        with pytest.raises(ShardNotFound):
            db.drop(name)


@pytest.mark.parametrize("purge", [False, True])
def test_a_completed_drop_is_repeated_by_its_id_and_by_name_says_that_nothing_is_left(db, orders, purge):
    """Whether it was interrupted or had completed, its message was that of a name that never was."""
    orders.append([{"id": 1, "name": "ada", "price": None}])
    how = {"purge": True, "confirm": "orders"} if purge else {}
    gone = db.drop("orders", **how)
    with pytest.raises(
        ShardNotFound, match="no table orders.*: it was never created, or was renamed, or a drop of it has completed"
    ):
        db.drop("orders", **how)
    by_id = {"purge": True, "confirm": str(gone)} if purge else {}
    assert db.drop(str(gone), **by_id) == gone
    if not purge:
        with pytest.raises(InvalidUsage, match=f"table {gone}: it has no name.*persist admin finalize {gone}"):
            db.drop(str(gone), purge=True, confirm=str(gone))
        assert db[gone].count() == 1
    with pytest.raises(ShardNotFound, match="does not exist"):
        db.drop(str(ShardId.new()))


def test_a_purge_completes_no_drop_whose_rows_were_to_stay(db, orders):
    orders.append([{"id": 1, "name": "ada", "price": None}])
    with dying_after(db, 1):
        db.drop("orders")
    db.create("orders", key="id BIGINT")
    db.drop("orders", purge=True, confirm="orders")
    with pytest.raises(ShardNotFound):
        db.drop("orders", purge=True, confirm="orders")
    assert db[orders.id].count() == 1


def test_a_new_name(db, orders):
    orders.append([{"id": 1, "name": "ada", "price": None}])
    renamed = db.rename("orders", "sales.orders")
    assert renamed is orders
    assert (renamed.id, renamed.name, db.tables()) == (orders.id, "sales.orders", ["sales.orders"])
    assert renamed.count() == 1
    db.create("orders", key="id BIGINT")
    with pytest.raises(InvalidUsage, match="leads to shard .* already"):
        db.rename("orders", "sales.orders")
    assert db.tables() == ["orders", "sales.orders"]


@contextmanager
def dying_after(db, steps):
    """Within, the process is killed after so many of its compare-and-sets on names and owners."""
    registry = db.client._registry
    put, left = registry._put, [steps]

    def dying(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return put(*args)

    registry._put = dying
    with pytest.raises(KeyboardInterrupt):
        yield
    registry._put = put


@pytest.mark.parametrize("steps", [1, 2])
def test_a_rename_that_was_interrupted_is_completed(db, orders, steps):
    """After each of its compare-and-sets the table answers to one name."""
    with dying_after(db, steps):
        db.rename("orders", "sold")
    (name,) = db.tables()
    assert db[name].id == orders.id
    assert db.rename("orders", "sold").id == orders.id
    assert db.tables() == ["sold"]
    assert db.client.registered(Owner("sql", "default", "orders")) is None
    db.create("orders", key="id BIGINT")


@pytest.mark.parametrize("steps", [1, 2])
def test_the_name_that_an_interrupted_rename_left_is_free_after_another_one(db, orders, steps):
    """For a new table, and for the name of another. It never leads to the table that was to have it."""
    with dying_after(db, steps):
        db.rename("orders", "sold")
    (name,) = db.tables()
    assert db.rename(name, "archived").id == orders.id
    assert "sold" not in db
    sold = db.create("sold", key="id BIGINT")
    assert sold.id != orders.id
    assert db.tables() == ["archived", "sold"]
    db.rename("sold", "orders")
    assert db.tables() == ["archived", "orders"]


def test_columns_from_ddl_arrow_and_frames(db):
    ddl = db.create("a", key="id BIGINT", value="name STRING")
    arrow = db.create("b", key=pa.schema([("id", pa.int64())]), value=pa.schema([("name", pa.string())]))
    like = db.create("c", like=pa.table({"name": ["x"], "id": [1]}), key=["id"])
    assert ddl.schema == arrow.schema == like.schema
    assert (like.key, like.schema.names) == (("id",), ["id", "name"])
    wide = pa.table(
        {
            "k": pa.array(["a"]).dictionary_encode(),
            "u": pa.array([1], pa.uint32()),
            "at": pa.array([1000], pa.timestamp("ns", tz="Europe/Berlin")),
            "text": pa.array(["x"], pa.large_string()),
            "raw": pa.array([b"x"], pa.binary_view()),
            "view": pa.array(["x"], pa.string_view()),
        }
    )
    with pytest.raises(
        InvalidUsage, match="table d: columns at have nanoseconds, and tables microseconds: coerce='us' takes it"
    ):
        db.create("d", like=wide, key="k")
    table = db.create("d", like=wide, key="k", coerce="us")
    table.append(wide, coerce="us")
    kinds = [pa.string(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.string(), pa.binary(), pa.string()]
    assert table.schema.types == kinds
    assert table.to_pylist()[0]["raw"] == b"x"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"key": "id BIGNT"}, "table t: key .*'BIGNT' is not one of"),
        ({"key": ["id"]}, "names alone go with like=frame"),
        ({"key": "x", "like": pa.table({"id": [1]})}, "key x is no column"),
        ({"key": "id", "like": pa.table({"id": [1], "n": [None]})}, "column n holds only nulls"),
        ({"key": "n", "like": pa.table({"id": [1], "n": [[1]]})}, "key.n: a key holds no ARRAY"),
        ({"key": "id", "like": pa.table({"id": [1], "n": [[]]})}, "column n.element holds only nulls"),
        (
            {"key": "id", "like": pa.table({"id": [1]}), "coerce": "ns"},
            "coerce is 'us' or 'truncate', or left out, not 'ns'",
        ),
        ({"key": "id BIGINT", "retain": "a week"}, "retain must be a span"),
        ({"key": "id BIGINT", "retain": 0}, "retain must be a span"),
    ],
)
def test_a_table_that_cannot_be(db, arguments, text):
    with pytest.raises(InvalidUsage, match=text):
        db.create("t", **arguments)
    assert db.tables() == []


@pytest.mark.parametrize(
    ("retain", "shown"), [("7 days", "7d"), ("12h", "12h"), (1500, "1500ms"), (None, "none"), ("none", "none")]
)
def test_how_long_times_stay_readable(db, retain, shown):
    assert db.create("t", key="id BIGINT", retain=retain).describe().retain == shown


def test_a_path_that_was_mistyped_stays_free(tmp_path):
    """Looking for tables made a store of it. The first table makes it, and other connections find it then."""
    typo = tmp_path / "typo"
    with connect(typo) as db, connect(f"file://{typo}") as other:
        for look in (db.tables, lambda: db["orders"], lambda: db.drop("orders"), lambda: db.rename("a", "b")):
            with pytest.raises(NoStore, match=r"there is no directory .*/typo/blobs: check the path; creating a table"):
                look()
        assert "orders" not in db
        assert (db.drain(), list(tmp_path.iterdir())) == (True, [])
        with pytest.raises(NoStore):
            connect(typo, create=False)
        db.create("orders", key="id BIGINT").append([{"id": 1}])
        assert (other.tables(), other["orders"].count()) == (db.tables(), 1)
    assert sorted(path.name for path in typo.iterdir())[0] == "blobs"
    with connect(typo, create=False) as again:
        assert again["orders"].to_pylist() == [{"id": 1}]


def test_the_stores_of_a_new_place_are_marked_as_a_pair_by_the_first_table(tmp_path):
    with connect("mem:") as db:
        assert db.tables() == []
        assert db._client is not None
        assert db._client._consensus.head(IDENTITY_KEY) is None, "nothing was written"
        db.create("orders", key="id BIGINT")
        assert db._client._consensus.head(IDENTITY_KEY) is not None


def test_a_closed_database(tmp_path):
    db = connect(tmp_path)
    db.close()
    db.close()
    with pytest.raises(InvalidUsage, match="the database was closed"):
        db.tables()


def test_a_client_of_its_own_finds_the_shard(db, orders, tmp_path):
    location = Location(blob=f"file://{tmp_path}/shop/blobs", consensus=f"sqlite://{tmp_path}/shop/consensus.db")
    with PersistClient.open(location) as client:
        assert client.shard_named("orders") == orders.id


def test_a_store_that_does_not_answer_is_named(tmp_path, caplog):
    """A port that was mistyped: an error within half a minute, and not a wait without end."""
    env = SeededEnv()
    connect(tmp_path).create("t", key="id BIGINT")
    start_s = env.monotonic_s()
    with pytest.raises(Unavailable, match=r"open consensus gave up .* redis://127.0.0.1:\d+/0: .*refused") as caught:
        connect(f"file://{tmp_path}/blobs", f"redis://:pass-word@127.0.0.1:{free_port()}/0", env=env)
    assert env.monotonic_s() - start_s == pytest.approx(CONNECT_S, abs=3)
    assert "no answer for" in caplog.text
    assert "pass-word" not in caplog.text + str(caught.value)


def test_calls_that_wait_say_so(caplog):
    env = SeededEnv()
    say = _saying(env)
    for pause_s in (0, 1, 3, 3, 4, 4, 60, 3, 16):
        env.sleep(pause_s)
        say("append of s1", Indeterminate("no route"))
    assert [record.message for record in caplog.records] == [
        f"append of s1: no answer for {seconds} s, waiting: no route" for seconds in (7, 15, 19)
    ]


def test_an_address_in_the_place_of_a_name_is_refused_without_its_password(tmp_path):
    address = "redis://:pass-word@host:6379/0"
    with connect(tmp_path) as db:
        db.create("t", key="id BIGINT")
        for call in (lambda: db[address], lambda: db.create(address, key="id BIGINT"), lambda: db.rename("t", address)):
            with pytest.raises(InvalidUsage, match=r"host:6379/0 is an address of a store, and no name") as caught:
                call()
            assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize("exist_ok", [False, True])
def test_of_two_calls_that_create_a_table_with_other_retentions_one_says_so(db, monkeypatch, exist_ok):
    """Both have found the name free. The one whose shard it is not must not return as if its retention held."""
    initialise = db.client.initialise

    def overtaken(*args, **more):
        monkeypatch.undo()
        with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as other:
            other.create("orders", key="id BIGINT", retain="1 day")
        initialise(*args, **more)

    monkeypatch.setattr(db.client, "initialise", overtaken)
    if exist_ok:
        db.create("orders", key="id BIGINT", retain="30 days", exist_ok=True)
    else:
        with pytest.raises(InvalidUsage, match="table orders: the name is taken"):
            db.create("orders", key="id BIGINT", retain="30 days")
    assert db.client.machine(db["orders"].id).refresh().retain_ms == 24 * 3600 * 1000
