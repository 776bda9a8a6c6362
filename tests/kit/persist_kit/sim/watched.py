"""The stores of a history, which report each write, deletion and commit to the witnesses that judge it; and the counted metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.codec.keys import parse_blob_key
from persist_engine.storage.blob import BlobInfo, KeptBlob

from persist_kit.sim.scheduler import Scheduler
from persist_kit.sim.witness import Witness

#: The metrics of rarely taken paths, and their names in the output of a campaign.
_RARE = {
    "inline_backpressure": "inline flushes",
    "compaction": "compactions",
    "update_state": "updates",
    "command_turn_timeout": "lost turns",
    "sink_append": "corrections",
    "sink_lapses": "lapses of a sink's",
    "background_failed": "failures in the background of",
    "compaction_skipped": "compactions skipped as",
}


class PathCounts(NoMetrics):
    """Counts the rare paths of the engine, to show that a campaign took them, and records the current command of each task."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.totals: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """See Metrics."""
        if name == "command_started":
            self._scheduler.current.command = labels["name"]
        if name in _RARE:
            self.totals[" ".join([_RARE[name], *labels.values()])] += 1


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
        kept = self._witness().kept
        if kept is not None and (data := self._inner.get(key)) is not None:
            kept[key] = data
        return self._inner.delete(key)

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob."""
        return self._inner.list_prefix(prefix)

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob."""
        return self._inner.list_kept(prefix)

    def restore(self, key: str) -> None:
        """See Blob."""
        kept = self._witness().kept or {}
        if key in kept and self._inner.get(key) is None:
            self._inner.set(key, kept[key])
            self._witness().resurrected.add(parse_blob_key(key).partial)
        elif self._inner.get(key) is None:
            self._inner.restore(key)

    def address(self) -> str:
        """See Blob."""
        return self._inner.address()

    def close(self) -> None:
        """See Blob."""


class WatchedConsensus:
    """The log. It reports to the witness, calls `on_commit` with each new version, and `on_recovery` with the first of a recovered log."""

    def __init__(
        self,
        witness: Witness,
        on_commit: Callable[[SeqNo], None],
        on_recovery: Callable[[VersionedData, Tip | None], None],
    ) -> None:
        self._witness, self._inner = witness, witness.consensus
        self._on_commit, self._on_recovery = on_commit, on_recovery

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        return self._inner.head(key)

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        result = self._inner.compare_and_set(key, expected, new)
        if result is CasResult.COMMITTED and self._witness.is_recovering():
            self._on_recovery(new, None)
        elif result is CasResult.COMMITTED and key != self._witness.shard_id:
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
        """See Consensus."""
        self._witness.keep_log()
        result = self._inner.replace(key, expected, new)
        if result is CasResult.COMMITTED:
            self._on_recovery(new, expected)
        return result

    def list_keys(self) -> Iterator[str]:
        """See Consensus."""
        return self._inner.list_keys()

    def address(self) -> str:
        """See Consensus."""
        return self._inner.address()

    def close(self) -> None:
        """See Consensus."""
