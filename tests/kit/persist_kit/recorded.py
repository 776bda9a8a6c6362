"""A shard with a fully recorded history, on stores in memory, and processes that die at a chosen store call.

For tests of maintenance. Wherever a process is killed, the contents at every readable time must equal the history, and every blob that a
live version names must exist.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Generator
from typing import Any

from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import (
    BatchSettings,
    CompactionSettings,
    MaintenanceSettings,
    RetrySettings,
    Settings,
)
from persist_engine.base.versioned import SCAN_ALL, SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.codec.keys import belongs_to_no_version, blob_key
from persist_engine.model.diff.state_diff import live_blobs
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.model.queries import rollup_seqnos, seqno_since
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.work.compact import compact_due
from persist_engine.work.merging import Merged, MergeJob, MergeTask
from persist_engine.work.rollup import write_rollup

SCHEMA = Schema.from_ddl("id BIGINT, tag STRING", "x BIGINT")
#: Sizes and thresholds are small, so that maintenance is due soon. Retries start at once.
SETTINGS = Settings(
    batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=0),
    maintenance=MaintenanceSettings(rollup_threshold=8, gc_versions_min=1, gc_delete_concurrency=1),
    compaction=CompactionSettings(sift_bytes_min=0, memory_bytes_max=4096, claim_ms=0),
    retry=RetrySettings(initial_ms=0.1, clamp_ms=0.5),
    retain_ms=None,
)
#: The width of one append in times.
SPAN = 10


class Killed(BaseException):
    """The process has died. No code catches this, and later calls do not reach a store."""


class Mortality:
    """Kills one process at its store call number `dies_at`, before that call takes effect or (`after`) just after."""

    def __init__(self, dies_at: int, *, after: bool) -> None:
        self._dies_at, self._after = dies_at, after
        self._calls = itertools.count(1)
        self._lock = threading.Lock()

    def wrap(self, store: Any) -> Any:
        """`store` for the process that dies."""
        return _Mortal(store, self)

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the method, or raises Killed."""
        with self._lock:
            at = next(self._calls)
            if at > self._dies_at:
                raise Killed
            answer = method(*args, **kwargs)
            if at == self._dies_at and self._after:
                raise Killed
            return answer


class _Mortal:
    def __init__(self, inner: Any, mortality: Mortality) -> None:
        self._inner, self._mortality = inner, mortality

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in {"address", "close"}:
            return method
        return lambda *args, **kwargs: self._mortality.call(method, *args, **kwargs)


class Meanwhile:
    """A store on which another process does `work` once, at the first call of `verb` that is `matching`: after the call took effect and
    before its answer, or (`before`) before the call takes effect.
    """

    def __init__(
        self,
        inner: Any,
        verb: str,
        work: Callable[[], object],
        *,
        before: bool = False,
        matching: Callable[..., bool] = lambda *_: True,
    ) -> None:
        self._inner, self._verb, self._work, self._before, self._matching = inner, verb, work, before, matching
        self.is_done = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return method if name != self._verb else lambda *args: self._call(method, *args)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        is_first = not self.is_done and self._matching(*args)
        self.is_done |= is_first
        if is_first and self._before:
            self._work()
        answer = method(*args)
        if is_first and not self._before:
            self._work()
        return answer


