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
    """One line of the report. `ratio` is ours over the baseline, in the direction that `better` names."""

    what: str
    ours: str
    baseline: str
    ratio: float
    better: str

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
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
    """Seconds of each of `repeat` calls after `warm` unmeasured ones; `between` runs between, not within, and so does the
    garbage collector when there are few calls (`collect`).
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
    """Seconds of `repeat` calls of each, one after the other, so that both meet the same machine; one of each unmeasured
    before.
    """
    ours(-1)
    baseline(-1)
    measured: tuple[list[float], list[float]] = ([], [])
    for index in range(repeat):
        measured[0].extend(timings_s(lambda _: ours(index), repeat=1, warm=0))  # noqa: B023 - called at once
        measured[1].extend(timings_s(lambda _: baseline(index), repeat=1, warm=0))  # noqa: B023
    return measured


def memory_bytes() -> tuple[int, int]:
    """Resident memory of this process, now and at its peak: all of it, code and data alike. From Linux itself: getrusage
    counts the peak of whoever started the process too.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    told = {name: value for name, _, value in (line.partition(":") for line in lines)}
    now, peak = (int(told[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, peak


def median(values: list[float]) -> float:
    """The middle."""
    return statistics.median(values)


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ms(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1000:.3g} ms"
