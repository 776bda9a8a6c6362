"""Counts, sizes and times as text for messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

#: The times that can be milliseconds since 1970. Earlier numbers (before 1973) are counters or seconds. Later numbers, whose year would
#: have more than four digits, have a finer unit.
_INSTANTS_MS = range(100_000_000_000, 253_402_300_800_000)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def counted(count: int, noun: str) -> str:
    """`1 blob`, `2 blobs`, `1,024 batches`. Plurals end in `es` after s, x, ch, sh, in `ies` after a consonant and y, else in `s`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{count:,} {noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}s"


def lasting(length_ms: int) -> str:
    """`7 days`, `90 minutes`, `1,500 ms`: in the largest unit in which it is a whole number."""
    for noun, unit_ms in (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1000)):
        if length_ms and length_ms % unit_ms == 0:
            return counted(length_ms // unit_ms, noun)
    return f"{length_ms:,} ms"


def sized(byte_count: int) -> str:
    """`17 B`, `1.2 kB`, `3.4 GB`: in powers of ten, the units in which stores bill."""
    size = float(byte_count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def dated(time: int | None) -> str:
    """`1388548800001 (2014-01-01T04:00:00.001Z)`: a frontier's time, followed by its date if it can be milliseconds since 1970. A
    counter stays a number. None, the empty frontier, is `closed`.
    """
    if time is None:
        return "closed"
    text = iso_text(time)
    return str(time) if text is None else f"{time} ({text})"


def is_instant(time: int) -> bool:
    """Whether `time` can be milliseconds since 1970. Otherwise it is a counter, or has another unit."""
    return time in _INSTANTS_MS


def iso_text(time: int) -> str | None:
    """`2014-01-01T04:00:00.001Z`; None for a time that is not an instant."""
    if not is_instant(time):
        return None
    at = _EPOCH + timedelta(milliseconds=time)
    text = at.replace(tzinfo=None).isoformat(timespec="milliseconds" if time % 1000 else "seconds")
    return f"{text}Z"
