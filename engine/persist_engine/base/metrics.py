"""The port through which every room counts. `NoMetrics` counts nothing; `PrometheusMetrics` feeds prometheus-client.

Names are given without the `persist_` prefix; label sets are fixed per name by their first use.
"""

from __future__ import annotations

import threading
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics(Protocol):
    """Counters, gauges and observed seconds. Thread-safe; never raises."""

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to the counter `persist_<name>_total`."""

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Set the gauge `persist_<name>`."""

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """Record a duration into the histogram `persist_<name>_seconds`."""


class NoMetrics:
    """Counts nothing."""

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Nothing."""

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Nothing."""

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """Nothing."""


class PrometheusMetrics:
    """Metrics on a prometheus-client registry; one collector per name, made at first use."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """See Metrics."""
        with self._lock:
            if name not in self._counters:
                self._counters[name] = Counter(f"persist_{name}", name, sorted(labels), registry=self._registry)
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """See Metrics."""
        with self._lock:
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"persist_{name}", name, sorted(labels), registry=self._registry)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """See Metrics."""
        with self._lock:
            if name not in self._histograms:
                self._histograms[name] = Histogram(
                    f"persist_{name}_seconds", name, sorted(labels), registry=self._registry
                )
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(seconds)
