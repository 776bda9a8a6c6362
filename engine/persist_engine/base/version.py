"""Code versions in durable bytes, and which of them this code can read."""

from __future__ import annotations

import re
from functools import lru_cache

from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage

#: Version of this code. Every state, diff and key carries it. Each release raises it.
APPLIER_VERSION = "0.1.0"

_VERSION = re.compile(r"(0|[1-9]\d{0,1})\.(0|[1-9]\d{0,2})\.(0|[1-9]\d{0,1})", re.ASCII)


@lru_cache(maxsize=64)
def parse_version(text: str) -> tuple[int, int, int]:
    """Parse into a comparable (major, minor, patch), up to 99.999.99, the limit of the writer key. Raises InvalidUsage for any
    other text.
    """
    found = _VERSION.fullmatch(text)
    if found is None:
        raise InvalidUsage(f"not a version: {text!r}, expected major.minor.patch up to 99.999.99")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch)


def writer_key(version: str) -> str:
    """Return the version as it appears in keys of parts: `n` and zero-padded digits, so that keys sort by version."""
    major, minor, patch = parse_version(version)
    return f"n{major:02}{minor:03}{patch:02}"


def check_readable(written_by: str, key: str) -> None:
    """Check that this code can read bytes at `key` that version `written_by` wrote: an older version, or a version at most one
    minor ahead of ours.

    Raises Incompatible for newer code, and CorruptData if `written_by` is not a version; both name `key`.
    """
    try:
        major, minor, _ = parse_version(written_by)
    except InvalidUsage as error:
        raise CorruptData(f"{key}: {error}", key=key) from error
    if not _reads(parse_version(APPLIER_VERSION), (major, minor)):
        raise Incompatible(
            f"{key}: written by version {written_by}, this code is {APPLIER_VERSION}: upgrade this code",
            key=key,
            written_by=written_by,
            version=APPLIER_VERSION,
        )


def may_write(code: tuple[int, int, int], state_version: str) -> bool:
    """Whether code of version `code` can open, and so write, a state tagged `state_version`."""
    major, minor, _ = parse_version(state_version)
    return _reads(code, (major, minor))


def _reads(code: tuple[int, int, int], written_by: tuple[int, int]) -> bool:
    """True for older data and for data at most one minor ahead."""
    return written_by[0] < code[0] or (written_by[0] == code[0] and written_by[1] <= code[1] + 1)
