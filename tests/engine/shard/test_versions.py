"""The log of states: init, fetch, rollups, walks."""

from __future__ import annotations

import dataclasses

import pytest
from persist_engine import Antichain, PersistClient
from persist_engine.base.errors import (
    CodecMismatch,
    CorruptData,
    ForkedLog,
    InvariantViolated,
    MissingBlob,
    ShardNotFound,
)
from persist_engine.base.settings import MaintenanceSettings, Settings
from persist_engine.base.versioned import SCAN_ALL, SeqNo, VersionedData
from persist_engine.codec.envelope import Kind, sealed
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.batch import HollowRollup
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.frontier import MINIMUM
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.state import CriticalReader, DebugInfo, ShardState
from persist_engine.pb import diff_pb2
from persist_engine.rows.schema import CODECS
from persist_engine.shard.log_reader import LiveDiffBounds
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.walk import VersionWalk
from persist_engine.work.gc import gc_and_truncate
from persist_kit.world import SCHEMA, World, row


def commits(client: PersistClient, shard_id: ShardId, count: int) -> Machine:
    """A shard whose last `count` versions are appends."""
    writer = client.open_writer(shard_id, SCHEMA, purpose="test")
    first = writer.fetch_recent_upper().time
    assert first is not None
    for time in range(first, first + count):
        writer.compare_and_append(
            [row(time, "x", time)], expected_upper=Antichain.of(time), new_upper=Antichain.of(time + 1)
        )
    return writer.machine


def link_rollup(machine: Machine) -> SeqNo:
    state = machine.refresh()
    written = machine.versions.write_rollup_for_state(state)
    assert written is not None
    added, _ = machine.add_rollup(state.seqno, HollowRollup(*written))
    assert added.applied
    return state.seqno


def state_at(machine: Machine, seqno: SeqNo) -> ShardState:
    walk = VersionWalk(machine)
    while walk.seqno < seqno:
        walk.advance()
    return walk.state


def test_init_makes_version_one_with_its_rollup_and_schema():
    world, client = (world := World()), world.process()
    shard_id = world.shard_id()
    state = client._versions.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair())
    assert state.seqno == 1
    assert set(state.rollups) == {SeqNo(1)}
    assert state.schemas[0] == SCHEMA.to_pair()
    assert world.blob_keys(shard_id, kind="rollup") == {f"{shard_id}/{state.rollups[SeqNo(1)].key}"}


def test_a_shard_has_the_reader_of_its_creation_from_the_first_version_on_and_keeps_it():
    """Spec 7.1."""
    world = World()
    client, shard_id = world.process(), world.shard_id()
    first = CriticalReaderId.from_bytes(bytes(16))
    client.initialise(shard_id, SCHEMA, critical=(first, b"mine", "retention"))
    client.initialise(shard_id, SCHEMA, critical=(CriticalReaderId.from_bytes(bytes([1] * 16)), b"late", "too late"))
    for process in (client, world.process()):
        state = process.machine(shard_id).refresh()
        assert state.seqno == 1
        assert dict(state.critical_readers.items()) == {
            first: CriticalReader(MINIMUM, b"mine", DebugInfo(state.hostname, "retention"))
        }
    registered = client.open_critical_since(shard_id, first, opaque=b"other")
    assert (registered.since, registered.opaque) == (MINIMUM, b"mine")


def test_init_again_changes_nothing_and_checks_codecs():
    world = World()
    versions, shard_id = world.process()._versions, world.shard_id()
    first = versions.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair())
    assert versions.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair()) == first
    wanted = (
        "records the codecs key struct, value struct, time u64, diff i64, not key other, .*use a release of persist"
    )
    with pytest.raises(CodecMismatch, match=wanted):
        versions.maybe_init_shard(shard_id, dataclasses.replace(CODECS, key="other"), SCHEMA.to_pair())
    assert len(world.blob_keys(shard_id, kind="rollup")) == 1


