"""The Prometheus series of PersistShards, bounded in number and small in memory.

Up to SHARDS_MAX shards have their own series. With more shards, only the shards that need attention most have them. The sums by namespace
count all shards. So a scrape stays small with any number of shards, and an alert on a shard in trouble still finds its series.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from persist_operator.steps import resource_metrics

#: With about 31 series each, a scrape has 62,000 lines. One process writes them in a second, and Prometheus reads them easily.
SHARDS_MAX = 2000
_OF_RESOURCE = ("namespace", "name")
#: The series of a shard, with their descriptions.
OF_SHARD: Mapping[str, str] = {
    "ready": "1 while Ready is True.",
    "upper_lag_seconds": "Seconds from upper to now.",
    "since_lag_seconds": "Seconds from since to upper.",
    "batches": "Batches in the trace.",
    "live_bytes": "Bytes of live parts, with those inside the state.",
    "debt_bytes": "Bytes that compaction would read.",
    "oldest_uncompacted_seconds": "How long ago the oldest update was retracted that may still be stored; 0: none.",
    "deadline_seconds": "compaction.deadlineSeconds: the age at which such an update must be gone.",
    "live_diffs": "State versions in consensus.",
    "last_rollup_seqno": "Version of the newest rollup.",
    "seqno": "Version of the state.",
    "readers": "Registered readers.",
    **resource_metrics.OF_SHARD,
}
_SUMS: Mapping[str, str] = {
    "persist_shards": "PersistShards, by namespace.",
    "persist_shards_ready": "PersistShards whose Ready is True, by namespace.",
    "persist_shards_failing": "PersistShards of which a kind of maintenance failed last, by namespace.",
    "persist_shards_live_bytes": "Bytes of live parts, with those inside the state, by namespace.",
    "persist_shards_debt_bytes": "Bytes that compaction would read, by namespace.",
}
_INDEX = {name: index for index, name in enumerate(OF_SHARD)}


@dataclass(frozen=True, slots=True)
class TaskRuns:
    """The runs of one kind of maintenance: failures in a row (None: failed runs are not repeated), and the end of the last success in
    seconds since the epoch.
    """

    task: str
    failures: int | None
    success_s: float | None


@dataclass(frozen=True, slots=True)
class _Row:
    values: tuple[float | None, ...]
    tasks: tuple[TaskRuns, ...]

    def of(self, name: str) -> float:
        return self.values[_INDEX[name]] or 0.0

    @property
    def is_failing(self) -> bool:
        return any(one.failures for one in self.tasks)

    def urgency(self) -> tuple[float, ...]:
        """A sort key. The smaller it is, the more attention the shard needs."""
        failures = max((one.failures or 0 for one in self.tasks), default=0)
        return (self.of("ready"), -failures, -self.of("oldest_uncompacted_seconds"), -self.of("debt_bytes"))


class ShardSeries(Collector):
    """A collector on a registry. Thread-safe."""

    def __init__(self, registry: CollectorRegistry, *, shards_max: int = SHARDS_MAX) -> None:
        self._shards_max = shards_max
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], _Row] = {}
        registry.register(self)

    def set(self, name: tuple[str, str], values: Mapping[str, float | None], tasks: tuple[TaskRuns, ...]) -> None:
        """Export a shard by (namespace, name). A value of None has no series, because an old value would look current."""
        row = _Row(tuple(values.get(one) for one in OF_SHARD), tasks)
        with self._lock:
            self._rows[name] = row

    def forget(self, name: tuple[str, str]) -> None:
        """Drop the series of a shard that is gone. Idempotent."""
        with self._lock:
            self._rows.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        with self._lock:
            rows = list(self._rows.items())
        yield from _sums(rows)
        if len(rows) > self._shards_max:
            rows = sorted(rows, key=lambda one: (one[1].urgency(), one[0]))[: self._shards_max]
        for name, text in OF_SHARD.items():
            family = GaugeMetricFamily(f"persist_shard_{name}", text, labels=_OF_RESOURCE)
            for labels, row in rows:
                value = row.values[_INDEX[name]]
                if value is not None:
                    family.add_metric(labels, value)
            yield family
        failures = GaugeMetricFamily(
            "persist_shard_consecutive_failures",
            "Failed runs in a row, of work that the operator tries again.",
            labels=(*_OF_RESOURCE, "task"),
        )
        success = GaugeMetricFamily(
            "persist_shard_last_success_timestamp_seconds",
            "End of the last run that succeeded.",
            labels=(*_OF_RESOURCE, "task"),
        )
        for labels, row in rows:
            for one in row.tasks:
                if one.failures is not None:
                    failures.add_metric([*labels, one.task], one.failures)
                if one.success_s is not None:
                    success.add_metric([*labels, one.task], one.success_s)
        yield failures
        yield success


def _sums(rows: list[tuple[tuple[str, str], _Row]]) -> Iterator[Metric]:
    found: dict[str, tuple[float, ...]] = {}
    for (namespace, _), row in rows:
        one = (1.0, row.of("ready"), float(row.is_failing), row.of("live_bytes"), row.of("debt_bytes"))
        sums = found.get(namespace, (0.0,) * len(one))
        found[namespace] = tuple(left + right for left, right in zip(sums, one, strict=True))
    for index, (name, text) in enumerate(_SUMS.items()):
        family = GaugeMetricFamily(name, text, labels=["namespace"])
        for namespace, sums in found.items():
            family.add_metric([namespace], sums[index])
        yield family
