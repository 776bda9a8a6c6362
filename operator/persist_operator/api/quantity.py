"""Kubernetes quantities of memory."""

from __future__ import annotations

import re
from decimal import Decimal

from persist_engine.base.errors import InvalidUsage

_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_FACTOR = {
    None: 1,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip


def to_bytes(quantity: str | int) -> int:
    """Bytes of `1Gi`, `1.5G`, `1024`. Raises InvalidUsage for any other form."""
    match = _FORM.fullmatch(str(quantity))
    if match is None:
        raise InvalidUsage(f"not a quantity of bytes: {quantity!r}, expected such as 512Mi or 2Gi")
    return int(Decimal(match[1]) * _FACTOR[match[2]])


def to_mebibytes(quantity: str | int) -> int:
    """MiB of the same quantity, rounded up, at least 1. Spark's settings and the manifests take whole MiB."""
    return max(1, -(-to_bytes(quantity) // (1 << 20)))
