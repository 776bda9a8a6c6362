"""What an operator asks of a shard's stores through a process of its own, and the answers. Values only.

Must not know: how they travel (codec.tending) and who carries them out (client.tend).
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import OwnedElsewhere, Owner, Unowned


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLog:
    """The newest entry of a shard's log that the operator knows, and which log it was."""

    seqno: int
    birth: str
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedHold:
    """The critical reader by which the operator holds since, and how far behind upper."""

    shard_id: ShardId
    """Another shard, to which the owner's name leads by then, is not held."""
    critical_id: CriticalReaderId
    purpose: str
    since_lag_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Make the shard `owner`'s (`wanted`, else the one its name leads to, else `proposed`), create it if a schema (DDL of key and
    value) is given, move its since if a hold is, and say how it is. `known`: nothing moves while the log is another one.
    `take_over`: the answer of before that does not stand in the way; a shard or an owner that is another one by now does.
    """

    owner: Owner
    wanted: ShardId | None
    proposed: ShardId
    take_over: OwnedElsewhere | None = None
    known: KnownLog | None = None
    schema: tuple[str, str] | None = None
    hold: WantedHold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tended:
    """The shard is the owner's and looks like this. Of readers it tells the owner's hold and some that stand at since; the rest, and
    the writers, are counted. `hold_problem`: why since was not moved; empty when there was no reason.
    """

    inspection: Inspection
    readers_left_out: int = 0
    writers_left_out: int = 0
    hold_problem: str = ""


@dataclass(frozen=True, slots=True)
class NoSuchShard:
    """The shard is the owner's and does not exist."""

    shard_id: ShardId


@dataclass(frozen=True, slots=True)
class NotTended:
    """It was not done. `kind`: one of `base.errors.ErrorKind`, or what stopped the answer itself."""

    kind: str
    message: str


Tending = Tended | NoSuchShard | OwnedElsewhere | Unowned | NotTended

#: Readers that a report names beside the owner's own hold.
READERS_MAX = 5


def since_target_ms(upper: int | None, lag_ms: int) -> int | None:
    """Where since should be: behind upper by the lag, and always so that the newest complete time can be read. None when closed."""
    if upper is None:
        return None
    return max(0, upper - max(1, lag_ms))


def is_known(seen: Inspection, known: KnownLog | None) -> bool:
    """Whether `seen` shows nothing that speaks against its log being the known one, grown."""
    if known is None:
        return True
    same_entry = seen.known_tag is None or not known.tag or seen.known_tag == known.tag
    return (not known.birth or seen.birth == known.birth) and seen.seqno >= known.seqno and same_entry
