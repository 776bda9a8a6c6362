"""A batched map from fixed-size keys to bytes on local disk, over RocksDB. Upsert state uses it when memory is not enough.
Knows nothing of upsert: keys are rows of uint64, records are bytes.

This is scratch space, not storage: nothing is fsynced, and there is no write-ahead log. A process that opens the folder
discards what a previous one left, and `close` removes it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

from persist_engine.base.errors import InvalidUsage, Unavailable

_log = logging.getLogger(__name__)

_WRITE_BUFFER_BYTES = 64 << 20
_CACHE_BYTES = 64 << 20
#: The bits of the Bloom filter per key. Most keys of a first load are absent, and the filter shows that without a read.
_BLOOM_BITS = 10
#: The overhead of RocksDB per record besides key and value (internal key, block index), according to its documentation.
_RECORD_BYTES = 16


class RocksStore:
    """One RocksDB in a folder of its own. For one thread at a time.

    Opening empties the folder's database. Raises InvalidUsage if the folder cannot be used or another process has it open. Raises
    Unavailable if the driver fails later: the caller must close the store and start over.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._size_bytes = 0
        options = _options()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            Rdict.destroy(str(directory), options)
            self._db: Rdict | None = Rdict(str(directory), options)
        except Exception as error:  # the driver raises bare Exception
            raise InvalidUsage(f"upsert state cannot be kept in {directory}: {error}") from error
        unsafe = WriteOptions()
        unsafe.disable_wal = True  # type: ignore[assignment, method-assign]  # a property, whatever its stub says
        self._db.set_write_options(unsafe)
        self._write_options = unsafe

    @property
    def driver(self) -> tuple[Rdict, WriteOptions]:
        """The driver and its write options, for measuring the overhead of this class."""
        return self._open(), self._write_options

    @property
    def size_bytes(self) -> int:
        """The size of the keys and records that were put and not deleted, before compression."""
        return self._size_bytes

    def multi_get(self, keys: npt.NDArray[np.uint64]) -> pa.LargeBinaryArray:
        """Return the record of each key, or null if it has none."""
        if not len(keys):
            return pa.array([], pa.large_binary())
        found = self._answered(lambda db: db.get(_as_bytes(keys)))
        return pa.array(found, pa.large_binary())

    def multi_put(
        self, keys: npt.NDArray[np.uint64], records: pa.LargeBinaryArray, previous: npt.NDArray[np.int64]
    ) -> int:
        """Put each record, and delete the keys of null records, in one write. `previous` holds the size of each key's previous
        record, -1 for none. Returns the change of `size_bytes`.
        """
        batch = WriteBatch(raw_mode=True)
        names = _as_bytes(keys)
        if records.null_count:
            absent = records.is_null().to_numpy(zero_copy_only=False)
            deleted = keys[absent & (previous >= 0)]
            deque(map(batch.delete, _as_bytes(deleted)), maxlen=0)
            names, records = _as_bytes(keys[~absent]), records.drop_null()
        deque(map(batch.put, names, records.to_pylist()), maxlen=0)
        self._answered(lambda db: db.write(batch, self._write_options))
        per_record = 8 * keys.shape[1] + _RECORD_BYTES
        lengths = int(
            np.diff(np.frombuffer(records.buffers()[1], np.int64)[records.offset :][: len(records) + 1]).sum()
        )
        known = previous[previous >= 0]
        changed: int = lengths + per_record * len(records) - int(known.sum()) - per_record * len(known)
        self._size_bytes += changed
        return changed

    def close(self) -> None:
        """Remove the database. Idempotent."""
        if self._db is None:
            return
        db, self._db, self._size_bytes = self._db, None, 0
        try:
            db.close()
            Rdict.destroy(str(self._directory), _options())
        except Exception as error:  # noqa: BLE001 - the driver raises bare Exception
            # The next process that opens the folder discards what is left.
            _log.warning("upsert state in %s was not removed: %s", self._directory, error)

    def _answered(self, ask: Callable[[Rdict], Any]) -> Any:
        """Return the driver's answer. Raises Unavailable if it fails: the disk is full or broken, and the state is unusable."""
        db = self._open()
        try:
            return ask(db)
        except Exception as error:  # the driver raises bare Exception
            raise Unavailable(f"the upsert state in {self._directory} failed: {error}") from error

    def _open(self) -> Rdict:
        if self._db is None:
            raise InvalidUsage(f"the upsert state in {self._directory} was closed")
        return self._db


def _as_bytes(keys: npt.NDArray[np.uint64]) -> Any:
    """Return each row as one `bytes`, in a list."""
    return np.ascontiguousarray(keys).view(f"V{8 * keys.shape[1]}").ravel().tolist()


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)  # noqa: FBT003 - the driver's own signature
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    table = BlockBasedOptions()
    table.set_bloom_filter(_BLOOM_BITS, False)  # noqa: FBT003
    table.set_block_cache(Cache(_CACHE_BYTES))
    options.set_block_based_table_factory(table)
    return options