def test_the_loser_of_an_init_race_deletes_its_rollup_and_takes_the_winners_state():
    """Spec 7.1."""
    world = World()
    winner, loser = world.process()._versions, world.process()._versions
    shard_id = world.shard_id()
    scan = loser.fetch_recent_live_diffs
    raced: list[object] = []

    def scan_then_lose(shard: ShardId) -> object:
        found = scan(shard)
        if not raced:
            raced.append(winner.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair()))
        return found

    loser.fetch_recent_live_diffs = scan_then_lose  # type: ignore[method-assign,assignment]  # the other is faster
    assert loser.maybe_init_shard(shard_id, CODECS, SCHEMA.to_pair()) == raced[0]
    assert len(world.blob_keys(shard_id, kind="rollup")) == 1


def test_an_unknown_shard_is_not_found():
    world = World()
    versions = world.process()._versions
    with pytest.raises(ShardNotFound, match="does not exist in mem:"):
        versions.fetch_current_state(world.shard_id())
    assert versions.fetch_all_live_states(world.shard_id()) is None
    assert versions.live_diff_bounds(world.shard_id()) is None


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 1000])
def test_current_state_is_the_same_however_few_diffs_a_scan_may_return(limit: int):
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 3)
    link_rollup(machine)
    commits(world.process(), shard_id, 3)
    expected = machine.refresh()
    settings = Settings(maintenance=MaintenanceSettings(recent_diffs_max=limit))
    assert world.process(settings=settings)._versions.fetch_current_state(shard_id) == expected
    # A cached state that is behind catches up by the same bound.
    lagging = world.process(settings=settings).machine(shard_id)
    commits(world.process(), shard_id, 5)
    assert lagging.refresh() == machine.refresh()


def test_regression_7_scans_are_bounded_when_a_newer_rollup_exists():
    """Regression for bug 7 of the specification: a long log is not read when its newest rollup makes it needless (spec 7.4)."""
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 40)
    at = link_rollup(machine)
    settings = Settings(maintenance=MaintenanceSettings(recent_diffs_max=10))
    live = world.process(settings=settings)._versions.fetch_recent_live_diffs(shard_id)
    assert live[0].seqno == at


def test_a_rollup_that_was_replaced_meanwhile_is_fetched_anew():
    """Spec 7.3."""
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 3)
    stale = machine.versions.fetch_recent_live_diffs(shard_id)
    link_rollup(machine)
    world.blob.delete(f"{shard_id}/{machine.state.rollups[SeqNo(1)].key}")
    state = machine.versions.fetch_current_state(shard_id, stale)
    assert state == machine.refresh()


def test_a_wiped_blob_store_is_named_and_not_retried_for_ever():
    """Spec 7.10."""
    world = World()
    shard_id = world.shard_id()
    state = commits(world.process(), shard_id, 3).state
    key = f"{shard_id}/{state.rollups[SeqNo(1)].key}"
    world.blob.delete(key)
    with pytest.raises(MissingBlob, match="wiped or does not belong") as raised:
        world.process()._versions.fetch_current_state(shard_id)
    assert raised.value.detail["key"] == key


def test_damaged_rollups_and_diffs_are_named():
    world = World()
    shard_id = world.shard_id()
    state = commits(world.process(), shard_id, 1).state
    key = f"{shard_id}/{state.rollups[SeqNo(1)].key}"
    whole = world.blob.get(key)
    assert whole is not None
    world.blob.set(key, whole[:-3])
    with pytest.raises(CorruptData) as raised:
        world.process()._versions.fetch_current_state(shard_id)
    assert raised.value.detail["key"] == key
    world.blob.set(key, whole)
    world.consensus.compare_and_set(shard_id, state.tip, VersionedData(state.seqno.next(), b"rubbish"))
    with pytest.raises(CorruptData, match=f"{shard_id} {state.seqno.next()}"):
        world.process()._versions.fetch_current_state(shard_id)


