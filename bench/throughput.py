"""Commits per second against the bare script in the same set-up: one writer of one shard, and eight processes with one shard each."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.storage.open import open_consensus
from persist_kit.servers import redis_server

from bench.commit import at_times
from bench.data import SCHEMA, updates
from bench.measure import Row, median

WARM = 50

#: (URL of Redis, folder, "ours" or "bare", commits, bytes of a bare commit).
_Job = tuple[str, str, str, int, int]


def run(folder: Path, quick: bool) -> list[Row]:
    """10 rows per commit, without maintenance, which runs elsewhere in production. The number of commits is limited to those that fit
    inline into state; otherwise the bench would mostly measure uploads. Ours and the baseline alternate, and the ratio compares the medians
    of three rounds.
    """
    commits = 100 if quick else 600
    rows = []
    with redis_server(appendonly=True) as redis:
        for writers in (1, 8):
            size = 2_500  # about the bytes of a commit of 10 rows; `bench commit` prints the exact number
            rates: dict[str, list[float]] = {"ours": [], "bare": []}
            for turn in range(3):
                for kind, found in rates.items():
                    job = (
                        f"{redis.url}?prefix={kind}-{writers}-{turn}:",
                        f"{folder}/{kind}-{writers}-{turn}",
                        kind,
                        commits,
                        size,
                    )
                    found.append(writers * commits / _slowest_s(job, writers))
            ours, bare = median(rates["ours"]), median(rates["bare"])
            what = f"commits per second, {writers} {'writer' if writers == 1 else 'processes, a shard each'}"
            rows.append(Row(what, f"{ours:.0f}", f"{bare:.0f}", ours / bare, "higher"))
    return rows


def _slowest_s(job: _Job, writers: int) -> float:
    """The seconds from the common start of `writers` processes that run `job` to the end of the last one."""
    # The fork server has imported the modules that the workers need. Workers start at once, and inherit no threads and no sockets.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.throughput"])
    barrier = context.Barrier(writers)
    queue: Any = context.Queue()
    workers = [context.Process(target=_work, args=(job, index, barrier, queue)) for index in range(writers)]
    for worker in workers:
        worker.start()
    spans = [queue.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    return float(max(end for _, end in spans) - min(start for start, _ in spans))


def _work(job: _Job, index: int, barrier: Barrier, queue: Any) -> None:
    url, folder, kind, commits, size = job
    if kind == "bare":
        consensus = open_consensus(url, env=SystemEnv(), metrics=NoMetrics())
        payload, key = b"x" * size, f"{folder}-{index}"

        def commit(at: int) -> None:
            expected = VersionedData(SeqNo(at), payload).tip if at else None
            consensus.compare_and_set(key, expected, VersionedData(SeqNo(at + 1), payload))
    else:
        client = PersistClient.open(Location(blob=f"file://{folder}", consensus=url))
        writer = client.open_writer(ShardId.new(), SCHEMA, purpose="bench")
        batches = at_times(updates(10, time=0), WARM + commits)

        def commit(at: int) -> None:
            writer.compare_and_append(batches[at], expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1))

    for at in range(WARM):
        commit(at)
    barrier.wait()
    start = time.monotonic()  # one clock for all processes of a machine
    for at in range(WARM, WARM + commits):
        commit(at)
    queue.put((start, time.monotonic()))
