"""The end of a simulated history. The faults are over, and the shard must be correct.

These checks need a system without faults: the whole log can be replayed, a new process reads every readable time correctly, and garbage
collection leaves no garbage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from persist_engine.base.errors import ShardLost
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.codec.keys import parse_blob_key
from persist_engine.model.frontier import Antichain
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.audit.finding import FindingKind
from persist_engine.work.audit.verify import lost_shard, verify_shard
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Ending
from persist_engine.work.repair.recover import recover_shard
from persist_engine.work.rollup import write_rollup

from persist_kit.sim.actors.names import settle_names
from persist_kit.sim.actors.reader import contents
from persist_kit.sim.actors.sinks import settle_sink
from persist_kit.sim.actors.upkeep import CRITICAL_ID
from persist_kit.sim.calls import CLOSED, OPERATED_ID, Takeover, time_of
from persist_kit.sim.witness import Witness
from persist_kit.world import SCHEMA

if TYPE_CHECKING:
    from persist_kit.sim.actors.actor import Host
    from persist_kit.sim.simulation import History

#: The rounds of rollup and collection after which an idle shard must hold no garbage: one round unlinks the garbage, one passes the version
#: that unlinked it, and the others are spare.
ROUNDS = 4
#: The number of times that are read at the end, spread over the readable times.
TIMES_MAX = 3
#: This is longer than the lease of the reader with which a purge moves since. If the purge is killed, this reader stays.
CLOSING_MS = 65_000
_OF_LOST_VERSIONS = {FindingKind.LOG_FORKED, FindingKind.LOG_BEHIND}


def settle(history: History) -> None:
    """Runs all final checks, in the first task, after all others have ended."""
    scheduler, plan = history.scheduler, history.plan
    scheduler.note("-- the end: calm weather, a fresh process")
    scheduler.pause(plan.weather.late_ms_max)
    host = history.process("final")
    scheduler.current.process = host.process
    if (lost := history.branches.wiped()) is not None:
        _settle_wiped(history, host, lost)
        return
    if plan.written_by == "names":
        settle_names(history, host)
        return
    host.client.initialise(history.shard_id, history.schema)
    _walk_log(history, host)
    if history.correcting:
        settle_sink(history, host)
    if plan.seed % 4 == 0:
        _verify(history, host)
    scheduler.pause(2 * plan.lease_ms + 2 * plan.weather.step_ms_max)
    if plan.is_purged:
        scheduler.pause(CLOSING_MS)
    if history.client_upper(host.client).is_empty():
        _finalize(history, host)
    _collect(history, host)
    _read_all(history, host)


def _settle_wiped(history: History, host: Host, lost: Witness) -> None:
    """The log is lost and its rollups exist: no process may create another log, and recovery must restore a version unchanged."""
    fail, shard_id, versions = history.scheduler.fail, history.shard_id, host.client._versions
    try:
        host.client.initialise(shard_id, SCHEMA)
        fail("a shard that consensus lost is created anew")
    except ShardLost:
        pass
    report = lost_shard(versions, shard_id)
    if report is None or [finding.kind for finding in report.findings] != [FindingKind.LOG_LOST]:
        fail(f"verification reports for a lost log: {report}")
    rollups = [key for key in history.witness.ruins() if parse_blob_key(key).partial not in lost.reborn]
    if not rollups:
        return  # a first version is not proven by any rollup, and a killed recovery may have left anything
    newest = max(rollups, key=lambda key: SeqNo.parse(key.split("/")[1]))
    client = PersistClient(
        lost.blob, MemConsensus(), settings=history.plan.settings, env=versions.env, metrics=NoMetrics()
    )
    found = recover_shard(client._versions, shard_id, commit=True, rollup=newest)
    was = lost.states[found.base.seqno]
    state = client.machine(shard_id).refresh()
    if found.missing or (state.trace.since, state.trace.upper) != (was.trace.since, was.trace.upper):
        fail(f"recovery of {newest} gives {state.trace.since} to {state.trace.upper}, without {found.missing[:3]}")
    since, upper = time_of(was.trace.since), time_of(was.trace.upper)
    if since < upper < CLOSED:
        with client.open_leased_reader(shard_id, purpose="recovered") as reader:
            answer = reader.snapshot(upper - 1)
            assert not isinstance(answer, SinceAhead)
            with answer:
                lost.read(contents(answer.to_table()), as_of=upper - 1, what="what was recovered")


def _walk_log(history: History, host: Host) -> None:
    """Every diff must apply to the state before it, from the earliest version to the newest."""
    live = host.client.machine(history.shard_id).versions.fetch_all_live_states(history.shard_id)
    assert live is not None
    history.witness.installed(live.state)
    while live.advance() is not None:
        history.witness.installed(live.state)
    if live.seqno != history.witness.seqno:
        history.scheduler.fail(f"the log ends at {live.seqno}, not at {history.witness.seqno}")


def _verify(history: History, host: Host) -> None:
    """The engine's verification must report every certain ruin of lost versions, and nothing else."""
    ruins = history.witness.ruins()
    findings = verify_shard(host.client.machine(history.shard_id)).findings
    reported = {finding.key for finding in findings if finding.kind in _OF_LOST_VERSIONS} & ruins.keys()
    if wrong := [finding for finding in findings if finding.key not in reported]:
        history.scheduler.fail(f"verification finds {wrong[:3]}")
    if missed := [key for key, is_certain in ruins.items() if is_certain and key not in reported]:
        history.scheduler.fail(f"verification does not find {missed[:3]}, of versions that the log lost")


