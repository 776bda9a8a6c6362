"""Times of the API server: RFC 3339 in UTC with whole seconds. The operator uses milliseconds since the epoch."""

from __future__ import annotations

from datetime import UTC, datetime


def to_text(now_ms: int) -> str:
    """`2026-11-20T08:15:30Z`; fractions of a second are cut off."""
    return datetime.fromtimestamp(now_ms // 1000, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_ms(text: str | None) -> int | None:
    """Inverse of `to_text`; also accepts fractions of a second. None when the text is absent or not a time."""
    if not text:
        return None
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return None


def backoff_s(failures: int, *, first_s: int, max_s: int) -> int:
    """The wait after this number of failures in a row (at least one): `first_s`, doubled for each further failure, at most `max_s`."""
    return min(max_s, first_s << min(max(failures - 1, 0), 20))
