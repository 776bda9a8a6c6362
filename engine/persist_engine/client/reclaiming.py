"""Reclaims the space of a shard that its owner gives up for good: closes it, makes it a tombstone, and with `purge` also removes its
orphans, its owner and its name.

A tombstone keeps two versions and two rollups without data, and the mark of its log. They prove that the shard existed, so that a late
writer cannot begin it anew. Nothing is deleted while a reader other than the owner's own holds the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from persist_engine.base.errors import Fenced, FinalizationError, ShardNotFound
from persist_engine.base.versioned import SeqNo
from persist_engine.base.wording import counted
from persist_engine.client.client import PersistClient
from persist_engine.client.closing import close_shard, finalize_shard
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.ownership import Owner
from persist_engine.model.queries import is_tombstone
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.outcome import Ending, Reclaimed, ReclaimOutcome

_UNKNOWN = SeqNo(0)


def reclaim(
    client: PersistClient,
    shard_id: ShardId | None,
    owner: Owner,
    *,
    own_hold: CriticalReaderId | None = None,
    purge: bool,
    max_deletes: int,
) -> ReclaimOutcome:
    """Reclaims the shard (None: the one to which the name of `owner` leads) if it belongs to `owner`. Removes the owner's own critical
    reader: `own_hold`, or (None) each one with the name of the owner as its token. With `purge`, also deletes at most `max_deletes` blobs
    that were staged and never linked. Once none is left, removes the owner and its name.

    Idempotent; a repetition completes an interrupted or incomplete call. A shard of another owner, or of none, stays as it is. An owner
    that takes the shard over meanwhile gets what is left of it, and keeps its name.
    """
    shard_id = shard_id or client.registered(owner)
    if shard_id is None:
        return _outcome(cast(ShardId, str(owner)), "NoShard", f"{owner} has no shard")
    if client.owner_of(shard_id) != owner:
        return _outcome(shard_id, "NotOwned", f"shard {shard_id} does not belong to {owner}: nothing was deleted")
    try:
        machine = client.machine(shard_id)
    except ShardNotFound:
        if purge:
            client.disown(shard_id, only=owner)
        return _outcome(shard_id, "NoShard", f"there is no shard {shard_id}")
    state, deleted = machine.refresh(), 0
    held, token = state.critical_readers.items(), str(owner).encode()
    give_up = [one for one, reader in held if (reader.opaque == token if own_hold is None else one == own_hold)]
    try:
        if not is_tombstone(state):
            close_shard(client, shard_id, give_up=give_up)
        outcomes = finalize_shard(client, shard_id)
    except (FinalizationError, Fenced) as error:  # a reader may have come, or moved its hold, since the check
        return _outcome(shard_id, "Held", str(error), seqno=machine.state.seqno)
    deleted += sum(one.blobs_deleted for one in outcomes)
    records = [one.deletion_record for one in outcomes]
    failed = [one.message for one in outcomes if one.ending is Ending.FAILED]
    if failed:
        return _outcome(shard_id, "Incomplete", failed[0], seqno=machine.state.seqno, deleted=deleted, records=records)
    if not purge:
        text = f"the shard is a tombstone: {counted(deleted, 'blob')} deleted"
        return _outcome(shard_id, "Reclaimed", text, seqno=machine.state.seqno, deleted=deleted, records=records)
    found = scan_orphans(machine, older_than_ms=0, commit=True, max_deletes=max_deletes)
    deleted += found.deleted
    records.append(found.deletion_record)
    if not found.is_complete:
        text = f"{counted(deleted, 'blob')} deleted; stopped at the limit of deletes"
        return _outcome(shard_id, "Incomplete", text, seqno=machine.state.seqno, deleted=deleted, records=records)
    client.disown(shard_id, only=owner)
    text = f"the shard is purged, and its name is free: {counted(deleted, 'blob')} deleted"
    return _outcome(shard_id, "Reclaimed", text, seqno=machine.state.seqno, deleted=deleted, records=records)


def _outcome(
    shard_id: ShardId,
    verdict: Reclaimed,
    message: str,
    *,
    seqno: SeqNo = _UNKNOWN,
    deleted: int = 0,
    records: Sequence[str] = (),
) -> ReclaimOutcome:
    return ReclaimOutcome(
        shard_id=shard_id,
        seqno=seqno,
        ending=Ending.SUCCEEDED,
        message=message,
        blobs_deleted=deleted,
        deletion_record=next(filter(None, reversed(records)), ""),
        verdict=verdict,
    )
