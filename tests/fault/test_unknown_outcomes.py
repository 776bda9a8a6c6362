"""Compare-and-set calls of unknown outcome: nothing is done twice, and nothing that was done is denied."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from persist_engine import Antichain, Appended, UpperMismatch
from persist_engine.base.errors import InvalidUsage, InvariantViolated, Unavailable
from persist_engine.base.settings import BatchSettings, LeaseSettings, MaintenanceSettings, RetrySettings, Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.codec.keys import rollup_key
from persist_engine.model.batch import HollowBatch, HollowRollup
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.model.ids import CriticalReaderId, RollupId, ShardId, WriterId
from persist_engine.model.spine.trace import MergeRes
from persist_engine.rows.schema import CODECS
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, World, contents, row

A = Antichain.of
NO_INLINE = Settings(batch=BatchSettings(inline_part_bytes_max=0))


def during_backoff(world: World, action: Callable[[], object]) -> None:
    """Run `action` while the process that next loses an answer sleeps before its retry."""
    sleep = world.env.sleep

    def act_and_sleep(seconds: float) -> None:
        world.env.sleep = sleep
        action()
        sleep(seconds)

    world.env.sleep = act_and_sleep


@pytest.mark.parametrize("happened", [True, False])
def test_regression_2_an_append_of_unknown_outcome_happens_exactly_once(happened: bool):
    """Bug 2: retried without a token it doubled, or was refused by its own success."""
    world = World()
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    world.faults.fail_next("compare_and_set", happened=happened, times=3)
    outcome = writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    assert outcome == Appended(A(5))
    assert world.faults.injected == 3
    assert contents(world.process(), shard_id, 4) == [(1, "a", 1)]


def test_an_append_that_surely_failed_is_simply_retried():
    world = World()
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    world.faults.fail_next("compare_and_set", happened=False, answered=True, times=4)
    assert writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5)) == Appended(A(5))
    assert contents(world.process(), shard_id, 4) == [(1, "a", 1)]


def test_regression_2_an_append_overtaken_after_its_lost_answer_is_still_a_success():
    """Its own success is found under its token although others have moved the upper on."""
    world = World()
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    rival = world.process().open_writer(shard_id, SCHEMA, purpose="rival")
    during_backoff(world, lambda: rival.append([row(2, "b", 5)], lower=A(5), upper=A(9)))
    world.faults.fail_next("compare_and_set", happened=True)
    assert isinstance(writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5)), Appended)
    assert contents(world.process(), shard_id, 8) == [(1, "a", 1), (2, "b", 1)]


def test_regression_2_an_append_that_lost_after_an_unknown_outcome_is_a_mismatch_and_leaves_nothing():
    world = World(settings=NO_INLINE)
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    rival = world.process().open_writer(shard_id, SCHEMA, purpose="rival")
    during_backoff(world, lambda: rival.append([row(2, "b", 0)], lower=A(0), upper=A(9)))
    world.faults.fail_next("compare_and_set", happened=False)
    outcome = writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    assert outcome == UpperMismatch(current=A(9), expected=A(0))
    assert contents(world.process(), shard_id, 8) == [(2, "b", 1)]
    assert len(world.blob_keys(shard_id, kind="part")) == 1


def test_regression_2_when_success_and_failure_look_alike_the_append_fails_hard():
    """The one ambiguous case: the writer's token was overwritten by its own later append."""
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    machine, same_writer = client.machine(shard_id), world.process().machine(shard_id)
    writer_id = WriterId.from_bytes(b"w" * 16)

    def empty(lower: int, upper: int) -> HollowBatch:
        return HollowBatch.empty(Description(A(lower), A(upper), MINIMUM))

    def overwrite() -> None:
        same_writer.refresh()
        same_writer.compare_and_append(empty(5, 9), writer_id=writer_id, purpose="test")

    during_backoff(world, overwrite)
    world.faults.fail_next("compare_and_set", happened=True)
    with pytest.raises(InvariantViolated, match="may or may not have happened"):
        machine.compare_and_append(empty(0, 5), writer_id=writer_id, purpose="test")


