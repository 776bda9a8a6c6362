"""The numbers of an inspection are those of the state."""

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


def test_numbers_of_an_inspection_are_those_of_the_state() -> None:
    inspection = inspected()
    assert (inspection.seqno, inspection.seqno_since, inspection.since, inspection.upper) == (9, 6, 0, 4)
    assert (inspection.batches, inspection.parts, inspection.runs, inspection.updates) == (4, 5, 5, 25)
    assert (inspection.live_bytes, inspection.inline_bytes) == (400, 5)
    assert (inspection.rollups, inspection.latest_rollup_seqno, inspection.latest_rollup_bytes) == (2, 5, 1000)
    assert (inspection.live_diffs, inspection.earliest_seqno, inspection.gc_seqnos) == (9, 1, 4)
    assert (inspection.compaction_requests, inspection.uncompacted_batches, inspection.compaction_bytes) == (1, 2, 300)
    assert (inspection.smallest_request_bytes, inspection.merged_updates) == (300, 8)
    assert (inspection.waits_from_ms, inspection.waits_after_merge_ms, inspection.owed_from_ms) == (None, None, None)
    assert inspection.spine_batches == 3
    assert inspection.progress == {"sink": 7}
    assert not inspection.is_tombstone


def test_holders_are_listed_with_what_they_hold() -> None:
    inspection = inspected()
    assert [
        (reader.id, reader.kind, reader.since, reader.seqno, reader.last_heartbeat_ms) for reader in inspection.readers
    ] == [
        (leased_id(1), "leased", 2, 6, 50),
        (critical_id(1), "critical", 0, None, None),
    ]
    assert [(writer.id, writer.upper) for writer in inspection.writers] == [(writer_id(1), 4), (writer_id(2), 2)]
    assert inspection.readers[0].purpose == "test"


def test_lapsed_holders_are_left_out_of_an_inspection() -> None:
    shard = Stepper()
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    assert inspection_of(shard.state, live_diffs=2, earliest_seqno=1, now_ms=100).readers
    assert not inspection_of(shard.state, live_diffs=2, earliest_seqno=1, now_ms=101).readers


def test_the_json_of_an_inspection_holds_every_field() -> None:
    inspection = inspected()
    assert set(json.loads(json.dumps(inspection.to_json()))) == {field.name for field in dataclasses.fields(Inspection)}
    assert inspection.to_json()["readers"][0]["kind"] == "leased"


def test_nothing_to_collect_when_the_oldest_rollup_is_the_newest_in_reach() -> None:
    shard = Stepper()
    assert inspection_of(shard.state, live_diffs=1, earliest_seqno=1, now_ms=0).gc_seqnos == 0
