"""Detects versions that the log lost, from blobs that prove them: the log was rolled back, wiped or replaced.

Only rollups are proof: each holds a whole version, with the birth of its log and the tag of its entry. When an audit or a collection finds
such a rollup, nothing may be deleted, and an administrator must decide (`persist admin recover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace

from persist_engine.base.errors import CorruptData, Incompatible, InvariantViolated, ShardLost
from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import RollupKey, blob_key
from persist_engine.codec.state import decode_rollup
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.ids import ShardId
from persist_engine.model.rebirth import is_recovered_from
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine


@dataclass(frozen=True, slots=True)
class Ruin:
    """A rollup that does not belong to the log's history or, with `names`, one whose history is unknown. In the second case, the blobs that
    it names are not garbage.
    """

    key: str
    seqno: SeqNo
    why: str
    is_behind: bool
    """The log ends before this version."""
    names: frozenset[str] | None = None
    """The whole keys of the blobs that the rollup names. None when it certainly belongs to another history."""
    is_of_recovery: bool = False
    """A recovery of this log wrote it. It was killed before it replaced the log, or what it began was lost."""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        shard_id = self.key.partition("/")[0]
        if self.is_of_recovery:
            return (
                f"if the log is whole, delete this rollup in the store; otherwise `persist admin recover {shard_id} --rollup {self.key} "
                "--replace-log` begins the log anew from it"
            )
        return f"`persist admin recover {shard_id}` shows what can be recovered; if the rollup is not wanted, delete it in the store"


def ruins_among(machine: Machine, rollups: Iterable[RollupKey], is_named: Callable[[str], bool]) -> Iterator[Ruin]:
    """The ruins among the listed `rollups`. Reads the log after that listing. `is_named` says whether a live version names the blob of a
    partial key. A rollup of the first version names nothing and proves nothing.

    Reads every unnamed rollup, of which there are few or none.
    """
    newest = machine.refresh()
    for key in rollups:
        if key.seqno > newest.seqno:
            yield _ahead(machine, key, newest)
        elif key.seqno > 1 and not is_named(key.partial):
            ruin = _compared(machine, key, newest)
            if ruin is not None:
                yield ruin


def claims_any(machine: Machine, ruin: Ruin, listed: Set[str]) -> bool:
    """Whether a blob of `listed` (whole keys) that `ruin` names still exists. Looks up one blob after the other until one exists.

    The listing was made before the log was read, so it alone proves nothing. A collection that passes a version deletes the blobs that only
    this version names, and then truncates the log. So once the log lacks the version, these blobs are gone.
    """
    return any(_exists(machine, key) for key in sorted((ruin.names or frozenset()) & listed))


def ruined(shard_id: ShardId, ruin: Ruin) -> ShardLost:
    """The error that refuses to delete anything because of this ruin."""
    return ShardLost(
        f"shard {shard_id}: rollup {ruin.key} is not of its log ({ruin.why}): the log lost versions or is not the one that "
        f"belongs to these blobs; nothing of this listing is deleted. {ruin.remedy[0].upper()}{ruin.remedy[1:]}",
        shard_id=shard_id,
        key=ruin.key,
    )


def _ahead(machine: Machine, key: RollupKey, newest: ShardState) -> Ruin:
    ruin = Ruin(_whole(key), key.seqno, f"the log ends at {newest.seqno}", is_behind=True)
    state = _state(machine, ruin.key)
    if not isinstance(state, ShardState) or not is_recovered_from(state.birth, newest.birth):
        return ruin
    why = f"{ruin.why}, and a recovery wrote the rollup, which was killed, or whose log was lost"
    return replace(ruin, why=why, is_of_recovery=True)


def _compared(machine: Machine, key: RollupKey, newest: ShardState) -> Ruin | None:
    whole = _whole(key)
    state = _state(machine, whole)
    if state is None:
        return None  # collected since the listing
    if isinstance(state, str):
        return Ruin(whole, key.seqno, f"it cannot be read: {state}", is_behind=False)
    if state.birth != newest.birth and not is_recovered_from(newest.birth, state.birth):
        why = f"it was born as {state.birth.hex()}, the log as {newest.birth.hex()}"
        return Ruin(whole, key.seqno, why, is_behind=False)
    entries = machine.versions.fetch_diffs_after(machine.shard_id, SeqNo(key.seqno - 1), limit=1)
    if entries and entries[0].seqno == key.seqno:
        if entries[0].tip.tag == state.tag:
            return None
        return Ruin(whole, key.seqno, f"another entry stands in the log at {key.seqno}", is_behind=False)
    parts = (blob.partial_key for blob in live_blobs(state) if blob.kind != "rollup")
    names = frozenset(blob_key(machine.shard_id, partial) for partial in parts)
    why = f"{key.seqno} is not in the log any more, and names blobs that no live version names"
    return Ruin(whole, key.seqno, why, is_behind=False, names=names)


def _state(machine: Machine, whole_key: str) -> ShardState | str | None:
    """The state in a rollup; why it cannot be read; None if it is not there."""
    data = machine.retry.external("get rollup", lambda: machine.blob.get(whole_key), shard=machine.shard_id)
    try:
        return None if data is None else decode_rollup(data, key=whole_key).state
    except (CorruptData, Incompatible, InvariantViolated) as error:
        return str(error)


def _exists(machine: Machine, key: str) -> bool:
    first = machine.retry.external("look for blob", lambda: machine.blob.get_range(key, 0, 1), shard=machine.shard_id)
    return first is not None


def _whole(key: RollupKey) -> str:
    return blob_key(key.shard_id, key.partial)
