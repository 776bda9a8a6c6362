"""Small commits with background maintenance in the writing process, beside the same commits without it.

Each side is a separate process with its own shard, on one Redis. They commit in turns, block by block, so that both run under the same load
of the machine, and neither takes processor time from the other.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

from persist_engine import Antichain, Appended, Location, PersistClient, ShardId
from persist_kit.servers import redis_server

from bench.commit import at_times
from bench.data import SCHEMA, updates
from bench.measure import Row, median, ms, percentile

#: The largest ratios that are acceptable.
P50_MAX, P99_MAX = 1.3, 3.0


def run(folder: Path, quick: bool) -> list[Row]:
    """Blocks of 10-row commits, in turns. The first block of each side is not counted."""
    blocks, commits = (4, 500) if quick else (6, 2_000)
    spawned = multiprocessing.get_context("spawn")
    taken: dict[bool, list[float]] = {True: [], False: []}
    with redis_server(appendonly=True) as redis:
        sides = {}
        for is_maintained in taken:
            ours, theirs = spawned.Pipe()
            args = (theirs, f"file://{folder}/blobs", redis.url, is_maintained)
            process = spawned.Process(target=_side, args=args, daemon=True)
            process.start()
            sides[is_maintained] = (process, ours)
        for block in range(blocks):
            for is_maintained, (_, pipe) in sides.items():
                pipe.send(commits)
                seconds = pipe.recv()
                if block:
                    taken[is_maintained] += seconds
        for process, pipe in sides.values():
            pipe.send(0)
            process.join()
    what = "commit of 10 rows with maintenance in its process, beside one without"
    rows = []
    for name, figure, most in (("p50", median, P50_MAX), ("p99", lambda each: percentile(each, 0.99), P99_MAX)):
        ours_s, base_s = figure(taken[True]), figure(taken[False])
        rows.append(Row(f"{what}, {name}", ms(ours_s), ms(base_s), ours_s / base_s, f"lower (asked for: {most:g})"))
    return rows


def _side(pipe: Connection, blob: str, consensus: str, is_maintained: bool) -> None:
    """Reads a number from the pipe, makes this many commits, and sends the seconds of each. Repeats until the number is 0."""
    batches = at_times(updates(10, time=0), 2_000)
    with (
        PersistClient.open(Location(blob=blob, consensus=consensus)) as client,
        client.background_maintenance() as background,
        client.open_writer(ShardId.new(), SCHEMA, purpose="bench") as writer,
    ):
        upkeep = background.of(writer.machine)
        at = 0
        while commits := pipe.recv():
            seconds = []
            if at + commits > len(batches):
                batches += at_times(updates(10, time=0), commits, first=len(batches))
            for _ in range(commits):
                began = time.perf_counter()
                done = writer.compare_and_append(
                    batches[at], expected_upper=Antichain.of(at), new_upper=Antichain.of(at + 1)
                )
                assert isinstance(done, Appended)
                if is_maintained:
                    upkeep.offer(done.maintenance)
                seconds.append(time.perf_counter() - began)
                at += 1
            pipe.send(seconds)