def _finalize(history: History, host: Host) -> None:
    """A closed shard without readers can be finalized. One empty batch must remain."""
    client, shard_id = host.client, history.shard_id
    client.set_retention(shard_id, None)
    client.machine(shard_id).expire_critical_reader(OPERATED_ID)
    handle = client.open_critical_since(shard_id, CRITICAL_ID, opaque=b"final")
    with history.scheduler.doing(Takeover(handle.opaque, b"closed")):
        handle.compare_and_downgrade_since(handle.opaque, (b"closed", Antichain.empty()))
    client.finalize(shard_id)
    state = history.witness.head
    assert state is not None
    if not client.is_finalized(shard_id) or state.trace.batch_count != 1 or state.writers or state.critical_readers:
        history.scheduler.fail(f"a finalized shard still has {state.trace.batch_count} batches, or writers or readers")
    with client.open_leased_reader(shard_id, purpose="late") as reader:
        answer = reader.snapshot(0)
        if not isinstance(answer, SinceAhead):
            history.scheduler.fail("a finalized shard was read")


def _read_all(history: History, host: Host) -> None:
    """Everything that was committed must be there once, at every readable time."""
    with host.client.open_leased_reader(history.shard_id, purpose="final") as reader:
        since, upper = time_of(reader.since), time_of(history.client_upper(host.client))
        times = range(since, min(upper, since + 20) if upper == CLOSED else upper)
        for as_of in times[:: max(1, len(times) // TIMES_MAX)]:
            snapshot = reader.snapshot(as_of, timeout_s=1)
            if isinstance(snapshot, SinceAhead):
                history.scheduler.fail(f"the final reader holds {since}, but {snapshot}")
            with snapshot:
                history.witness.read(contents(snapshot.to_table()), as_of=as_of, what="final snapshot")


def _collect(history: History, host: Host) -> None:
    """With all leases lapsed, rollups and collection must leave few versions (at most ROUNDS behind the newest) and no garbage."""
    machine = host.client.machine(history.shard_id)
    compact_due(machine)
    garbage: set[str] = set()
    for _ in range(ROUNDS):
        write_rollup(machine)
        gc_and_truncate(machine)
        garbage = history.witness.garbage()
        if not garbage:
            break
    else:
        history.scheduler.fail(f"collection left {len(garbage)} blobs behind: {sorted(garbage)[:3]}")
    outcome = gc_and_truncate(machine)
    earliest = history.witness.consensus.scan(str(history.shard_id), SeqNo(0), 1)[0].seqno
    if outcome.ending is Ending.SKIPPED and history.witness.seqno - earliest > ROUNDS:
        history.scheduler.fail(f"versions {earliest} to {history.witness.seqno} remain after collection")
