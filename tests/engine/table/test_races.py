"""Corrections beside writers that are faster: they read the table once, follow what others wrote, and end as if they had come last. Reads
beside a schema that evolves.
"""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from persist_engine import Database, connect
from persist_engine.base.errors import SchemaMismatch, Unavailable
from persist_engine.base.settings import RetrySettings, Settings
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.table import database
from persist_engine.table.corrections import Correction
from persist_engine.table.database import LET_GO_S
from persist_kit.world import AheadEnv, World

CALLS = {
    "upsert": lambda table: table.upsert([row(key, "mine") for key in (2, 3, 50)]),
    "delete": lambda table: table.delete("name >= 'd' AND id < 6"),
    "delete by an expression": lambda table: table.delete(pc.field("id") % 2 == 0)
    if hasattr(pc.Expression, "__mod__")
    else table.delete(pc.bit_wise_and(pc.field("id"), 1) == 0),
    "overwrite": lambda table: table.overwrite([row(key, "all") for key in (1, 1, 4, 60)]),
    "overwrite with a stream": lambda table: table.overwrite(iter([pa.Table.from_pylist([row(4, "all"), row(60, "all")])])),
}  # fmt: skip


def row(key, name):
    return {"id": key, "name": name}


def after(call, rows):
    """What the call makes of the rows of a table."""
    left = Counter(rows)
    match call:
        case "upsert":
            left = Counter({each: count for each, count in left.items() if each[0] not in {2, 3, 50}})
            return left + Counter({(key, "mine"): 1 for key in (2, 3, 50)})
        case "delete":
            return Counter({each: count for each, count in left.items() if not (each[1] >= "d" and each[0] < 6)})
        case "delete by an expression":
            return Counter({each: count for each, count in left.items() if each[0] % 2})
        case "overwrite":
            return Counter({(1, "all"): 2, (4, "all"): 1, (60, "all"): 1})
        case "overwrite with a stream":
            return Counter({(4, "all"): 1, (60, "all"): 1})
    raise AssertionError(call)


def contents(table):
    return Counter((each["id"], each["name"]) for each in table.to_pylist())


@pytest.mark.parametrize("memory_bytes", [1 << 18, 0])
@pytest.mark.parametrize("call", CALLS)
def test_a_correction_follows_faster_writers(db, monkeypatch, call, memory_bytes):
    """Before each of its first commits others append, delete and upsert. The table is read once, and the call counts exactly what it
    changed, if it is small.
    """
    monkeypatch.setattr("persist_engine.table.corrections.RESTAGED_BYTES_MAX", memory_bytes - 1)
    table, rng = db.create("t", key="id BIGINT", value="name STRING"), random.Random(f"{call}{memory_bytes}")
    table.append([row(key, rng.choice("abcdef")) for key in [*range(12), *range(4)]])
    writer, reads = table._writer._current()[0], []
    swap, left = writer.compare_and_append_batch, iter(range(4))
    with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as others:
        theirs = others["t"]
        steps = [
            lambda: theirs.append([row(rng.randrange(12), rng.choice(["d", "mine", "all"])) for _ in range(9)]),
            lambda: theirs.delete(f"id = {rng.randrange(12)} OR name = 'mine'"),
            lambda: theirs.upsert([row(3, "e"), row(4, "all"), row(60, "b")]),
            lambda: theirs.append([row(2, "mine"), row(50, "mine"), row(1, "all")]),
        ]
        before = []

        def raced(*args, **more):
            step = next(left, None)
            if step is not None:
                steps[step]()
            before[:] = [contents(theirs)]
            return swap(*args, **more)

        monkeypatch.setattr(writer, "compare_and_append_batch", raced)
        with table._reader.lent() as reader:
            read = type(reader).snapshot
            monkeypatch.setattr(
                type(reader), "snapshot", lambda self, *a, **k: (reads.append(self), read(self, *a, **k))[1]
            )
            done = CALLS[call](table)
            mine = [each for each in reads if each is reader]
    assert len(mine) == 1, "the table is read once"
    wanted = after(call, before[0])
    assert contents(table) == wanted
    added, removed = wanted - before[0], before[0] - wanted
    assert done.inserted - done.deleted == added.total() - removed.total()
    if memory_bytes:
        assert (done.inserted, done.deleted) == (added.total(), removed.total())
    assert contents(table.at(done.time)) == wanted
    assert table.verify().findings == []


