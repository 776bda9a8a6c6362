"""Observe: read everything a plan depends on. Live reads only: what a list does not show does not exist."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.api.redact import redact
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge
from persist_operator.build.driver import COMPONENT as SINK_COMPONENT
from persist_operator.build.maintenance import COMPONENT as MAINTENANCE_COMPONENT
from persist_operator.cluster.port import CONFIG_MAP, JOB, PERSIST_SHARD, POD, ApiError, Cluster
from persist_operator.plan.observed import (
    ActionFailure,
    Executors,
    NotInspected,
    Phase,
    Run,
    ShardObserved,
    ShardView,
    SinkObserved,
)
from persist_operator.plan.shard import assigned_id, claims_of
from persist_operator.plan.sink import is_under_way
from persist_operator.settings import OperatorSettings
from persist_operator.steps import children

_LOG_LINES = 20
#: A conflict of two resources may be seen this late; listing all shards at every reconcile would cost the square of them.
_CLAIMS_S = 5.0


class Observer:
    """Reads for plans. Thread-safe."""

    def __init__(self, cluster: Cluster, bridge: Bridge, settings: OperatorSettings, env: Env) -> None:
        self._cluster, self._bridge, self._settings, self._env = cluster, bridge, settings, env
        self._lock = threading.Lock()
        self._shards: tuple[Shard, ...] = ()
        self._shards_s: float | None = None

    def shard(self, shard: Shard, failures: Mapping[str, ActionFailure]) -> ShardObserved:
        """What a PersistShard's plan needs. The stores are asked only once the id is on the status, and last: it is the newest fact."""
        shard_id = assigned_id(shard)
        if shard.meta.deleting or shard_id is None:
            return ShardObserved()
        owned = {**_owned(shard.meta.uid), names.LABEL_COMPONENT: MAINTENANCE_COMPONENT}
        jobs = self._cluster.find(JOB, shard.meta.namespace, owned)
        pods = self._cluster.find(POD, shard.meta.namespace, owned) if jobs else []
        runs = [children.maintenance_run(job, pods) for job in jobs]
        try:
            location = shard.spec.location(self._settings)
        except ValueError:
            # The plan finds the same and tells it.
            return ShardObserved(inspected=NotInspected())
        return ShardObserved(
            runs=tuple(run for run in runs if run is not None),
            claims=claims_of(shard, self._all_shards(), self._settings),
            failures=failures,
            inspected=self._bridge.inspect(location, shard_id),
        )

    def sink(self, sink: Sink, failures: Mapping[str, ActionFailure]) -> SinkObserved:
        """What a SparkSink's plan needs."""
        found = self._cluster.get(PERSIST_SHARD, sink.meta.namespace, sink.spec.shard_name)
        shard = None if found is None else Shard.of(load_schemas().default(found))
        owned = {**_owned(sink.meta.uid), names.LABEL_COMPONENT: SINK_COMPONENT}
        pods = self._cluster.find(POD, sink.meta.namespace, owned)
        drivers = [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == "driver"]
        workers = [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) == "executor"]
        runs = [children.driver_run(pod) for pod in drivers]
        untold = {run.name for run in runs if run.phase is Phase.FAILED and _is_news(sink, run)}
        runs = [
            children.driver_run(pod, log_tail=self._log_tail(sink.meta.namespace, run.name))
            if run.name in untold
            else run
            for pod, run in zip(drivers, runs, strict=True)
        ]
        newest = max((run.attempt for run in runs), default=0)
        return SinkObserved(
            leftovers=self._leftovers(sink, owned, runs),
            shard=ShardView.of(sink.spec.shard_name, shard, self._settings),
            runs=tuple(runs),
            executors=children.executors(workers, newest) if newest else Executors(),
            failures=failures,
        )

    def _leftovers(self, sink: Sink, owned: Mapping[str, str], runs: list[Run]) -> tuple[str, ...]:
        """Attempts of which only the ConfigMap is left (it is made first, and removed last)."""
        if is_under_way(sink.status):
            return ()
        found = self._cluster.find(CONFIG_MAP, sink.meta.namespace, {**owned, names.LABEL_ROLE: "driver"})
        return tuple(sorted({one["metadata"]["name"] for one in found} - {run.name for run in runs}))

    def _log_tail(self, namespace: str, pod: str) -> str:
        try:
            return redact(self._cluster.logs(namespace, pod, lines=_LOG_LINES))
        except ApiError:
            # The log is a help, not a fact: its kubelet may be gone with the pod.
            return ""

    def _all_shards(self) -> tuple[Shard, ...]:
        with self._lock:
            now_s = self._env.monotonic_s()
            if self._shards_s is None or now_s - self._shards_s > _CLAIMS_S:
                found = []
                for namespace in self._settings.namespaces or (None,):
                    found += self._cluster.find(PERSIST_SHARD, namespace, {})
                self._shards = tuple(Shard.of(load_schemas().default(one)) for one in found)
                self._shards_s = now_s
            return self._shards


def _owned(uid: str) -> dict[str, str]:
    return {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_OWNER_UID: uid}


def _is_news(sink: Sink, run: Run) -> bool:
    """Whether the plan will enter the failure of `run`: those of attempts before are told, their pods are only retained."""
    status = sink.status
    newest = run.name == status.get("driver", {}).get("podName") or run.attempt > status.get("attempt", 0)
    return bool(newest and status.get("lastFailure", {}).get("podName") != run.name)
