"""The port for immutable objects. Its docstrings are the contract; `persist_engine.testing.conformance` proves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """One row of a listing."""

    key: str
    size_bytes: int


class Blob(Protocol):
    """Objects named by keys such as `s<uuid>/n0000100/p<uuid>`: written once, deleted when not needed.

    Linearizable. Thread-safe. Every method raises Determinate or Indeterminate (persist_engine.base.errors) chained to
    the driver's error, with the address and the key in the text and never a credential; adapters retry nothing.
    All calls may be repeated by the caller: content under a key is fixed, and deleting what is missing succeeds.
    A key that not every store could hold (persist_engine.storage.checks) is InvalidUsage on all of them.
    """

    def get(self, key: str) -> bytes | None:
        """The whole object, or None when there is none. Never a part of it."""

    def set(self, key: str, value: bytes) -> None:
        """Make `value` the object at `key`, all or nothing, replacing what was there. Durable when it returns. InvalidUsage
        when it has more bytes than every store takes at once (persist_engine.storage.checks).
        """

    def delete(self, key: str) -> int | None:
        """Remove the object; its size in bytes, or None when there was none."""

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """All objects whose key starts with `prefix`, in no particular order; "" lists everything."""

    def restore(self, key: str) -> None:
        """Make the object exist again. Succeeds iff it exists afterwards; NotKept when there is no copy to make it of."""

    def address(self) -> str:
        """URL of this store for messages, without credentials."""

    def close(self) -> None:
        """Release connections. Idempotent. Later calls are InvalidUsage, or work; they are no failure of the store."""
