"""A process that knows versions which consensus lost finds out wherever it takes in what stands, and does no more."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from persist_engine import Antichain, PersistClient, ShardId
from persist_engine.base.errors import CorruptData, ErrorKind, ForkedLog, InvariantViolated, ShardNotFound
from persist_engine.base.settings import MaintenanceSettings, RetrySettings, Settings
from persist_engine.base.versioned import SCAN_ALL, SeqNo, Tip, VersionedData
from persist_engine.client.write.handle import WriteHandle
from persist_engine.client.write.outcomes import Appended
from persist_engine.codec import state as codec_state
from persist_engine.codec.keys import blob_key
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.queries import latest_rollup
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.walk import VersionWalk
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
LOST = "consensus lost or replaced acknowledged versions"


class Forked:
    """A log of two appends that is copied; `stale` then knows some appends that the copy, which stands, has not."""

    def __init__(self, *, lost: int = 2, settings: Settings | None = None) -> None:
        self.world = World(settings=settings)
        self.shard_id = self.world.shard_id()
        self.appended(self.world.process(), 2, "before")
        self.stale = self.world.process()
        self.stale.machine(self.shard_id).refresh()
        copy = self.log()
        self.appended(self.stale, lost, "lost")
        self.lost = self.log()
        self.restore(copy)

    def log(self) -> list[VersionedData]:
        return self.world.consensus.scan(self.shard_id, SeqNo(0), SCAN_ALL)

    def restore(self, log: list[VersionedData]) -> None:
        """What a store does behind our back."""
        self.world.consensus._inner._logs[self.shard_id] = list(log)  # type: ignore[attr-defined]

    def appended(self, client: PersistClient, times: int, name: str) -> None:
        with client.open_writer(self.shard_id, SCHEMA, purpose=name) as writer:
            for _ in range(times):
                upper = writer.fetch_recent_upper().time or 0
                writer.append([row(upper, name, upper)], lower=A(upper), upper=A(upper + 1))

    def regrow(self, times: int) -> None:
        """Processes that know nothing of the lost entries go on."""
        self.appended(self.world.process(), times, "stands")

    def contents(self) -> list[str]:
        client = self.world.process()
        with client.open_leased_reader(self.shard_id, purpose="fresh") as reader:
            upper = client.recent_upper(self.shard_id).time or 0
            return [each["val"]["name"] for each in reader.snapshot(upper - 1).to_table().to_pylist()]

    def assert_given_up(self) -> None:
        """`stale` reads, writes and deletes nothing any more, whatever it is asked."""
        log, blobs = self.log(), {info.key for info in self.world.blob.list_prefix("")}
        machine = self.stale.machine(self.shard_id)
        for act in (
            lambda: machine.state,
            machine.refresh,
            lambda: machine.snapshot_batches(A(0), timeout_s=0),
            lambda: machine.spine_exert(1),
            lambda: self.stale.recent_upper(self.shard_id),
            lambda: self.stale.open_writer(self.shard_id, SCHEMA, purpose="again"),
            lambda: self.stale.open_leased_reader(self.shard_id, purpose="again"),
            lambda: write_rollup(machine),
            lambda: gc_and_truncate(machine),
            lambda: scan_orphans(machine, older_than_ms=0, commit=True),
        ):
            with pytest.raises(ForkedLog, match="is not the log that") as caught:
                act()
            assert caught.value.kind is ErrorKind.FORKED_LOG
            assert caught.value.detail["shard_id"] == self.shard_id
            assert str(self.shard_id) in str(caught.value)
        assert (self.log(), {info.key for info in self.world.blob.list_prefix("")}) == (log, blobs)


@pytest.mark.parametrize("regrown", [0, 1, 2, 3, 30], ids=lambda count: f"{count} appends since")
def test_a_refresh_finds_that_the_log_is_another(regrown: int) -> None:
    """Shorter than what is known, as long, and longer: where it is longer, foreign diffs were applied to lost state (spec 24.3)."""
    forked = Forked()
    if regrown:
        forked.regrow(regrown)
    with pytest.raises(ForkedLog, match=LOST):
        forked.stale.machine(forked.shard_id).refresh()
    forked.assert_given_up()
    assert forked.contents() == ["before"] * 2 + ["stands"] * regrown


@pytest.mark.parametrize("regrown", [0, 2, 3, 5, 30])
def test_a_writer_of_the_lost_branch_appends_nothing(regrown: int) -> None:
    """Decided on lost entries, without a look beforehand. It appended where seqnos fitted, and the log was unreadable from there."""
    forked = Forked(lost=0)
    writer = forked.stale.open_writer(forked.shard_id, SCHEMA, purpose="lost")
    copy = forked.log()
    writer.compare_and_append([row(9, "lost", 2)], expected_upper=A(2), new_upper=A(3))
    forked.restore(copy)
    if regrown:
        forked.regrow(regrown)
    log = forked.log()
    with pytest.raises(ForkedLog, match=LOST):
        writer.compare_and_append([row(10, "lost", 3)], expected_upper=A(3), new_upper=A(4))
    assert forked.log() == log
    forked.assert_given_up()
    assert "lost" not in forked.contents()


@pytest.mark.parametrize("since", [1, 2, 30])
def test_a_commit_that_comes_from_a_failed_server_after_a_look_at_its_successor_stops_the_process(since: int) -> None:
    """Found by simulation (seed 1013264): a thread waits for a server that fails, and another has looked at the one that took over."""
    forked = Forked(lost=0)
    writer = forked.stale.open_writer(forked.shard_id, SCHEMA, purpose="lost")
    copy = forked.log()

    def fails_over() -> None:
        forked.restore(copy)
        forked.regrow(since)
        forked.stale.machine(forked.shard_id).refresh()

    forked.world.consensus.after_next("compare_and_set", fails_over)
    with pytest.raises(ForkedLog, match=LOST):
        writer.compare_and_append([row(9, "lost", 2)], expected_upper=A(2), new_upper=A(3))
    forked.assert_given_up()
    assert forked.contents() == ["before"] * 2 + ["stands"] * since


def commits_late(forked: Forked, *, fails_over: bool, failures: int) -> WriteHandle:
    """A writer whose next commit is answered late. Meanwhile others append, roll up and collect, and its process looks: it goes past by a
    rollup. `fails_over`: they do so on a server that took over without that commit. `failures`: the attempts at reading a rollup afterwards
    that fail.
    """
    writer = forked.stale.open_writer(forked.shard_id, SCHEMA, purpose="late")
    other = forked.world.process()
    copy = forked.log()

    def meanwhile() -> None:
        if fails_over:
            forked.restore(copy)
        forked.appended(other, 3, "stands")
        machine = other.machine(forked.shard_id)
        for _ in range(2):
            write_rollup(machine)
            gc_and_truncate(machine)
        forked.stale.machine(forked.shard_id).refresh()
        forked.world.faults.fail_next("get", happened=False, matching=f"{forked.shard_id}/v", times=failures)

    forked.world.consensus.after_next("compare_and_set", meanwhile)
    return writer


def test_a_commit_of_a_failed_server_after_a_look_that_went_past_it_by_a_rollup_stops_the_process() -> None:
    """The look went past the commit's version without its entry. The append was acknowledged, although the log lacks it."""
    forked = Forked(lost=0)
    writer = commits_late(forked, fails_over=True, failures=0)
    with pytest.raises(ForkedLog, match=LOST):
        writer.compare_and_append([row(2, "late", 2)], expected_upper=A(2), new_upper=A(3))
    forked.assert_given_up()
    assert forked.contents() == ["before"] * 2 + ["stands"] * 3


