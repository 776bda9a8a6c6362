"""Ends a shard: closes both frontiers, and finalizes a closed shard (spec 9.16, B.4). For administration.

Finalizing requires since and upper to be empty, and never forces them. `close_shard` empties them with ordinary commands: it appends the
empty upper, ends the retention, and releases the holds of the readers that the caller names. It never removes any other hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist_engine.base.errors import Fenced, FinalizationError
from persist_engine.client.client import PersistClient
from persist_engine.client.write.outcomes import Appended
from persist_engine.model.commands import OpaqueMismatch
from persist_engine.model.frontier import EMPTY
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, ShardId
from persist_engine.model.leases import expires_after_ms
from persist_engine.model.maintenance import Maintenance, rollup_wanted
from persist_engine.model.state import ShardState
from persist_engine.work.outcome import Outcome
from persist_engine.work.perform import perform

_PURPOSE = "persist admin finalize"
#: The lease of the temporary reader that moves since. It is needed for one command, and must not stay for long after a crash.
_LEASE_MS = 60_000


def obstacles(
    state: ShardState, *, now_ms: int, close: bool = False, give_up: Sequence[CriticalReaderId] = ()
) -> list[str]:
    """The reasons why `state` cannot be finalized, one line each; empty when it can be. With `close`, the reasons that would be left after
    `close_shard` with `give_up`.
    """
    upper, since = state.trace.upper, state.trace.since
    open_upper = [] if upper.is_empty() or close else [f"upper is {upper}: a writer may still append"]
    if since.is_empty():
        return open_upper
    held = []
    for critical_id, critical in state.critical_readers.items():
        if not critical.since.is_empty() and not (close and critical_id in give_up):
            text = f"since is held at {critical.since} by critical reader {critical_id}"
            held.append(f"{text} ({critical.debug.purpose or 'without a purpose'})")
    for reader_id, reader in state.leased_readers.items():
        if not reader.since.is_empty() and now_ms <= expires_after_ms(reader):
            ends = f"its lease ends in {(expires_after_ms(reader) - now_ms) / 1000:.0f} s"
            held.append(f"since is held at {reader.since} by reader {reader_id} ({reader.debug.purpose}), {ends}")
    if state.retain_ms is not None and not close:
        held.append(f"since is held at {since} by the shard's retention of {state.retain_ms} ms")
    if not held and not close:
        held.append(f"since is {since} although no reader holds it: no command has advanced it")
    return open_upper + held


def close_shard(client: PersistClient, shard_id: ShardId, *, give_up: Sequence[CriticalReaderId] = ()) -> None:
    """Appends the empty upper, ends the retention and lets since become empty. `give_up` names critical readers whose holds end.

    Raises FinalizationError, before anything is changed, while another reader holds since. Raises Fenced when the owner of a critical
    reader moves it at the same time. May be repeated after either error.
    """
    machine = client.machine(shard_id)
    state = machine.refresh()
    found = obstacles(state, now_ms=machine.env.now_ms(), close=True, give_up=give_up)
    if found:
        raise _refused(f"cannot close {shard_id}", state, found)
    with client.open_writer(shard_id, machine.schema, purpose=_PURPOSE) as writer:
        while not (upper := writer.fetch_recent_upper()).is_empty():
            if isinstance(writer.compare_and_append([], expected_upper=upper, new_upper=EMPTY), Appended):
                break
    if machine.refresh().retain_ms is not None:
        machine.set_retention(None)
    for critical_id in give_up:
        critical = machine.refresh().critical_readers.get(critical_id)
        if critical is None:
            continue
        answer, _ = machine.compare_and_downgrade_since(
            critical_id, expected_opaque=critical.opaque, new_opaque=critical.opaque, new_since=EMPTY
        )
        if isinstance(answer, OpaqueMismatch):
            raise Fenced(f"critical reader {critical_id} of {shard_id} was moved by its owner", reader_id=critical_id)
    if not machine.refresh().trace.since.is_empty():
        reader_id = LeasedReaderId.from_bytes(machine.env.random_bytes(16))
        machine.register_leased_reader(reader_id, lease_ms=_LEASE_MS, purpose=_PURPOSE)
        machine.downgrade_since(reader_id, outstanding_seqno=None, new_since=EMPTY)
        machine.expire_leased_reader(reader_id)


def finalize_shard(client: PersistClient, shard_id: ShardId) -> list[Outcome]:
    """Makes the closed shard a tombstone and does all maintenance that follows. Two versions and two rollups remain, and none of them holds
    data.

    Idempotent; a repetition completes an interrupted call. Raises FinalizationError, with the obstacles, unless since and upper are empty.
    """
    machine = client.machine(shard_id)
    state = machine.refresh()
    found = obstacles(state, now_ms=machine.env.now_ms())
    if found:
        raise _refused(f"cannot finalize {shard_id}", state, found)
    machine.become_tombstone()
    state = machine.state
    # Do all work that a tombstone may need, including work that was assigned before: its state does not show an interrupted collection.
    rollup = state.seqno if rollup_wanted(state, machine.settings.maintenance) else None
    return perform(machine, Maintenance(rollup, state.seqno))


def _refused(what: str, state: ShardState, found: list[str]) -> FinalizationError:
    since, upper = state.trace.since, state.trace.upper
    return FinalizationError(f"{what}: {'; '.join(found)}", since=since, upper=upper, obstacles=found)
