"""The operator's process: settings, leader election, then watches and workers. `python -m persist_operator.main`.

Only the leader watches and acts. A leader that loses its Lease ends the process, so that no part of it acts as leader any more. With
`sharding`, every replica watches, and acts for its own slices of the resources (cluster.membership). SIGTERM and SIGINT end the process
within five seconds, even when calls hang: workers finish their reconciles if they can, then the process releases the Lease. Exit codes: 0
after a signal, 1 when the Lease was lost, 64 for a wrong configuration.
"""

from __future__ import annotations

import logging
import os
import queue
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

from persist_operator.api.schema_check import load_schemas
from persist_operator.bridge import Bridge
from persist_operator.cluster.informed import Informed
from persist_operator.cluster.kube import KubeCluster, load_client
from persist_operator.cluster.lease import Election
from persist_operator.cluster.membership import SLICES, Membership
from persist_operator.cluster.port import ApiError
from persist_operator.cluster.stops import DriverStops, create_key
from persist_operator.handlers import logs
from persist_operator.handlers.controller import Controller
from persist_operator.handlers.probes import ProbeServer
from persist_operator.handlers.watch import Watches
from persist_operator.settings import OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Reconciler

_LOG = logging.getLogger("persist_operator")
_CONFIG_VARIABLE = "PERSIST_OPERATOR_CONFIG"
#: The pause after a refused creation of the key of graceful stops.
_KEY_AGAIN_S = 60.0
#: The time limits of the steps of a stop: reconciles under way, release of the Lease, end of the watches, closing of connections.
_FINISH_S, _RELEASE_S, _UNWATCH_S, _CLOSE_S = 2.0, 1.5, 0.5, 0.5


