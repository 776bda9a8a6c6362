"""The port for the storage of upsert state: a batched map from 32-byte keys to bytes. Also the store that starts in memory and
moves to disk when it grows.

A store knows nothing of state values: a record is bytes (whole 64-bit words). It caches what the shard holds, so a lost store
loses no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa

from persist_engine.base.errors import check
from persist_engine.flow.word_rows import Int64s, UInt64s

#: 64-bit words of a key, which is a 32-byte hash.
KEY_WORDS = 4


class KeyValues(Protocol):
    """A map from keys, rows of four uint64, to records. For one thread at a time. Callers must not change key arrays after they
    passed them in.
    """

    @property
    def size_bytes(self) -> int:
        """The size of all records as this store keeps them, by its own estimate."""

    def multi_get(self, keys: UInt64s) -> pa.LargeBinaryArray:
        """Return the record of each key, null for none."""

    def multi_put(self, keys: UInt64s, records: pa.LargeBinaryArray, previous: Int64s) -> int:
        """Put each record; a null record deletes its key. Keys are distinct. `previous` is the size of each key's current
        record in bytes, -1 for none. Returns the change of `size_bytes`.
        """

    def close(self) -> None:
        """Delete everything. Idempotent."""


class MovableKeyValues(KeyValues, Protocol):
    """A store that can be emptied into another."""

    def items(self) -> Iterator[tuple[UInt64s, pa.LargeBinaryArray]]:
        """Yield all keys with their records, in chunks of bounded size."""


class SpillingStore:
    """A store in memory until it exceeds `spill_bytes`, then on disk permanently (spec 16.7).

    The move happens within the put that exceeds the limit; a successful move calls `open_disk` once. If the move fails, the
    store in memory is intact, and the next put above the limit tries again.
    """

    def __init__(self, memory: MovableKeyValues, open_disk: Callable[[], KeyValues], *, spill_bytes: int) -> None:
        self._memory: MovableKeyValues | None = memory
        self._store: KeyValues = memory
        self._open_disk = open_disk
        self._spill_bytes = spill_bytes

    @property
    def is_spilled(self) -> bool:
        """Whether the store is on disk."""
        return self._memory is None

    @property
    def size_bytes(self) -> int:
        """See KeyValues."""
        return self._store.size_bytes

    def multi_get(self, keys: UInt64s) -> pa.LargeBinaryArray:
        """See KeyValues."""
        return self._store.multi_get(keys)

    def multi_put(self, keys: UInt64s, records: pa.LargeBinaryArray, previous: Int64s) -> int:
        """See KeyValues. The returned change includes the move."""
        changed = self._store.multi_put(keys, records, previous)
        if self._memory is not None and self._memory.size_bytes > self._spill_bytes:
            changed += self._move(self._memory)
        return changed

    def close(self) -> None:
        """See KeyValues."""
        self._store.close()

    def _move(self, memory: MovableKeyValues) -> int:
        disk = self._open_disk()
        try:
            for keys, records in memory.items():
                disk.multi_put(keys, records, np.full(len(keys), -1, np.int64))
        except BaseException:
            disk.close()
            raise
        self._store, self._memory = disk, None
        changed = disk.size_bytes - memory.size_bytes
        memory.close()
        return changed


def check_keys(keys: UInt64s, records: pa.LargeBinaryArray | None = None) -> None:
    """Check that these can be keys, and that there are as many as records."""
    check(keys.ndim == 2 and keys.shape[1] == KEY_WORDS, f"upsert keys have the shape {keys.shape}")
    if records is not None:
        check(len(keys) == len(records), f"{len(keys)} upsert keys for {len(records)} records")
