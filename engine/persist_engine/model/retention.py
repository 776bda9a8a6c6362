"""The effect of a shard's retention, for people: as text and as a plan. `queries.retained_since` holds the rule itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated
from persist_engine.model.commands import RetentionSet, SetRetention
from persist_engine.model.state import ShardState
from persist_engine.model.transitions import transition

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
#: The limit on the digits of a retention. Longer numbers are not useful, and Python refuses to parse thousands of digits.
_DIGITS_MAX = 20
_WANTED = "a whole number with a unit, as in 7d, 12h, 30m, 45s or 500ms; or none"


def retention_of(text: str) -> int | None:
    """Parse `7d`, `12h`, `30m`, `45s`, `500ms` into milliseconds; None for `none`. Raises InvalidUsage for zero and anything else."""
    if text == "none":
        return None
    digits = text.rstrip("dhms")
    unit = _UNITS_MS.get(text[len(digits) :])
    is_number = digits.isascii() and digits.isdigit() and len(digits) < _DIGITS_MAX
    if unit is None or not is_number or int(digits) == 0:
        raise InvalidUsage(f"a retention is {_WANTED}, not {text[:40]!r}")
    return int(digits) * unit


def in_words(retain_ms: int | None) -> str:
    """Return `retain_ms` in the form that `retention_of` parses, in the largest unit that is exact."""
    if retain_ms is None:
        return "none"
    unit, size = next((name, size) for name, size in reversed(_UNITS_MS.items()) if retain_ms % size == 0)
    return f"{retain_ms // size}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A shard's retention and its effect: since (None: closed), upper, and a remark for people."""

    retain_ms: int | None
    since: int | None
    upper: int | None
    remark: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; the keys are the field names."""
        return asdict(self)


def current(state: ShardState) -> Retention:
    """Return the retention of `state`."""
    since, upper = state.trace.since.time, state.trace.upper.time
    return Retention(retain_ms=state.retain_ms, since=since, upper=upper, remark=remark(state.retain_ms, since, upper))


def planned(state: ShardState, retain_ms: int | None) -> Retention:
    """Return the retention that `state` would have with `retain_ms`. Raises InvalidUsage as the command does."""
    outcome = transition(state, SetRetention(retain_ms), now_ms=state.walltime_ms)
    assert isinstance(outcome.answer, RetentionSet), "SetRetention always answers RetentionSet"
    since, upper = outcome.answer.since.time, state.trace.upper.time
    kept_ms = outcome.answer.retain_ms
    return Retention(retain_ms=kept_ms, since=since, upper=upper, remark=remark(kept_ms, since, upper))


def remark(retain_ms: int | None, since: int | None, upper: int | None) -> str:
    """Return the effect on since, in one sentence."""
    if retain_ms is None:
        return "since advances as readers release it; without readers it stays"
    if upper is None:
        return "upper is closed: since stays"
    if upper <= retain_ms and since == 0:
        return (
            f"the whole history is kept: upper is {upper}, within {retain_ms}. If times are not milliseconds, it is kept for good: "
            "set another retention, or none"
        )
    if since is None or since > upper - retain_ms:
        return f"times before {'upper' if since is None else dated(since)} are gone; the kept window grows as the shard is written"
    return "since follows upper as far as readers allow"