@pytest.mark.parametrize("failures", [0, 8])
def test_a_commit_after_a_look_that_went_past_it_by_a_rollup_of_the_same_log_is_done(failures: int) -> None:
    """The lineage of that rollup shows it. While no rollup can be read the outcome is unknown, and the next attempt finds the token."""
    forked = Forked(lost=0, settings=Settings(retry=RetrySettings(give_up_ms=200.0)))
    writer = commits_late(forked, fails_over=False, failures=failures)
    answer = writer.compare_and_append([row(2, "late", 2)], expected_upper=A(2), new_upper=A(3))
    assert isinstance(answer, Appended)
    assert forked.contents() == ["before"] * 2 + ["late"] + ["stands"] * 3


@pytest.mark.parametrize("collected", ["to a rollup", "twice"])
def test_a_process_that_slept_while_its_versions_were_truncated_finds_the_fork(collected: str) -> None:
    """No live entry shows any more what stood there: the rollup does, as far as its lineage reaches back."""
    forked = Forked()
    for _ in range(2 if collected == "twice" else 1):
        forked.regrow(6)
        others = forked.world.process().machine(forked.shard_id)
        write_rollup(others)
        gc_and_truncate(others)
    known = forked.stale.machine(forked.shard_id).state.seqno
    assert forked.log()[0].seqno > known + 1
    with pytest.raises(ForkedLog, match="another entry stood there"):
        forked.stale.machine(forked.shard_id).refresh()
    forked.assert_given_up()


