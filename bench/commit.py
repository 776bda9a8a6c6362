"""A small commit against the bare script call on the same Redis."""

from __future__ import annotations

from pathlib import Path

from persist_engine import Antichain, Appended, Location, PersistClient, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.model.maintenance import Maintenance
from persist_engine.storage.open import open_consensus
from persist_engine.testing.servers import redis_server
from persist_engine.work.perform import perform

from bench.data import SCHEMA, updates
from bench.measure import Row, median, ms, percentile, timings_s


def run(folder: Path, quick: bool) -> list[Row]:
    """10 rows a commit, inline in the state diff; the baseline appends as many bytes with the adapter's script.

    Maintenance is performed between the measured commits, as the operator does beside a writer.
    """
    commits = 200 if quick else 2_000
    with redis_server(appendonly=True) as redis:
        consensus = open_consensus(redis.url, env=SystemEnv(), metrics=NoMetrics())
        location = Location(blob=f"file://{folder}/blobs", consensus=redis.url)
        with (
            PersistClient.open(location) as client,
            client.open_writer(ShardId.new(), SCHEMA, purpose="bench") as writer,
        ):
            batch = updates(10, time=0)
            upper = [0]

            due: list[Maintenance] = []

            def maintain() -> None:
                while due:
                    perform(client.machine(writer.shard_id), due.pop())

            def ours(_: int) -> None:
                at = upper[0]
                moved = batch.set_column(2, "time", [[at] * batch.num_rows])
                result = writer.compare_and_append(
                    moved, expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1)
                )
                upper[0] = at + 1
                assert isinstance(result, Appended)
                due.append(result.maintenance)

            measured = timings_s(ours, repeat=commits, warm=50, between=maintain)
            size = len((consensus.head(str(writer.shard_id)) or VersionedData(SeqNo(0), b"")).data)
        payload = b"x" * size
        seqno = [SeqNo(0)]

        def bare(_: int) -> None:
            new = VersionedData(seqno[0].next(), payload)
            consensus.compare_and_set("bench-bare", seqno[0] if seqno[0] else None, new)
            seqno[0] = new.seqno

        base = timings_s(bare, repeat=commits, warm=50)
        consensus.close()
    name = f"commit of 10 rows on Redis ({size} B diff)"
    return [
        Row(f"{name}, p50", ms(median(measured)), ms(median(base)), median(measured) / median(base), "lower"),
        Row(
            f"{name}, p99",
            ms(percentile(measured, 0.99)),
            ms(percentile(base, 0.99)),
            percentile(measured, 0.99) / percentile(base, 0.99),
            "lower",
        ),
    ]
