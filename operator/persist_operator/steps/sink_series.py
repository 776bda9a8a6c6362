"""The Prometheus series of SparkSinks, bounded in number like those of PersistShards (`shard_series`).

Up to SINKS_MAX sinks have series. With more sinks, only the sinks that need attention most have them, so that an alert on a sink in trouble
still finds its series.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: Each sink has some 20 series while a driver runs.
SINKS_MAX = 2000
_OF_RESOURCE = ("namespace", "name")
#: The series of a sink, with their descriptions.
OF_SINK: Mapping[str, str] = {
    "ready": "1 while Ready is True.",
    "attempts": "Drivers started so far.",
    "consecutive_failures": "Failed attempts since the last success.",
    "executors": "Running executors.",
    "rows_read": "Rows read by the last successful run.",
    "errors": "Rows that the last successful run could not write and collected as errors.",
    "updates_written": "Updates appended by the last successful run.",
    "missing": "Rows of the input that the shard lacked when a ReadOnly sink last compared them.",
    "extra": "Rows that the shard held too many when a ReadOnly sink last compared them.",
    "running_rows_read": "Rows that the running driver has read.",
    "running_errors": "Rows that the running driver could not write and collected as errors.",
    "running_bytes_read": "Bytes that the running driver has read, as far as its source counts them.",
    "running_task_seconds": "Time that the tasks of the running driver have taken, all executors together.",
    "running_gc_seconds": "Time that these tasks have waited for the garbage collector of Java.",
    "running_shuffle_bytes": "Bytes that these tasks have written for other tasks.",
    "running_batches": "Batches that the running driver of a stream has committed.",
    "rollout": "1 while a new revision is on its way to take over from the driver that runs.",
    "rolled_back": "1 while the newest revision is rolled back, and an older one runs.",
    "rollout_lag_seconds": "Seconds from a commit of the driver that runs to its comparison by the driver on standby.",
    "rollout_missing": "Updates that the driver on standby would have written and the running driver did not.",
    "rollout_extra": "Updates that the running driver wrote and the driver on standby would not have.",
    "lag_seconds": "Seconds from the choice of the newest batch of a stream to its commit.",
    "fresh": "1 while Fresh is True, 0 while it is not. Only of sinks with spec.freshness.",
    "fresh_timestamp_seconds": "The shard has everything that the input had at this time. Only of sinks with spec.freshness.",
    "stalled": "1 while Stalled is True: the operator waits for a change by a person.",
    "suspended": "1 while the resource is suspended.",
    "running": "1 while Running is True: a driver runs.",
    "driver_pending": "1 while the pod of the driver is created or pending.",
    "executors_wanted": "Executors that the spec asks for, while a driver runs.",
    "fresh_target_seconds": "spec.freshness.targetSeconds.",
    "next_run_timestamp_seconds": "Time of the next run of a Scheduled sink that is not suspended.",
}
_FAILURE = "spark_sink_last_failure_timestamp_seconds"


class SinkSeries(Collector):
    """A collector on a registry. Thread-safe."""

    def __init__(self, registry: CollectorRegistry, *, sinks_max: int = SINKS_MAX) -> None:
        self._sinks_max = sinks_max
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], dict[str, float]] = {}
        self._failures: dict[tuple[str, str], tuple[str, float]] = {}
        registry.register(self)

    def update(self, name: tuple[str, str], values: Mapping[str, float | None]) -> None:
        """Export these values of a sink by (namespace, name). Its other series stay. A value of None has no series."""
        with self._lock:
            row = {**self._rows.get(name, {}), **values}
            self._rows[name] = {series: value for series, value in row.items() if value is not None}

    def failed(self, name: tuple[str, str], failure: tuple[str, float] | None) -> None:
        """Export the class of the sink's last failure, and its time in seconds since the epoch; None: it had none."""
        with self._lock:
            if failure is None:
                self._failures.pop(name, None)
            else:
                self._failures[name] = failure

    def forget(self, name: tuple[str, str]) -> None:
        """Drop the series of a sink that is gone. Idempotent."""
        with self._lock:
            self._rows.pop(name, None)
            self._failures.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        with self._lock:
            rows, failures = list(self._rows.items()), dict(self._failures)
        if len(rows) > self._sinks_max:
            rows = sorted(rows, key=lambda one: (_urgency(one[1]), one[0]))[: self._sinks_max]
        for series, text in OF_SINK.items():
            family = GaugeMetricFamily(f"spark_sink_{series}", text, labels=_OF_RESOURCE)
            for labels, row in rows:
                if series in row:
                    family.add_metric(labels, row[series])
            yield family
        family = GaugeMetricFamily(
            _FAILURE, "End of the last attempt that failed, by its class.", labels=(*_OF_RESOURCE, "class")
        )
        for labels, _ in rows:
            if labels in failures:
                failure_class, time_s = failures[labels]
                family.add_metric((*labels, failure_class), time_s)
        yield family


def _urgency(row: Mapping[str, float]) -> tuple[float, ...]:
    """A sort key. The smaller it is, the more attention the sink needs."""
    fresh = row.get("fresh", 1.0)
    return -row.get("stalled", 0.0), row.get("ready", 1.0), fresh, -row.get("consecutive_failures", 0.0)
