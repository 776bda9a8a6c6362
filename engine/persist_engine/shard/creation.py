"""Whether a shard's log ever began, as blobs tell it: what keeps a shard that consensus lost from being created anew."""

from __future__ import annotations

from persist_engine.base.retry import Retry
from persist_engine.codec.keys import created_key, is_first_rollup, shard_prefix
from persist_engine.model.ids import ShardId
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus


class Creation:
    """The proof, and the mark that is left as one. Retries as `shard.versions` does. Thread-safe."""

    def __init__(self, blob: Blob, consensus: Consensus, retry: Retry) -> None:
        self._blob, self._consensus, self._retry = blob, consensus, retry

    def first_ruin(self, shard_id: ShardId) -> str | None:
        """The key of a blob that proves that the shard's log began, whether it is still there or not; None without any.

        A rollup of the first version proves nothing: its creator may have died before the log began. All else comes later,
        and each creator of a shard, and each opening for writing, leaves a mark of that: small appends leave no blob of their own.
        """
        prefix = shard_prefix(shard_id)

        def first() -> str | None:
            return next((info.key for info in self._blob.list_prefix(prefix) if not is_first_rollup(info.key)), None)

        return self._retry.external("list", first, shard=shard_id)

    def is_marked(self, shard_id: ShardId) -> bool:
        """Whether the mark is there."""
        key = created_key(shard_id)
        return self._retry.external("get mark", lambda: self._blob.get(key), shard=shard_id) is not None

    def mark(self, shard_id: ShardId) -> None:
        """Leave the mark: the log began. Idempotent."""
        self._retry.external("set mark", lambda: self._blob.set(created_key(shard_id), b""), shard=shard_id)

    def lost(self, shard_id: ShardId, ruin: str) -> str:
        """What to say of a shard without a log, by that proof."""
        return (
            f"shard {shard_id} is not in {self._consensus.address()}, and {self._blob.address()} holds blobs of it, {ruin} "
            "among them: consensus lost it, or is not the one that belongs to these blobs. Nothing was created; "
            f"`persist admin recover {shard_id}` tells what can be brought back"
        )
