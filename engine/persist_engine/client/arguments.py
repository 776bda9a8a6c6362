"""Checks the arguments of public calls before anything is done. Raises InvalidUsage, which names the parameter and what is expected.
Messages never show values that may be secret.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from persist_engine.base.errors import CodecMismatch, InvalidUsage
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.state import (
    CLOCK,
    COMMIT_INFO,
    COMMIT_INFO_BYTES_MAX,
    Clock,
    CodecNames,
    FirstHold,
    SourceProgress,
)

if TYPE_CHECKING:
    from persist_engine.rows.schema import Schema

T = TypeVar("T")

_STORED_MAX = 2**63 - 1


def expect(given: Any, kind: type[T] | tuple[type[T], ...], name: str, wanted: str) -> T:
    """Returns `given` if it is a `kind`. Otherwise raises InvalidUsage: `name` must be `wanted`."""
    if not isinstance(given, kind) or (isinstance(given, bool) and kind is not bool):
        raise unexpected(given, name, wanted)
    return given


def unexpected(given: object, name: str, wanted: str) -> InvalidUsage:
    """The error for an argument that is not `wanted`."""
    return InvalidUsage(f"{name} must be {wanted}, not {'None' if given is None else f'a {type(given).__name__}'}")


def expect_shard(given: Any) -> ShardId:
    """`given` as a ShardId; text is parsed."""
    if isinstance(given, ShardId):
        return given
    return ShardId(expect(given, str, "shard_id", "a ShardId"))


def expect_schema(given: Any) -> Schema:
    """Returns `given` if it is a Schema."""
    from persist_engine.rows.schema import Schema  # loads Arrow, which a Location does without

    return expect(given, Schema, "schema", "a Schema")


def expect_text(given: Any, name: str) -> str:
    """Returns `given` if it is text that UTF-8 can hold, so that it can be stored."""
    text: str = expect(given, str, name, "a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidUsage(f"{name} must be a text that UTF-8 can hold: {error.reason}") from None
    return text


def expect_count(given: Any, name: str, *, least: int) -> int:
    """Returns `given` if it is an integer of at least `least` that can be stored."""
    number: int = expect(given, int, name, "a whole number")
    if not least <= number <= _STORED_MAX:
        raise InvalidUsage(f"{name} must be at least {least} and at most 2**63 - 1, not {number}")
    return number


def expect_seconds(given: Any, name: str) -> float | None:
    """The maximum number of seconds to wait. None means for ever."""
    if given is None:
        return None
    seconds: float = expect(given, (int, float), name, "a number of seconds, or None to wait for ever")
    if math.isnan(seconds):
        raise InvalidUsage(f"{name} must be a number of seconds, not nan")
    return seconds


def expect_all(given: Any, kind: type[T], name: str, wanted: str) -> Sequence[T]:
    """Returns `given` if it is a list of `kind`."""
    several: Sequence[Any] = expect(given, Sequence, name, f"a list of {wanted}")
    for each in several:
        expect(each, kind, f"each of {name}", f"a {kind.__name__}")
    return several


def expect_progress(progress: Any, expected_progress: Any) -> None:
    """Checks the progress to store with an append (a sink's id and its token), and the progress that is expected to be stored before."""
    wanted = "a tuple of a sink's id, a text, and its token, bytes"
    if progress is not None:
        expect(progress, tuple, "progress", wanted)
        if len(progress) != 2 or not isinstance(progress[0], str) or not isinstance(progress[1], bytes):
            given = ", ".join(type(each).__name__ for each in progress[:3])
            raise InvalidUsage(f"progress must be {wanted}, not ({given}{', ...' if len(progress) > 3 else ''})")
        expect_text(progress[0], "the sink's id in progress")
        if progress[0] == COMMIT_INFO:
            raise InvalidUsage(f"progress: the id {COMMIT_INFO} is that of commit_info; name the sink otherwise")
        if progress[0] == CLOCK:
            raise InvalidUsage(
                f"progress: the id {CLOCK} is that of the clock, which a shard keeps; name the sink otherwise"
            )
    if expected_progress is not None:
        wanted = "bytes, a SourceProgress, or None where none was stored"
        expect(expected_progress, (bytes, SourceProgress), "expected_progress", wanted)
        if progress is None:
            raise InvalidUsage("expected_progress is given without progress, so nothing would be compared")


def expect_clock(given: Any) -> Clock:
    """The clock of a new shard's table."""
    wanted = " or ".join(map(repr, get_args(Clock)))
    text = expect(given, str, "clock", wanted)
    if text not in get_args(Clock):
        raise InvalidUsage(f"clock is {wanted}, not {text[:40]!r}")
    return cast("Clock", text)


def expect_codecs(given: Any) -> CodecNames:
    """The codecs of a new shard, from the names of those of keys and values. None means those of this release. Raises CodecMismatch for
    names that it does not have.
    """
    from persist_engine.rows.schema import CODECS  # as in expect_schema

    if given is None:
        return CODECS
    wanted = "a tuple of two texts, the names of the codecs of keys and values, or None"
    expect(given, tuple, "codecs", wanted)
    if len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise InvalidUsage(f"codecs must be {wanted}")
    codecs = CodecNames(*given)
    if codecs != CODECS:
        text = f"there are no codecs {codecs}: this release of persist has {CODECS}"
        raise CodecMismatch(text, requested=codecs, actual=CODECS)
    return codecs


def expect_first_hold(critical: Any) -> FirstHold | None:
    """The critical reader that a new shard has from the beginning, from a tuple of its id, opaque and purpose."""
    if critical is None:
        return None
    wanted = "a tuple of a CriticalReaderId, its opaque, bytes, and its purpose, a text"
    expect(critical, tuple, "critical", wanted)
    kinds = (CriticalReaderId, bytes, str)
    if len(critical) != len(kinds) or not all(map(isinstance, critical, kinds)):
        raise InvalidUsage(f"critical must be {wanted}")
    reader_id, opaque, purpose = critical
    return FirstHold(reader_id, opaque, expect_text(purpose, "the purpose in critical"))


def expect_commit_info(commit_info: Any) -> None:
    """Checks the metadata that the log stores with an append."""
    if commit_info is None:
        return
    expect(commit_info, bytes, "commit_info", "bytes, or None")
    if len(commit_info) > COMMIT_INFO_BYTES_MAX:
        raise InvalidUsage(f"commit_info has {len(commit_info)} bytes; it may have {COMMIT_INFO_BYTES_MAX}")