def test_a_process_that_slept_on_a_sound_log_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From any version in the rollup's lineage, and from those before it, which are believed."""
    monkeypatch.setattr(codec_state, "LINEAGE_MAX", 12)
    world = World()
    shard_id, sleepers = world.shard_id(), []
    forked = object.__new__(Forked)
    forked.world, forked.shard_id = world, shard_id
    for _ in range(5):
        forked.regrow(4)
        others = world.process().machine(shard_id)
        sleepers.append(world.process())
        sleepers[-1].machine(shard_id).refresh()
        write_rollup(others)
        gc_and_truncate(others)
    rollup = newest_rollup(world, shard_id)
    known = [rollup.knows(client.machine(shard_id).state.tip) for client in sleepers]
    assert known[-1] is True
    assert known[0] is None, "before the lineage begins"
    assert len(rollup.lineage) == 12 * 8
    for client in sleepers:
        machine = client.machine(shard_id)
        assert machine.refresh() == world.process().machine(shard_id).state


def newest_rollup(world: World, shard_id: ShardId) -> Rollup:
    _, rollup = latest_rollup(world.process().machine(shard_id).refresh())
    key = blob_key(shard_id, rollup.key)
    return decode_rollup(world.blob.get(key) or b"", key=key)


def test_a_rollup_knows_the_entries_of_its_lineage_and_no_others() -> None:
    """Spec 24.4."""
    world = World()
    forked = object.__new__(Forked)
    forked.world, forked.shard_id = world, world.shard_id()
    machine = None
    tips: list[Tip] = []
    for _ in range(3):
        forked.regrow(3)
        tips = tips + [entry.tip for entry in forked.log() if entry.tip not in tips]
        machine = world.process().machine(forked.shard_id)
        state = machine.refresh()
        write_rollup(machine)
        rollup = newest_rollup(world, forked.shard_id)
        assert rollup.state == state
        for tip in tips:
            expected = True if tip.seqno <= state.seqno else None
            assert rollup.knows(tip) is expected, tip
            if expected:
                assert rollup.knows(Tip(tip.seqno, b"\x00" * 16)) is False, tip
        tips = tips + [entry.tip for entry in forked.log() if entry.tip not in tips]
    assert rollup.knows(Tip(SeqNo(0), b"\x00" * 16)) is None


def test_pushed_news_of_another_history_is_not_applied() -> None:
    """It follows by its seqno, and was believed by the birth alone."""
    forked = Forked(lost=1)
    forked.regrow(2)
    machine = forked.stale.machine(forked.shard_id)
    known = machine.state
    (news,) = [entry for entry in forked.log() if entry.seqno == known.seqno + 1]
    machine._applier._news.hear(news)
    with pytest.raises(ForkedLog, match=LOST):
        machine._applier.catch_up()
    forked.assert_given_up()
    assert machine._applier._state is known


