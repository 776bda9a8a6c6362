"""The stores of a history. They report each write, deletion and commit to the witnesses, which judge it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.blob import BlobInfo, KeptBlob

from persist_kit.sim.witness import Witness


class WatchedBlob:
    """The blob store. It reports to the witness that `witness` returns at the time."""

    def __init__(self, witness: Callable[[], Witness]) -> None:
        self._witness, self._inner = witness, witness().blob

    def get(self, key: str) -> bytes | None:
        """See Blob."""
        return self._inner.get(key)

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """See Blob."""
        return self._inner.get_range(key, start, size_bytes)

    def set(self, key: str, value: bytes) -> None:
        """See Blob."""
        self._witness().writing(key, value)
        self._inner.set(key, value)

    def delete(self, key: str) -> int | None:
        """See Blob."""
        self._witness().deleting(key)
        return self._inner.delete(key)

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob."""
        return self._inner.list_prefix(prefix)

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob."""
        return self._inner.list_kept(prefix)

    def restore(self, key: str) -> None:
        """See Blob."""
        self._inner.restore(key)

    def address(self) -> str:
        """See Blob."""
        return self._inner.address()

    def close(self) -> None:
        """See Blob."""


class WatchedConsensus:
    """The log. It reports to the witness, and calls `on_commit` with each new version."""

    def __init__(self, witness: Witness, on_commit: Callable[[SeqNo], None]) -> None:
        self._witness, self._inner, self._on_commit = witness, witness.consensus, on_commit

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        return self._inner.head(key)

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        result = self._inner.compare_and_set(key, expected, new)
        if result is CasResult.COMMITTED and key != self._witness.shard_id:
            self._witness.names.committed(key, new)
        elif result is CasResult.COMMITTED:
            self._witness.committed(new)
            self._witness.wire.send(key, new)
            self._on_commit(new.seqno)
        return result

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        return self._inner.scan(key, from_seqno, limit)

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        earliest = self._witness.earliest()
        dropped = self._inner.truncate(key, before, known)
        if dropped and key == self._witness.shard_id:
            self._witness.truncated(before, known, earliest=earliest)
        return dropped

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus. Nothing is recovered here."""
        return self._inner.replace(key, expected, new)

    def list_keys(self) -> Iterator[str]:
        """See Consensus."""
        return self._inner.list_keys()

    def address(self) -> str:
        """See Consensus."""
        return self._inner.address()

    def close(self) -> None:
        """See Consensus."""