def test_regression_2_a_writer_whose_registration_lapsed_while_its_outcome_was_unknown_fails_hard():
    world = World(settings=Settings(lease=LeaseSettings(writer_lease_ms=1000)))
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    rival = world.process().open_writer(shard_id, SCHEMA, purpose="rival")

    def sleep_long() -> None:
        world.env.advance_ms(10_000)
        rival.append([], lower=A(5), upper=A(9))

    during_backoff(world, sleep_long)
    world.faults.fail_next("compare_and_set", happened=True)
    with pytest.raises(InvariantViolated, match="may or may not have happened"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    assert contents(world.process(), shard_id, 8) == [(1, "a", 1)]


class Wanted:
    """A lock that sets `wanted` when a thread is about to wait for it."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_regression_2_a_handle_that_is_expired_beside_its_append_of_unknown_outcome_waits_for_it():
    """It took away the token by which the append knows its own success: the blobs of what was appended were deleted."""
    world = World(settings=NO_INLINE)
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    lock = writer._append_lock = Wanted()  # type: ignore[assignment]  # shows when the other thread has come

    def expire() -> None:
        writer.expire()
        lock.wanted.set()

    expiring = threading.Thread(target=expire, daemon=True)

    def expire_meanwhile() -> None:
        lock.wanted.clear()
        expiring.start()
        assert lock.wanted.wait(60)

    during_backoff(world, expire_meanwhile)
    world.faults.fail_next("compare_and_set", happened=True)
    assert writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5)) == Appended(A(5))
    expiring.join(60)
    assert contents(world.process(), shard_id, 4) == [(1, "a", 1)]
    assert writer.writer_id not in writer.machine.refresh().writers
    with pytest.raises(InvalidUsage, match="has expired"):
        writer._swap_in(HollowBatch.empty(Description(A(5), A(6), MINIMUM)), A(6), None, None, commit_info=None)


def test_regression_2_a_writer_that_was_removed_while_its_outcome_was_unknown_fails_hard():
    """Within its lease: its absence says nothing of the append."""
    world = World(settings=NO_INLINE)
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(5))
    other = world.process().machine(shard_id)
    during_backoff(world, lambda: (other.refresh(), other.expire_writer(writer.writer_id)))
    world.faults.fail_next("compare_and_set", happened=True)
    with pytest.raises(InvariantViolated, match="may or may not have happened"):
        writer.compare_and_append([row(2, "b", 5)], expected_upper=A(5), new_upper=A(9))
    assert contents(world.process(), shard_id, 8) == [(1, "a", 1), (2, "b", 1)]


def test_regression_2_a_writer_whose_lease_had_lapsed_before_is_surely_refused():
    """A success would have registered it anew: it was removed for its old registration."""
    world = World(settings=NO_INLINE)
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(5))
    world.env.advance_ms(world.settings.lease.writer_lease_ms + 1)
    rival = world.process().open_writer(shard_id, SCHEMA, purpose="rival")
    during_backoff(world, lambda: rival.append([row(2, "b", 5)], lower=A(5), upper=A(9)))
    world.faults.fail_next("compare_and_set", happened=False)
    outcome = writer.compare_and_append([row(3, "c", 5)], expected_upper=A(5), new_upper=A(7))
    assert outcome == UpperMismatch(current=A(9), expected=A(5))


def test_regression_3_a_stale_cache_never_refuses_an_append():
    """Bug 3: the mismatch came from the cache, without a fetch."""
    world = World()
    shard_id = world.shard_id()
    stale = world.process().open_writer(shard_id, SCHEMA, purpose="stale")
    other = world.process().open_writer(shard_id, SCHEMA, purpose="other")
    other.append([row(1, "a", 0)], lower=A(0), upper=A(5))
    assert stale.shared_upper() == A(0)
    assert stale.compare_and_append([row(2, "b", 5)], expected_upper=A(5), new_upper=A(6)) == Appended(A(6))
    other.append([], lower=A(6), upper=A(7))
    outcome = stale.compare_and_append([], expected_upper=A(6), new_upper=A(8))
    assert outcome == UpperMismatch(current=A(7), expected=A(6))


def test_regression_3_stale_progress_never_refuses_an_append():
    world = World()
    shard_id = world.shard_id()
    stale = world.process().open_writer(shard_id, SCHEMA, purpose="stale")
    other = world.process().open_writer(shard_id, SCHEMA, purpose="other")
    other.compare_and_append([], expected_upper=A(0), new_upper=A(5), progress=("sink", b"one"))
    outcome = stale.compare_and_append(
        [], expected_upper=A(5), new_upper=A(6), progress=("sink", b"two"), expected_progress=b"one"
    )
    assert outcome == Appended(A(6))


@pytest.mark.parametrize("happened", [True, False])
def test_regression_1a_the_first_rollup_survives_an_init_of_unknown_outcome(happened: bool):
    """Bug 1a: the winner of its own retry took itself for the loser and deleted the shard's only rollup."""
    world = World()
    shard_id = world.shard_id()
    world.faults.fail_next("compare_and_set", happened=happened, times=2)
    state = world.process()._versions.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair())
    assert world.blob_keys(shard_id, kind="rollup") == {f"{shard_id}/{state.rollups[SeqNo(1)].key}"}
    assert world.process().open_writer(shard_id, SCHEMA, purpose="test").fetch_recent_upper() == A(0)


