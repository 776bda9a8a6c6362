"""The operator's process: settings, leader election, then watches and workers. `python -m persist_operator.main`.

Only the leader watches and acts. A leader that loses its Lease ends the process: a fresh start is the one way back, so that no half
of an old life goes on. Exit codes: 0 after SIGTERM, 1 when the Lease was lost or the watches failed, 64 for a wrong configuration.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.metrics import PrometheusMetrics
from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

from persist_operator.bridge import Bridge
from persist_operator.cluster.kube import KubeCluster, load_client
from persist_operator.cluster.lease import Election
from persist_operator.handlers import logs
from persist_operator.handlers.controller import Controller
from persist_operator.handlers.probes import ProbeServer
from persist_operator.handlers.watch import watch
from persist_operator.settings import OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Reconciler

_LOG = logging.getLogger("persist_operator")
_CONFIG_VARIABLE = "PERSIST_OPERATOR_CONFIG"


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    try:
        path = os.environ.get(_CONFIG_VARIABLE)
        settings = OperatorSettings.load(Path(path)) if path else OperatorSettings()
    except InvalidUsage as error:
        sys.stderr.write(f"error: {error}\n")
        return 64
    logs.configure(settings.log_level)
    stop = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.getpid()}"
    return Operator(settings, identity).run(stop)


class Operator:
    """All parts, wired. `run` once."""

    def __init__(self, settings: OperatorSettings, identity: str) -> None:
        self._settings, self._env = settings, SystemEnv()
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self._metrics = metrics = OperatorMetrics(registry)

        def on_request(verb: str, status: int, seconds: float) -> None:
            metrics.api_requests.labels(verb=verb, code=str(status)).inc()

        cluster = KubeCluster(load_client(), on_request=on_request)
        self._bridge = Bridge(settings, env=self._env, metrics=PrometheusMetrics(registry))
        reconciler = Reconciler(cluster, self._bridge, settings, self._env, metrics)
        self._election = election = Election(cluster, settings.leader, identity, self._env)
        self._controller = Controller(
            reconciler,
            cluster,
            settings,
            self._env,
            metrics,
            may_act=lambda: not settings.leader.enabled or election.is_leader,
        )
        self._lost = threading.Event()
        self._leading, self._watching = threading.Event(), threading.Event()
        self._probes = ProbeServer(
            settings.http_port,
            registry=registry,
            is_healthy=lambda: not self._lost.is_set() and self._controller.is_healthy(),
            # A standby is ready too: it is ready to take over.
            is_ready=lambda: self._watching.is_set() or not self._leading.is_set(),
            refresh=self._controller.export,
        )

    def run(self, stop: threading.Event) -> int:
        """Wait for leadership, work until `stop` is set or the Lease is lost; the exit code."""
        self._probes.start()
        try:
            if not self._lead(stop):
                return 0
            self._metrics.leader.set(1)
            self._leading.set()
            _LOG.info("leading")
            renewer = threading.Thread(target=self._renew, args=(stop,), name="lease", daemon=True)
            renewer.start()
            self._controller.start()
            watch(self._controller.changed, self._settings, stop=stop, ready=self._watching)
            # kopf takes the signals over while it runs: its end is the wish to stop.
            stop.set()
            self._controller.stop()
            renewer.join(self._settings.leader.renew_seconds + 30)
            if self._settings.leader.enabled and not self._lost.is_set():
                self._election.release()
            return 1 if self._lost.is_set() else 0
        finally:
            self._metrics.leader.set(0)
            self._bridge.close()
            self._probes.stop()

    def _lead(self, stop: threading.Event) -> bool:
        """Wait until this replica leads; False when told to stop before."""
        if not self._settings.leader.enabled:
            return True
        _LOG.info("waiting for the lease")
        while not stop.is_set():
            if self._election.tick():
                return True
            stop.wait(self._settings.leader.renew_seconds * self._env.uniform(0.8, 1.2))
        return False

    def _renew(self, stop: threading.Event) -> None:
        while self._settings.leader.enabled and not stop.wait(self._settings.leader.renew_seconds):
            if not self._is_renewed():
                _LOG.error("lost the lease, ending")
                self._lost.set()
                stop.set()

    def _is_renewed(self) -> bool:
        try:
            return self._election.tick()
        except Exception:  # noqa: BLE001 - whatever it is: who renews no more must not go on as if nothing were
            _LOG.exception("renewing the lease raised")
            return self._election.is_leader


if __name__ == "__main__":
    sys.exit(main())
