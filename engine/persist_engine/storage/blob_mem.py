"""Blob in memory: the reference implementation of the contract, for tests and simulation. Its contents end with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from persist_engine.base.errors import NotKept
from persist_engine.storage.blob import BlobInfo, KeptBlob
from persist_engine.storage.checks import check_blob_key, check_blob_value, check_prefix, check_range


class MemBlob:
    """A dict under a lock. Only `restore` can fail."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """See Blob."""
        check_blob_key(key)
        with self._lock:
            return self._objects.get(key)

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """See Blob."""
        check_range(key, start, size_bytes)
        value = self.get(key)
        return None if value is None else value[start : start + size_bytes]

    def set(self, key: str, value: bytes) -> None:
        """See Blob."""
        check_blob_value(key, value)
        with self._lock:
            self._objects[key] = bytes(value)

    def delete(self, key: str) -> int | None:
        """See Blob."""
        check_blob_key(key)
        with self._lock:
            value = self._objects.pop(key, None)
        return None if value is None else len(value)

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob. The listing is a snapshot of one moment."""
        check_prefix(prefix)
        with self._lock:
            found = [BlobInfo(key, len(value)) for key, value in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found, key=lambda info: info.key))

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob. This store keeps no deleted objects."""
        check_prefix(prefix)
        return iter(())

    def restore(self, key: str) -> None:
        """See Blob. This store keeps no deleted objects."""
        if self.get(key) is None:
            raise NotKept(f"restore {key} at {self.address()}: deleted objects are not kept", key=key)

    def address(self) -> str:
        """See Blob."""
        return f"mem:{self._name}"

    def close(self) -> None:
        """Releases nothing: other users of the shared store keep its contents."""


_shared: dict[str, MemBlob] = {}
_shared_lock = threading.Lock()


def shared_mem_blob(name: str) -> MemBlob:
    """Return the store shared under `name` in this process; a new private one for ""."""
    if not name:
        return MemBlob()
    with _shared_lock:
        return _shared.setdefault(name, MemBlob(name))