def test_the_first_rollup_stays_while_live_versions_name_it_although_the_newest_does_not():
    """The process that created the shard hears of it only after others have rolled up and collected (seed 5011940)."""
    world = World()
    shard_id = world.shard_id()

    def live_as_usual() -> None:
        client = world.process()
        client.open_writer(shard_id, SCHEMA, purpose="test").append([], lower=A(0), upper=A(1))
        machine = client.machine(shard_id)
        write_rollup(machine)
        gc_and_truncate(machine)
        assert SeqNo(1) not in machine.refresh().rollups

    world.faults.fail_next("compare_and_set", happened=True)
    during_backoff(world, live_as_usual)
    versions = world.process()._versions
    versions.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair())
    walk = versions.fetch_all_live_states(shard_id)
    assert walk is not None
    named = {rollup.key for rollup in walk.state.rollups.values()}
    while walk.advance() is not None:
        named |= {rollup.key for rollup in walk.state.rollups.values()}
    assert {f"{shard_id}/{key}" for key in named} <= world.blob_keys(shard_id, kind="rollup")


@pytest.mark.parametrize("happened", [True, False])
def test_regression_1c_a_rollup_linked_with_unknown_outcome_counts_as_linked(happened: bool):
    """Bug 1c: also when a rival's rollup of the same version is what the retry finds."""
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    client.open_writer(shard_id, SCHEMA, purpose="test").append([], lower=A(0), upper=A(1))
    machine = client.machine(shard_id)
    written = machine.versions.write_rollup_for_state(machine.state)
    assert written is not None
    world.faults.fail_next("compare_and_set", happened=happened)
    added, _ = machine.add_rollup(machine.state.seqno, HollowRollup(*written))
    assert added.applied
    assert HollowRollup(*written) in machine.refresh().rollups.values()


def test_regression_1c_a_rollup_that_was_linked_and_replaced_before_the_retry_counts_as_linked():
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    client.open_writer(shard_id, SCHEMA, purpose="test").append([], lower=A(0), upper=A(1))
    machine, rival = client.machine(shard_id), world.process().machine(shard_id)
    seqno = machine.state.seqno
    ours = HollowRollup(rollup_key(seqno, RollupId.from_bytes(b"o" * 16)), 1)
    theirs = HollowRollup(rollup_key(seqno.next(), RollupId.from_bytes(b"t" * 16)), 1)

    def replace() -> None:
        rival.refresh()
        rival.add_rollup(seqno.next(), theirs)  # the newest rollup may not go
        rival.remove_rollups([(seqno, ours)])

    during_backoff(world, replace)
    world.faults.fail_next("compare_and_set", happened=True)
    added, _ = machine.add_rollup(seqno, ours)
    assert added.applied
    assert list(machine.refresh().rollups.values()) == [theirs]


@pytest.mark.parametrize("happened", [True, False])
def test_regression_1b_a_merge_result_of_unknown_outcome_counts_as_applied(happened: bool):
    """Bug 1b: the retry found its inputs gone, so that live output was deleted."""
    world = World()
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    for time in range(4):
        # Each pair cancels out, so that nothing at all is a valid result of merging it.
        writer.append([row(1, "x", time, diff=1 - 2 * (time % 2))], lower=A(time), upper=A(time + 1))
    machine = writer.machine
    batch = next(batch for batch in machine.state.trace.spine_batches() if len(batch.parts) > 1)
    output = HollowBatch.empty(batch.desc)
    world.faults.fail_next("compare_and_set", happened=happened)
    inputs = tuple(part for _, part in batch.parts)
    outcome, _ = machine.apply_merge_res(MergeRes(output=output, input=batch.id, inputs=inputs))
    assert outcome.applied


def _append(client: PersistClient, shard_id: ShardId) -> None:
    client.open_writer(shard_id, SCHEMA, purpose="late").append([row(4, "x", 4)], lower=A(4), upper=A(5))


