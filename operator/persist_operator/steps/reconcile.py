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
from persist_engine.base.errors import PersistError

from persist_operator.api import conditions, names, times
from persist_operator.api.conditions import Condition
from persist_operator.api.resource import Meta
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge, StoreBusy
from persist_operator.cluster.port import BY_KIND, EVENT, ApiError, Cluster, Resource
from persist_operator.plan.actions import Action, AdvanceSince, InitialiseShard, Note, Plan, action_key, done_note
from persist_operator.plan.observed import ActionFailure
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import OperatorSettings
from persist_operator.steps import refused
from persist_operator.steps.act import Actor
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.observe import Observer

_LOG = logging.getLogger(__name__)
_AFTER_NEWS_S = 0.2
#: The API server's word for a status that its definition does not allow.
_INVALID = 422
_PASSING_WORTH_TELLING = 2
#: Refusals that plan/shard.py tells in its own way, and keeps the time of.
_TOLD_BY_THE_SHARD = {InitialiseShard.__name__, AdvanceSince.__name__}
_ACCEPTED = (
    Condition("Ready", "Unknown", "Accepted", "not looked at yet"),
    Condition("Reconciling", "True", "Accepted", "not looked at yet"),
)


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
        self._actor = Actor(cluster, bridge, settings, env, metrics)
        self._lock = threading.Lock()
        self._failures: dict[Key, dict[str, ActionFailure]] = {}
        self._blind: dict[Key, int] = {}

    def reconcile(self, key: Key) -> float | None:
        """Bring the resource one step on; seconds until it wants another look, None when it is gone.

        What an action is refused is told by the status of the next reconcile, which is wanted at once. What keeps the resource from
        being looked at or planned for is told by the status, too, and raised: repeat later. StoreBusy
        when the shard's store has no room for a call now: repeat soon, nothing is told. Idempotent.
        """
        started_s = self._env.monotonic_s()
        resource = self._accepted(key)
        if resource is None:
            self._forget(key)
            return None
        try:
            # A definition older than this operator leaves newer fields out: their defaults are filled in here.
            meta, plan = self._plan(key, load_schemas().default(resource))
        except StoreBusy:
            raise
        except Exception as error:
            self._tell(key, resource, error)
            raise
        with self._lock:
            self._blind.pop(key, None)
        if meta.deleting:
            return None
        try:
            if not self._write_status(key, resource, plan.status):
                self._forget(key)
                return None
        except ApiError as error:
            if error.status == _INVALID:
                self._tell(key, resource, error)
            raise
        for note in plan.notes:
            self._post(key, meta, note)
        self._keep_only(key, plan.refused)
        look_again = False
        for action in plan.actions:
            # Not `any`: every action is done.
            look_again = self._do(key, meta, action) or look_again
        if look_again:
            return min(plan.requeue_after_s or 0.0, _AFTER_NEWS_S)
        if plan.requeue_after_s is None:
            return None
        if plan.is_periodic:
            return plan.requeue_after_s * self._env.uniform(1.0, 1.1)
        # What is due is due then, however long this took.
        return max(0.0, plan.requeue_after_s - (self._env.monotonic_s() - started_s))

    def _accepted(self, key: Key) -> Resource | None:
        """The resource as it is stored, with a status; None when it is gone. One without any counts as ready to those who wait by
        kstatus: it gets its first status before anything is asked of anybody.
        """
        kind = BY_KIND[key.kind]
        resource = self._cluster.get(kind, key.namespace, key.name)
        if resource is None or resource.get("status") or resource["metadata"].get("deletionTimestamp"):
            return resource
        generation = int(resource["metadata"].get("generation", 1))
        first = conditions.with_outcome({}, _ACCEPTED, (), generation=generation, now_ms=self._env.now_ms())
        return self._cluster.get(kind, key.namespace, key.name) if self._write_status(key, resource, first) else None

    def _do(self, key: Key, meta: Meta, action: Action) -> bool:
        """Whether there is something new for the next plan to tell."""
        what = action_key(action)
        with self._lock:
            before = self._failures.get(key, {}).get(what)
        try:
            done = self._actor.act(action, meta)
        except StoreBusy:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is: the resource's status tells of it, and other actions go on
            now_ms = self._env.now_ms()
            failure = refused.as_failure(error, before, generation=meta.generation, now_ms=now_ms)
            with self._lock:
                self._failures.setdefault(key, {})[what] = failure
            self._metrics.refusals.labels(what=type(action).__name__).inc()
            unexpected = error if not isinstance(error, PersistError) else None
            _LOG.warning(
                "action failed",
                extra={"key": str(key), "action": what, "error": failure.message},
                exc_info=unexpected,
            )
            return True
        with self._lock:
            self._failures.get(key, {}).pop(what, None)
        _LOG.info("acted", extra={"key": str(key), "action": what, "run": getattr(action, "name", None)})
        note = done_note(action) if done else None
        if note is not None:
            self._post(key, meta, note)
        return before is not None or isinstance(action, InitialiseShard)

    def _keep_only(self, key: Key, standing: frozenset[str]) -> None:
        with self._lock:
            failures = self._failures.get(key, {})
            for what in failures.keys() - standing - _TOLD_BY_THE_SHARD:
                del failures[what]

    def _tell(self, key: Key, resource: Resource, error: Exception) -> None:
        """Have the status say that there is no plan, and why. The other parts of it stay: what they say was seen.

        What passes by itself is told from the second time on.
        """
        with self._lock:
            self._blind[key] = self._blind.get(key, 0) + 1
            if refused.is_passing(error) and self._blind[key] < _PASSING_WORTH_TELLING:
                return
        self._metrics.refusals.labels(what="plan").inc()
        status, generation = resource.get("status") or {}, int(resource["metadata"].get("generation", 1))
        told = conditions.with_outcome(
            status,
            refused.outcome(error),
            status.get("conditions", ()),
            generation=generation,
            now_ms=self._env.now_ms(),
        )
        try:
            self._write_status(key, resource, told)
        except ApiError as second:
            _LOG.warning("status not written", extra={"key": str(key), "error": str(second)})

    def _plan(self, key: Key, resource: Resource) -> tuple[Meta, Plan]:
        now_ms = self._env.now_ms()
        with self._lock:
            failures = dict(self._failures.get(key, {}))
        if key.kind == "PersistShard":
            shard = Shard.of(resource)
            observed = self._observer.shard(shard, failures)
            return shard.meta, plan_shard(shard, observed, now_ms=self._env.now_ms(), settings=self._settings)
        sink = Sink.of(resource)
        seen = self._observer.sink(sink, failures)
        return sink.meta, plan_sink(sink, seen, now_ms=now_ms, settings=self._settings)

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
        try:
            return self._cluster.apply_status(BY_KIND[key.kind], key.namespace, key.name, status, version=version)
        except ApiError:
            self._metrics.refusals.labels(what="status").inc()
            raise

    def _forget(self, key: Key) -> None:
        self._metrics.forget(key.kind, key.namespace, key.name)
        with self._lock:
            self._failures.pop(key, None)
            self._blind.pop(key, None)

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