def test_a_correction_that_others_made_already_writes_nothing(db, monkeypatch):
    table = db.create("t", key="id BIGINT", value="name STRING")
    table.append([row(1, "a"), row(2, "b")])
    writer = table._writer._current()[0]
    swap = writer.compare_and_append_batch

    def raced(*args, **more):
        monkeypatch.undo()
        with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as others:
            others["t"].delete("id = 1")
        return swap(*args, **more)

    monkeypatch.setattr(writer, "compare_and_append_batch", raced)
    done = table.delete("name = 'a'")
    assert (done.time, done.inserted, done.deleted) == (None, 0, 0)
    assert contents(table) == Counter({(2, "b"): 1})


def test_a_correction_begins_anew_when_it_cannot_follow(db, monkeypatch):
    """Others wrote more than it keeps in memory, and evolved the schema."""
    monkeypatch.setattr("persist_engine.table.corrections.FOLLOWED_BYTES_MAX", 0)
    table = db.create("t", key="id BIGINT", value="name STRING")
    table.append([row(1, "a"), row(2, "b")])
    writer = table._writer._current()[0]
    swap, left = writer.compare_and_append_batch, iter(range(2))

    def raced(*args, **more):
        step = next(left, None)
        if step is not None:
            with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as others:
                if step:
                    others["t"].alter(add="note STRING")
                others["t"].append([row(3 + step, "a") | ({"note": "new"} if step else {})])
        return swap(*args, **more)

    monkeypatch.setattr(writer, "compare_and_append_batch", raced)
    assert table.delete("name = 'a'").deleted == 3
    assert contents(table) == Counter({(2, "b"): 1})
    assert table.verify().findings == []


def test_a_delete_goes_on_with_the_schema_that_evolved_while_it_was_staged(db, monkeypatch):
    table = db.create("t", key="id BIGINT", value="name STRING")
    table.append([row(1, "a"), row(2, "b")])

    def staged(*args, **more):
        monkeypatch.undo()
        correction = Correction(*args, **more)
        table.alter(add="note STRING")
        return correction

    monkeypatch.setattr("persist_engine.table.writing.Correction", staged)
    assert table.delete("name = 'a'").deleted == 1
    assert table.to_arrow().to_pylist() == [row(2, "b") | {"note": None}]


def test_an_upsert_beside_which_the_schema_evolves_says_so(db, monkeypatch):
    """Through the handle that knows the value of every key."""
    table = db.create("t", key="id BIGINT", value="name STRING")
    for name in "abc":
        table.upsert([row(1, name)])
    upsert = UpsertHandle.upsert

    def evolved(*args, **more):
        monkeypatch.undo()
        table.alter(add="note STRING")
        return upsert(*args, **more)

    monkeypatch.setattr(UpsertHandle, "upsert", evolved)
    with pytest.raises(
        SchemaMismatch, match="table t: the schema has evolved during the call; nothing was written, call again"
    ):
        table.upsert([row(1, "d")])
    table.upsert([row(1, "d") | {"note": "n"}])
    assert table.to_arrow().to_pylist() == [row(1, "d") | {"note": "n"}]


