"""`make sim`: runs many seeds, or one seed again. Prints the results; exit code 1 when a rule was broken.

python -m persist_kit.sim.main --seeds 2000 [--first 0] [--jobs 2] [--without disaster]
python -m persist_kit.sim.main --seed 17 [--without reader1,crash] [--events]
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process

from persist_kit.sim.plan import plan_of
from persist_kit.sim.simulation import Report, simulate

#: The kinds of weather that minimising leaves out, beside actors, in this order.
_WEATHER = ("crash", "freeze", "step", "slow", "late", "happens", "answers")
#: The number of failing seeds that are minimised and shown. The others are only counted.
SHOWN_MAX = 3
_PROGRESS_S = 10.0


def minimise(seed: int, without: frozenset[str] = frozenset()) -> tuple[frozenset[str], Report]:
    """Leaves out everything that a failing history does not need to fail: actors, then kinds of weather. Meant for reading, not as proof: a
    history without an actor is a different one, and may fail for another reason.
    """
    plan = plan_of(seed)
    report = simulate(seed, without=without)
    for name in [
        *(name for name, _ in plan.actors),
        "disaster",
        "crash",
        "freeze",
        "step",
        "slow",
        "late",
        "happens",
        "answers",
    ]:
        tried = without | {name}
        attempt = simulate(seed, without=tried)
        if attempt.failure is not None:
            without, report = tried, attempt
    return without, report


def explain(report: Report, *, without: frozenset[str] = frozenset(), last: int = 80) -> str:
    """The broken rule, the command that repeats it, and the end of the history."""
    left_out = f" WITHOUT={','.join(sorted(without))}" if without else ""
    plan = report.plan
    lines = [
        f"seed {plan.seed}: {report.failure or 'no rule was broken'}",
        f"again: make sim SEED={plan.seed}{left_out}",
        f"plan: {plan.processes} processes, {plan.actors}, lease {plan.lease_ms} ms",
        f"      {plan.weather}",
        f"      {plan.settings}",
        *report.events[-last:],
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="sim", description="deterministic simulation of the engine")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes to spread them over")
    parser.add_argument("--seed", type=int, help="only this one, with its events")
    parser.add_argument(
        "--without", default="", help="leave these out, separated by commas: actors, kinds of weather, disaster"
    )
    options = parser.parse_args(arguments)
    without = frozenset(name for name in options.without.split(",") if name)
    if options.seed is not None:
        report = simulate(options.seed, without=without)
        _say(explain(report, without=without, last=len(report.events)))
        return int(report.failure is not None)
    return _campaign(range(options.first, options.first + options.seeds), jobs=options.jobs, left_out=without)


def _campaign(seeds: range, *, jobs: int, left_out: frozenset[str]) -> int:
    started_s = printed_s = time.monotonic()
    totals: Counter[str] = Counter()
    broken: list[int] = []
    done = 0
    for seed, failure, counts in _outcomes(seeds, jobs=jobs, left_out=left_out):
        done += 1
        totals.update(counts)
        if failure is not None:
            broken.append(seed)
            _say(f"seed {seed}: {failure}")
        if time.monotonic() - printed_s >= _PROGRESS_S:
            printed_s = time.monotonic()
            _say(f"{done} of {len(seeds)} histories, {len(broken)} broken")
    for seed in broken[:SHOWN_MAX]:
        without, report = minimise(seed, left_out)
        _say(explain(report, without=without))
    rate = done / max(1e-9, time.monotonic() - started_s)
    numbers = ", ".join(f"{count} {name}" for name, count in totals.items())
    _say(f"{done} histories, {len(broken)} broken, {rate:.1f}/s: {numbers}")
    return int(bool(broken))


def _outcomes(seeds: range, *, jobs: int, left_out: frozenset[str]) -> Iterator[tuple[int, str | None, dict[str, int]]]:
    outcome = partial(_outcome, left_out)
    if jobs == 1:
        yield from map(outcome, seeds)
        return
    with workers(jobs) as pool:
        yield from pool.map(outcome, seeds, chunksize=16)


def workers(jobs: int) -> ProcessPoolExecutor:
    """A pool of `jobs` processes, which end with this process however it ends."""
    # Spawned, because forking a process with threads is unsafe.
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Ends the worker with its parent. A killed parent cannot stop its pool, and the workers would wait for seeds for ever."""
    parent = parent_process()
    assert parent is not None, "runs in a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _outcome(left_out: frozenset[str], seed: int) -> tuple[int, str | None, dict[str, int]]:
    report = simulate(seed, without=left_out)
    return seed, report.failure, report.counts


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
