"""What history costs: a commit and an opening at 100 versions and live batches, and at 100,000 and 10,000.

And what a diff and a state cost by themselves: nothing may grow with what did not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from persist_engine import Antichain, Appended, Location, PersistClient, ShardId, WriteHandle
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.state_diff import StateDiff, apply
from persist_engine.testing.servers import redis_server
from persist_engine.testing.states import Stepper, append, batch
from persist_engine.work.perform import perform

from bench.commit import at_times
from bench.data import SCHEMA, updates
from bench.measure import Row, median, ms, timings_s

EARLY = 100
SAMPLES = 60


def run(folder: Path, quick: bool) -> list[Row]:
    """Rollups and garbage collection are performed between the measured commits, compactions are not: live batches stay.

    An opening is measured after every second commit, so that it meets rollups of every age.
    """
    versions, live = (2_000, 500) if quick else (100_000, 10_000)
    with redis_server(appendonly=True) as redis:
        shard = _Shard(Location(blob=f"file://{folder}/blobs", consensus=redis.url))
        shard.write(EARLY, with_data=True)
        early = shard.sample()
        shard.write(versions - live - 4 * SAMPLES, with_data=False)
        shard.write(live - 2 * SAMPLES - EARLY, with_data=True)
        late = shard.sample()
        shard.close()
    rows = []
    for what, before, after in (("commit", early[0], late[0]), ("open", early[1], late[1])):
        name = f"{what} at {versions:,} versions and {live:,} live batches against 100"
        rows.append(Row(name, ms(median(after)), ms(median(before)), median(after) / median(before), "lower"))
    return rows + _pure(live)


class _Shard:
    """A shard, its one writer that commits inline, and one that stages in blob, since state takes no 10,000 inline."""

    def __init__(self, location: Location) -> None:
        self._location, self._id = location, ShardId.new()
        self._client = PersistClient.open(location)
        in_blob = Settings(batch=BatchSettings(inline_part_bytes_max=0))
        self._stager = PersistClient.open(location, settings=in_blob)
        self._inline = self._client.open_writer(self._id, SCHEMA, purpose="bench")
        self._in_blob = self._stager.open_writer(self._id, SCHEMA, purpose="bench")
        self._time = 0

    def write(self, versions: int, *, with_data: bool) -> None:
        """`versions` more of them: 10 rows each, in blob, or the news that nothing happened."""
        for first in range(0, versions, 1_000):
            count = min(1_000, versions - first)
            for each in at_times(updates(10, time=0), count, first=self._time):
                self._append(self._in_blob, each if with_data else [])

    def sample(self) -> tuple[list[float], list[float]]:
        """Seconds of commits of 10 rows inline, and of openings."""
        self._inline.fetch_recent_upper()
        commits: list[float] = []
        opens: list[float] = []
        for index, rows in enumerate(at_times(updates(10, time=0), 2 * SAMPLES, first=self._time)):
            commits.append(self._append(self._inline, rows))
            if index % 2:
                opens += timings_s(lambda _: self._open(), repeat=1, warm=0, collect=False)
        return commits, opens

    def close(self) -> None:
        self._client.close()
        self._stager.close()

    def _append(self, writer: WriteHandle, rows: pa.Table | list[Any]) -> float:
        """One commit and what fell due after it; seconds of the commit."""
        lower, upper = Antichain.of(self._time), Antichain.of(self._time + 1)
        began = time.perf_counter()
        result = writer.compare_and_append(rows, expected_upper=lower, new_upper=upper)
        seconds = time.perf_counter() - began
        assert isinstance(result, Appended)
        self._time += 1
        perform(writer.machine, replace(result.maintenance, requests=()))
        return seconds

    def _open(self) -> None:
        with PersistClient.open(self._location) as client:
            client.recent_upper(self._id)


def _pure(live: int) -> list[Row]:
    """Diffs and states alone, without stores: at `live` batches against at 100."""
    few, many = _figures(EARLY), _figures(live)
    return [
        Row(f"{what}, {live:,} live batches against 100", ms(after), ms(before), after / before, "lower")
        for (what, before), after in zip(few.items(), many.values(), strict=True)
    ]


def _figures(live: int) -> dict[str, float]:
    shard = Stepper()
    trace = shard.state.trace
    for index in range(live):
        trace = trace.push_without_requests(batch(index, index + 1, 10))
    shard.state = before = replace(shard.state, trace=trace)
    commands = [append(batch(live + n, live + n + 1, 10), token_number=1 + n) for n in range(64)]
    out = {"transition and diff": _each_s(shard.do, commands)}
    out["diff encode"] = _each_s(encode_state_diff, shard.diffs)
    encoded = [encode_state_diff(diff) for diff in shard.diffs]
    out["diff decode"] = _each_s(lambda data: decode_state_diff(data, key="bench"), encoded)
    replica = before

    def follow(diff: StateDiff) -> None:
        nonlocal replica
        replica = apply(replica, diff)

    out["diff apply"] = _each_s(follow, shard.diffs)
    assert replica == shard.state
    stored = encode_rollup(Rollup(shard.state))
    out["state encode, again"] = _each_s(lambda _: encode_rollup(Rollup(shard.state)), range(8))
    out["state decode, to open it"] = _each_s(lambda _: decode_rollup(stored, key="bench", lazily=True), range(8))
    out["state decode, all of it"] = _each_s(lambda _: decode_rollup(stored, key="bench"), range(3))
    return out


def _each_s(call: Callable[[Any], object], items: Iterable[Any]) -> float:
    """Median seconds of `call` on each item."""
    values = list(items)
    return median(timings_s(lambda index: call(values[index]), repeat=len(values), warm=0, collect=False))
