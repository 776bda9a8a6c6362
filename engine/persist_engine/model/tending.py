"""The values of an operator's wish for a shard, which a separate process carries out, and of the answers.

Must not know: their transport (codec.tending) and their execution (client.tend).
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.inspection import Inspection
from persist_engine.model.ownership import OwnedElsewhere, Owner, Unowned


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLog:
    """The newest entry of a shard's log that the operator knows, and the birth of that log."""

    seqno: int
    birth: str
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedHold:
    """The critical reader with which the operator holds since, and how far behind upper it holds it."""

    shard_id: ShardId
    """The shard to which the hold applies. If the owner's name leads to another shard by now, nothing is held."""
    critical_id: CriticalReaderId
    purpose: str
    since_lag_ms: int
    since_min: int = 0
    """Since moves at least to this time, whatever the lag, but not past the newest complete time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedSchema:
    """The schema that the shard is to get, as DDL, and the generation of the resource that wants it."""

    shard_id: ShardId
    """See WantedHold."""
    key: str
    value: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Make `owner` the owner of a shard: `wanted`, else the shard to which the owner's name leads, else `proposed`. Create the
    shard if `schema` (DDL of key and value) is given, with `codecs` (of key and value; None: those of the release). Evolve its
    schema if `evolve` is given, move its since if `hold` is given, and report its state. With `known`, change nothing if the log
    is another one. `take_over` is an earlier answer: its owner may be replaced, but not if the shard or its owner changed since
    then.
    """

    owner: Owner
    wanted: ShardId | None
    proposed: ShardId
    take_over: OwnedElsewhere | None = None
    known: KnownLog | None = None
    schema: tuple[str, str] | None = None
    codecs: tuple[str, str] | None = None
    hold: WantedHold | None = None
    evolve: WantedSchema | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tended:
    """The shard belongs to the owner and has this state. The report names the owner's hold and some of the readers at since; all
    others, and the writers, are only counted. `hold_problem` is why since did not move; empty if nothing prevented it.
    `schema_problem` is why the schema that `schema_generation` wants cannot succeed the shard's; empty if it did, or none is wanted.
    """

    inspection: Inspection
    readers_left_out: int = 0
    writers_left_out: int = 0
    hold_problem: str = ""
    schema_problem: str = ""
    schema_generation: int = 0


@dataclass(frozen=True, slots=True)
class NoSuchShard:
    """The shard belongs to the owner and does not exist."""

    shard_id: ShardId


@dataclass(frozen=True, slots=True)
class NotTended:
    """The wish failed. `kind` is one of `base.errors.ErrorKind`, or the reason why there is no other answer."""

    kind: str
    message: str


Tending = Tended | NoSuchShard | OwnedElsewhere | Unowned | NotTended

#: A report names at most this many readers besides the owner's own hold.
READERS_MAX = 5


def since_target_ms(upper: int | None, lag_ms: int) -> int | None:
    """Return the target of since: `lag_ms` behind upper, but at most the newest complete time, which stays readable. None if closed."""
    if upper is None:
        return None
    return max(0, upper - max(1, lag_ms))


def is_known(found: Inspection, known: KnownLog | None) -> bool:
    """Whether nothing in `found` contradicts that its log continues the known one."""
    if known is None:
        return True
    same_entry = found.known_tag is None or not known.tag or found.known_tag == known.tag
    return (not known.birth or found.birth == known.birth) and found.seqno >= known.seqno and same_entry
