"""Transactions of applications: `txn=(app_id, version)` makes a write happen once, however often it is repeated.

The version is committed with the rows, as the source progress of the sink `txn:APP_ID`: the digits of the number, in ASCII. A write whose
version is not greater than the committed one was done before, by this process or another. Other tokens under such a name are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.model.state import SourceProgress

Txn = tuple[str, int]
"""An application, and the number of its transaction. Numbers must rise, but may have gaps."""

SINK_PREFIX = "txn:"
_VERSION_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a write commits for its transaction, and what must be stored before it."""

    txn: Txn
    progress: tuple[str, bytes]
    expected: bytes | None
    is_repeat: bool


def ticket_of(txn: Txn, stored: Callable[[str], SourceProgress | None]) -> Ticket:
    """The ticket of a transaction, given what is stored. Raises InvalidUsage if `txn` is not a transaction."""
    is_pair = isinstance(txn, tuple) and len(txn) == 2 and isinstance(txn[0], str) and type(txn[1]) is int
    if not is_pair or not txn[0] or not 0 <= txn[1] <= _VERSION_MAX:
        raise InvalidUsage(f"txn must be (app_id, version), a text and a whole number from 0 on, not {txn!r}")
    name, found = SINK_PREFIX + txn[0], stored(SINK_PREFIX + txn[0])
    token = None if found is None else found.token
    is_repeat = token is not None and txn[1] <= version_of(name, token)
    return Ticket(txn, (name, b"%d" % txn[1]), token, is_repeat)


def version_of(name: str, token: bytes) -> int:
    """The number in a token. Raises CorruptData for a token that no transaction has."""
    if not token.isdigit() or len(token) > len(str(_VERSION_MAX)):
        raise CorruptData(f"the progress {name} is no number of a transaction", key=name)
    return int(token)