class InRanges:
    """A Merger of up to `count` ranges of keys for each chunk. Its tasks travel as bytes, and the chunks end last to first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.tasks: list[MergeTask] = []

    def merged(self, job: MergeJob) -> Generator[Merged, None, None]:
        """See Merger."""
        for chunk in reversed(job.chunks):
            tasks = pickle.loads(pickle.dumps(job.task(chunk).split(self.count)))  # noqa: S301 - its own bytes
            self.tasks += tasks
            yield chunk, job.joined(task.run_remote(job.store) for task in tasks)


def connect(blob: Blob, consensus: Consensus, settings: Settings = SETTINGS) -> PersistClient:
    """The client of a new process."""
    return PersistClient(blob, consensus, settings=settings, env=SystemEnv(), metrics=NoMetrics())


class RecordedShard:
    """One location and the history of one shard in it. Every `client()` is a new process."""

    def __init__(self, seed: int = 0) -> None:
        self.blob, self.consensus = MemBlob(), MemConsensus()
        self.shard_id = ShardId.from_bytes(random.Random(seed).randbytes(16))  # noqa: S311 - repeatable
        self.history: list[Any] = []
        self.upper = 0
        self._random = random.Random(seed)  # noqa: S311 - repeatable

    def copy(self) -> RecordedShard:
        """A copy with its own stores, history and random numbers."""
        other = copy.copy(self)
        other.history, other._random = list(self.history), copy.copy(self._random)
        other.blob, other.consensus = MemBlob(), MemConsensus()
        for info in self.blob.list_prefix(""):
            other.blob.set(info.key, self.blob.get(info.key) or b"")
        expected = None
        for entry in self.consensus.scan(self.shard_id, SeqNo(0), SCAN_ALL):
            other.consensus.compare_and_set(self.shard_id, expected, entry)
            expected = entry.tip
        return other

    def client(self, settings: Settings = SETTINGS) -> PersistClient:
        """The client of a new process."""
        return connect(self.blob, self.consensus, settings)

    def append(self, times: int = 1, rows: int = 20) -> None:
        """Makes `times` appends of `rows` random updates each."""
        at = Antichain.of
        with self.client().open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            for _ in range(times):
                updates = []
                for _ in range(rows):
                    key = (self._random.choice([None, *range(30)]), self._random.choice([None, "a", "b"]))
                    time = self.upper + self._random.randrange(SPAN)
                    updates.append(((key, (self._random.randrange(2),)), time, self._random.choice([1, 1, -1])))
                self.history += updates
                writer.compare_and_append(updates, expected_upper=at(self.upper), new_upper=at(self.upper + SPAN))
                self.upper += SPAN

    def downgrade(self, since: int) -> None:
        """Advances the shard's since."""
        with self.client().open_leased_reader(self.shard_id, purpose="test") as reader:
            reader.downgrade_since(Antichain.of(since))

    def contents(self, as_of: int) -> tuple[dict[tuple[Any, ...], int], int]:
        """Row -> diff and the number of rows, read by a new process."""
        with self.client().open_leased_reader(self.shard_id, purpose="test") as reader:
            snapshot = reader.snapshot(as_of)
            assert not isinstance(snapshot, SinceAhead)
            table = snapshot.to_table()
        return {(*r["key"].values(), *r["val"].values()): r["diff"] for r in table.to_pylist()}, table.num_rows

    def check_contents(self, since: int = 0) -> None:
        """Asserts that reads at the first, the middle and the last readable time equal the history."""
        for as_of in sorted({since, (since + self.upper) // 2, self.upper - 1}):
            sums: collections.Counter[tuple[Any, ...]] = collections.Counter()
            for (key, val), time, diff in self.history:
                if time <= as_of:
                    sums[(*key, *val)] += diff
            expected = {row: diff for row, diff in sums.items() if diff}
            assert self.contents(as_of) == (expected, len(expected))

    def blobs(self) -> set[str]:
        """The keys of all blobs that versions can name: neither the mark of the created shard nor its records of deletions."""
        return {info.key for info in self.blob.list_prefix("") if not belongs_to_no_version(info.key, self.shard_id)}

    def named_by_live_states(self) -> set[str]:
        """The keys of the blobs that any live version names."""
        states = self.client().machine(self.shard_id).versions.fetch_all_live_states(self.shard_id)
        assert states is not None
        named: set[str] = set()
        while True:
            named |= {blob_key(self.shard_id, blob.partial_key) for blob in live_blobs(states.state)}
            if states.advance() is None:
                return named

    def check_nothing_lost(self) -> None:
        """Asserts that every blob of the newest state exists, and that the earliest live version has a rollup."""
        machine = self.client().machine(self.shard_id)
        state = machine.refresh()
        needed = {blob_key(self.shard_id, blob.partial_key) for blob in live_blobs(state)}
        assert needed <= self.blobs()
        bounds = machine.versions.live_diff_bounds(self.shard_id)
        assert bounds is not None
        assert bounds.earliest in rollup_seqnos(state)
        assert bounds.earliest <= seqno_since(state)


def aged(seed: int = 0) -> tuple[RecordedShard, int]:
    """A shard with several rollups and compacted batches, and so garbage of both kinds. Also returns its since. It is made once, and every
    call returns a copy.
    """
    shard, since = _aged(seed)
    return shard.copy(), since


@functools.cache
def _aged(seed: int) -> tuple[RecordedShard, int]:
    shard = RecordedShard(seed)
    for since in (0, 60, 140):
        shard.append(times=8)
        if since:
            shard.downgrade(since)
        machine = shard.client().machine(shard.shard_id)
        assert any(outcome.applied for outcome in compact_due(machine))
        write_rollup(machine)
    return shard, 140
