"""Bugs of the specification's list that no other folder replays: 6, 8, 13 and 15."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from persist_engine import Antichain
from persist_engine.base.settings import BatchSettings, CompactionSettings, Settings
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.keys import blob_key
from persist_engine.model.spine.trace import MergeOutcome, MergeRes, Trace
from persist_engine.storage import consensus_sqlite
from persist_engine.storage.consensus_sqlite import SqliteConsensus
from persist_engine.work.compact import compact
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.rollup import write_rollup
from persist_kit.states import batch
from persist_kit.world import SCHEMA, World, row

A = Antichain.of


def scan_steps(path, key: str) -> int:
    """How many steps of the database's machine it takes to scan the log of `key`."""
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection = sqlite3.connect(path)
    connection.set_progress_handler(step, 1)
    connection.execute(consensus_sqlite._SCAN, (key, 0, 100)).fetchall()
    connection.close()
    return steps


def test_regression_6_a_part_that_a_stale_result_brought_back_is_not_collected() -> None:
    """Its deletion was counted, that it lives again was not."""
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
    shard_id = world.shard_id()
    client = world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in range(4):
            writer.append([row(time, "a", time)], lower=A(time), upper=A(time + 1))
    machine = client.machine(shard_id)
    held = next(each for each in machine.state.trace.spine_batches() if len(each.parts) > 1)
    assert compact(machine, held.request()).applied
    ours = next(
        part for each in machine.refresh().trace.spine_batches() if each.id == held.id for _, part in each.parts
    )
    # Another compactor has the same output under its own name, and then ours is tried again: by code that did not yet
    # say what its inputs were.
    (key,) = ours.blob_keys()
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    world.blob.set(blob_key(shard_id, other), world.blob.get(blob_key(shard_id, key)))
    theirs = replace(ours, parts=(replace(ours.parts[0], key=other),))
    for result in (theirs, ours):
        assert machine.apply_merge_res(MergeRes(result, held.id))[0].applied
    write_rollup(machine)
    assert gc_and_truncate(machine).blobs_deleted == 3, "two inputs, and what the other had written"
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert [each["key"]["id"] for each in reader.snapshot(3).to_table().to_pylist()] == [0, 1, 2, 3]


def test_regression_8_what_was_truncated_does_not_slow_scans_down(tmp_path) -> None:
    """Deleted rows stayed as tombstones for a day, and every scan of a busy shard crawled through them."""
    store = SqliteConsensus(tmp_path / "c.db")
    for key, versions in (("sold", 400), ("snew", 3), ("sother", 100)):
        for seqno in range(1, versions + 1):
            expected = None if seqno == 1 else VersionedData(SeqNo(seqno - 1), b"x" * 50).tip
            store.compare_and_set(key, expected, VersionedData(SeqNo(seqno), b"x" * 50))
    store.truncate("sold", SeqNo(398), VersionedData(SeqNo(398), b"x" * 50).tip)
    assert [entry.seqno for entry in store.scan("sold", SeqNo(0), 100)] == [398, 399, 400]
    assert scan_steps(tmp_path / "c.db", "sold") == scan_steps(tmp_path / "c.db", "snew")
    store.close()


def test_regression_13_a_result_with_more_updates_than_it_replaces_is_rejected() -> None:
    """It panicked; and a later, less consolidated result for the same range must not undo a better one."""
    trace = Trace()
    for time in range(3):
        trace = trace.push_without_requests(batch(time, time + 1, 100))
    better, outcome = trace.apply_merge_res(MergeRes(batch(0, 2, 50), None), checked=False)
    assert outcome is MergeOutcome.APPLIED_EXACT
    same, outcome = better.apply_merge_res(MergeRes(batch(0, 2, 51), None), checked=False)
    assert outcome is MergeOutcome.NOT_APPLIED_TOO_MANY_UPDATES
    assert same is better


@pytest.mark.parametrize("empties", [0, 3])
def test_regression_15_a_result_that_is_not_applied_takes_its_own_blobs_with_it_and_no_others(empties: int) -> None:
    """With one input that held data the input itself was handed back as the output, under another description; when that
    was not applied, "delete the output" deleted what was live.
    """
    world = World(
        settings=Settings(
            batch=BatchSettings(inline_part_bytes_max=0),
            compaction=CompactionSettings(inputs_min=1, parts_min=1, updates_min=1, claim_ms=0),
        )
    )
    shard_id = world.shard_id()
    client = world.process()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(1, "a", 0)], lower=A(0), upper=A(1))
        for time in range(1, 1 + empties):
            writer.append([], lower=A(time), upper=A(time + 1))
        writer.append([row(2, "b", 9)], lower=A(1 + empties), upper=A(10))
        writer.append([row(3, "c", 10)], lower=A(10), upper=A(11))
    machine = client.machine(shard_id)
    machine.spine_exert(1 << 20)
    (request, *_) = machine.refresh().trace.fueled_requests(claimed_before_ms=1 << 60)
    live = world.blob_keys(shard_id, kind="part")
    first = compact(machine, request)
    assert first.applied
    kept = world.blob_keys(shard_id, kind="part")
    # The same once more, of inputs that are replaced by now, and of a since that is ahead: neither is applied.
    late = compact(machine, request)
    assert late.ending is Ending.CONFLICT
    ahead = replace(request, desc=replace(request.desc, since=A(5)))
    assert compact(machine, ahead).ending is Ending.CONFLICT
    assert world.blob_keys(shard_id, kind="part") == kept >= live, "inputs are left to garbage collection"
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert [each["key"]["id"] for each in reader.snapshot(10).to_table().to_pylist()] == [1, 2, 3]
