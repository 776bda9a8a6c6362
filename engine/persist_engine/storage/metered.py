"""The outermost wrappers. They count calls, outcomes, bytes and seconds per verb, and change nothing else.

`persist_{blob,consensus}_calls_total{verb,outcome}`, `..._bytes_total{verb}`, `..._seconds{verb}`. The outcome is `ok`,
`mismatch`, the class of the error, or `stopped` for a listing that its caller abandoned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.env import Env
from persist_engine.base.metrics import Metrics
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.storage.blob import Blob, BlobInfo, KeptBlob
from persist_engine.storage.consensus import Consensus


class MeteredBlob:
    """Blob with metrics. The time of a listing ends when its caller takes the last row or stops."""

    def __init__(self, inner: Blob, *, env: Env, metrics: Metrics) -> None:
        self._inner = inner
        self._meter = _Meter("blob", env, metrics)

    def get(self, key: str) -> bytes | None:
        """See Blob."""
        with self._meter.call("get") as call:
            value = self._inner.get(key)
            call.byte_count = len(value or b"")
        return value

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """See Blob."""
        with self._meter.call("get_range") as call:
            value = self._inner.get_range(key, start, size_bytes)
            call.byte_count = len(value or b"")
        return value

    def set(self, key: str, value: bytes) -> None:
        """See Blob."""
        with self._meter.call("set") as call:
            self._inner.set(key, value)
            call.byte_count = len(value)

    def delete(self, key: str) -> int | None:
        """See Blob."""
        with self._meter.call("delete") as call:
            size = self._inner.delete(key)
            call.byte_count = size or 0
        return size

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob."""
        with self._meter.call("list_prefix"):
            yield from self._inner.list_prefix(prefix)

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob."""
        with self._meter.call("list_kept"):
            yield from self._inner.list_kept(prefix)

    def restore(self, key: str) -> None:
        """See Blob."""
        with self._meter.call("restore"):
            self._inner.restore(key)

    def address(self) -> str:
        """See Blob."""
        return self._inner.address()

    def close(self) -> None:
        """See Blob."""
        self._inner.close()


class MeteredConsensus:
    """Consensus with metrics."""

    def __init__(self, inner: Consensus, *, env: Env, metrics: Metrics) -> None:
        self._inner = inner
        self._meter = _Meter("consensus", env, metrics)

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        with self._meter.call("head") as call:
            entry = self._inner.head(key)
            call.byte_count = len(entry.data) if entry else 0
        return entry

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        with self._meter.call("compare_and_set") as call:
            result = self._inner.compare_and_set(key, expected, new)
            if result is CasResult.COMMITTED:
                call.byte_count = len(new.data)
            else:
                call.outcome = "mismatch"
        return result

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        with self._meter.call("scan") as call:
            entries = self._inner.scan(key, from_seqno, limit)
            call.byte_count = sum(len(entry.data) for entry in entries)
        return entries

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        with self._meter.call("truncate") as call:
            dropped = self._inner.truncate(key, before, known)
            if dropped is None:
                call.outcome = "mismatch"
        return dropped

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        with self._meter.call("replace"):
            return self._inner.replace(key, expected, new)

    def list_keys(self) -> Iterator[str]:
        """See Consensus."""
        with self._meter.call("list_keys"):
            yield from self._inner.list_keys()

    def address(self) -> str:
        """See Consensus."""
        return self._inner.address()

    def close(self) -> None:
        """See Consensus."""
        self._inner.close()


class _Call:
    def __init__(self) -> None:
        self.outcome = "ok"
        self.byte_count = 0


class _Meter:
    def __init__(self, port: str, env: Env, metrics: Metrics) -> None:
        self._port = port
        self._env = env
        self._metrics = metrics

    @contextmanager
    def call(self, verb: str) -> Iterator[_Call]:
        started_s = self._env.monotonic_s()
        call = _Call()
        try:
            yield call
        except Exception as error:
            call.outcome = type(error).__name__
            raise
        except BaseException:
            call.outcome = "stopped"
            raise
        finally:
            self._metrics.observe_s(self._port, self._env.monotonic_s() - started_s, verb=verb)
            self._metrics.count(f"{self._port}_calls", verb=verb, outcome=call.outcome)
            self._metrics.count(f"{self._port}_bytes", call.byte_count, verb=verb)
