"""Changes of tables: those between two times, and those that follow."""

from __future__ import annotations

import asyncio
import gc
import threading
from decimal import Decimal

import numpy as np
import pyarrow.compute as pc
import pytest
from persist_engine import Change, connect
from persist_engine.base.errors import InvalidUsage
from persist_engine.table import readers

ROWS = [{"id": number, "name": "abc"[number % 3], "price": Decimal(number)} for number in range(10)]
#: When the table `timed` begins.
START_MS = 1_800_000_000_000
HOUR = 3_600_000


def test_changes(timed, clock):
    def shown(**range_):
        return [(c.kind, c.before and c.before["name"], c.after and c.after["name"]) for c in timed.changes(**range_)]

    timed.upsert([{"id": 2, "name": "x"}])
    timed.delete("id = 1")
    everything = [
        ("insert", None, "a"),
        ("update", "a", "b"),
        ("update", "b", "c"),
        ("insert", None, "x"),
        ("delete", "c", None),
    ]
    assert shown(since="-1 day") == shown(since="start") == everything
    assert shown(since=START_MS) == everything[1:]
    assert shown(since=START_MS, upto=START_MS + HOUR) == everything[1:2]
    assert shown(since=timed.last_time) == []
    assert shown(since="-1 day", where="name = 'b'") == [("insert", None, "b"), ("delete", "b", None)]
    table = timed.changes("-1 day").to_arrow()
    assert table.schema.names == ["_change", "_time", "id", "_before", "_after"]
    assert sorted(table.to_pylist(), key=repr) == sorted(
        timed.changes("-1 day").to_reader().read_all().to_pylist(), key=repr
    )
    first = next(iter(timed.changes("start")))
    assert first == Change("insert", START_MS, None, {"id": 1, "name": "a"})
    assert repr(first) == f"Change(insert at {START_MS} (2027-01-15T08:00:00Z), before=None, after={first.after})"


@pytest.mark.parametrize(
    ("range_", "text"),
    [
        ({"since": "-1h", "upto": "-2h"}, "upto .* is before since"),
        ({"since": "-1h", "upto": "2099-01-01T00:00:00Z"}, "upto .* is in the future"),
        ({"since": "2099-01-01T00:00:00Z"}, "since .* is in the future"),
        ({"since": "-1h", "upto": "-1h", "follow": True}, "has no upto"),
        ({"since": None}, "since must be"),
        ({"since": "-1h", "where": pc.field("id") == 1}, "an expression of pyarrow sees one row"),
    ],
)
def test_what_are_no_changes(timed, range_, text):
    with pytest.raises(InvalidUsage, match=f"table timed: .*{text}"):
        timed.changes(**range_)


def test_several_rows_of_a_key_change_together(orders):
    """Two rows become one: one update, one delete."""
    row = {"id": 1, "name": "a", "price": None}
    orders.append([row, row | {"name": "b"}])
    orders.upsert([row | {"name": "c"}])
    kinds = [
        (each.kind, each.before and each.before["name"], each.after and each.after["name"])
        for each in orders.changes("start")
    ]
    assert kinds == [("insert", None, "a"), ("insert", None, "b"), ("update", "a", "c"), ("delete", "b", None)]


def test_changes_across_batches(db, monkeypatch):
    """Pairs are found wherever the batches of a read are cut."""
    table = db.create("t", key="id BIGINT", value="n BIGINT")
    for turn in range(3):
        table.upsert({"id": list(range(50)), "n": [turn] * 50})
    whole = table.changes("start").to_arrow()
    monkeypatch.setattr("persist_engine.client.read.changes.BATCH_ROWS", 7)
    assert table.changes("start").to_arrow() == whole
    assert whole.num_rows == 150
    assert whole.column("_change").to_pylist() == ["insert"] * 50 + ["update"] * 100
    assert [row["_after"]["n"] - row["_before"]["n"] for row in whole.to_pylist()[50:]] == [1] * 100


