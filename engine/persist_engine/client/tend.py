"""Carries out a wish of model.tending: claims the shard, creates it, evolves its schema, holds since, inspects it. Each step, and so
the whole, is idempotent.
"""

from __future__ import annotations

from dataclasses import replace

from persist_engine.base.errors import InvalidUsage, ShardNotFound
from persist_engine.client.client import PersistClient
from persist_engine.client.since import SinceHandle
from persist_engine.model.commands import OpaqueMismatch
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import Adopted, OwnedElsewhere
from persist_engine.model.queries import held_since
from persist_engine.model.state import DebugInfo, ShardState
from persist_engine.model.tending import (
    READERS_MAX,
    NoSuchShard,
    Tended,
    Tending,
    WantedHold,
    WantedSchema,
    Wish,
    is_known,
    since_target_ms,
)
from persist_engine.rows.schema import Schema
from persist_engine.shard.schemas import SchemaIncompatible


def tend(client: PersistClient, wish: Wish) -> Tending:
    """The result of `wish`. Idempotent. Raises the errors of the client; the caller turns them into NotTended."""
    adoption = client.adopt(wish.owner, wish.wanted, wish.proposed)
    if isinstance(adoption, OwnedElsewhere) and adoption == wish.take_over:
        adoption = client.adopt(wish.owner, adoption.shard_id, wish.proposed, take_over=True)
    if not isinstance(adoption, Adopted):
        return adoption
    shard_id, known_seqno = adoption.shard_id, None if wish.known is None else wish.known.seqno
    try:
        seen = client.inspect(shard_id, known_seqno=known_seqno)
    except ShardNotFound:
        if wish.schema is None:
            return NoSuchShard(shard_id)
        client.initialise(shard_id, Schema.from_ddl(*wish.schema), codecs=wish.codecs)
        seen = client.inspect(shard_id, known_seqno=known_seqno)
    schema_problem, generation = "", 0
    if wish.evolve is not None and wish.evolve.shard_id == shard_id and is_known(seen, wish.known):
        schema_problem, generation = _evolve(client, wish.evolve), wish.evolve.generation
        seen = client.inspect(shard_id, known_seqno=known_seqno)
    problem = ""
    if wish.hold is not None and wish.hold.shard_id == shard_id and is_known(seen, wish.known):
        target_ms = since_target_ms(seen.upper, wish.hold.since_lag_ms)
        if target_ms is not None and seen.upper is not None and not seen.is_tombstone:
            target_ms = max(target_ms, min(wish.hold.since_min, seen.upper - 1))
            problem = _hold(client, shard_id, wish, wish.hold, target_ms)
            seen = client.inspect(shard_id, known_seqno=known_seqno)
    return replace(_report(seen, wish.hold, problem), schema_problem=schema_problem, schema_generation=generation)


def hold_since(
    client: PersistClient,
    shard_id: ShardId,
    critical_id: CriticalReaderId,
    *,
    token: bytes,
    purpose: str,
    since_ms: int,
) -> int | None:
    """Holds since at `since_ms` or later with the opaque `token`. Returns the held since (None: closed). Idempotent; since never goes back.
    Takes over a hold with another token, which fences its owner. If since stayed behind all holds, advances it to them. Raises InvalidUsage
    when another process takes the hold over meanwhile. Raises ShardNotFound.

    This hold then replaces the shard's retention, which ends (one commit, if there is one). If this host registered the hold, with this
    token and purpose, one commit moves it, and no commit is needed when it stays.
    """
    machine = client.machine(shard_id)
    known = machine.refresh().critical_readers.get(critical_id)
    if known is not None and (known.opaque, known.debug) == (token, DebugInfo(machine.env.hostname(), purpose)):
        handle = SinceHandle(machine, critical_id, since=known.since, opaque=known.opaque)
    else:
        handle = client.open_critical_since(shard_id, critical_id, opaque=token, purpose=purpose)
    held = handle.since.time
    is_reached = held is None or held >= since_ms
    if is_reached and handle.opaque == token and not _is_behind(machine.state):
        _end_retention(client, shard_id)
        return held
    since = handle.since if is_reached else Antichain.of(since_ms)
    answer = handle.compare_and_downgrade_since(handle.opaque, (token, since))
    if isinstance(answer, OpaqueMismatch):
        raise InvalidUsage(f"critical reader {critical_id} of shard {shard_id} was taken over by another owner")
    _end_retention(client, shard_id)
    return answer.since.time


def _is_behind(state: ShardState) -> bool:
    """Whether since is behind all holds. The end of a reader does not move since, and without writes no other command does."""
    held = held_since(state)
    return held is not None and state.trace.since != state.trace.since.join(held)


def _end_retention(client: PersistClient, shard_id: ShardId) -> None:
    if client.machine(shard_id).state.retain_ms is not None:
        client.set_retention(shard_id, None)


def _evolve(client: PersistClient, wanted: WantedSchema) -> str:
    """The reason why the schema cannot succeed the shard's; empty when it is the newest now."""
    answer = client.evolve_schema(wanted.shard_id, Schema.from_ddl(wanted.key, wanted.value))
    return "; ".join(answer.reasons) if isinstance(answer, SchemaIncompatible) else ""


def _hold(client: PersistClient, shard_id: ShardId, wish: Wish, hold: WantedHold, since_ms: int) -> str:
    """The reason why since was not moved; empty when it was."""
    token = str(wish.owner).encode()
    try:
        hold_since(client, shard_id, hold.critical_id, token=token, purpose=hold.purpose, since_ms=since_ms)
    except InvalidUsage as error:
        return str(error)
    return ""


def _report(seen: Inspection, hold: WantedHold | None, problem: str) -> Tended:
    """The result, reduced to the size of a report: it has the operator's own hold, and a few of the readers that hold since."""
    own = [one for one in seen.readers if hold is not None and one.id == hold.critical_id]
    holding = [one for one in seen.readers if one not in own and one.since is not None and one.since == seen.since]
    named = (*own, *holding[:READERS_MAX])
    return Tended(
        inspection=replace(seen, readers=named, writers=(), progress={}),
        readers_left_out=len(seen.readers) - len(named),
        writers_left_out=len(seen.writers),
        hold_problem=problem,
    )
