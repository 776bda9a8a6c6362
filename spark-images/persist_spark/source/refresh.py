"""The refreshes of a stream over a shard. The stream shows the shard as it was at each refresh, and no state between them (spec 17.7).
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from persist_engine import Refresh
from persist_engine.base.errors import InvalidUsage
from persist_engine.model.frontier import DATA_TIME_MAX, time_of
from persist_engine.model.retention import retention_of

from persist_spark.options import Ago, moment
from persist_spark.spec import REFRESH_OPTIONS

EVERY, ALIGNED, AT = (name.lower() for name in REFRESH_OPTIONS)
#: The names of the options, in lower case.
NAMES = frozenset({EVERY, ALIGNED, AT})


def refresh_in(given: Mapping[str, str]) -> Refresh | None:
    """The schedule that the options define, or None if they define none. Names are in lower case. Raises InvalidUsage, which names the
    wrong option.
    """
    if not NAMES & set(given):
        return None
    aligned = moment(given, ALIGNED)
    if isinstance(aligned, Ago):
        raise InvalidUsage(
            f"option refreshAlignedTo: {given[ALIGNED]!r} is a new time at every start; give a fixed time"
        )
    if aligned is not None and EVERY not in given:
        raise InvalidUsage("option refreshAlignedTo: needs option refreshEvery")
    every = _length(given[EVERY]) if EVERY in given else None
    return Refresh(every=every, aligned_to=aligned or 0, at=_times(given.get(AT, "")))


def batch_end(refresh: Refresh, begin: int, wanted: int, upper: int) -> int:
    """The end of a batch that begins at `begin` and should end at `wanted`. The batch ends after the last refresh before `wanted`, or, if
    there is none in the batch, after the first refresh from `begin` on. Returns `begin` if the shard's `upper` has not passed that refresh,
    or if there is no refresh.

    So a batch has all updates that its last refresh shows. An update left to the next batch would come at a time that the sink has
    completed.
    """
    last = refresh.last_before(wanted)
    if last is None or last < begin:
        last = refresh.round_up(begin)
    return begin if last is None or last >= upper else last + 1


def _length(text: str) -> int:
    try:
        length_ms = retention_of(text)
    except InvalidUsage:
        length_ms = None
    if length_ms is None or length_ms > DATA_TIME_MAX:
        raise InvalidUsage(f"option refreshEvery: {text[:64]!r} is not a length of time such as 1h, 15m or 1d")
    return length_ms


def _times(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    return tuple(int(word) if word.isdecimal() else time_of(word, "option refreshAt") for word in words)
