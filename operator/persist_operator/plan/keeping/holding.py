"""The readers that hold a shard's since at its present time, the ages of their holds, and the condition SinceAdvancing. Pure.

The stores do not record when a hold began. So the status remembers when the operator first saw a reader hold since at the present time. The
hold is at least as old. A reader that moves its since begins a new hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.base.wording import iso_text
from persist_engine.model.inspection import Inspection, ReaderInfo

from persist_operator.api import times
from persist_operator.api.conditions import Condition
from persist_operator.api.redact import clip, redact
from persist_operator.api.shard_status import Holder, Holds
from persist_operator.plan.hints import Expire, Words
from persist_operator.plan.observed import ActionFailure

#: The most readers that a status names. The longest holds come first.
BLOCKING_MAX = 5
_MESSAGE_MAX = 2048


@dataclass(frozen=True, slots=True)
class Held:
    """A reader that holds since back, and the time at which this was first seen."""

    reader: ReaderInfo
    from_ms: int

    def block(self, now_ms: int) -> Holder:
        """The entry of status.holds.blocking."""
        reader = self.reader
        return Holder(
            id=reader.id,
            purpose=redact(reader.purpose)[:256],
            kind=reader.kind,
            host=redact(reader.hostname)[:253],
            since="" if reader.since is None else str(reader.since),
            held_from=times.to_text(self.from_ms),
            held_seconds=max(0, (now_ms - self.from_ms) // 1000),
        )


def holders(known: Holds, inspection: Inspection, *, critical_id: str, now_ms: int) -> tuple[Held, ...]:
    """The readers other than the operator's own (`critical_id`) that hold since exactly at its present time: at most BLOCKING_MAX, the
    longest holds first. `known` is the block of the status so far.
    """
    seen = {(one.id, one.since): times.to_ms(one.held_from) for one in known.blocking or ()}
    found = []
    for reader in inspection.readers:
        if reader.id == critical_id or reader.since is None or reader.since != inspection.since:
            continue
        from_ms = seen.get((reader.id, str(reader.since)))
        # A time ahead of now comes from before a clock was set back.
        found.append(Held(reader, now_ms if from_ms is None else min(from_ms, now_ms)))
    return tuple(sorted(found, key=lambda one: (one.from_ms, one.reader.id))[:BLOCKING_MAX])


def has_news(known: Holds, held: tuple[Held, ...]) -> bool:
    """Whether one of these holds is not on the status yet. Its time would be lost if the status were not written."""
    named = {(one.id, one.since) for one in known.blocking or ()}
    return any((one.reader.id, str(one.reader.since)) not in named for one in held)


def is_held_back(inspection: Inspection, target: int | None, held: tuple[Held, ...]) -> bool:
    """Whether `held` keep since behind its target."""
    return target is not None and inspection.since is not None and inspection.since < target and bool(held)


def since_condition(
    inspection: Inspection,
    held: tuple[Held, ...],
    *,
    target: int | None,
    own_since: int | None,
    failure: ActionFailure | None,
    words: Words,
) -> Condition:
    """The condition SinceAdvancing. `target`: the time at which since should be (None: closed). `own_since`: the since of the operator's
    own reader. `failure`: of the last try to move that reader.
    """
    if failure is not None and target is not None and (own_since is None or own_since < target):
        return Condition("SinceAdvancing", "False", failure.reason, failure.message)
    if not is_held_back(inspection, target, held):
        return Condition("SinceAdvancing", "True", "Advancing", "")
    by = "; ".join(f"{named(one.reader)}, seen since {times.to_text(one.from_ms)}" for one in held)
    first = held[0].reader
    way = words(Expire(shard_id=inspection.shard_id, reader_id=first.id, is_critical=first.kind == "critical"))
    advice = f"end the process, or end its hold with {way}"
    if first.kind == "leased":
        advice = f"end the process and wait for its lease, or end its hold with {way}"
    text = f"since is held at {_dated(inspection.since)} by {by}. To go on, {advice}"
    return Condition("SinceAdvancing", "False", "HeldByReader", clip(text, _MESSAGE_MAX))


def named(reader: ReaderInfo) -> str:
    """A reader in a message: kind, id, purpose and host."""
    host = f", {redact(reader.hostname)}" if reader.hostname else ""
    return f"{reader.kind} reader {reader.id} ({redact(reader.purpose) or 'no purpose'}{host})"


def _dated(time: int | None) -> str:
    text = None if time is None else iso_text(time)
    return f"{time} ({text})" if text else f"{time}"
