"""When garbage collection falls due under its bound, and what a shard without maintenance needs."""

from dataclasses import replace

import pytest
from persist_engine.base.settings import MaintenanceSettings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import EMPTY, MINIMUM, Description
from persist_engine.model.maintenance import (
    collectable_versions,
    collection_target,
    gc_due,
    is_collection_due,
    is_compaction_due,
    is_rollup_due,
    rollup_due,
    rollup_wanted,
)
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.trace import Trace
from persist_kit.states import first_state, rollup

SETTINGS = MaintenanceSettings(gc_versions_min=4, gc_versions_max=100, rollup_threshold=8)


def state_at(seqno, *rollups, **changes):
    held = SharedMap({SeqNo(n): rollup(n) for n in rollups})
    return replace(first_state()[0], seqno=SeqNo(seqno), rollups=held, **changes)


def due(state):
    return gc_due(state, SETTINGS, now_ms=0, is_write=True)


def test_a_request_is_bounded_beyond_the_last_one():
    assert due(state_at(900, 1, 50, 90, 140, 890)) == 100
    assert due(state_at(900, 50, 90, 140, 890, last_gc_req=SeqNo(60))) == 160


@pytest.mark.parametrize(
    ("seqno", "rollups", "last"),
    [(900, (1, 890), 0), (900, (1, 890), 1), (9000, (5000, 5200, 8990), 6)],
    ids=["rollups far apart", "and a request made", "others collected past the bound"],
)
def test_regression_7_the_bound_on_a_request_never_keeps_collection_from_going_on(seqno, rollups, last):
    """The request reaches the next rollup at least; else none would ever be due again."""
    asked = due(state_at(seqno, *rollups, last_gc_req=SeqNo(last)))
    assert asked is not None
    assert asked >= rollups[1]


def test_nothing_is_due_without_a_second_rollup():
    assert due(state_at(9000, 1)) is None
    assert due(state_at(9000, 5000, last_gc_req=SeqNo(6))) is None


def test_a_rollup_is_due_after_the_given_number_of_versions_and_on_tombstones_at_once():
    assert not rollup_wanted(state_at(8, 1), SETTINGS)
    assert rollup_wanted(state_at(9, 1), SETTINGS)
    open_state = state_at(3, 1)
    closed = replace(open_state, trace=open_state.trace.downgrade_since(EMPTY))
    assert not rollup_wanted(closed, SETTINGS), "the upper is still open"


def test_a_tombstone_that_names_two_rollups_of_its_own_is_collected() -> None:
    trace = Trace().downgrade_since(EMPTY).push_without_requests(HollowBatch.empty(Description(MINIMUM, EMPTY, EMPTY)))
    ended = {"trace": trace, "last_gc_req": SeqNo(20)}
    assert collection_target(state_at(24, 9, 20, **ended)) == 20
    assert collection_target(state_at(24, 20, 22, **ended)) is None
    assert collection_target(state_at(26, 20, 22, 24, **ended)) == 24


def test_the_log_may_be_truncated_to_the_newest_rollup_that_no_reader_holds_back():
    assert collection_target(state_at(20, 1)) is None
    assert collection_target(state_at(20, 1, 7, 15)) == 15
    assert collection_target(state_at(20, 15)) is None


def test_the_rules_that_engine_and_operator_share_are_due_exactly_at_their_thresholds():
    assert [is_rollup_due(seqno=seqno, rollup_seqno=10, every=3) for seqno in (12, 13)] == [False, True]
    assert [is_collection_due(versions, at_least=4) for versions in (3, 4)] == [False, True]
    assert [is_compaction_due(batches, at_least=64) for batches in (63, 64)] == [False, True]
    assert [collectable_versions(keep, earliest=5) for keep in (None, 4, 5, 9)] == [0, 0, 0, 4]


def test_a_commit_offers_a_rollup_one_version_later_than_a_closing_writer_writes_one():
    assert [rollup_due(state_at(seqno, 1), SETTINGS, now_ms=0) for seqno in (9, 10)] == [None, 10]
    assert [rollup_wanted(state_at(seqno, 1), SETTINGS) for seqno in (8, 9)] == [False, True]
