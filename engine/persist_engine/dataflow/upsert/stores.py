"""Storage of upsert state: creates the store for a handle's backend, behind the port of `flow.upsert_store`, and meters it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.extras import needs_extra
from persist_engine.base.metrics import Metrics
from persist_engine.base.settings import MIB
from persist_engine.flow.upsert_memory import MemoryStore
from persist_engine.flow.upsert_store import KeyValues, SpillingStore
from persist_engine.flow.word_rows import Int64s, UInt64s

Backend = Literal["memory", "rocksdb", "auto", "shard"]

#: With `auto`, a state larger than this moves to disk. This is enough for half a million keys with short values.
SPILL_BYTES = 64 * MIB


def store_opener(
    backend: str, directory: Path | str | None, *, spill_bytes: int, env: Env, metrics: Metrics
) -> OpenStore:
    """A function that opens the stores of one handle. Raises InvalidUsage for an unknown backend, and for a disk backend without a
    directory or without RocksDB.
    """
    if backend not in get_args(Backend):
        raise InvalidUsage(f"unknown upsert backend {backend!r}: use memory, rocksdb, auto or shard")
    if backend in ("memory", "shard"):
        return lambda _: MeteredStore(MemoryStore(), env, metrics)
    if directory is None:
        raise InvalidUsage(f"the upsert backend {backend} needs a directory of its own on a local disk")
    folder = Path(directory)
    # Check this for `auto`, too, so that a handle does not find out only when it must spill.
    with needs_extra("rocksdb", f"the upsert backend {backend}"):
        from persist_engine.storage.upsert_rocks import RocksStore

    def on_disk(name: str) -> KeyValues:
        return RocksStore(folder / name)

    def spilling(name: str) -> KeyValues:
        return SpillingStore(MemoryStore(), lambda: on_disk(name), spill_bytes=spill_bytes)

    open_store = on_disk if backend == "rocksdb" else spilling
    return lambda name: MeteredStore(open_store(name), env, metrics)


class MeteredStore:
    """A store that counts and times its gets and puts. It records a failure, because its contents are then unknown."""

    def __init__(self, inner: KeyValues, env: Env, metrics: Metrics) -> None:
        self._inner, self._env, self._metrics = inner, env, metrics
        self.has_failed = False

    @property
    def size_bytes(self) -> int:
        """See KeyValues."""
        return self._inner.size_bytes

    @property
    def is_spilled(self) -> bool:
        """Whether the store started in memory and is now on disk."""
        return isinstance(self._inner, SpillingStore) and self._inner.is_spilled

    def multi_get(self, keys: UInt64s) -> pa.LargeBinaryArray:
        """See KeyValues."""
        with self._measured("multi_get", len(keys)):
            return self._inner.multi_get(keys)

    def multi_put(self, keys: UInt64s, records: pa.LargeBinaryArray, previous: Int64s) -> int:
        """See KeyValues."""
        with self._measured("multi_put", len(keys)):
            return self._inner.multi_put(keys, records, previous)

    def close(self) -> None:
        """See KeyValues."""
        self._inner.close()

    @contextmanager
    def _measured(self, verb: str, keys: int) -> Iterator[None]:
        began_s = self._env.monotonic_s()
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise
        self._metrics.observe_s("upsert_store", self._env.monotonic_s() - began_s, verb=verb)
        self._metrics.count("upsert_store_keys", keys, verb=verb)


OpenStore = Callable[[str], MeteredStore]
"""Opens an empty store under a name that is unique within the handle."""
