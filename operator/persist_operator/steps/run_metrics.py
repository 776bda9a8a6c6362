"""The calls of runs' pods to the stores, from the pods' reports, because the pods end before a scrape.

Owns the series `persist_run_*`, counters of this process. A report comes from a pod, so every word and number in it is checked. The number
of series is bounded, whatever a pod reports.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from persist_engine.base.metrics import BUCKETS_S
from persist_engine.base.tally import OUTCOMES, STORES
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

#: The runs that are counted, by the `type` of their reports.
TYPES = frozenset({"Compaction", "GC", "OrphanScan", "Rollup", "Sink", "Verify"})
_VERBS: Mapping[str, frozenset[str]] = {
    "blob": frozenset({"get", "get_range", "set", "delete", "list_prefix", "list_kept", "restore"}),
    "consensus": frozenset({"head", "compare_and_set", "scan", "truncate", "replace", "list_keys"}),
}
_OTHER = "other"


class RunMetrics(Collector):
    """The series on one registry. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"persist_run_{name}", text, ["type", "store", "verb", *labels], registry=registry)

        self._calls = counter(
            "store_calls", "Calls of the pods of ended runs to the stores, as they reported.", "outcome"
        )
        self._bytes = counter("store_bytes", "Bytes that these calls moved or deleted.")
        self._seconds = counter("store_seconds", "Time of these calls.")
        self._lock = threading.Lock()
        #: By type: the number of commits in each of BUCKETS_S, and of longer ones.
        self._commits: dict[str, list[int]] = {}
        #: By type: the total seconds of all commits.
        self._commit_seconds: dict[str, float] = {}
        registry.register(self)

    def count(self, report: Mapping[str, Any] | None) -> None:
        """Add the store calls in the report of an ended run, if it has any. Call once for each run. Never raises."""
        stores, kind = (report or {}).get("stores"), str((report or {}).get("type"))
        if not isinstance(stores, Mapping):
            return
        kind = kind if kind in TYPES else _OTHER
        for store in STORES:
            verbs = stores.get(store)
            for verb, numbers in verbs.items() if isinstance(verbs, Mapping) else ():
                if isinstance(numbers, Mapping):
                    self._count(kind, store, verb if verb in _VERBS[store] else _OTHER, numbers)
        self._count_commits(kind, stores)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        family = HistogramMetricFamily(
            "persist_run_commit_seconds", "Time of one commit of these runs to consensus.", labels=["type"]
        )
        with self._lock:
            known = [(kind, list(counts), self._commit_seconds[kind]) for kind, counts in self._commits.items()]
        for kind, counts, total_s in known:
            buckets, so_far = [], 0
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                so_far += count
                buckets.append((bound, float(so_far)))
            family.add_metric([kind], buckets, sum_value=total_s)
        yield family

    def _count(self, kind: str, store: str, verb: str, numbers: Mapping[str, Any]) -> None:
        for outcome in OUTCOMES:
            if amount := _amount(numbers.get(outcome)):
                self._calls.labels(kind, store, verb, outcome).inc(amount)
        for counter, name in ((self._bytes, "bytes"), (self._seconds, "seconds")):
            if amount := _amount(numbers.get(name)):
                counter.labels(kind, store, verb).inc(amount)

    def _count_commits(self, kind: str, stores: Mapping[str, Any]) -> None:
        counts = stores.get("commits")
        if not isinstance(counts, list) or len(counts) != len(BUCKETS_S) + 1:
            return
        consensus = stores.get("consensus")
        commits = consensus.get("compare_and_set") if isinstance(consensus, Mapping) else None
        seconds = _amount(commits.get("seconds")) if isinstance(commits, Mapping) else 0.0
        with self._lock:
            known = self._commits.setdefault(kind, [0] * len(counts))
            self._commits[kind] = [before + int(_amount(one)) for before, one in zip(known, counts, strict=True)]
            self._commit_seconds[kind] = self._commit_seconds.get(kind, 0.0) + seconds


def _amount(value: Any) -> float:
    """The number, or 0 for a value that a counter cannot take."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and 0 < value < 1e18 else 0.0
