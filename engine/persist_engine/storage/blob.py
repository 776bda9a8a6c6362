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


@dataclass(frozen=True, slots=True)
class KeptBlob:
    """An object that was deleted or replaced, and that the store still keeps as a version of its key."""

    key: str
    version: str
    size_bytes: int


class Blob(Protocol):
    """Objects named by keys such as `s<uuid>/n0000100/p<uuid>`: written once, deleted when no longer needed.

    Linearizable. Thread-safe. Every method raises Determinate or Indeterminate (persist_engine.base.errors), chained to the
    driver's error. The message names the address and the key, and never contains a credential. Adapters retry nothing. Callers
    may repeat every call: the content under a key is fixed, and deleting a missing object succeeds. A key that some store could
    not hold (persist_engine.storage.checks) raises InvalidUsage on all of them.
    """

    def get(self, key: str) -> bytes | None:
        """Return the whole object, or None if it does not exist. Never returns a part of it."""

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """Return `size_bytes` (at least one) bytes of the object from `start` on, or fewer if the object ends before. Return
        None if it does not exist. The caller must verify the bytes: no store's checksum covers a piece of an object.
        """

    def set(self, key: str, value: bytes) -> None:
        """Store `value` as the object at `key`, all or nothing, replacing any previous object. It is durable when this returns.
        Raises InvalidUsage for more bytes than every store accepts in one put (persist_engine.storage.checks).
        """

    def delete(self, key: str) -> int | None:
        """Remove the object. Returns its size in bytes, or None if it did not exist."""

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """Yield all objects whose key starts with `prefix`, in the order of their keys. "" lists everything."""

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """Yield what the store keeps of deleted and replaced objects whose key starts with `prefix`; nothing if it keeps none.
        Delete markers hold no data and are left out.
        """

    def restore(self, key: str) -> None:
        """Bring a deleted object back. Succeeds iff the object exists afterwards. Raises NotKept if the store has no copy of it."""

    def address(self) -> str:
        """Return the URL of this store for messages, without credentials."""

    def close(self) -> None:
        """Release connections. Idempotent. Later calls raise InvalidUsage, or work; they never count as failures of the store."""
