"""Where upsert state is kept: which store a handle asked for, wired to the port of `flow.upsert_store`, and its meter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa

from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.extras import needs_extra
from persist_engine.base.metrics import Metrics
from persist_engine.base.settings import MIB
from persist_engine.flow.upsert_memory import MemoryStore
from persist_engine.flow.upsert_store import KeyValues, SpillingStore
from persist_engine.flow.word_rows import Int64s, UInt64s

Backend = Literal["memory", "rocksdb", "auto"]

#: With `auto`, state larger than this goes to disk: half a million keys with short values.
SPILL_BYTES = 64 * MIB


def store_opener(
    backend: str, directory: Path | str | None, *, spill_bytes: int, env: Env, metrics: Metrics
) -> OpenStore:
    """What opens the stores of one handle. InvalidUsage for a backend that there is not, or a disk
    without a directory or without RocksDB.
    """
    if backend not in ("memory", "rocksdb", "auto"):
        raise InvalidUsage(f"no upsert backend is called {backend!r}: there are memory, rocksdb and auto")
    if backend == "memory":
        return lambda _: MeteredStore(MemoryStore(), env, metrics)
    if directory is None:
        raise InvalidUsage(f"the upsert backend {backend} needs a directory of its own on a local disk")
    folder = Path(directory)
    # Also for `auto`: a handle that has to spill must not find out then that it cannot.
    with needs_extra("rocksdb", f"the upsert backend {backend}"):
        from persist_engine.storage.upsert_rocks import RocksStore

    def on_disk(name: str) -> KeyValues:
        return RocksStore(folder / name)

    def spilling(name: str) -> KeyValues:
        return SpillingStore(MemoryStore(), lambda: on_disk(name), spill_bytes=spill_bytes)

    open_store = on_disk if backend == "rocksdb" else spilling
    return lambda name: MeteredStore(open_store(name), env, metrics)


class MeteredStore:
    """A store whose gets and puts are counted and timed, and that remembers a failure: what it holds is then unknown."""

    def __init__(self, inner: KeyValues, env: Env, metrics: Metrics) -> None:
        self._inner, self._env, self._metrics = inner, env, metrics
        self.has_failed = False

    @property
    def size_bytes(self) -> int:
        """See KeyValues."""
        return self._inner.size_bytes

    @property
    def is_spilled(self) -> bool:
        """Whether it began in memory and is on disk now."""
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
"""Opens an empty store, named apart from others of the same handle."""
