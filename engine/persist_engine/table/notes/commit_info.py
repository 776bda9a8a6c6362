"""What a caller says of a write: `commit_info={"job": "nightly"}`, which history shows beside the version.

It is stored as JSON. This module owns its form and knows nothing of where it stands: see `model.state.COMMIT_INFO`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.state import COMMIT_INFO_BYTES_MAX
from persist_engine.table.notes.transactions import Txn

CommitInfo: TypeAlias = "Mapping[str, str | int | float | bool | None]"
"""Names and values. Every reader of the table sees them: no secrets."""

_KINDS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Notes:
    """What is committed beside the rows."""

    txn: Txn | None = None
    info: bytes | None = None


def noted(txn: Txn | None, commit_info: CommitInfo | None) -> Notes:
    """The notes of a write. InvalidUsage names the entry of `commit_info` that cannot be stored."""
    return Notes(txn, None if commit_info is None else encoded(commit_info))


def encoded(commit_info: CommitInfo) -> bytes:
    """JSON without spaces, in the order that was given. InvalidUsage for what is no mapping of texts to plain values, or is too large."""
    if not isinstance(commit_info, Mapping):
        raise InvalidUsage(
            f"commit_info must be a dict such as {{'job': 'nightly'}}, not a {type(commit_info).__name__}"
        )
    for name, value in commit_info.items():
        if not isinstance(name, str):
            raise InvalidUsage(f"commit_info: the name {name!r} must be a text")
        if type(value) not in _KINDS or (isinstance(value, float) and not isfinite(value)):
            raise InvalidUsage(
                f"commit_info: {name} must be a text, a finite number, True, False or None, not {value!r:.80}"
            )
    try:
        text = json.dumps(dict(commit_info), ensure_ascii=False, separators=(",", ":"))
    except ValueError as error:  # Python's limit on the digits of a number
        raise InvalidUsage("commit_info holds a whole number of thousands of digits; give it as a text") from error
    try:
        out = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidUsage("commit_info holds text with half of a surrogate pair, which is no Unicode text") from error
    if len(out) > COMMIT_INFO_BYTES_MAX:
        largest = max(commit_info, key=lambda name: len(str(commit_info[name])))
        raise InvalidUsage(
            f"commit_info has {len(out)} bytes as JSON, and may have {COMMIT_INFO_BYTES_MAX}; the largest entry is {largest:.80}"
        )
    return out


def shown(stored: bytes) -> str:
    """The JSON of `stored`. What another program put there and is no JSON, or nested too deeply for a reader, shows as the hexadecimal
    digits of its bytes, in quotes.
    """
    try:
        text = stored.decode()
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return json.dumps(stored.hex())
    return text


def _refused(constant: str) -> None:
    """Python reads NaN and Infinity, which are no JSON."""
    raise ValueError(constant)