def test_a_rollup_of_another_history_is_no_base_to_start_from() -> None:
    """It stands under the very key that the log names, and the log's entry at its version is another."""
    forked = Forked()
    forked.regrow(2)
    others = forked.world.process().machine(forked.shard_id)
    write_rollup(others)
    gc_and_truncate(others)
    _, linked = latest_rollup(others.state)
    whole = newest_rollup(forked.world, forked.shard_id)
    phantom = encode_rollup(Rollup(dataclasses.replace(whole.state, tag=b"\x07" * 16)))
    sound = forked.world.blob.get(blob_key(forked.shard_id, linked.key))
    assert sound is not None
    forked.world.blob.set(blob_key(forked.shard_id, linked.key), phantom)
    fresh = forked.world.process()
    for start in (fresh._versions.fetch_current_state, fresh._versions.fetch_all_live_states, fresh.machine):
        with pytest.raises(ForkedLog, match=f"the log has another entry at {whole.state.seqno}"):
            start(forked.shard_id)
    with pytest.raises(ForkedLog):
        gc_and_truncate(fresh.machine(forked.shard_id))
    # Nor is it where only the walk over all versions starts there.
    forked.world.blob.set(blob_key(forked.shard_id, linked.key), sound)
    forked.regrow(2)
    write_rollup(others)
    forked.world.blob.set(blob_key(forked.shard_id, linked.key), phantom)
    fresh._versions.fetch_current_state(forked.shard_id)
    with pytest.raises(ForkedLog, match=f"the log has another entry at {whole.state.seqno}"):
        fresh._versions.fetch_all_live_states(forked.shard_id)


def test_a_phantom_rollup_is_never_written_nor_linked() -> None:
    """Its process was fast: its link had the right seqno, and fresh readers saw what was lost."""
    forked = Forked()
    machine = forked.stale.machine(forked.shard_id)
    phantom = machine.state
    forked.regrow(2)
    assert forked.log()[-1].seqno >= phantom.seqno
    rollups = forked.world.blob_keys(forked.shard_id, kind="rollup")
    with pytest.raises(ForkedLog):
        machine.versions.write_rollup_for_state(phantom)
    assert forked.world.blob_keys(forked.shard_id, kind="rollup") == rollups
    with pytest.raises(ForkedLog):
        write_rollup(machine)
    forked.assert_given_up()
    assert forked.contents() == ["before"] * 2 + ["stands"] * 2


@pytest.mark.parametrize("regrown", [0, 20], ids=lambda count: f"{count} appends since")
@pytest.mark.parametrize("known", [0, 6], ids=["all of it is lost", "the link of its rollup is lost"])
def test_a_collection_that_was_decided_before_the_loss_cuts_no_log_that_stands(known: int, regrown: int) -> None:
    """It was past its last look: where the log reached that far, the versions went that another rollup was to begin. Where the entry at the
    cut stood and the later one that links its rollup did not, no process could have read what was left (spec 7.9; found by simulation).
    """
    forked = Forked(lost=0)
    machine = forked.stale.machine(forked.shard_id)
    forked.appended(forked.stale, known, "known")
    before = forked.log()
    forked.appended(forked.stale, 6 - known, "lost")
    write_rollup(machine)
    stands: list[list[VersionedData]] = []

    def lose() -> None:
        forked.restore(before)
        if regrown:
            forked.regrow(regrown)
        stands.append(forked.log())

    forked.world.consensus.before_next("truncate", lose)
    with pytest.raises(ForkedLog, match="holds another entry in its place"):
        gc_and_truncate(machine)
    assert stands == [forked.log()]
    with pytest.raises(ForkedLog, match=LOST):
        machine.refresh()
    forked.assert_given_up()
    assert forked.contents() == ["before"] * 2 + ["known"] * known + ["stands"] * regrown


FEW_DIFFS = Settings(maintenance=MaintenanceSettings(recent_diffs_max=4))


def test_regression_a_log_that_is_lost_under_an_opening_is_opened_as_it_stands() -> None:
    """Found by simulation: the lost head named a rollup that the log which stands does not reach back to: a broken rule."""
    forked = Forked(lost=0, settings=FEW_DIFFS)
    forked.regrow(2)
    copy = forked.log()
    write_rollup(forked.world.process().machine(forked.shard_id))
    forked.regrow(2)
    forked.world.consensus.after_next("head", lambda: forked.restore(copy))
    state = forked.world.process().machine(forked.shard_id).state
    assert state.tip == copy[-1].tip


