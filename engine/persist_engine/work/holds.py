"""The holders of a shard: every reader and writer, and the retention; what each holds, since when, and what it blocks.

A reader whose own since equals the shard's blocks `since`. A reader with the least held version blocks collection. When its process is
gone, a leased reader holds until its lease ends, and a critical reader holds for ever. An administrator can end the hold of either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import lasting
from persist_engine.model.diff.field_diff import Delete, Insert, Update
from persist_engine.model.diff.state_diff import StateDiff
from persist_engine.model.ids import CriticalReaderId, LeasedReaderId, WriterId
from persist_engine.model.leases import expires_after_ms
from persist_engine.model.queries import retained_since, seqno_since
from persist_engine.model.state import CriticalReader, LeasedReader, ShardState, Writer
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.walk import VersionWalk, WalkEnd

Holder = LeasedReader | CriticalReader | Writer
#: The id of the retention's hold; a shard has at most one.
RETENTION: Literal["retention"] = "retention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """One holder; the shard's retention has the id RETENTION. `since` and `upper` are times; None when closed, or when holders of this
    `kind` have none.

    `held_from_ms` is when the holder last moved what it holds. `is_older` means that it did so before the first live version; the time is
    then an upper bound. `lease_ends_ms` is None for critical readers and retention, which never lapse. `has_lapsed` means that the next
    command removes the holder.
    """

    id: str
    kind: Literal["leased", "critical", "writer", "retention"]
    purpose: str
    hostname: str
    since: int | None
    upper: int | None
    seqno: int | None
    blocks_since: bool
    blocks_collection: bool
    held_from_ms: int
    is_older: bool
    last_heartbeat_ms: int | None
    lease_ends_ms: int | None
    has_lapsed: bool

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """All holders, oldest hold first, and the frontiers of the shard. `retain_ms` is None without retention."""

    shard_id: str
    seqno: int
    seqno_since: int
    since: int | None
    upper: int | None
    retain_ms: int | None
    now_ms: int
    holds: tuple[Hold, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return asdict(self) | {"holds": [hold.to_json() for hold in self.holds]}


def holds_of(machine: Machine) -> Holds:
    """All current holders. Linearized. Walks all live versions to find when each holder last moved."""
    moved: dict[str, int] = {}
    walk, end = VersionWalk(machine), None
    begun_ms = walk.state.walltime_ms
    while end is not WalkEnd.NEWEST:
        diff = walk.advance()
        if isinstance(diff, StateDiff):
            moved.update((holder_id, diff.walltime_ms) for holder_id in _moved_by(diff))
        elif diff is WalkEnd.OVERTAKEN:
            walk = VersionWalk(machine)
            begun_ms = walk.state.walltime_ms
        else:
            end = diff
    state, now_ms = walk.state, machine.env.now_ms()
    holds = [
        _hold(state, holder_id, holder, moved, begun_ms=begun_ms, now_ms=now_ms)
        for holder_id, holder in _holders(state)
    ]
    if state.retain_ms is not None:
        holds.append(_retention(state, moved, begun_ms=begun_ms))
    return Holds(
        shard_id=str(state.shard_id),
        seqno=int(state.seqno),
        seqno_since=int(seqno_since(state)),
        since=state.trace.since.time,
        upper=state.trace.upper.time,
        retain_ms=state.retain_ms,
        now_ms=now_ms,
        holds=tuple(sorted(holds, key=lambda hold: (hold.held_from_ms, not hold.is_older, hold.id))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedHold:
    """A reader whose hold was ended, or would be."""

    id: str
    kind: Literal["leased", "critical"]
    purpose: str
    hostname: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return asdict(self)


def expire_holds(machine: Machine, reader_ids: Iterable[str], *, force: bool, commit: bool) -> list[EndedHold]:
    """Ends the holds of these readers by removing them, with one command for each. Without `commit`, only returns what it would end.

    Raises InvalidUsage, before any hold is ended, when one of them is not a registered reader, or is a critical reader and `force` is not
    given: the owner of a critical reader relies on its hold while no process runs, and loses its place for good. A process that still uses
    a removed reader gets Fenced at its next call. Nothing else changes: the shard's since stays until a command moves it. A call that was
    interrupted may be repeated. After a call that returned, a repetition raises InvalidUsage.
    """
    state = machine.refresh()
    wanted = [_reader_to_end(state, text, force=force) for text in dict.fromkeys(reader_ids)]
    for one in wanted if commit else ():
        if one.kind == "critical":
            machine.expire_critical_reader(CriticalReaderId(one.id))
        else:
            machine.expire_leased_reader(LeasedReaderId(one.id))
    return wanted


def _reader_to_end(state: ShardState, text: str, *, force: bool) -> EndedHold:
    if text == RETENTION:
        raise InvalidUsage("the retention is no reader: end it with `persist admin retention`")
    if text[:1] == WriterId.letters:
        raise InvalidUsage(
            f"{WriterId(text)} is a writer, which holds nothing back: `persist admin holds` lists the readers"
        )
    reader: LeasedReader | CriticalReader | None
    if text[:1] == CriticalReaderId.letters:
        reader, kind = state.critical_readers.get(CriticalReaderId(text)), "critical"
    else:
        reader, kind = state.leased_readers.get(LeasedReaderId(text)), "leased"
    if reader is None:
        raise InvalidUsage(f"shard {state.shard_id} has no {kind} reader {text}")
    purpose = reader.debug.purpose or "no purpose"
    if isinstance(reader, CriticalReader) and not force:
        raise InvalidUsage(
            f"{text} ({purpose}) is a critical reader: its owner counts on the hold while no process runs, and loses its place for good. "
            "Make sure that the owner is gone, then add --force"
        )
    return EndedHold(
        id=text,
        kind="critical" if isinstance(reader, CriticalReader) else "leased",
        purpose=reader.debug.purpose,
        hostname=reader.debug.hostname,
    )


def _holders(state: ShardState) -> list[tuple[str, Holder]]:
    return [*state.leased_readers.items(), *state.critical_readers.items(), *state.writers.items()]


def _moved_by(diff: StateDiff) -> list[str]:
    """The ids of holders that the diff moved. A heartbeat alone moves none."""
    out: list[str] = []
    for leased in diff.leased_readers:
        match leased:
            case Insert():
                out.append(leased.key)
            case Update(old=old, to=to) if (old.since, old.seqno) != (to.since, to.seqno):
                out.append(leased.key)
    for critical in diff.critical_readers:
        match critical:
            case Insert():
                out.append(critical.key)
            case Update(old=before, to=after) if before.since != after.since:
                out.append(critical.key)
    if diff.retain_ms or diff.since:
        out.append(RETENTION)
    return out + [writer.key for writer in diff.writers if not isinstance(writer, Delete)]


def _hold(
    state: ShardState, holder_id: str, holder: Holder, moved: dict[str, int], *, begun_ms: int, now_ms: int
) -> Hold:
    ends_ms = None if isinstance(holder, CriticalReader) else expires_after_ms(holder)
    seqno = holder.seqno if isinstance(holder, LeasedReader) else None
    since = None if isinstance(holder, Writer) else holder.since
    return Hold(
        id=str(holder_id),
        kind="writer" if since is None else "critical" if seqno is None else "leased",
        purpose=holder.debug.purpose,
        hostname=holder.debug.hostname,
        since=None if since is None else since.time,
        upper=holder.most_recent_write_upper.time if isinstance(holder, Writer) else None,
        seqno=None if seqno is None else int(seqno),
        blocks_since=since is not None and since == state.trace.since and not since.is_empty(),
        blocks_collection=seqno is not None and seqno == seqno_since(state) and seqno < state.seqno,
        held_from_ms=moved.get(holder_id, begun_ms),
        is_older=holder_id not in moved,
        last_heartbeat_ms=None if isinstance(holder, CriticalReader) else holder.last_heartbeat_ms,
        lease_ends_ms=ends_ms,
        has_lapsed=ends_ms is not None and ends_ms < now_ms,
    )


def _retention(state: ShardState, moved: dict[str, int], *, begun_ms: int) -> Hold:
    held = retained_since(state)
    return Hold(
        id=RETENTION,
        kind=RETENTION,
        purpose=f"the newest {lasting(state.retain_ms or 0)}",
        hostname="",
        since=None if held is None else held.time,
        upper=None,
        seqno=None,
        blocks_since=held == state.trace.since and not state.trace.since.is_empty(),
        blocks_collection=False,
        held_from_ms=moved.get(RETENTION, begun_ms),
        is_older=RETENTION not in moved,
        last_heartbeat_ms=None,
        lease_ends_ms=None,
        has_lapsed=False,
    )
