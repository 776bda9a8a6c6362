"""Metrics that tests can read."""

from __future__ import annotations

import threading
from collections import defaultdict

from persist_engine.base.metrics import NoMetrics

Key = tuple[str, frozenset[tuple[str, str]]]


class CountedMetrics(NoMetrics):
    """Keeps every count and duration. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[Key, float] = defaultdict(float)
        self._seconds: defaultdict[Key, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """See Metrics."""
        with self._lock:
            self._counts[_key(name, labels)] += amount

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """See Metrics."""
        with self._lock:
            self._seconds[_key(name, labels)].append(seconds)

    def total(self, name: str, /, **labels: str) -> float:
        """The sum of the counts of `name` with at least these labels."""
        with self._lock:
            return sum(amount for key, amount in self._counts.items() if _fits(key, name, labels))

    def observed_s(self, name: str, /, **labels: str) -> list[float]:
        """The durations of `name` with at least these labels."""
        with self._lock:
            return [each for key, some in self._seconds.items() if _fits(key, name, labels) for each in some]


def _key(name: str, labels: dict[str, str]) -> Key:
    return name, frozenset(labels.items())


def _fits(key: Key, name: str, labels: dict[str, str]) -> bool:
    return key[0] == name and frozenset(labels.items()) <= key[1]
