"""Values of a resource as texts and numbers for a page. Pure.

An operator writes a status, but a field may be absent or have another type. A value of another type counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist_engine.base.wording import iso_text, sized

from persist_operator.api import times

_SIZES_MS = (("y", 31_536_000_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000))


def block(value: Any, *path: str) -> Mapping[str, Any]:
    """The object at this path; empty when there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; empty for anything else."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []


def text(value: Any) -> str:
    """The value as text; empty when it is absent."""
    return "" if value is None else str(value)


def number(value: Any) -> int | None:
    """The value when it is a whole number or a text of digits, because frontiers are texts."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20 else None


def grouped(value: Any) -> str:
    """`1,024`; empty when absent."""
    found = number(value)
    return "" if found is None else f"{found:,}"


def size(value: Any) -> str:
    """`1.2 MB`; empty when absent."""
    found = number(value)
    return "" if found is None else sized(found)


def span(length_ms: float) -> str:
    """`850 ms`, `12s`, `3m`, `2h`, `5d`, `4y`: rounded down, in the largest unit of which there are at least two."""
    for unit, unit_ms in _SIZES_MS:
        if length_ms >= 2 * unit_ms:
            return f"{int(length_ms // unit_ms)}{unit}"
    return f"{int(length_ms)} ms" if length_ms < 1000 else "1s"


def seconds(value: Any) -> str:
    """A number of seconds as a span; empty when absent."""
    found = number(value)
    if found is None:
        return ""
    return "0s" if found < 1 else span(found * 1000)


def ago(time: Any, now_ms: int) -> str:
    """`3m ago`, or `in 3m` for a future time; empty when absent."""
    at = to_ms(time)
    if at is None:
        return ""
    return f"in {span(at - now_ms)}" if at > now_ms else f"{span(now_ms - at)} ago"


def due(time: Any, now_ms: int) -> str:
    """The text for a planned time: `in 3m`, or `due since 3m` when the time has passed without a start; empty when absent."""
    at = to_ms(time)
    return f"due since {span(now_ms - at)}" if at is not None and at <= now_ms else ago(time, now_ms)


def to_ms(time: Any) -> int | None:
    """Milliseconds since 1970 of a time of Kubernetes; None when it is absent or invalid."""
    try:
        return times.to_ms(time) if isinstance(time, str) else None
    except ValueError:
        return None


def instant(time: Any) -> str:
    """A frontier's time: its date when it can be one, otherwise the number. `closed` for the empty frontier."""
    found = number(time)
    if found is None:
        return "closed"
    return iso_text(found) or str(found)
