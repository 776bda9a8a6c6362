"""The port for the log of versions. Its docstrings are the contract; `persist_engine.testing.conformance` proves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData


class Consensus(Protocol):
    """Per key a list of (seqno, bytes) with consecutive seqnos. Linearizable. Thread-safe.

    Errors: Determinate only where it is certain that nothing happened, Indeterminate otherwise (time-outs, lost
    connections, unknown errors); chained, with address and key, never a credential. CorruptData where the store shows
    that it lost or mangled entries. Adapters retry nothing that is not idempotent.
    """

    def head(self, key: str) -> VersionedData | None:
        """The latest entry, or None when the key has none."""

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """Append `new` iff the latest entry is exactly `expected`, its seqno and its tag (None: iff the key has no entries
        at all): nothing is appended to a log that was rolled back and has grown again to the same length.

        InvalidUsage when `new.seqno` is not `expected.seqno + 1` (any seqno may be the first), or `new` larger than every store
        takes (persist_engine.storage.checks). A mismatch carries no data: callers refetch. Not idempotent.
        """

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """Entries with seqno >= from_seqno, ascending, at most `limit`; empty past the head and for unknown keys."""

    def truncate(self, key: str, keep: Tip) -> int | None:
        """Delete the entries below `keep`, which becomes the earliest; returns how many (0 is fine: idempotent, also where
        `keep` itself was truncated). The latest entry always stays.

        None, and nothing is deleted, when another entry stands at that seqno, or none yet: this is not the log on which
        that was decided.
        """

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """Make `new` the only entry iff the latest entry is exactly `expected`: the one way to give up a log, for recovery.

        InvalidUsage when `new.seqno` is not past `expected.seqno`, or `new` larger than every store takes. Not idempotent.
        """

    def list_keys(self) -> Iterator[str]:
        """Every key that has entries, in no particular order."""

    def address(self) -> str:
        """URL of this store for messages, without credentials."""

    def close(self) -> None:
        """Release connections. Idempotent. Later calls are InvalidUsage, or work; they are no failure of the store."""
