"""A small commit against the bare script call on the same Redis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from persist_engine import Antichain, Appended, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.model.maintenance import Maintenance
from persist_engine.storage.open import open_consensus
from persist_engine.work.perform import perform
from persist_kit.servers import redis_server

from bench.data import SCHEMA, updates
from bench.measure import Row, median, ms, percentile, timings_s

WARM = 100


def run(folder: Path, quick: bool) -> list[Row]:
    """10 rows per commit, inline in the state diff. The baseline appends the same number of bytes with the adapter's script. The two
    alternate, so that both run under the same load.

    Maintenance runs between the measured commits, as the operator does beside a writer.
    """
    commits = 200 if quick else 2_000
    with redis_server(appendonly=True) as redis:
        consensus = open_consensus(redis.url, env=SystemEnv(), metrics=NoMetrics())
        location = Location(blob=f"file://{folder}/blobs", consensus=redis.url)
        with (
            PersistClient.open(location) as client,
            client.open_writer(ShardId.new(), SCHEMA, purpose="bench") as writer,
        ):
            batches = at_times(updates(10, time=0), WARM + commits)
            due: list[Maintenance] = []
            last: list[VersionedData] = []
            base: list[float] = []

            def ours(index: int) -> None:
                at = index + WARM
                result = writer.compare_and_append(
                    batches[at], expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1)
                )
                assert isinstance(result, Appended)
                due.append(result.maintenance)

            def bare(_: int) -> None:
                new = VersionedData(SeqNo(last[0].seqno + 1 if last else 1), payload)
                consensus.compare_and_set("bench-bare", last[0].tip if last else None, new)
                last[:] = [new]

            def between() -> None:
                while due:
                    perform(client.machine(writer.shard_id), due.pop())
                base.extend(timings_s(bare, repeat=1, warm=0, collect=False))

            for index in range(-WARM, 0):
                ours(index)
            head = consensus.head(str(writer.shard_id))
            assert head is not None
            size = len(head.data)
            payload = b"x" * size
            measured = timings_s(ours, repeat=commits, warm=0, between=between)
        consensus.close()
    name = f"commit of 10 rows on Redis ({size} B diff)"
    rows = [(f"{name}, p50", median(measured), median(base))]
    rows.append((f"{name}, p99", percentile(measured, 0.99), percentile(base, 0.99)))
    return [Row(what, ms(one), ms(other), one / other, "lower") for what, one, other in rows]


def at_times(batch: pa.Table, times: int, *, first: int = 0) -> list[pa.Table]:
    """One copy of `batch` per time, at `times` consecutive times from `first` on."""
    columns = [pa.array(np.full(batch.num_rows, time, dtype=np.int64)) for time in range(first, first + times)]
    return [batch.set_column(2, "time", column) for column in columns]