def test_scans_and_feeds_keep_their_columns(db, orders):
    """Another process adds columns and widens one after they were made, before they are read, and while one is read."""
    orders.append([{"id": 1, "name": "ada", "price": Decimal(1)}])
    row = {"id": 1, "name": "ada", "price": Decimal("1.00")}
    scan, where, feed = orders.scan(), orders.scan("id = 1", columns=["price"]), orders.changes(since="start")
    with orders.changes(since="start", follow=True) as following:
        followed = following.to_batches()
        assert next(followed).column("_after").to_pylist() == [row]
        with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as other:
            theirs = other["orders"]
            theirs.alter(add="note STRING, more STRUCT<x: INT>")
            theirs.append([{"id": 2, "name": "lin", "price": 2, "note": "n", "more": {"x": 1}}])
        later = {"id": 2, "name": "lin", "price": Decimal("2.00")}
        assert next(followed).column("_after").to_pylist() == [later]
    assert orders.scan("note = 'n'", columns=["id", "note"]).to_pylist() == [{"id": 2, "note": "n"}]
    assert (scan.to_pylist(), scan.count(), where.to_pylist()) == ([row], 1, [{"price": Decimal("1.00")}])
    assert [change.after for change in feed] == feed.to_arrow().column("_after").to_pylist() == [row, later]
    assert orders.to_pylist()[0] == {**row, "note": None, "more": None}


def test_a_scan_keeps_the_type_of_a_widened_column(db):
    table = db.create("counts", key="id BIGINT", value="n INT")
    table.append([{"id": 1, "n": 1}])
    scan, feed = table.scan(), table.changes(since="start")
    table.alter(widen={"n": "BIGINT"})
    assert scan.to_arrow().column("n").type == feed.to_arrow().column("_after").type.field("n").type == pa.int32()
    table.append([{"id": 2, "n": 2**40}])
    with pytest.raises(SchemaMismatch, match="table counts: .* do not fit INT"):
        feed.to_arrow()


@pytest.mark.parametrize("give_up_ms", [None, 10])
def test_a_feed_that_follows_outlives_a_log_that_does_not_answer(monkeypatch, give_up_ms):
    """With a bound on waiting for stores it ends, as every call does."""
    monkeypatch.setattr("persist_engine.table.feed.POLL_S", 0.01)
    world = World(env=AheadEnv(), settings=Settings(retry=RetrySettings(give_up_ms=give_up_ms)))
    with Database(world.process(), maintain=False) as db:
        table = db.create("t", key="id BIGINT", value="name STRING")
        table.append([row(1, "a")])
        with table.changes(since="start", follow=True) as feed:
            followed, wait, failed = feed.to_batches(), feed._machine.wait_for_upper_past, []

            def waited(*args):
                """The log is away for the first waits."""
                try:
                    return wait(*args)
                except Unavailable:
                    failed.append(None)
                    if len(failed) == 3:
                        world.faults.heal()
                        table.append([row(2, "b")])
                    raise

            monkeypatch.setattr(feed._machine, "wait_for_upper_past", waited)
            assert next(followed).column("id").to_pylist() == [1]
            world.faults.set_rates(happens=0.0, answers=0.0)
            if give_up_ms is None:
                assert next(followed).column("id").to_pylist() == [2]
                return
            with pytest.raises(Unavailable):
                next(followed)
            world.faults.heal()


@pytest.mark.parametrize("give_up_ms", [None, 600_000])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Unavailable])
def test_the_end_of_a_database_waits_for_no_store_that_is_down(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    give_up_ms: float | None,
    error: type[BaseException],
):
    """It waited until the store was back, after an interrupt too, and its own error took the place of the one that ended the block."""
    monkeypatch.setattr(database, "LET_GO_S", LET_GO_S / 10)
    world = World(env=AheadEnv(), settings=Settings(retry=RetrySettings(give_up_ms=give_up_ms)))
    db = Database(world.process(), maintain=False)
    for table in [db.create(name, key="id BIGINT", value="name STRING") for name in ("t", "u")]:
        table.append([row(1, "a")])
        assert table.to_pylist() == [row(1, "a")]
    world.faults.break_down()
    down_s = world.env.monotonic_s()
    with pytest.raises(error, match="first"), db:
        raise error("first")
    assert world.env.monotonic_s() - down_s < 2 * LET_GO_S
    assert [record.getMessage().partition(":")[0] for record in caplog.records if "lapse" in record.getMessage()] == [
        "table t",
        "table u",
    ]
