"""Timing and the table: medians and ratios against a baseline of the same run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `ratio` compares ours with the baseline; `better` names the better direction."""

    what: str
    ours: str
    baseline: str
    ratio: float
    better: str

    def as_json(self) -> dict[str, object]:
        """The row for `--json`."""
        return {
            "what": self.what,
            "ours": self.ours,
            "baseline": self.baseline,
            "ratio": round(self.ratio, 3),
            "better": self.better,
        }


def timings_s(
    call: Callable[[int], object],
    *,
    repeat: int,
    warm: int = 1,
    between: Callable[[], object] | None = None,
    collect: bool = True,
) -> list[float]:
    """The seconds of each of `repeat` calls, after `warm` unmeasured ones. `between` runs after each call, unmeasured. With `collect` and
    at most 50 calls, the garbage collector runs before each call, unmeasured.
    """
    for index in range(warm):
        call(-1 - index)
    out = []
    for index in range(repeat):
        if collect and repeat <= 50:
            gc.collect()
        began = time.perf_counter()
        call(index)
        out.append(time.perf_counter() - began)
        if between is not None:
            between()
    return out


def interleaved_s(
    ours: Callable[[int], object], baseline: Callable[[int], object], *, repeat: int
) -> tuple[list[float], list[float]]:
    """The seconds of `repeat` calls of each. The calls alternate, so that both sides run under the same load. One call of each runs first
    and is not measured.
    """
    ours(-1)
    baseline(-1)
    measured: tuple[list[float], list[float]] = ([], [])
    for index in range(repeat):
        measured[0].extend(timings_s(lambda _: ours(index), repeat=1, warm=0))  # noqa: B023 - called at once
        measured[1].extend(timings_s(lambda _: baseline(index), repeat=1, warm=0))  # noqa: B023
    return measured


def memory_bytes() -> tuple[int, int]:
    """The resident memory of this process, code and data, now and at its peak. Read from /proc, because the peak that getrusage reports
    includes the parent process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    now, peak = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, peak


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: list[float], share: float) -> float:
    """The percentile, by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ms(seconds: float) -> str:
    """The time in milliseconds, as text."""
    return f"{seconds * 1000:.3g} ms"
