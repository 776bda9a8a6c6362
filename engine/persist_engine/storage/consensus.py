"""The port for the log of versions. Its docstrings are the contract; `persist_engine.testing.conformance` proves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData


class Consensus(Protocol):
    """For each key, a list of (seqno, bytes) with consecutive seqnos. Linearizable. Thread-safe.

    Raises Determinate only if certainly nothing happened, and Indeterminate otherwise (time-outs, lost connections, unknown
    errors). These errors are chained to the driver's and name address and key, never a credential. Raises CorruptData if the
    store shows that it lost or damaged entries. Adapters retry nothing that is not idempotent.
    """

    def head(self, key: str) -> VersionedData | None:
        """Return the latest entry, or None if the key has none."""

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """Append `new` iff the latest entry is exactly `expected`, by seqno and tag (None: iff the key has no entries). A log
        that was rolled back and has grown again to the same length therefore takes no append.

        Raises InvalidUsage if `new.seqno` is not `expected.seqno + 1` (the first entry may have any seqno), or if `new` is larger
        than every store accepts (persist_engine.storage.checks). A mismatch carries no data: callers must fetch again. Not
        idempotent.
        """

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """Return entries with seqno >= from_seqno, ascending, at most `limit`; empty past the head and for unknown keys."""

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """Delete the entries below `before`, iff the log has the entry `known`. Returns the number deleted, which may be 0
        (idempotent, even if `known` itself was already truncated). The entry at `before` and all later ones stay.

        `known` is the entry of the state from which the truncation was decided. Returns None and deletes nothing if its seqno has another
        entry, or none yet: the decision was made for another log. Raises InvalidUsage if `before` is past it.
        """

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """Make `new` the only entry iff the latest entry is exactly `expected`. This is for recovery, and the only way to discard a
        log.

        Raises InvalidUsage if `new.seqno` is not past `expected.seqno`, or if `new` is larger than every store accepts. Not
        idempotent.
        """

    def list_keys(self) -> Iterator[str]:
        """Yield every key that has entries, in no particular order."""

    def address(self) -> str:
        """Return the URL of this store for messages, without credentials."""

    def close(self) -> None:
        """Release connections. Idempotent. Later calls raise InvalidUsage, or work; they never count as failures of the store."""