def _append_doubtful_copy(client: PersistClient, shard_id: ShardId) -> None:
    """Of a batch that others may have appended: staged anew, by the append itself."""
    writer = client.open_writer(shard_id, SCHEMA, purpose="late")
    with writer.builder(A(3)) as builder:
        builder.add([row(3, "x", 3), row(4, "x", 4)])
        copy = writer.batch_from_transmittable(builder.finish(A(5)).to_transmittable())
    writer.compare_and_append_batch([copy], expected_upper=A(4), new_upper=A(5))


def _compact(client: PersistClient, shard_id: ShardId) -> None:
    machine = client.machine(shard_id)
    compact(machine, next(each for each in machine.state.trace.spine_batches() if len(each.parts) > 1).request())


def _roll_up(client: PersistClient, shard_id: ShardId) -> None:
    write_rollup(client.machine(shard_id))


@pytest.mark.parametrize("command", [_append, _append_doubtful_copy, _compact, _roll_up])
def test_regression_1_what_may_have_been_linked_stays_when_retrying_ends(command):
    """Bug 1, once more: a command that gives up before its outcome is known deletes none of its blobs."""
    world = World(settings=replace(NO_INLINE, retry=RetrySettings(give_up_ms=0)))
    shard_id = world.shard_id()
    client = world.process()
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    for time in range(4):
        writer.append([row(time, "x", time)], lower=A(time), upper=A(time + 1))
    machine = client.machine(shard_id)
    before = machine.state
    world.faults.fail_next("compare_and_set", happened=True)
    with pytest.raises(Unavailable):
        command(client, shard_id)
    after = machine.refresh()
    assert after.trace != before.trace or after.rollups != before.rollups, "it happened"
    assert verify_shard(machine).findings == []
    rows = 5 if after.trace.upper == A(5) else 4
    assert contents(world.process(), shard_id, rows - 1) == [(key, "x", 1) for key in range(rows)]


@pytest.mark.parametrize("happened", [True, False])
def test_a_critical_downgrade_of_unknown_outcome_does_not_fence_itself(happened: bool):
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    critical = CriticalReaderId.from_bytes(b"c" * 16)
    handle = client.open_critical_since(shard_id, critical, opaque=b"one")
    world.faults.fail_next("compare_and_set", happened=happened, times=2)
    answer = handle.compare_and_downgrade_since(b"one", (b"two", A(3)))
    assert (answer.since, handle.opaque) == (A(3), b"two")


@pytest.mark.parametrize("happened", [True, False])
def test_expiry_of_unknown_outcome_says_that_the_reader_existed(happened: bool):
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    handle = client.open_critical_since(shard_id, CriticalReaderId.from_bytes(b"c" * 16), opaque=b"one")
    world.faults.fail_next("compare_and_set", happened=happened)
    assert handle.expire()
    assert not handle.expire()


def test_giving_up_names_the_store_and_keeps_blobs_that_may_be_in_use():
    settings = Settings(batch=BatchSettings(inline_part_bytes_max=0), retry=RetrySettings(give_up_ms=1000))
    world = World(settings=settings)
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    world.faults.fail_next("compare_and_set", happened=True, times=1000)
    with pytest.raises(Unavailable, match="compare_and_append of s.* gave up .* mem:"):
        writer.compare_and_append([row(1, "a", 0)], expected_upper=A(0), new_upper=A(5))
    world.faults.heal()
    assert contents(world.process(), shard_id, 4) == [(1, "a", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_under_heavy_faults_every_append_is_there_exactly_once(seed: int):
    """Three processes race on one shard whose stores lose a third of their calls and answers (spec 21.1)."""
    world = World(seed, settings=Settings(maintenance=MaintenanceSettings(recent_diffs_max=5)))
    shard_id = world.shard_id()
    writers = [world.process().open_writer(shard_id, SCHEMA, purpose=f"writer {i}") for i in range(3)]
    world.faults.set_rates(happens=0.7, answers=0.7)
    rng, expected = random.Random(seed), []
    for number in range(30):
        writer = rng.choice(writers)
        while True:
            upper = writer.upper
            outcome = writer.compare_and_append(
                [row(number, "x", upper.time)], expected_upper=upper, new_upper=A(upper.time + rng.randrange(1, 3))
            )
            if isinstance(outcome, Appended):
                break
        expected.append((number, "x", 1))
    world.faults.heal()
    assert world.faults.injected > 30
    assert contents(world.process(), shard_id, writers[0].fetch_recent_upper().time - 1) == expected
