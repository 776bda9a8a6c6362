"""Tables of `connect` beside the same tables of Lance, deltalake and pyiceberg: same rows, same disk, same run.

Each system is a separate process, so that its processor time and its memory peak can be measured. The systems make each call in turn, so
that all run under the same load; while one works, the others wait. First, each system makes each kind of call on a small table, so that no
measured call loads modules. Ratios compare processor time, user and system, which hardly depends on load; elapsed time is shown beside it.
`python -m bench.table [--quick]` prints each row on standard error when it is measured, and at the end the whole table as Markdown.

Needs `uv sync --group bench`. Our writes are on disk when they return; those of the peers are not.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.measure import Row, median, memory_bytes, percentile
from bench.table_systems import SYSTEMS, NotOffered, System

OURS = "persist"
#: The limit on the total processor time of repeated calls. Beyond it, calls are not repeated.
SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call. `memory_bytes`: the growth of resident memory at its peak."""

    cpu_s: float
    wall_s: float
    memory_bytes: int


Costs = dict[str, list[Cost] | str]
"""By system, the cost of each call, or the reason why there is none."""


def rows_of(ids: np.ndarray, seed: int) -> pa.Table:
    """Rows with these keys: text of 32 characters, one of a hundred groups, a number."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "id": ids.astype(np.int64),
            "name": pa.array(np.char.mod("%032x", rng.integers(0, 2**62, len(ids)))),
            "grp": pa.array((ids % 100).astype(np.int32)),
            "x": rng.random(len(ids)),
        }
    )


def run(folder: Path, quick: bool) -> list[Row]:
    """The processor time of each call beside that of the best peer."""
    out = []
    for what, costs in compared(folder, quick):
        medians = _medians(costs)
        peers = {name: cost for name, cost in medians.items() if name != OURS}
        if OURS in medians and peers:
            best = min(peers, key=lambda name: peers[name].cpu_s)
            ours, theirs = medians[OURS].cpu_s, peers[best].cpu_s
            out.append(Row(f"{what}, beside {best}", _ms(ours), _ms(theirs), ours / theirs, "lower"))
    return out


def markdown(compared_costs: Iterable[tuple[str, Costs]]) -> Iterator[str]:
    """The lines of the whole table: for each system processor time / elapsed time in ms / peak of memory in MB."""
    yield f"| processor / elapsed ms / peak MB | {' | '.join(SYSTEMS)} | to the best: processor | elapsed |"
    yield "|---|" + "---|" * (len(SYSTEMS) + 2)
    yield from map(_line, compared_costs)


def _line(compared_costs: tuple[str, Costs]) -> str:
    what, costs = compared_costs
    medians = _medians(costs)
    cells = [_cell(medians.get(name), costs[name]) for name in SYSTEMS]
    peers = [cost for name, cost in medians.items() if name != OURS]
    if OURS in medians and peers:
        ours = medians[OURS]
        cells.append(f"{ours.cpu_s / min(each.cpu_s for each in peers):.2f}")
        cells.append(f"{ours.wall_s / min(each.wall_s for each in peers):.2f}")
    else:
        cells += ["", ""]
    return f"| {what} | {' | '.join(cells)} |"


def compared(folder: Path, quick: bool) -> Iterator[tuple[str, Costs]]:
    """Yields the name and the costs of each measurement as soon as it is done. The tables stay in the folder."""
    keys, repeat, versions = (50_000, 3, 200) if quick else (500_000, 5, 1_000)
    with _Group(folder, "rows") as rows:
        rows.warm()
        yield from _upserted(rows, keys, repeat)
    with _Group(folder, "appended") as appended:
        appended.warm()
        yield from _appended(appended, keys // 10)
    with _Group(folder, "small") as small:
        small.warm()
        yield from _small(small, versions)


def _upserted(group: _Group, keys: int, repeat: int) -> Iterator[tuple[str, Costs]]:
    few = keys // 25
    yield f"first {keys:,} rows by upsert (peers: append)", group.call("first", [keys])
    yield f"upsert of {few:,} of {keys:,} keys", group.call("upsert", [(few, keys, turn) for turn in range(10)])
    yield from _reads(group, keys, repeat, "after 10 upserts")
    yield "delete of 1 % by a condition", group.call("delete", range(repeat))
    yield "overwrite with 1 % changed", group.call("overwrite", range(repeat))
    yield from _reads(group, keys, repeat, "after overwrites")
    yield "optimize", group.call("optimize", [None])
    yield "optimize once more", group.call("optimize", [None] * repeat)
    yield from _reads(group, keys, repeat, "optimized")
    yield "vacuum", group.call("vacuum", [None])


def _reads(group: _Group, keys: int, repeat: int, state: str) -> Iterator[tuple[str, Costs]]:
    yield f"read of all rows, {state}", group.call("read", [None] * repeat)
    yield f"read of 1 % by a value, {state}", group.call("read_group", [99] * repeat)
    yield f"read of 1 % by keys, {state}", group.call("read_keys_below", [keys // 100] * repeat)
    yield f"read of the past, {state}", group.call("read_past", [None] * repeat)


def _appended(group: _Group, rows: int) -> Iterator[tuple[str, Costs]]:
    yield f"append of {rows:,} rows", group.call("append", [(rows, turn) for turn in range(20)])
    yield "read of 20 appends", group.call("read", [None] * 5)
    yield "optimize 20 appends", group.call("optimize", [None])
    yield "read of 20 appends, optimized", group.call("read", [None] * 5)


def _small(group: _Group, versions: int) -> Iterator[tuple[str, Costs]]:
    commits = group.call("append", [(10, turn) for turn in range(versions)], seconds_max=versions)
    slow = {name: [_at(costs, 0.99)] if isinstance(costs, list) else costs for name, costs in commits.items()}
    yield "append of 10 rows, median", commits
    yield "append of 10 rows, 99th percentile", slow
    yield "changes of 100 versions", group.call("changes", [100] * 5)
    yield f"history of {versions:,} versions", group.call("history", [None] * 5)
    yield f"open a table of {versions:,} versions", group.call("reopen", [None] * 5)


class _Group:
    """One process for each system, with a table of the same name in each."""

    def __init__(self, folder: Path, name: str) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._sides = {}
        for system in SYSTEMS:
            ours, theirs = spawned.Pipe()
            process = spawned.Process(target=_serve, args=(theirs, system, folder / system, name), daemon=True)
            process.start()
            self._sides[system] = (process, ours)

    def warm(self) -> None:
        """Every system makes each kind of call on its own small table, so that no measured call loads modules."""
        for _, pipe in self._sides.values():
            pipe.send(("warm", None))
            pipe.recv()

    def call(self, what: str, arguments: Iterable[Any], *, seconds_max: float = SECONDS_MAX) -> Costs:
        """Every system makes the call with each argument, in turns. Reports when the systems read different numbers of rows."""
        out: Costs = {name: [] for name in self._sides}
        for argument in arguments:
            found = {}
            for name, (_, pipe) in self._sides.items():
                costs = out[name]
                if isinstance(costs, str) or sum(each.cpu_s for each in costs) > seconds_max:
                    continue
                pipe.send((what, argument))
                answer, rows = pipe.recv()
                if isinstance(answer, str):
                    out[name] = answer
                    continue
                costs.append(answer)
                found[name] = rows
            if what.startswith("read") and len(set(found.values())) > 1:
                print(f"{what}: the systems read different numbers of rows: {found}", file=sys.stderr)
        return out

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._sides.values():
            pipe.send(None)
            process.join()


def _serve(pipe: Connection, kind: str, folder: Path, name: str) -> None:
    system = SYSTEMS[kind](folder, name)
    steps = _Steps(system)
    while (command := pipe.recv()) is not None:
        what, argument = command
        if what == "warm":
            pipe.send(_warmed(SYSTEMS[kind](folder / f"warm-{name}", "rows")))
            shutil.rmtree(folder / f"warm-{name}")
            continue
        try:
            call = getattr(steps, what)(argument)
            pipe.send(_measured(call))
        except NotOffered:
            pipe.send(("–", None))
        except Exception as error:  # noqa: BLE001 - a peer's failure is a result
            pipe.send((f"failed: {type(error).__name__}", None))
            print(f"{kind}: {what}: {error}", file=sys.stderr)
        system.settle()
    system.close()


def _warmed(system: System) -> None:
    steps, rows = _Steps(system), 2_000
    calls: list[tuple[str, Any]] = [
        ("first", rows),
        *(("upsert", (100, rows, turn)) for turn in range(3)),
        ("append", (10, 1_000)),
    ]
    calls += [(what, 1) for what in ("delete", "overwrite", "read", "read_group", "read_keys_below")]
    for what, argument in [
        *calls,
        ("read_past", None),
        ("optimize", None),
        ("vacuum", None),
        ("history", None),
        ("reopen", None),
    ]:
        try:
            getattr(steps, what)(argument)()
        except Exception as error:  # noqa: BLE001 - the same call fails when it is measured, and is shown there
            print(f"{type(system).__name__}: {what}, small: {error}", file=sys.stderr)
        system.settle()
    system.close()


class _Steps:
    """The unmeasured preparation of each call. Each method returns the call."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._versions: list[Any] = []
        self._whole: pa.Table | None = None

    def first(self, keys: int) -> Callable[[], object]:
        frame = rows_of(np.random.default_rng(0).permutation(keys), 0)
        return lambda: self._system.first(frame)

    def upsert(self, argument: tuple[int, int, int]) -> Callable[[], object]:
        few, keys, turn = argument
        frame = rows_of(np.random.default_rng(100 + turn).choice(keys, few, replace=False), 100 + turn)
        return self._written(lambda: self._system.upsert(frame))

    def append(self, argument: tuple[int, int]) -> Callable[[], object]:
        rows, turn = argument
        frame = rows_of(np.random.default_rng(turn).permutation(rows) + turn * rows, turn)
        return lambda: self._system.append(frame)

    def delete(self, grp: int) -> Callable[[], object]:
        return self._written(lambda: self._system.delete(grp))

    def overwrite(self, turn: int) -> Callable[[], object]:
        if self._whole is None:
            self._whole = self._system.read().combine_chunks()
        x = self._whole.column("x").to_numpy().copy()
        x[turn::100] += turn + 1
        frame = self._whole.set_column(3, "x", pa.array(x))
        return self._written(lambda: self._system.overwrite(frame))

    def read(self, _: None) -> Callable[[], object]:
        return self._system.read

    def read_group(self, grp: int) -> Callable[[], object]:
        return lambda: self._system.read_group(grp)

    def read_keys_below(self, key: int) -> Callable[[], object]:
        return lambda: self._system.read_keys_below(key)

    def read_past(self, _: None) -> Callable[[], object]:
        version = self._versions[-2]
        return lambda: self._system.read_version(version)

    def changes(self, versions: int) -> Callable[[], object]:
        return lambda: self._system.changes(versions)

    def optimize(self, _: None) -> Callable[[], object]:
        return self._system.optimize

    def vacuum(self, _: None) -> Callable[[], object]:
        return self._system.vacuum

    def history(self, _: None) -> Callable[[], object]:
        return self._system.history

    def reopen(self, _: None) -> Callable[[], object]:
        return self._system.reopen

    def _written(self, write: Callable[[], object]) -> Callable[[], object]:
        """The write. The version before it is remembered."""
        self._versions.append(self._system.version())
        return write


