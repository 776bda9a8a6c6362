"""One reconcile: read the resource, observe, plan, write the status if it differs, post Events, act.

Level-triggered: depends on nothing but what is stored now. The status, and with it the intent of every action, is written before acting,
so that whoever comes after a crash knows what was begun, and over nothing but the status it was made of. Never writes spec, labels or
annotations.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persist_engine.base.env import Env
from persist_engine.base.errors import InvalidUsage, PersistError

from persist_operator.api import names, times
from persist_operator.api.redact import redact
from persist_operator.api.resource import Meta
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge, StoreBusy
from persist_operator.cluster.port import BY_KIND, EVENT, ApiError, Cluster, Resource
from persist_operator.plan.actions import InitialiseShard, Note, Plan
from persist_operator.plan.observed import ActionFailure
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import OperatorSettings
from persist_operator.steps.act import Actor
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.observe import Observer

_LOG = logging.getLogger(__name__)
_AFTER_CREATION_S = 0.2


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which resource. `str()` is how logs name it."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


class Reconciler:
    """Reconciles keys. Thread-safe for different keys; one key at a time is the queue's promise."""

    def __init__(
        self, cluster: Cluster, bridge: Bridge, settings: OperatorSettings, env: Env, metrics: OperatorMetrics
    ) -> None:
        self._cluster, self._settings, self._env, self._metrics = cluster, settings, env, metrics
        self._observer = Observer(cluster, bridge, settings, env)
        self._actor = Actor(cluster, bridge, settings, metrics)
        self._lock = threading.Lock()
        self._failures: dict[Key, dict[str, ActionFailure]] = {}

    def reconcile(self, key: Key) -> float | None:
        """Bring the resource one step on; seconds until it wants another look, None when it is gone.

        Raises ApiError when the API server fails it, StoreBusy when its store has no room for it: repeat later. Idempotent.
        """
        resource = self._cluster.get(BY_KIND[key.kind], key.namespace, key.name)
        if resource is None:
            self._forget(key)
            return None
        # A definition older than this operator leaves newer fields out: their defaults are filled in here.
        meta, plan = self._plan(key, load_schemas().default(resource))
        if meta.deleting:
            return None
        if not self._write_status(key, resource, plan.status):
            self._forget(key)
            return None
        for note in plan.notes:
            self._post(key, meta, note)
        created = False
        for action in plan.actions:
            name = type(action).__name__
            try:
                self._actor.act(action, meta)
            except (ApiError, StoreBusy):
                raise
            except PersistError as error:
                self._remember(key, name, error)
            else:
                self._remember(key, name, None)
                created = created or isinstance(action, InitialiseShard)
            _LOG.info("acted", extra={"key": str(key), "action": name, "run": getattr(action, "name", None)})
        return min(plan.requeue_after_s or 0.0, _AFTER_CREATION_S) if created else plan.requeue_after_s

    def _plan(self, key: Key, resource: Resource) -> tuple[Meta, Plan]:
        now_ms = self._env.now_ms()
        if key.kind == "PersistShard":
            shard = Shard.of(resource)
            with self._lock:
                failures = dict(self._failures.get(key, {}))
            observed = self._observer.shard(shard, failures)
            return shard.meta, plan_shard(shard, observed, now_ms=self._env.now_ms(), settings=self._settings)
        sink = Sink.of(resource)
        return sink.meta, plan_sink(sink, self._observer.sink(sink), now_ms=now_ms, settings=self._settings)

    def _write_status(self, key: Key, resource: Resource, status: Mapping[str, Any]) -> bool:
        """Whether the resource is still there. Nothing is written when nothing differs, nor (ApiError) over a newer resource
        than the one that was read: intents of whoever was faster would be lost.
        """
        if key.kind == "PersistShard":
            self._metrics.set_shard(key.namespace, key.name, status, now_ms=self._env.now_ms())
        else:
            self._metrics.set_sink(key.namespace, key.name, status)
        if (resource.get("status") or {}) == status:
            return True
        version = resource["metadata"]["resourceVersion"]
        return self._cluster.apply_status(BY_KIND[key.kind], key.namespace, key.name, status, version=version)

    def _remember(self, key: Key, action: str, error: PersistError | None) -> None:
        """Keep what an action was refused for until it succeeds; the next plan tells it."""
        if error is not None:
            _LOG.warning("action failed", extra={"key": str(key), "action": action, "error": str(error)})
        with self._lock:
            failures = self._failures.setdefault(key, {})
            if error is None:
                failures.pop(action, None)
                return
            failures[action] = ActionFailure(
                reason=error.kind.value,
                message=redact(str(error)),
                permanent=isinstance(error, InvalidUsage),
                at_ms=self._env.now_ms(),
            )

    def _forget(self, key: Key) -> None:
        self._metrics.forget(key.kind, key.namespace, key.name)
        with self._lock:
            self._failures.pop(key, None)

    def _post(self, key: Key, meta: Meta, note: Note) -> None:
        """An Event, best effort: the status holds everything that matters. The same note within a minute is the same Event."""
        now = times.to_text(self._env.now_ms())
        digest = hashlib.sha256(f"{meta.uid}{note}{now[:16]}".encode()).hexdigest()[:16]
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": key.namespace, "name": f"{key.name}.{digest}"},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": key.kind,
                "namespace": key.namespace,
                "name": key.name,
                "uid": meta.uid,
            },
            "type": note.kind,
            "reason": note.reason[:128],
            "message": note.message[:1024],
            "source": {"component": names.MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        _LOG.info("note", extra={"key": str(key), "reason": note.reason, "text": note.message})
        try:
            self._cluster.create(EVENT, manifest)
        except ApiError as error:
            _LOG.warning("event not posted", extra={"key": str(key), "error": str(error)})