@pytest.mark.parametrize(
    "named", ["", "rubbish", "v1", "v1/", "v01/{rollup}", "v1/{rollup}/x", "w1/{rollup}", "../{rollup}"]
)
def test_regression_a_diff_that_names_no_rollup_is_damage_whatever_the_number_of_diffs(named: str):
    """The search from the newest rollup took it for misuse by the caller, and named neither shard nor version."""
    world = World(settings=Settings(maintenance=MaintenanceSettings(recent_diffs_max=2)))
    shard_id = world.shard_id()
    state = commits(world.process(), shard_id, 3).state
    (head,) = world.consensus.scan(shard_id, state.seqno, 1)
    diff = decode_state_diff(head.data, key="head")
    key = named.format(rollup=diff.latest_rollup_key.split("/")[1])
    bad = dataclasses.replace(diff, seqno_from=state.seqno, seqno_to=state.seqno.next(), latest_rollup_key=key)
    world.consensus.compare_and_set(shard_id, state.tip, VersionedData(bad.seqno_to, encode_state_diff(bad)))
    for versions in (world.process()._versions, world.process(settings=Settings())._versions):
        with pytest.raises(CorruptData, match=f"{shard_id} {bad.seqno_to} names no rollup"):
            versions.fetch_current_state(shard_id)


def test_a_log_that_lost_acknowledged_versions_stops_the_writer():
    world = World()
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    earlier = world.consensus.scan(shard_id, SeqNo(0), 10)
    writer.compare_and_append([], expected_upper=Antichain.of(0), new_upper=Antichain.of(1))
    log = world.consensus._inner._logs  # type: ignore[attr-defined]  # what a store rolled back behind our back holds
    log[shard_id] = list(earlier)
    with pytest.raises(ForkedLog, match="ends before it; consensus lost or replaced acknowledged versions"):
        writer.compare_and_append([], expected_upper=Antichain.of(1), new_upper=Antichain.of(2))


def test_a_rollup_holds_the_state_and_the_diffs_since_the_last():
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 4)
    assert link_rollup(machine) == 5
    commits(world.process(), shard_id, 2)
    state = machine.refresh()
    written = machine.versions.write_rollup_for_state(state)
    assert written is not None
    key, size_bytes = written
    data = world.blob.get(f"{shard_id}/{key}")
    assert data is not None
    assert len(data) == size_bytes
    rollup = machine.versions._decode_rollup(shard_id, key, data)
    assert rollup.state == state
    assert [entry.seqno for entry in rollup.diffs] == [6, 7, 8]


def test_no_rollup_is_written_for_a_state_that_is_one_or_was_truncated():
    """Spec 7.8."""
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    client.initialise(shard_id, SCHEMA)
    machine = client.machine(shard_id)
    assert machine.versions.write_rollup_for_state(machine.state) is None
    old = commits(client, shard_id, 3).state
    at = link_rollup(machine)
    machine.versions.truncate_diffs(at, machine.state)
    assert machine.versions.write_rollup_for_state(old) is None


def test_a_walk_visits_every_live_state_once_in_order():
    """Spec 7.6."""
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 3)
    at = link_rollup(machine)
    commits(world.process(), shard_id, 2)
    expected = machine.refresh()
    walk = machine.versions.fetch_all_live_states(shard_id)
    assert walk is not None
    seqnos = [walk.seqno]
    while (diff := walk.advance()) is not None:
        assert diff.seqno_to == walk.seqno
        seqnos.append(walk.seqno)
    assert seqnos == list(range(1, expected.seqno + 1))
    assert walk.state == expected
    assert machine.versions.live_diff_bounds(shard_id) == LiveDiffBounds(SeqNo(1), expected.seqno)

    machine.versions.truncate_diffs(at, machine.state)
    bounded = machine.versions.fetch_all_live_states(shard_id, through=SeqNo(at + 1))
    assert bounded is not None
    assert bounded.seqno == at
    assert bounded.advance() is not None
    assert bounded.advance() is None
    assert bounded.seqno == at + 1


def test_a_walk_starts_at_a_rollup_that_only_diffs_still_name():
    """Regression for an interrupted collection: the rollup at the earliest version was unlinked before its truncation."""
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 2)
    link_rollup(machine)
    machine.remove_rollups([(SeqNo(1), machine.state.rollups[SeqNo(1)])])
    walk = machine.versions.fetch_all_live_states(shard_id)
    assert walk is not None
    assert walk.seqno == 1


