"""The cost of history: a commit and an open with 100 versions and live batches, against 100,000 versions and 10,000 live batches.

Also the cost of only a diff and a state. No cost may grow with unchanged parts of the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from persist_engine import Antichain, Appended, Location, PersistClient, ShardId, WriteHandle
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.diff.state_diff import StateDiff, apply
from persist_engine.work.perform import perform
from persist_kit.servers import redis_server
from persist_kit.states import Stepper, append, batch

from bench.commit import at_times
from bench.data import SCHEMA, updates
from bench.measure import Row, median, ms, timings_s

EARLY = 100
SAMPLES = 60
T = TypeVar("T")


def run(folder: Path, quick: bool) -> list[Row]:
    """Rollups and garbage collection run between the measured commits. Compactions do not, so that the live batches stay.

    The measurements of an old shard and a young one alternate, so that both run under the same load. An open follows every second commit,
    so that it sees rollups of every age.
    """
    versions, live = (2_000, 500) if quick else (100_000, 10_000)
    with redis_server(appendonly=True) as redis:
        location = Location(blob=f"file://{folder}/blobs", consensus=redis.url)
        old, young = _Shard(location), _Shard(location)
        old.write(versions - live - 2 * SAMPLES, with_data=False)
        old.write(live - 2 * SAMPLES, with_data=True)
        young.write(EARLY, with_data=True)
        for index in range(2 * SAMPLES):
            for shard in (young, old):
                shard.sample(opens=index % 2 == 1)
        old.close()
        young.close()
    rows = []
    for what in old.seconds:
        after, before = median(old.seconds[what]), median(young.seconds[what])
        name = f"{what} at {versions:,} versions and {live:,} live batches against 100"
        rows.append(Row(name, ms(after), ms(before), after / before, "lower"))
    return rows + _pure(live)


class _Shard:
    """A shard with one writer that commits inline, and one that stages in blob, because state cannot hold 10,000 inline parts."""

    def __init__(self, location: Location) -> None:
        self._location, self._id = location, ShardId.new()
        self._client = PersistClient.open(location)
        in_blob = Settings(batch=BatchSettings(inline_part_bytes_max=0))
        self._stager = PersistClient.open(location, settings=in_blob)
        self._inline = self._client.open_writer(self._id, SCHEMA, purpose="bench")
        self._in_blob = self._stager.open_writer(self._id, SCHEMA, purpose="bench")
        self._time = 0
        self.seconds: dict[str, list[float]] = {}

    def write(self, versions: int, *, with_data: bool) -> None:
        """Commits `versions` more versions: each appends 10 rows in blob, or only advances the upper."""
        for first in range(0, versions, 1_000):
            count = min(1_000, versions - first)
            for each in at_times(updates(10, time=0), count, first=self._time):
                self._append(self._in_blob, each if with_data else [])

    def sample(self, *, opens: bool) -> None:
        """Measures a commit of 10 inline rows and, with `opens`, an open."""
        self._inline.fetch_recent_upper()
        self._append(self._inline, at_times(updates(10, time=0), 1, first=self._time)[0], measured=True)
        if opens:
            self._timed("open", self._open)

    def close(self) -> None:
        self._client.close()
        self._stager.close()

    def _append(self, writer: WriteHandle, rows: pa.Table | list[Any], *, measured: bool = False) -> None:
        """One commit and the maintenance that it returns."""
        lower, upper = Antichain.of(self._time), Antichain.of(self._time + 1)

        def commit() -> Appended:
            result = writer.compare_and_append(rows, expected_upper=lower, new_upper=upper)
            assert isinstance(result, Appended)
            return result

        result = self._timed("commit", commit) if measured else commit()
        self._time += 1
        perform(writer.machine, replace(result.maintenance, requests=()))

    def _timed(self, what: str, call: Callable[[], T]) -> T:
        began, began_cpu = time.perf_counter(), time.process_time()
        result = call()
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)
        self.seconds.setdefault(f"{what}, processor time,", []).append(time.process_time() - began_cpu)
        return result

    def _open(self) -> None:
        with PersistClient.open(self._location) as client:
            client.recent_upper(self._id)


def _pure(live: int) -> list[Row]:
    """Only diffs and states, without stores: with `live` batches against 100."""
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
    """The median seconds of `call` over the items."""
    values = list(items)
    return median(timings_s(lambda index: call(values[index]), repeat=len(values), warm=0, collect=False))
