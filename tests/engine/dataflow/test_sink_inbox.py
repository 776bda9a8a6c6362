"""The inbox of a sink's part: which events wait for room, and what becomes of batches that are left in it at the end."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
from persist_engine import Antichain
from persist_engine.dataflow.sink.actors import Control, Desired, Inbox, ShardUpper, StagedBatch
from persist_engine.flow.desired import DesiredFrontiers
from persist_engine.flow.mint import Mint
from persist_engine.model.batch import HollowRun
from persist_kit.world import SCHEMA, row

A = Antichain.of
PATIENCE_S = 60.0


def test_only_rows_wait_for_room_in_a_full_inbox():
    inbox = Inbox(bytes_max=100)
    rows = Desired(pa.table({"x": np.zeros(10, dtype=np.int64)}))
    inbox.put(rows)
    inbox.put(ShardUpper(A(1)))
    entered = threading.Event()

    def second() -> None:
        inbox.put(rows)
        entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not entered.wait(0.05)
    assert inbox.take() is rows
    assert entered.wait(PATIENCE_S)
    assert (inbox.take(), inbox.take()) == (ShardUpper(A(1)), rows)
    inbox.put(rows)
    waiting = threading.Thread(target=inbox.put, args=(rows,))
    waiting.start()
    inbox.close()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert inbox.take() is None
    thread.join()


def test_a_batch_that_arrives_after_the_end_is_deleted(stores):
    client = stores.client()
    with client.open_writer(stores.shard_id, SCHEMA, purpose="late") as writer:
        batch = writer.batch([row(1, "a", 0)], lower=A(0), upper=A(1))
        inbox = Inbox(bytes_max=1)
        inbox.close()
        inbox.put(StagedBatch(A(0), batch))
        assert stores.blobs() == 1
        Control(Mint(DesiredFrontiers.without_errors(), as_of=A(0), read_only=True), writer, []).close(inbox)
    assert stores.blobs() == 0


def test_regression_a_sink_continues_although_stale_batches_cannot_be_deleted(stores, caplog):
    """An error of the clean-up, here a damaged listing of parts, ended the sink or left the other batches behind."""
    client = stores.client(runs_max=2, run_parts_max=2, target_part_bytes=1024)
    with client.open_writer(stores.shard_id, SCHEMA, purpose="late") as writer:
        damaged = writer.batch([row(n, "a" * 200, 0) for n in range(20)], lower=A(0), upper=A(1))
        listing = next(part for part in damaged.hollow.parts if isinstance(part, HollowRun))
        stores.blob.set(f"{stores.shard_id}/{listing.key}", b"damaged")
        left = stores.blobs()
        sound = writer.batch([row(n, "b", 0) for n in range(20)], lower=A(0), upper=A(1))
        assert stores.blobs() > left
        control = Control(Mint(DesiredFrontiers.without_errors(), as_of=A(0), read_only=True), writer, [])
        inbox = Inbox(bytes_max=1)
        for batch in (damaged, sound):
            inbox.put(StagedBatch(A(0), batch))
        control.close(inbox)
    assert stores.blobs() <= left
    assert listing.key in caplog.text