def test_regression_every_walk_starts_at_a_rollup_that_only_a_later_diff_names(monkeypatch: pytest.MonkeyPatch):
    """The diff at the earliest version says nothing of the rollup there: the one that linked it comes after it."""
    monkeypatch.setattr("persist_engine.shard.log_reader._SEARCHED_DIFFS", 2)
    world = World()
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 2)
    earliest = link_rollup(machine)
    commits(world.process(), shard_id, 5)
    link_rollup(machine)
    machine.versions.truncate_diffs(earliest, machine.state)
    machine.remove_rollups([(seqno, machine.state.rollups[seqno]) for seqno in (SeqNo(1), earliest)])
    walk = VersionWalk(machine)
    assert walk.seqno == earliest
    commits(world.process(), shard_id, 2)
    newest = link_rollup(machine)
    assert gc_and_truncate(machine).truncated_to == newest
    bounds = machine.versions.live_diff_bounds(shard_id)
    assert bounds is not None
    assert bounds.earliest == newest


def test_keys_that_name_no_shard_are_not_listed():
    """Spec 6.5."""
    world = World()
    client, shard_id = world.process(), world.shard_id()
    client.initialise(shard_id, SCHEMA)
    world.consensus.compare_and_set("LIVENESS", None, VersionedData(SeqNo(1), b""))
    assert list(client.shards()) == [shard_id]


def test_a_diff_of_another_shard_is_refused():
    """Diffs name their shard: a log that was copied under another's key is not read as that shard's."""
    world = World()
    client = world.process()
    ours, other = world.shard_id(), world.shard_id()
    for shard in (ours, other):
        with client.open_writer(shard, SCHEMA, purpose="test") as writer:
            writer.append([], lower=Antichain.of(0), upper=Antichain.of(1))
    foreign = world.consensus.scan(other, SeqNo(0), SCAN_ALL)
    versions = client.machine(ours).versions
    head = versions.consensus.head(ours)
    assert head is not None
    (successor,) = [entry for entry in foreign if entry.seqno == head.seqno]
    with pytest.raises(CorruptData, match=f"belongs to shard {other}"):
        list(versions.decode_diffs_after(ours, SeqNo(0), [successor]))
    state = client.machine(ours).state
    diff = decode_state_diff(successor.data, key="foreign")
    with pytest.raises(InvariantViolated, match=f"belongs to shard {other}"):
        apply(state, dataclasses.replace(diff, seqno_from=state.seqno, seqno_to=state.seqno.next()))
    unnamed = diff_pb2.StateDiff.FromString(successor.data[10:])
    unnamed.ClearField("shard_id")
    with pytest.raises(CorruptData, match="the-key: the state diff breaks a rule"):
        decode_state_diff(sealed(Kind.STATE_DIFF, unnamed), key="the-key")


def test_regression_a_head_that_names_a_rollup_beyond_it_is_not_fetched_for_ever():
    """No entry stands where that rollup would begin: a scan from there finds nothing, as where the log is lost meanwhile."""
    world = World(settings=Settings(maintenance=MaintenanceSettings(recent_diffs_max=4)))
    shard_id = world.shard_id()
    machine = commits(world.process(), shard_id, 8)
    head = machine.versions.fetch_all_live_diffs(shard_id)[-1]
    diff = decode_state_diff(head.data, key="head")
    named = f"{head.seqno.next()}/{diff.latest_rollup_key.partition('/')[2]}"
    wrong = dataclasses.replace(diff, latest_rollup_key=named)
    world.consensus._inner._logs[shard_id][-1] = VersionedData(head.seqno, encode_state_diff(wrong))

    def counted() -> None:
        assert world.consensus.calls["head"] < looks + 9, "it is fetched for ever"
        world.consensus.before_next("head", counted)

    looks = world.consensus.calls["head"]
    counted()
    with pytest.raises(MissingBlob, match="which the shard's newest version names"):
        world.process().machine(shard_id)
