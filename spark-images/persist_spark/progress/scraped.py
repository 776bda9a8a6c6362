"""The engine's metrics in the process of a driver. They are served to Prometheus while the run lasts, and tallied for its report.

Must not know: what is counted. Executors count nothing, because their Python workers start and end with tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.metrics import Metrics, PrometheusMetrics
from persist_engine.base.tally import StoreTally
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

from persist_spark.report import Log


class Meters:
    """The counts of one process. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.tally = StoreTally()
        self.metrics: Metrics = self.tally.over(PrometheusMetrics(self._registry))
        """For the clients of the process."""

    @contextmanager
    def served(self, port: int | None, log: Log) -> Iterator[None]:
        """While the body runs, serves `/metrics` on `port` of every address. Serves nothing without a port. If the port is taken, it logs
        that, and the body still runs, because a run must not fail because of its metrics.
        """
        if port is None:
            yield
            return
        try:
            server, thread = start_http_server(port, registry=self._registry)
        except OSError as error:
            log.event("metrics_not_served", port=port, error=str(error))
            yield
            return
        log.event("metrics", port=server.server_address[1])
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