def _measured(call: Callable[[], object]) -> tuple[Cost, int | None]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the memory peak
    before = memory_bytes()[0]
    used, began = _cpu_s(), time.perf_counter()
    found = call()
    cost = Cost(_cpu_s() - used, time.perf_counter() - began, max(0, memory_bytes()[1] - before))
    return cost, found.num_rows if isinstance(found, pa.Table) else None


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _medians(costs: Costs) -> dict[str, Cost]:
    """The median cost of each system. If there are several calls, the first warms the system and is not counted."""
    out = {}
    for name, each in costs.items():
        if isinstance(each, list) and each:
            out[name] = _at(each[1:] if len(each) > 2 else each, None)
    return out


def _at(costs: list[Cost], share: float | None) -> Cost:
    """The median of each figure, or its percentile; the greatest peak of memory."""
    cpu, wall = [each.cpu_s for each in costs], [each.wall_s for each in costs]
    peak = max(each.memory_bytes for each in costs)
    return (
        Cost(median(cpu), median(wall), peak)
        if share is None
        else Cost(percentile(cpu, share), percentile(wall, share), peak)
    )


def _cell(cost: Cost | None, costs: list[Cost] | str) -> str:
    if cost is None:
        return costs if isinstance(costs, str) else "too slow"
    return f"{cost.cpu_s * 1000:.3g} / {cost.wall_s * 1000:.3g} / {cost.memory_bytes >> 20}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def main() -> None:
    """Prints the whole table, and the load of the machine."""
    with tempfile.TemporaryDirectory(prefix="persist-bench-") as folder:
        rows = []
        for row in compared(Path(folder), "--quick" in sys.argv):
            print(_line(row), file=sys.stderr, flush=True)
            rows.append(row)
        for line in markdown(rows):
            print(line)
        for name in SYSTEMS:
            tables = [path for path in (Path(folder) / name).rglob("*") if path.is_file()]
            print(f"bytes on disk, {name}: {sum(path.stat().st_size for path in tables) / 1e6:.1f} MB")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
