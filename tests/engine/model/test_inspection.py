"""The numbers told of a state are those that stand in it."""

from __future__ import annotations

import dataclasses
import json

from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands as c
from persist_engine.model.inspection import Inspection, inspection_of
from persist_engine.model.state import SourceProgress
from persist_kit.states import (
    DEBUG,
    Stepper,
    append,
    batch,
    critical_id,
    frontier,
    inline_batch,
    leased_id,
    rollup,
    writer_id,
)


def inspected() -> Inspection:
    shard = Stepper(now_ms=50)
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    shard.do(c.RegisterCriticalReader(reader_id=critical_id(1), opaque=b"a", debug=DEBUG))
    shard.do(append(batch(0, 1, 8, keys=("a", "b"), runs=2), token_number=1))
    shard.do(append(batch(1, 2, 8), by=2, token_number=2, lease_ms=10**6))
    progress = ("sink", SourceProgress(b"x", frontier(7)))
    shard.do(dataclasses.replace(append(inline_batch(2, 3, b"12345"), token_number=3), progress=progress))
    shard.do(append(batch(3, 4, 8), token_number=4))
    shard.do(c.AddRollup(SeqNo(5), rollup(5)))
    shard.do(c.DowngradeSince(reader_id=leased_id(1), outstanding_seqno=SeqNo(6), new_since=frontier(2)))
    return inspection_of(shard.state, live_diffs=9, earliest_seqno=1, now_ms=100)


def test_numbers() -> None:
    told = inspected()
    assert (told.seqno, told.seqno_since, told.since, told.upper) == (9, 6, 0, 4)
    assert (told.batches, told.parts, told.runs, told.updates) == (4, 5, 5, 25)
    assert (told.live_bytes, told.inline_bytes) == (400, 5)
    assert (told.rollups, told.latest_rollup_seqno, told.latest_rollup_bytes) == (2, 5, 1000)
    assert (told.live_diffs, told.earliest_seqno, told.gc_seqnos) == (9, 1, 4)
    assert (told.compaction_requests, told.uncompacted_batches, told.compaction_bytes) == (1, 2, 300)
    assert told.oldest_uncompacted_ms == 50
    assert told.spine_batches == 3
    assert told.progress == {"sink": 7}
    assert not told.is_tombstone


def test_holders() -> None:
    told = inspected()
    assert [
        (reader.id, reader.kind, reader.since, reader.seqno, reader.last_heartbeat_ms) for reader in told.readers
    ] == [
        (leased_id(1), "leased", 2, 6, 50),
        (critical_id(1), "critical", 0, None, None),
    ]
    assert [(writer.id, writer.upper) for writer in told.writers] == [(writer_id(1), 4), (writer_id(2), 2)]
    assert told.readers[0].purpose == "test"


def test_lapsed_holders_are_left_out() -> None:
    shard = Stepper()
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    assert inspection_of(shard.state, live_diffs=2, earliest_seqno=1, now_ms=100).readers
    assert not inspection_of(shard.state, live_diffs=2, earliest_seqno=1, now_ms=101).readers


def test_json_holds_every_field() -> None:
    told = inspected()
    assert set(json.loads(json.dumps(told.to_json()))) == {field.name for field in dataclasses.fields(Inspection)}
    assert told.to_json()["readers"][0]["kind"] == "leased"


def test_nothing_to_collect_when_the_oldest_rollup_is_the_newest_in_reach() -> None:
    shard = Stepper()
    assert inspection_of(shard.state, live_diffs=1, earliest_seqno=1, now_ms=0).gc_seqnos == 0