def test_a_feed_follows_and_closes(orders):
    seen, feed = [], orders.changes("start", follow=True)
    reached = threading.Event()

    def work():
        for change in feed:
            seen.append(change.after["id"])
            if change.after["id"] == 2:
                reached.set()

    orders.append([ROWS[0]])
    thread = threading.Thread(target=work)
    thread.start()
    orders.append([ROWS[1]])
    orders.append([ROWS[2]])
    assert reached.wait(60)
    feed.close()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [0, 1, 2]
    assert orders.holds().filter(pc.field("kind") == "leased").num_rows == 0
    for method in (feed.to_arrow, feed.to_reader):
        with pytest.raises(InvalidUsage, match="would never end"):
            method()


def test_a_feed_in_an_event_loop(orders):
    """As docs/howto/tables.md shows it. The loop goes on while the feed waits, and a task that is cancelled ends it."""
    seen, ticks = [], []

    async def follow():
        with orders.changes("start", follow=True) as feed:
            changes = iter(feed)
            while (change := await asyncio.to_thread(next, changes, None)) is not None:
                seen.append(change.after["id"])

    async def tick():
        while True:
            ticks.append(len(seen))
            await asyncio.sleep(0.001)

    async def main():
        tasks = [asyncio.create_task(follow()), asyncio.create_task(tick())]
        for row in ROWS[:3]:
            await asyncio.to_thread(orders.append, [row])
            async with asyncio.timeout(60):
                while len(seen) <= row["id"]:
                    await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = asyncio.run(main())  # which waits for its threads
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
    assert seen == [0, 1, 2]
    assert set(ticks) >= {1, 2}
    assert orders.holds().filter(pc.field("kind") == "leased").num_rows == 0


def test_iterations_that_are_left_hold_nothing(orders):
    orders.append(ROWS)
    for _ in orders.changes("start", follow=True):
        break
    with orders.changes("start") as feed:
        next(iter(feed))
    reader = orders.to_reader()
    reader.read_next_batch()
    del reader
    gc.collect()
    orders.close()
    assert orders.holds().filter(pc.field("kind") == "leased").num_rows == 0
    assert orders.count() == 10


def test_a_table_that_is_not_read_holds_nothing(orders, monkeypatch):
    monkeypatch.setattr(readers, "IDLE_S", 0.1)
    orders.append(ROWS)
    for _ in range(3):
        orders.count()
    wait = threading.Event()
    for _ in range(600):
        if not orders.holds().filter(pc.field("kind") == "leased").num_rows:
            break
        wait.wait(0.1)
    else:
        raise AssertionError("the reader stayed")
    assert orders.count() == 10


def test_a_stream_stays_readable_while_others_vacuum(db):
    table = db.create("t", key="id BIGINT", value="n BIGINT", retain=None)
    table.append({"id": np.arange(200_000), "n": np.zeros(200_000, np.int64)})
    stream = table.to_reader()
    first = stream.read_next_batch().num_rows
    with connect(db.location.blob.removesuffix("/blobs"), maintain=False) as other:
        other["t"].overwrite([])
        other["t"].optimize()
        other["t"].vacuum()
    assert first + sum(batch.num_rows for batch in stream) == 200_000


def test_regression_a_key_may_have_the_names_of_a_feed(db):
    table = db.create("t", key="_time BIGINT, id BIGINT", value="_change STRING")
    time = table.append([{"_time": 7, "id": 1, "_change": "x"}]).time
    (change,) = table.changes("start")
    assert (change.time, change.after) == (time, {"_time": 7, "id": 1, "_change": "x"})
    rows = table.changes("start").to_arrow()
    assert rows.column_names == ["_change", "_time", "key._time", "id", "_before", "_after"]
    assert (rows.column("_time").to_pylist(), rows.column("key._time").to_pylist()) == ([time], [7])