@pytest.mark.parametrize("regrown", [0, 1, 20], ids=lambda count: f"{count} appends since")
def test_regression_catching_up_from_far_behind_finds_what_is_lost_meanwhile(regrown: int) -> None:
    """Its entry was there as it looked; what it then took whole was another log, and it went on with that."""
    forked = Forked(lost=0, settings=FEW_DIFFS)
    copy = forked.log()
    forked.appended(forked.stale, 1, "lost")
    for _ in range(2):
        forked.appended(forked.world.process(), 3, "lost")

    def lose() -> None:
        forked.restore(copy)
        if regrown:
            forked.regrow(regrown)
            write_rollup(forked.world.process().machine(forked.shard_id))

    forked.world.consensus.after_next("scan", lose)
    with pytest.raises(ForkedLog, match=LOST):
        forked.stale.machine(forked.shard_id).refresh()
    forked.assert_given_up()


@pytest.mark.parametrize("hole", [1, 3, 6], ids=lambda back: f"{back} before the head")
def test_a_log_with_a_hole_is_no_log_that_was_lost_meanwhile(hole: int) -> None:
    """To fetch it again would never end."""
    forked = Forked(lost=0, settings=FEW_DIFFS)
    forked.regrow(8)
    forked.restore([entry for entry in forked.log() if entry.seqno != forked.log()[-1].seqno - hole])
    for act in (lambda: forked.world.process().machine(forked.shard_id), forked.stale.machine(forked.shard_id).refresh):
        with pytest.raises(InvariantViolated, match="have a gap"):
            act()


def test_regression_a_log_that_is_wiped_under_an_opening_or_a_walk_is_reported() -> None:
    """Found by simulation: a process that knew nothing of it met a broken rule, that the shard vanished, and so did one that knew it."""
    forked = Forked(settings=FEW_DIFFS)
    known = forked.stale.machine(forked.shard_id)
    forked.world.consensus.after_next("scan", lambda: forked.restore([]))
    with pytest.raises(ShardNotFound, match="does not exist.*persist admin recover"):
        forked.world.process().machine(forked.shard_id)
    assert known.versions.live_diff_bounds(forked.shard_id) is None
    with pytest.raises(ForkedLog, match=LOST):
        VersionWalk(known)


def test_a_walk_over_live_states_stops_at_entries_that_do_not_follow() -> None:
    """A log put together of two, as by a restore that was done by halves."""
    forked = Forked()
    forked.regrow(4)
    lost = {entry.seqno: entry for entry in forked.lost}
    middle = max(lost)

    def mixed() -> list[VersionedData]:
        return [lost[entry.seqno] if entry.seqno == middle else entry for entry in forked.log()]

    stands, versions = forked.log(), forked.world.process()._versions
    forked.restore(mixed())
    with pytest.raises(ForkedLog, match=f"{middle} follows another entry"):
        versions.fetch_current_state(forked.shard_id)
    forked.restore(stands)
    write_rollup(forked.world.process().machine(forked.shard_id))  # an opening process starts behind it
    forked.restore(mixed())
    walk = versions.fetch_all_live_states(forked.shard_id)
    assert walk is not None
    while walk.seqno < middle - 1:
        walk.advance()
    with pytest.raises(ForkedLog, match=f"{middle} follows another entry"):
        walk.advance()
    assert walk.seqno == middle - 1


def test_the_diffs_in_a_rollup_are_those_of_its_state() -> None:
    forked = Forked()
    forked.regrow(3)
    write_rollup(forked.world.process().machine(forked.shard_id))
    whole = newest_rollup(forked.world, forked.shard_id)
    lost = {entry.seqno: entry for entry in forked.lost}
    for at in (len(whole.diffs) - 1, len(whole.diffs) - 2):
        assert decode_rollup(encode_rollup(whole), key="k") == whole
        diffs = list(whole.diffs)
        diffs[at] = VersionedData(diffs[at].seqno, lost[diffs[at].seqno].data if diffs[at].seqno in lost else b"x")
        with pytest.raises(CorruptData, match="is not the entry that what comes after it follows") as caught:
            decode_rollup(forged(whole, tuple(diffs)), key="k")
        assert caught.value.detail["key"] == "k"


