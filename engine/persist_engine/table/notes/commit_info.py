"""What stands beside a write, and history shows: which operation it was, and what its caller says of it, `commit_info={"job": "nightly"}`.

Stored as one byte for the operation, then the JSON of `commit_info`, or nothing (spec 17.13). This module owns that form and knows nothing
of where it stands: see `model.state.COMMIT_INFO`.
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
"""Names and values. Every reader of the table sees them: no secrets."""

Operation = Literal["append", "upsert", "delete", "overwrite"]

_KINDS = (str, int, float, bool, type(None))
#: Byte 0 of the stored form. JSON begins with none of these bytes. Never renumber.
_BYTES: Mapping[Operation, bytes] = {name: bytes([place]) for place, name in enumerate(get_args(Operation), 1)}
_OPERATIONS: Mapping[bytes, Operation] = {byte: name for name, byte in _BYTES.items()}
_JSON_BYTES_MAX = COMMIT_INFO_BYTES_MAX - 1


@dataclass(frozen=True, slots=True)
class Notes:
    """What is committed beside the rows. `info`: the stored form of the operation and of `commit_info`."""

    info: bytes
    txn: Txn | None = None


def noted(operation: Operation, txn: Txn | None = None, commit_info: CommitInfo | None = None) -> Notes:
    """The notes of a write. InvalidUsage names the entry of `commit_info` that cannot be stored."""
    return Notes(_BYTES[operation] + (b"" if commit_info is None else encoded(commit_info)), txn)


def read(stored: bytes) -> tuple[Operation | None, str | None]:
    """Inverse of `noted`: the operation, and the JSON of `commit_info`. What another program stored has no operation: see `shown`."""
    operation = _OPERATIONS.get(stored[:1])
    if operation is None:
        return None, shown(stored)
    return operation, shown(stored[1:]) if stored[1:] else None


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
    if len(out) > _JSON_BYTES_MAX:
        largest = max(commit_info, key=lambda name: len(str(commit_info[name])))
        raise InvalidUsage(
            f"commit_info has {len(out)} bytes as JSON, and may have {_JSON_BYTES_MAX}; the largest entry is {largest:.80}"
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
