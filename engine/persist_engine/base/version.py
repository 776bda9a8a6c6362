"""Versions of the code as they stand in durable bytes, and which of them this code may read."""

from __future__ import annotations

import re
from functools import lru_cache

from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage

#: Version of this code; written into every state, diff and key. Raised with every release.
APPLIER_VERSION = "0.1.0"

_VERSION = re.compile(r"(0|[1-9]\d{0,1})\.(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,1})", re.ASCII)


@lru_cache(maxsize=64)
def parse_version(text: str) -> tuple[int, int, int]:
    """(major, minor, patch), comparable; the limits are those of the writer key: 99.999.99. InvalidUsage on anything
    else.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise InvalidUsage(f"not a version: {text!r}, expected major.minor.patch up to 99.999.99")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch)


def writer_key(version: str) -> str:
    """How keys of parts tell which version wrote them: `n` and padded digits, so that they sort by version."""
    major, minor, patch = parse_version(version)
    return f"n{major:02}{minor:03}{patch:02}"


def check_readable(written_by: str, key: str) -> None:
    """Returns when bytes at `key` written by version `written_by` are readable: older code, or at most one minor
    ahead of ours.

    Raises Incompatible for newer code and CorruptData for what is not a version; both name `key`.
    """
    try:
        major, minor, _ = parse_version(written_by)
    except InvalidUsage as error:
        raise CorruptData(f"{key}: {error}", key=key) from error
    if not _reads(parse_version(APPLIER_VERSION), (major, minor)):
        raise Incompatible(
            f"{key}: written by version {written_by}, this is {APPLIER_VERSION}: upgrade it",
            key=key,
            written_by=written_by,
            version=APPLIER_VERSION,
        )


def may_write(code: tuple[int, int, int], state_version: str) -> bool:
    """Whether code of version `code` can still open, and so write, a state tagged `state_version`."""
    major, minor, _ = parse_version(state_version)
    return _reads(code, (major, minor))


def _reads(code: tuple[int, int, int], written_by: tuple[int, int]) -> bool:
    """Older data, or at most one minor ahead."""
    return written_by[0] < code[0] or (written_by[0] == code[0] and written_by[1] <= code[1] + 1)