def main() -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code."""
    try:
        path = os.environ.get(_CONFIG_VARIABLE)
        settings = OperatorSettings.load(Path(path)) if path else OperatorSettings()
    except InvalidUsage as error:
        sys.stderr.write(f"error: {error}\n")
        return 64
    logs.configure(settings.log_level)
    pod = os.environ.get("POD_NAME") or socket.gethostname()
    operator = Operator(settings, f"{pod}_{os.getpid()}", pod=pod, pod_uid=os.environ.get("POD_UID"))
    _stop_on_signals(operator)
    return operator.run()


def _stop_on_signals(operator: Operator) -> None:
    """Stop the operator on SIGTERM or SIGINT. The interpreter's own handler writes each signal to a socket, in any thread, and a thread
    here reads it. A Python handler would run only in the main thread, and not while that thread waits for a lock.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # noqa: FBT003 - the method has no keyword
    signal.set_wakeup_fd(writer.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        _LOG.info("ending", extra={"signal": signal.Signals(reader.recv(1)[0]).name})
        writer.detach()  # keep it open, because the handler also writes the next signal
        operator.stop()

    threading.Thread(target=wait, name="signals", daemon=True).start()


class Operator:
    """Builds and connects all parts. Call `run` once."""

    def __init__(
        self, settings: OperatorSettings, identity: str, *, pod: str = "operator", pod_uid: str | None = None
    ) -> None:
        """`identity` names this process as the leader, and `pod` names this replica among the replicas that share the resources."""
        self._settings, self._env = settings, SystemEnv()
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self._metrics = metrics = OperatorMetrics(registry)
        load_schemas()  # loaded now, because otherwise every worker would begin to parse them

        def on_request(verb: str, status: int, seconds: float) -> None:
            metrics.api_requests.labels(verb=verb, code=str(status)).inc()

        cluster = KubeCluster(load_client(), on_request=on_request)
        self._bridge = Bridge(settings, env=self._env, metrics=PrometheusMetrics(registry))
        informed = Informed()
        self._cluster, self._stops = cluster, DriverStops()
        stops = None if settings.graceful_stop.port is None else self._stops
        reconciler = Reconciler(cluster, self._bridge, settings, self._env, metrics, informed=informed, stops=stops)
        self._election = Election(cluster, settings.leader, identity, self._env)
        self._membership = Membership(
            cluster, settings.leader, settings.sharding, self._env, member=pod, pod_uid=pod_uid
        )
        self._controller = Controller(
            reconciler,
            cluster,
            settings,
            self._env,
            metrics,
            may_act=self._may_act,
            informed=informed,
        )
        reconciler.on_news(self._controller.news)
        self._watches = Watches(
            self._controller.changed, cluster, settings, self._env, on_restart=metrics.watch_restarts.inc
        )
        #: The events for which the main thread waits: "leads", "stop" or "lost".
        self._turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopping, self._leading, self._finished = threading.Event(), threading.Event(), threading.Event()
        self._lost = threading.Event()
        takes_part = self._share if settings.sharding.enabled else self._elect
        self._elector = threading.Thread(target=takes_part, name="lease", daemon=True)
        self._probes = ProbeServer(
            settings.http_port,
            registry=registry,
            sick_of=self.sick_of,
            waits_for=self.waits_for,
            refresh=self._controller.export,
        )

    def _may_act(self) -> bool:
        if self._settings.sharding.enabled:
            return self._membership.is_member
        return not self._settings.leader.enabled or self._election.is_leader

    def sick_of(self) -> str | None:
        """The problem that only a restart of the process can solve; None when there is none."""
        if self._lost.is_set():
            return "the lease is lost"
        if self._leading.is_set() and not self._finished.is_set():
            has_lease = self._settings.leader.enabled or self._settings.sharding.enabled
            elects = self._elector.is_alive() or not has_lease
            if not (self._watches.is_alive and elects):
                return "the watches or the election ended"
            if not self._controller.is_healthy():
                return "a worker ended, or all of them hang"
        return None

    def waits_for(self) -> str | None:
        """What the leader waits for before it sees every resource; None when it does. None for a standby replica, because it is ready
        to lead.
        """
        return (self._watches.waits_for or self._controller.waits_for) if self._leading.is_set() else None

    def stop(self) -> None:
        """Make `run` return. Any thread may call it, more than once."""
        self._turns.put("stop")

    def run(self) -> int:
        """Wait for leadership, then work until `stop` is called or the Lease is lost. Returns the exit code, within five seconds of
        `stop`.
        """
        self._probes.start()
        _LOG.info("serving", extra={"port": self._probes.port})
        self._elector.start()
        threading.Thread(target=self._create_stop_key, name="stop-key", daemon=True).start()
        try:
            if self._turns.get() == "leads":
                if not self._settings.sharding.enabled:
                    self._metrics.leader.set(1)
                    self._metrics.slices.set(SLICES)
                _LOG.info("leading")
                self._controller.start()
                self._watches.start()
                self._leading.set()
                self._turns.get()
            self._end()
            return 1 if self._lost.is_set() else 0
        finally:
            self._metrics.leader.set(0)
            self._metrics.slices.set(0)
            closing = threading.Thread(target=self._bridge.close, name="closing", daemon=True)
            closing.start()
            self._probes.stop()
            closing.join(_CLOSE_S)

    def _end(self) -> None:
        self._stopping.set()
        if not self._controller.stop(timeout_s=_FINISH_S):
            _LOG.warning("ending during a reconcile: every step is safe to repeat")
        self._finished.set()
        # The thread that renews the Lease also releases it, so that no renewal can follow the release.
        self._elector.join(_RELEASE_S)
        if self._leading.is_set() and not self._watches.stop(timeout_s=_UNWATCH_S):
            _LOG.info("the watches end with the process")

    def _create_stop_key(self) -> None:
        """Create the key of graceful stops, unless it is mounted already. Without a key, drivers are stopped by the deletion of their pods,
        so no refusal ends the process. Runs in its own thread, because the API server may hang.
        """
        settings = self._settings.graceful_stop
        while settings.port is not None and not self._stops.is_ready():
            try:
                is_new = create_key(self._cluster, settings, self._env)
                _LOG.info("the key of stops exists", extra={"secret": settings.secret_name, "is_new": is_new})
                return
            except ApiError as error:
                _LOG.warning("the key of stops cannot be created", extra={"error": str(error)})
            if self._stopping.wait(_KEY_AGAIN_S):
                return

    def _elect(self) -> None:
        """Take the Lease, renew it, and release it in the end. Runs in its own thread, so that a hanging API server does not
        delay a stop.
        """
        settings = self._settings.leader
        if not settings.enabled:
            self._turns.put("leads")
            return
        _LOG.info("waiting for the lease")
        while not self._stopping.is_set() and not self._is_leading():
            self._stopping.wait(settings.retry_seconds * self._env.uniform(0.8, 1.2))
        self._turns.put("leads")
        while not self._stopping.wait(settings.renew_seconds):
            if not self._is_leading():
                _LOG.error("lost the lease, ending")
                self._lost.set()
                self._turns.put("lost")
                return
        # Release after the workers have finished, unless they exceed their time.
        self._finished.wait(2 * _FINISH_S)
        self._election.release()

    def _share(self) -> None:
        """Take part in the division of the resources, and leave in the end. A replica that cannot renew its Lease owns nothing meanwhile.
        Runs in its own thread.
        """
        owned: frozenset[int] | None = None
        while not self._stopping.is_set():
            slices = self._tick()
            if slices != owned:
                _LOG.info("slices", extra={"count": len(slices), "of": SLICES})
                self._controller.own(slices)
                self._metrics.slices.set(len(slices))
                self._metrics.leader.set(int(0 in slices))
                if owned is None:
                    self._turns.put("leads")
                owned = slices
            self._stopping.wait(self._settings.sharding.poll_seconds)
        # Leave after the workers have finished, unless they exceed their time.
        self._finished.wait(2 * _FINISH_S)
        self._membership.leave()

    def _tick(self) -> frozenset[int]:
        try:
            return self._membership.tick()
        except Exception:  # noqa: BLE001 - after any error, the replica owns nothing
            _LOG.exception("renewing the lease raised")
            return frozenset()

    def _is_leading(self) -> bool:
        try:
            return self._election.tick()
        except Exception:  # noqa: BLE001 - after any error, leadership ends with the Lease's duration
            _LOG.exception("renewing the lease raised")
            return self._election.is_leader


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # sys.exit would wait for calls that hang in a store. The Lease is already released.
    os._exit(code)
