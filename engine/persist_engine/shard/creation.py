"""Proofs in blob that a shard's log began. They prevent that a shard that consensus lost is created anew."""

from __future__ import annotations

from persist_engine.base.retry import Retry
from persist_engine.codec.keys import created_key, is_first_rollup, shard_prefix
from persist_engine.model.ids import ShardId
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus


class Creation:
    """Finds the proofs, and writes the mark, which is one of them. Retries as `shard.versions` does. Thread-safe."""

    def __init__(self, blob: Blob, consensus: Consensus, retry: Retry) -> None:
        self._blob, self._consensus, self._retry = blob, consensus, retry

    def first_ruin(self, shard_id: ShardId) -> str | None:
        """Returns the key of a blob that proves that the shard's log began, whether or not the log still exists; None if there is none.

        A rollup of the first version proves nothing, because its creator may have died before the log began. All other blobs are written
        later. Every creation of a shard, and every opening for writing, leaves a mark, because small appends leave no blob of their own.
        """
        prefix = shard_prefix(shard_id)

        def first() -> str | None:
            return next((info.key for info in self._blob.list_prefix(prefix) if not is_first_rollup(info.key)), None)

        return self._retry.external("list", first, shard=shard_id)

    def is_marked(self, shard_id: ShardId) -> bool:
        """Whether the mark exists."""
        key = created_key(shard_id)
        return self._retry.external("get mark", lambda: self._blob.get(key), shard=shard_id) is not None

    def mark(self, shard_id: ShardId) -> None:
        """Writes the mark, which records that the log began. Idempotent."""
        self._retry.external("set mark", lambda: self._blob.set(created_key(shard_id), b""), shard=shard_id)

    def lost(self, shard_id: ShardId, ruin: str) -> str:
        """The error message for a shard that has this proof but no log."""
        return (
            f"shard {shard_id} is not in {self._consensus.address()}, but {self._blob.address()} holds its blobs, among them "
            f"{ruin}: consensus lost the shard, or does not belong to these blobs. Nothing was created; "
            f"`persist admin recover {shard_id}` shows what can be recovered"
        )