def forged(rollup: Rollup, diffs: tuple[VersionedData, ...]) -> bytes:
    """As code would write it that does not look."""
    check, codec_state._check_diffs = codec_state._check_diffs, lambda *_, **__: None
    try:
        return encode_rollup(dataclasses.replace(rollup, diffs=diffs))
    finally:
        codec_state._check_diffs = check


def test_a_diff_is_applied_to_the_entry_it_names_only() -> None:
    """Spec 24.1."""
    forked = Forked()
    client = forked.world.process()
    state = client.machine(forked.shard_id).refresh()
    forked.regrow(1)
    first, second = [decode_state_diff(entry.data, key="k") for entry in forked.log() if entry.seqno > state.seqno][:2]
    after = apply(state, first)
    assert (after.tag, second.predecessor) == (first.tag, first.tag)
    assert apply(after, first) is after, "again"
    with pytest.raises(ForkedLog, match="follows another entry"):
        apply(dataclasses.replace(state, tag=b"\x01" * 16), first)
    with pytest.raises(ForkedLog, match="follows another entry"):
        apply(state, dataclasses.replace(first, predecessor=b""))
    with pytest.raises(ForkedLog, match=f"the log has another entry at {after.seqno}"):
        apply(dataclasses.replace(after, tag=b"\x01" * 16), first)
    first_entry = decode_state_diff(forked.log()[0].data, key="k")
    assert (first_entry.seqno_from, first_entry.predecessor) == (0, b"")
    assert len(first_entry.birth) == 16, "so the first tag depends on it"
    encoded = encode_state_diff(dataclasses.replace(second, predecessor=b"\x02" * 16))
    assert decode_state_diff(encoded, key="k").tag != second.tag


def test_waiters_are_woken_with_the_error() -> None:
    """Every waiter of the process is woken, whichever of its handles found the fork."""
    forked = Forked()
    machine = forked.stale.machine(forked.shard_id)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            machine.wait(lambda: None if machine.state.trace.upper < A(99) else True, timeout_s=60)
        except ForkedLog as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()
    assert len(raised) == 1
    forked.assert_given_up()


def test_catching_up_in_many_steps_is_no_alarm() -> None:
    """Far behind, with and without truncation, and with news that comes late or twice."""
    settings = Settings(maintenance=MaintenanceSettings(recent_diffs_max=4))
    world = World(settings=settings)
    forked = object.__new__(Forked)
    forked.world, forked.shard_id = world, world.shard_id()
    forked.regrow(1)
    machine = world.process().machine(forked.shard_id)
    for times in (1, 2, 3, 10):
        machine.refresh()
        forked.regrow(times)
        for entry in [*forked.log(), *forked.log()[-3:]]:
            machine._applier._news.hear(entry)
        machine._applier.catch_up()
        assert machine.refresh() == world.process().machine(forked.shard_id).state


def follow_whatever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("persist_engine.model.diff.state_diff.check_follows", lambda state, diff: None)


def take_any_entry(patch: pytest.MonkeyPatch) -> None:
    for module in ("model.diff.state_diff", "shard.versions", "shard.log_reader", "shard.applier"):
        patch.setattr(f"persist_engine.{module}.check_same_entry", lambda state, tag: None)


def take_any_past(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollup, "knows", lambda self, tip: True)


@pytest.mark.parametrize(
    ("plant", "proof"),
    [
        (follow_whatever, test_a_walk_over_live_states_stops_at_entries_that_do_not_follow),
        (follow_whatever, test_a_diff_is_applied_to_the_entry_it_names_only),
        (take_any_entry, test_a_rollup_of_another_history_is_no_base_to_start_from),
        (take_any_entry, test_a_phantom_rollup_is_never_written_nor_linked),
        (
            take_any_past,
            lambda: test_a_process_that_slept_while_its_versions_were_truncated_finds_the_fork("to a rollup"),
        ),
    ],
)
def test_each_check_of_the_history_has_a_test_that_needs_it(monkeypatch: pytest.MonkeyPatch, plant, proof) -> None:
    """The laws above fail without it. What histories can show is planted in the simulation; behind the look at one's own
    entry they show none of these.
    """
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, InvariantViolated)):
            proof()
    proof()
