"""Cost of a commit, and of opening a shard, at 100 versions and at 10,000: history must not matter."""

from __future__ import annotations

from pathlib import Path

from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.model.maintenance import Maintenance
from persist_engine.testing.servers import redis_server
from persist_engine.work.perform import perform

from bench.data import SCHEMA, updates
from bench.measure import Row, median, ms, timings_s


def run(folder: Path, quick: bool) -> list[Row]:
    """Maintenance is performed outside the measured commits, as the operator does."""
    late = 1_000 if quick else 10_000
    with redis_server(appendonly=True) as redis:
        location = Location(blob=f"file://{folder}/blobs", consensus=redis.url)
        shard = ShardId.new()
        batch = updates(10, time=0)
        at = [0]
        pending: list[Maintenance] = []
        with PersistClient.open(location) as client, client.open_writer(shard, SCHEMA, purpose="bench") as writer:

            def commit(_: int) -> None:
                moved = batch.set_column(2, "time", [[at[0]] * batch.num_rows])
                result = writer.compare_and_append(
                    moved, expected_upper=Antichain.of(at[0]), new_upper=Antichain.of(at[0] + 1)
                )
                at[0] += 1
                pending.append(result.maintenance)

            def advance(versions: int) -> None:
                while at[0] < versions:
                    commit(0)
                    perform(client.machine(shard), pending.pop())

            advance(100)
            early_commit = timings_s(commit, repeat=100, warm=0)
            early_open = timings_s(lambda _: _open(location, shard), repeat=7)
            advance(late)
            late_commit = timings_s(commit, repeat=100, warm=0)
            late_open = timings_s(lambda _: _open(location, shard), repeat=7)
    return [
        Row(
            f"commit at {late:,} versions against 100",
            ms(median(late_commit)),
            ms(median(early_commit)),
            median(late_commit) / median(early_commit),
            "lower",
        ),
        Row(
            f"open at {late:,} versions against 100",
            ms(median(late_open)),
            ms(median(early_open)),
            median(late_open) / median(early_open),
            "lower",
        ),
    ]


def _open(location: Location, shard: ShardId) -> None:
    with PersistClient.open(location) as client:
        client.recent_upper(shard)
