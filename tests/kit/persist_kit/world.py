"""One pair of in-memory stores and any number of "processes" that use them, for tests of shards and handles.

Every process has its own client, and so its own cached states. Time is seeded and advances only by sleeping, so retry loops of any length
take no time. Store calls are counted, and tests can make them fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import Settings
from persist_engine.base.versioned import CasResult, SeqNo, Tip, VersionedData
from persist_engine.client.client import PersistClient
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.storage.notify import Push
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus

SCHEMA = Schema(key=pa.schema([("id", pa.int64())]), val=pa.schema([("name", pa.string())]))
"""The schema of most tests. Rows are `(((id,), (name,)), time, diff)`."""

T = TypeVar("T")
Row = tuple[tuple[tuple[int], tuple[str]], int, int]


def row(key: int, name: str, time: int, diff: int = 1) -> Row:
    """One update of SCHEMA."""
    return ((key,), (name,)), time, diff


def contents(client: PersistClient, shard_id: ShardId, as_of: int) -> list[tuple[int, str, int]]:
    """The contents of a shard of SCHEMA at a time, as (id, name, diff)."""
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        table = reader.snapshot(Antichain.of(as_of)).to_table()
    return [(each["key"]["id"], each["val"]["name"], each["diff"]) for each in table.to_pylist()]


class CountedConsensus:
    """Consensus that counts its calls by method, and runs a test's function before or after the next call of a method."""

    def __init__(self, inner: Consensus) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()
        self._before: dict[str, Callable[[], None]] = {}
        self._after: dict[str, Callable[[], None]] = {}

    def before_next(self, verb: str, run: Callable[[], None]) -> None:
        """Runs `run` once, as the next call of `verb` begins."""
        self._before[verb] = run

    def after_next(self, verb: str, run: Callable[[], None]) -> None:
        """Runs `run` once, between the next call of `verb` and its answer."""
        self._after[verb] = run

    def _call(self, verb: str, call: Callable[[], T]) -> T:
        self.calls[verb] += 1
        if before := self._before.pop(verb, None):
            before()
        after = self._after.pop(verb, None)
        answer = call()
        if after:
            after()
        return answer

    def head(self, key: str) -> VersionedData | None:
        """See Consensus."""
        return self._call("head", lambda: self._inner.head(key))

    def compare_and_set(self, key: str, expected: Tip | None, new: VersionedData) -> CasResult:
        """See Consensus."""
        return self._call("compare_and_set", lambda: self._inner.compare_and_set(key, expected, new))

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[VersionedData]:
        """See Consensus."""
        return self._call("scan", lambda: self._inner.scan(key, from_seqno, limit))

    def truncate(self, key: str, before: SeqNo, known: Tip) -> int | None:
        """See Consensus."""
        return self._call("truncate", lambda: self._inner.truncate(key, before, known))

    def replace(self, key: str, expected: Tip, new: VersionedData) -> CasResult:
        """See Consensus."""
        return self._call("replace", lambda: self._inner.replace(key, expected, new))

    def list_keys(self) -> Iterator[str]:
        """See Consensus."""
        return self._call("list_keys", self._inner.list_keys)

    def address(self) -> str:
        """See Consensus."""
        return self._inner.address()

    def close(self) -> None:
        """See Consensus."""
        self._inner.close()


class AheadEnv(SystemEnv):
    """The real environment with a clock that can be set ahead, for worlds with readers that stay open. Here heartbeats really sleep. With a
    seeded clock, which advances by sleeping, they would beat without pause.
    """

    def __init__(self) -> None:
        self._ahead_ms = 0

    def now_ms(self) -> int:
        """See Env."""
        return super().now_ms() + self._ahead_ms

    def advance_ms(self, milliseconds: int) -> None:
        """Sets the clock further ahead."""
        self._ahead_ms += milliseconds


class StillEnv(AheadEnv):
    """An AheadEnv whose clock moves only when a test sets it ahead. A short lease makes heartbeats frequent, and never lapses by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._start_ms = SystemEnv().now_ms()

    def now_ms(self) -> int:
        """See Env."""
        return self._start_ms + self._ahead_ms


class World:
    """The stores, faults and clock that all processes share. Its shards have the retention `retain_ms`, which overrides the settings. The
    default is none, because times in tests are not milliseconds.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        settings: Settings | None = None,
        env: SeededEnv | AheadEnv | None = None,
        retain_ms: int | None = None,
    ) -> None:
        self.env = env or SeededEnv(seed)
        self.settings = replace(settings or Settings(), retain_ms=retain_ms)
        self.faults = Faults(seed)
        self.blob = MemBlob()
        self.consensus = CountedConsensus(MemConsensus())

    def process(self, *, settings: Settings | None = None, push: Push | None = None) -> PersistClient:
        """A client that shares only the stores and the push of news with other clients."""
        return PersistClient(
            FaultyBlob(self.blob, self.faults),
            FaultyConsensus(self.consensus, self.faults),
            settings=replace(settings or self.settings, retain_ms=self.settings.retain_ms),
            env=self.env,
            metrics=NoMetrics(),
            push=push,
        )

    def shard_id(self) -> ShardId:
        """A new shard id."""
        return ShardId.from_bytes(self.env.random_bytes(16))

    def blob_keys(self, shard_id: ShardId, *, kind: str) -> set[str]:
        """The keys of the shard's blobs of one kind, "part" or "rollup"."""
        letter = {"part": "n", "rollup": "v"}[kind]
        return {info.key for info in self.blob.list_prefix(f"{shard_id}/{letter}")}
