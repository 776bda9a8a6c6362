"""A tally of the calls that one process made to its two stores. It is small enough for the termination message of a pod, because Prometheus
cannot scrape a pod of a run.

Owns the format `stores` of the reports of runs: `to_json` writes it, and `persist_operator.steps.run_metrics` adds it up.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from persist_engine.base.metrics import BUCKETS_S, Metrics, NoMetrics, ShardGauges

O = TypeVar("O")  # noqa: E741 - the owner of a shard's state

STORES = ("blob", "consensus")
#: The outcomes of a call to a store. All classes of errors are one outcome here, because their number has no limit.
OUTCOMES = ("ok", "mismatch", "stopped", "error")
#: Kubernetes cuts off termination messages at this length.
REPORT_BYTES_MAX = 4096
_COMMIT = ("consensus", "compare_and_set")


class StoreTally:
    """Metrics that also counts calls, bytes and seconds by store and verb, and the times of commits. Thread-safe."""

    def __init__(self) -> None:
        self._inner: Metrics = NoMetrics()
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, str], dict[str, float]] = {}
        self._commits = [0] * (len(BUCKETS_S) + 1)

    def over(self, inner: Metrics) -> Metrics:
        """Makes these metrics pass everything on to `inner` from now on, and returns them."""
        self._inner = inner
        return self

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """See Metrics."""
        self._inner.count(name, amount, **labels)
        store, _, what = name.partition("_")
        if store in STORES and what == "calls":
            outcome = labels["outcome"]
            self._add(store, labels["verb"], outcome if outcome in OUTCOMES else "error", amount)
        elif store in STORES and what == "bytes":
            self._add(store, labels["verb"], what, amount)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """See Metrics."""
        self._inner.gauge(name, value, **labels)

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """See Metrics."""
        self._inner.observe_s(name, seconds, **labels)
        if name in STORES:
            self._add(name, labels["verb"], "seconds", seconds)
            if (name, labels["verb"]) == _COMMIT:
                with self._lock:
                    self._commits[bisect_left(BUCKETS_S, seconds)] += 1

    def watch_shard(self, shard: str, owner: O, read: Callable[[O], ShardGauges], /) -> None:
        """See Metrics."""
        self._inner.watch_shard(shard, owner, read)

    def to_json(self) -> dict[str, Any]:
        """`{blob: {get: {ok, error, bytes, seconds}}, consensus: ..., commits: [...]}` with whole numbers, seconds rounded to ms, and
        without zeros. `commits` has the number of commits in each bucket of BUCKETS_S, and of longer ones. At most 2 KiB.
        """
        with self._lock:
            found: dict[str, Any] = {}
            for (store, verb), numbers in sorted(self._numbers.items()):
                shown = {name: round(value, 3 if name == "seconds" else None) for name, value in numbers.items()}
                found.setdefault(store, {})[verb] = {name: value for name, value in shown.items() if value}
            return found | ({"commits": list(self._commits)} if any(self._commits) else {})

    def added_to(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """The report with `stores`. Leaves `stores` out if the report would be too long, because a message that is cut off is no report."""
        full = {**report, "stores": self.to_json()}
        return full if len(json.dumps(full, ensure_ascii=False).encode()) < REPORT_BYTES_MAX else dict(report)

    def _add(self, store: str, verb: str, name: str, amount: float) -> None:
        with self._lock:
            numbers = self._numbers.setdefault((store, verb), {})
            numbers[name] = numbers.get(name, 0) + amount
