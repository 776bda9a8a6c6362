"""The metadata that a write commits and that history shows: the operation, and the caller's own, as in `commit_info={"job": "nightly"}`.

The stored form is one byte for the operation, then the JSON of `commit_info`, or nothing (spec 17.13). This module owns that form. It does
not know where it is stored: see `model.state.COMMIT_INFO`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypeAlias, get_args

from persist_engine.base.errors import InvalidUsage
from persist_engine.model.state import COMMIT_INFO_BYTES_MAX
from persist_engine.table.notes.transactions import Txn

CommitInfo: TypeAlias = "Mapping[str, str | int | float | bool | None]"
"""Names and values. Every reader of the table sees them, so they must not be secrets."""

Operation = Literal["append", "upsert", "delete", "overwrite"]

_KINDS = (str, int, float, bool, type(None))
#: Byte 0 of the stored form. JSON begins with none of these bytes. Never renumber.
_BYTES: Mapping[Operation, bytes] = {name: bytes([place]) for place, name in enumerate(get_args(Operation), 1)}
_OPERATIONS: Mapping[bytes, Operation] = {byte: name for name, byte in _BYTES.items()}
_JSON_BYTES_MAX = COMMIT_INFO_BYTES_MAX - 1


@dataclass(frozen=True, slots=True)
class Notes:
    """The metadata that a write commits with its rows. `info` is the stored form of the operation and of `commit_info`."""

    info: bytes
    txn: Txn | None = None


def noted(operation: Operation, txn: Txn | None = None, commit_info: CommitInfo | None = None) -> Notes:
    """The notes of a write. Raises InvalidUsage, which names the entry, if `commit_info` cannot be stored."""
    return Notes(_BYTES[operation] + (b"" if commit_info is None else encoded(commit_info)), txn)


def read(stored: bytes) -> tuple[Operation | None, str | None]:
    """Inverse of `noted`: the operation, and the JSON of `commit_info`. If another program stored it, there is no operation: see
    `shown`.
    """
    operation = _OPERATIONS.get(stored[:1])
    if operation is None:
        return None, shown(stored)
    return operation, shown(stored[1:]) if stored[1:] else None


def encoded(commit_info: CommitInfo) -> bytes:
    """The JSON without spaces, in the given order. Raises InvalidUsage if `commit_info` is not a mapping of texts to plain values, or is
    too large.
    """
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
    if len(out) > _JSON_BYTES_MAX:
        largest = max(commit_info, key=lambda name: len(str(commit_info[name])))
        raise InvalidUsage(
            f"commit_info has {len(out)} bytes as JSON, and may have {_JSON_BYTES_MAX}; the largest entry is {largest:.80}"
        )
    return out


def shown(stored: bytes) -> str:
    """The JSON of `stored`. If another program stored bytes that are not JSON, or too deeply nested for a reader, this is the hexadecimal
    digits of the bytes, in quotes.
    """
    try:
        text = stored.decode()
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return json.dumps(stored.hex())
    return text


def _refused(constant: str) -> None:
    """Refuses NaN and Infinity, which Python accepts although they are not JSON."""
    raise ValueError(constant)
