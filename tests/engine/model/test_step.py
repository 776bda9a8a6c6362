"""From one version to the next: numbering, clocks, expiry, what falls due and which process is to do it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persist_engine.base.errors import InvariantViolated
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.model import commands as c
from persist_engine.model.diff.state_diff import Insert, Update
from persist_engine.model.frontier import EMPTY, MINIMUM
from persist_engine.model.invariants import check_invariants
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.queries import is_tombstone, rollup_seqnos, seqno_since
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.spine import Fueling, Level, MergeReq, Sizes
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import Claim
from persist_kit.states import (
    DEBUG,
    SCHEMA,
    Stepper,
    append,
    batch,
    description,
    first_state,
    frontier,
    leased_id,
    rollup,
    writer_id,
)

SETTINGS = Settings(
    maintenance=MaintenanceSettings(rollup_threshold=5, rollup_claim_ms=10, gc_versions_min=4, gc_claim_ms=10)
)


def fill(shard: Stepper, versions: int) -> None:
    """That many appends."""
    for _ in range(versions):
        upper = shard.state.trace.upper.time or 0
        shard.do(append(batch(upper, upper + 1), token_number=shard.state.seqno, lease_ms=10**6))


def test_the_first_version_has_its_rollup_and_schema() -> None:
    state, diff = first_state(now_ms=5)
    assert (state.seqno, state.walltime_ms) == (1, 5)
    assert state.schemas[0] == SCHEMA
    assert rollup_seqnos(state) == (1,)
    assert (diff.seqno_from, diff.seqno_to, diff.latest_rollup_key) == (0, 1, "v1/first")
    assert diff.hostname == (Update(None, "", "host"),)
    assert diff.schemas == (Insert(0, SCHEMA),)
    check_invariants(None, state, deep=True)


def test_walltime_rises_whatever_the_clock_does() -> None:
    """Bug 34."""
    shard = Stepper(now_ms=100)
    walltimes = []
    for now_ms in (100, 100, 50, 300):
        shard.now_ms = now_ms
        fill(shard, 1)
        walltimes.append(shard.state.walltime_ms)
    assert walltimes == [100, 101, 102, 300]


def test_regression_27_the_mark_of_the_highest_writer_never_steps_back() -> None:
    """Bug 27; compared as numbers, not as text."""
    shard = Stepper()
    marks = []
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        shard.do(c.HeartbeatLeasedReader(leased_id(1)), version=version)
        marks.append(shard.state.applier_version)
    assert marks == ["0.9.0", "0.10.0", "0.10.0"]


def test_leases_end_with_the_next_command_and_leave_since_alone() -> None:
    """Bug 22."""
    shard = Stepper()
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(2), lease_ms=500, debug=DEBUG))
    shard.do(append(batch(0, 1, 1), by=1, token_number=1, lease_ms=200))
    shard.do(c.DowngradeSince(reader_id=leased_id(2), outstanding_seqno=None, new_since=frontier(9)))
    shard.now_ms = 100
    shard.do(c.HeartbeatLeasedReader(leased_id(9)))
    assert leased_id(1) in shard.state.leased_readers, "a lease holds to its last millisecond"
    shard.now_ms = 101
    shard.do(c.HeartbeatLeasedReader(leased_id(9)))
    assert list(shard.state.leased_readers) == [leased_id(2)]
    assert shard.state.trace.since == MINIMUM
    shard.now_ms = 201
    shard.do(c.HeartbeatLeasedReader(leased_id(9)))
    assert not shard.state.writers
    assert list(shard.state.leased_readers) == [leased_id(2)]


def test_a_late_heartbeat_and_a_late_retry_come_before_the_end_of_their_lease() -> None:
    """Leases end after the command: none had been noticed yet, and a token that is forgotten could append twice (spec 9.13)."""
    shard = Stepper()
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    again = append(batch(0, 1, 1), token_number=1, lease_ms=100)
    shard.do(again)
    shard.now_ms = 1000
    assert shard.do(again) == c.AlreadyCommitted()
    assert shard.do(c.HeartbeatLeasedReader(leased_id(1))) == c.HeartbeatSeen(existed=True)
    assert leased_id(1) in shard.state.leased_readers
    assert writer_id(1) not in shard.state.writers


def test_a_rollup_is_claimed_once_and_offered_again_when_the_claim_lapses() -> None:
    shard = Stepper(settings=SETTINGS)
    fill(shard, 5)
    assert shard.state.seqno == 6
    assert shard.maintenance.rollup is None
    fill(shard, 1)
    assert shard.maintenance.rollup == 7
    assert shard.state.active_rollup == Claim(SeqNo(7), 0)
    shard.now_ms = 9
    fill(shard, 1)
    assert shard.maintenance.rollup is None
    shard.now_ms = 10
    fill(shard, 1)
    assert shard.maintenance.rollup == 9
    shard.do(c.AddRollup(SeqNo(9), rollup(9)))
    assert shard.state.active_rollup is None
    assert shard.maintenance.rollup is None


def test_a_claim_of_a_broken_clock_does_not_block_for_ever() -> None:
    shard = Stepper(settings=SETTINGS, now_ms=10**9)
    fill(shard, 6)
    assert shard.maintenance.rollup == 7
    shard.now_ms = 0
    fill(shard, 1)
    assert shard.maintenance.rollup == 8


def with_rollup(versions: int) -> Stepper:
    shard = Stepper(settings=SETTINGS)
    fill(shard, versions)
    shard.do(c.AddRollup(shard.state.seqno, rollup(shard.state.seqno)))
    return shard


def test_gc_falls_due_when_enough_versions_could_be_truncated() -> None:
    """Spec 14.3."""
    assert with_rollup(3).maintenance.gc is None
    shard = with_rollup(4)
    assert shard.maintenance.gc == 6, "the rollup at v5 was linked at v6; no reader holds anything back"
    assert (shard.state.last_gc_req, shard.state.active_gc) == (6, Claim(SeqNo(6), 0))
    fill(shard, 1)
    assert shard.maintenance.gc is None, "another process is at it"
    shard.now_ms = 11
    fill(shard, 1)
    assert shard.maintenance.gc == 8
    first = shard.state.rollups[SeqNo(1)]
    shard.do(c.RemoveRollups(((SeqNo(1), first),)))
    assert shard.state.active_gc is None
    fill(shard, 1)
    assert shard.maintenance.gc is None


def test_gc_waits_for_readers_that_hold_versions() -> None:
    shard = Stepper(settings=SETTINGS)
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=10**6, debug=DEBUG))
    fill(shard, 6)
    shard.do(c.AddRollup(shard.state.seqno, rollup(shard.state.seqno)))
    assert seqno_since(shard.state) == 2
    assert shard.maintenance.gc is None
    shard.do(
        c.DowngradeSince(reader_id=leased_id(1), outstanding_seqno=None, new_since=frontier(0)),
    )
    assert shard.maintenance.gc == shard.state.seqno == seqno_since(shard.state)


def test_gc_is_left_to_writers_while_there_are_any() -> None:
    shard = Stepper(settings=SETTINGS)
    fill(shard, 4)
    shard.do(c.AddRollup(shard.state.seqno, rollup(shard.state.seqno)), is_write=False)
    assert shard.maintenance.gc is None
    shard.do(c.ExpireWriter(writer_id(1)), is_write=False)
    assert shard.maintenance.gc == 7


def test_one_gc_covers_a_bounded_number_of_versions() -> None:
    bounded = replace(SETTINGS.maintenance, gc_versions_max=5)
    shard = Stepper(settings=replace(SETTINGS, maintenance=bounded))
    fill(shard, 8)
    shard.do(c.AddRollup(SeqNo(5), rollup(5)))
    assert shard.maintenance.gc == 5


def test_regression_28_tombstones_are_collected_and_rolled_up_at_once_and_carry_no_version() -> None:
    """Bug 28: they are version-inert."""
    shard = Stepper(settings=SETTINGS)
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    shard.do(append(batch(0, None, 5), token_number=1))
    shard.do(c.DowngradeSince(reader_id=leased_id(1), outstanding_seqno=None, new_since=EMPTY))
    shard.do(c.BecomeTombstone())
    assert is_tombstone(shard.state)
    assert shard.maintenance == Maintenance(rollup=shard.state.seqno, gc=shard.state.seqno)
    ended = shard.state.seqno
    shard.do(c.AddRollup(ended, rollup(ended)), version="9.0.0")
    assert shard.state.applier_version == "0.1.0"
    assert shard.maintenance == Maintenance(gc=shard.state.seqno)
    assert shard.state.last_gc_req == ended, "the last request that is remembered"


def test_maintenance_merges_to_the_later_and_to_each_request_once() -> None:
    one = MergeReq(*next((each.id, each.desc, each.parts) for each in filled().state.trace.spine_batches()))
    merged = Maintenance(SeqNo(3), None, (one,)).merge(Maintenance(SeqNo(2), SeqNo(4), (one,)))
    assert merged == Maintenance(SeqNo(3), SeqNo(4), (one,))
    assert Maintenance().merge(merged) == merged.merge(Maintenance()) == merged
    assert Maintenance().is_empty()
    assert not merged.is_empty()


def filled() -> Stepper:
    shard = Stepper()
    fill(shard, 1)
    return shard


def test_invariants_refuse_what_is_no_successor() -> None:
    """Spec 1.6, 1.7."""
    shard = filled()
    before = shard.state
    fill(shard, 1)
    after = shard.state
    check_invariants(before, after, deep=True)
    broken = [
        replace(after, seqno=SeqNo(9)),
        replace(after, walltime_ms=before.walltime_ms),
        replace(after, trace=first_state()[0].trace),
        replace(after, rollups=SharedMap()),
        replace(after, last_gc_req=SeqNo(99)),
        replace(after, rollups=SharedMap({SeqNo(99): rollup(99)})),
    ]
    for state in broken:
        with pytest.raises(InvariantViolated):
            check_invariants(before, state)
    ahead = replace(after, trace=after.trace.downgrade_since(frontier(7)))
    check_invariants(before, ahead)
    with pytest.raises(InvariantViolated, match=r"since steps back from \{7\}"):
        check_invariants(ahead, replace(shard.state, seqno=after.seqno.next(), walltime_ms=after.walltime_ms + 1))
    shard.do(c.RegisterLeasedReader(reader_id=leased_id(1), lease_ms=100, debug=DEBUG))
    held = shard.state
    with pytest.raises(InvariantViolated, match="reader holds"):
        check_invariants(None, replace(held, trace=held.trace.downgrade_since(frontier(7))))


def test_a_spine_that_does_not_line_up_is_refused() -> None:
    """Each rule of the levels, broken by hand (spec 11.12)."""
    trace = Trace()
    for index in range(3):
        trace = trace.push_without_requests(batch(index, index + 1, 8))
    spine = trace.spine
    top, low = spine.levels[-1], spine.levels[3]
    broken = [
        replace(spine, next_id=9),
        replace(spine, upper=frontier(9)),
        replace(spine, levels=spine.levels[:-1]),
        replace(spine, levels=(*spine.levels, Level())),
        replace(spine, levels=(*spine.levels[:-1], replace(top, merge=Fueling(MINIMUM, 1)))),
        spine.with_batch(replace(low.batches[0], desc=description(5, 6))),
        spine.with_batch(replace(low.batches[0], desc=description(2, 3, 7))),
        replace(spine, levels=(low, *spine.levels[1:3], Level(), top)),
    ]
    spine.validate(deep=True)
    for bad in broken:
        with pytest.raises(InvariantViolated):
            bad.validate()
    shifted = replace(top.batches[0], sizes=Sizes())
    spine.with_batch(shifted).validate()
    with pytest.raises(InvariantViolated, match="sums"):
        spine.with_batch(shifted).validate(deep=True)
