"""Times on the command line: what options accept, and whether a time of the shard is complete yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated

if TYPE_CHECKING:
    from persist_engine.client.client import PersistClient
    from persist_engine.model.frontier import Antichain
    from persist_engine.model.ids import ShardId

TIME_HELP = "a number, ISO 8601 with its zone, a time ago such as -1h (ms, s, m, h, d)"
AsOf = Annotated[
    str, typer.Option(metavar="TIME", help=f"{TIME_HELP.capitalize()}, or `latest`: the newest that is complete.")
]
#: The number of digits of 2**64.
_TIME_DIGITS_MAX = 20


def number_or_text(text: str) -> int | str:
    """A number of at most as many digits as a time has, or the text as it is."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _TIME_DIGITS_MAX else text


def one_time(text: str, option: str) -> int | None:
    """The time that `option` asks for: a number, ISO 8601 with its zone, or `-1h` for an hour before now. Returns None for `latest`. Raises
    InvalidUsage for anything else.
    """
    from persist_engine.model.frontier import time_of
    from persist_engine.model.retention import retention_of

    if text == "latest":
        return None
    if isinstance(number := number_or_text(text), int):
        return number
    try:
        if text.startswith("-"):
            ago_ms = retention_of(text[1:])
            if ago_ms is None:
                raise InvalidUsage("none is not a length of time")
            return max(0, SystemEnv().now_ms() - ago_ms)
        return time_of(text, "the time")
    except InvalidUsage as error:
        ago = f"{text[:40]!r} is not a time ago such as -1h, -30m or -7d"
        why = ago if text.startswith("-") else f"{error}; a time ago begins with a minus, as in -1h"
        raise InvalidUsage(f"{option} takes a time, or `latest`; {why}") from None


def refuse_instants(client: PersistClient, shard_id: ShardId, **given: str | None) -> None:
    """Raises InvalidUsage when the shard counts its writes and an option of `given`, which maps names to values, is an instant or a time
    ago. The times of such a shard are plain numbers, and all of them are before any instant.
    """
    if client.clock(shard_id) != "counter":
        return
    for option, text in given.items():
        if text is not None and text not in ("latest", "start") and not text.isdecimal():
            raise InvalidUsage(
                f"--{option}: shard {shard_id} counts its writes, so a time is a number, not {text[:40]!r}"
            )


def written_time(client: PersistClient, shard_id: ShardId, text: str, option: str, *, wait_s: float = 0.0) -> int:
    """The complete time of the shard that `option` asks for. Raises InvalidUsage, which names the upper, when the time is not written yet,
    unless the caller waits for it.
    """
    time = one_time(text, option)
    if time is not None and wait_s > 0:
        return time
    upper = client.recent_upper(shard_id)
    if upper.time == 0:
        raise InvalidUsage(f"shard {shard_id} has no complete time yet: nothing was appended (its upper is 0)")
    if time is None:
        return upper.newest_complete
    if upper.less_equal(time):
        raise _not_written(shard_id, time, upper, option)
    return time


def _not_written(shard_id: ShardId, time: int, upper: Antichain, option: str) -> InvalidUsage:
    newest = dated(upper.newest_complete)
    text = f"{option}: shard {shard_id} is not written up to {dated(time)} yet, its upper is {dated(upper.time)}"
    return InvalidUsage(f"{text}; the newest complete time is {newest}: use `latest`", time=time, upper=upper.time)
