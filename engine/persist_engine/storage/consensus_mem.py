"""Consensus in memory: the reference implementation of the contract, for tests and simulation. Its contents end with the process."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator

from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.checks import check_append, check_log_key, check_replace, check_scan, check_truncate


class MemConsensus:
    """A dict of lists under a lock. Never fails."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._logs: dict[str, list[VersionedData]] = {}
        self._lock = threading.Lock()

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        check_log_key(key)
        with self._lock:
            log = self._logs.get(key)
            return log[-1] if log else None

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_append(key, expected, new)
        with self._lock:
            log = self._logs.get(key)
            if (log[-1].tip if log else None) != expected:
                return CasResult.EXPECTATION_MISMATCH
            self._logs.setdefault(key, []).append(VersionedData(new.seqno, bytes(new.data)))
            return CasResult.COMMITTED

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        check_scan(key, limit)
        with self._lock:
            log = self._logs.get(key, [])
            start = _first_at(log, from_seqno)
            return log[start : start + limit]

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        check_truncate(key, before, known)
        with self._lock:
            log = self._logs.get(key, [])
            at = _first_at(log, known.seqno)
            if at == len(log) or (log[at].seqno == known.seqno and log[at].tip != known):
                return None
            count = _first_at(log, before)
            del log[:count]
            return count

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        check_replace(key, expected, new)
        with self._lock:
            log = self._logs.get(key)
            if not log or log[-1].tip != expected:
                return CasResult.EXPECTATION_MISMATCH
            self._logs[key] = [VersionedData(new.seqno, bytes(new.data))]
            return CasResult.COMMITTED

    def list_keys(self) -> Iterator[str]:
        """See Consensus. The listing is a snapshot of one moment."""
        with self._lock:
            return iter(list(self._logs))

    def address(self) -> str:
        """See Consensus."""
        return f"mem:{self._name}"

    def close(self) -> None:
        """Releases nothing: other users of the shared store keep its contents."""


def _first_at(log: list[VersionedData], seqno: SeqNo) -> int:
    return bisect.bisect_left(log, seqno, key=lambda entry: entry.seqno)


_shared: dict[str, MemConsensus] = {}
_shared_lock = threading.Lock()


def shared_mem_consensus(name: str) -> MemConsensus:
    """Return the store shared under `name` in this process; a new private one for ""."""
    if not name:
        return MemConsensus()
    with _shared_lock:
        return _shared.setdefault(name, MemConsensus(name))
