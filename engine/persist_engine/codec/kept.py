"""Encodings that are kept for as long as they may be asked for again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Kept:
    """Encodes immutable values of one kind and keeps what it encoded, by identity: what one diff or rollup holds, the
    next one often holds again, as the same object. Thread-safe; holds `bytes_max` of encodings at most.
    """

    def __init__(self, encode: Callable[[Any], bytes], *, bytes_max: int) -> None:
        self._encode = encode
        self._bytes_max = bytes_max
        self._kept: dict[int, tuple[Any, bytes]] = {}
        self._bytes = 0

    def __call__(self, value: Any) -> bytes:
        """The value's bytes."""
        found = self._kept.get(id(value))
        if found is not None and found[0] is value:
            return found[1]
        data = self._encode(value)
        if self._bytes + len(data) > self._bytes_max:
            self._kept, self._bytes = {}, 0
        self._kept[id(value)] = (value, data)
        self._bytes += len(data)
        return data
