"""One reconcile: read the resource, observe, plan, write the status if it differs, post Events, act.

Level-triggered: the changes of a reconcile depend only on what is stored now. The status, with the intent of every action, is written
before the actions, so that after a crash the next process knows which actions were begun. For a creation, the claim in the stores has the
intent. The write replaces only the status from which the plan was made. A reconcile never writes spec, labels or annotations.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from persist_engine.base.env import Env
from persist_engine.base.errors import PersistError
from persist_engine.model.inspection import Inspection

from persist_operator.api import conditions, names, pausing, times
from persist_operator.api.redact import printable
from persist_operator.api.resource import Meta
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import Shard
from persist_operator.api.sink import Sink
from persist_operator.bridge import Bridge, StoreBusy
from persist_operator.cluster.informed import Informed
from persist_operator.cluster.port import BY_KIND, EVENT, PERSIST_SHARD, ApiError, Cluster, Resource, Stops
from persist_operator.plan.actions import (
    Action,
    AdvanceSince,
    EvolveSchema,
    InitialiseShard,
    KeepFinalizer,
    Note,
    Plan,
    ShardAction,
    action_key,
    done_note,
)
from persist_operator.plan.keeping import reclaiming
from persist_operator.plan.observed import ActionFailure, Run, Seen
from persist_operator.plan.shard import plan_shard
from persist_operator.plan.sink import plan_sink
from persist_operator.settings import OperatorSettings
from persist_operator.steps import refused
from persist_operator.steps.act import Actor
from persist_operator.steps.canary import Canary
from persist_operator.steps.contested import Contested
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.observe import Observer, Sight
from persist_operator.steps.resource_metrics import spec_of

_LOG = logging.getLogger(__name__)
_AFTER_NEWS_S = 0.2
#: The API server's code for a status that the resource definition does not allow.
_INVALID = 422
#: The number of passing failures in a row from which they are shown.
_PASSING_SHOWN_MIN = 2
#: Actions whose refusals and retries plan/shard.py itself shows.
_SHOWN_BY_THE_SHARD = {InitialiseShard.__name__, EvolveSchema.__name__, AdvanceSince.__name__}
_CONTESTED = "another operator serves this resource and writes its status: let only one release watch the namespace"
_ACCEPTED = conditions.reconciling("Accepted", "not reconciled yet", ready="Unknown")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies a resource. `str()` is its form in logs."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, with the resource and the runs from which it was made. `is_heard`: see `Sighted`."""

    resource: Resource
    meta: Meta
    plan: Plan
    runs: tuple[Run, ...] = ()
    is_heard: bool = False
    inspection: Inspection | None = None
    canary: Callable[[str], float] | None = None
    """For the canary: makes a round trip through the shard of this id if one is due, and returns the seconds until the next one."""
    shard: Shard | None = None
    """The parsed `resource`, if it is a shard."""


class Reconciler:
    """Reconciles keys. Thread-safe for different keys. The queue never gives one key to two workers."""

    def __init__(
        self,
        cluster: Cluster,
        bridge: Bridge,
        settings: OperatorSettings,
        env: Env,
        metrics: OperatorMetrics,
        *,
        informed: Informed | None = None,
        stops: Stops | None = None,
    ) -> None:
        """`informed` has the objects from the watches. Without it, every read is live. `stops`: see Actor."""
        self._cluster, self._settings, self._env, self._metrics = cluster, settings, env, metrics
        self._informed = informed or Informed()
        self._observer = Observer(cluster, bridge, settings, env, self._informed)
        self._actor = Actor(cluster, bridge, settings, env, metrics, stops=stops)
        self._canary = Canary(bridge, settings, env, metrics)
        self._contested = Contested()
        self._lock = threading.Lock()
        self._failures: dict[Key, dict[str, ActionFailure]] = {}
        self._blind: dict[Key, int] = {}
        self._uids: dict[Key, str] = {}
        self._again: Callable[[Key, float], None] = lambda key, after_s: None

    def on_news(self, listener: Callable[[Key, float], None]) -> None:
        """Call `listener` with the key of a changed resource, and the seconds after which to reconcile it. The change was in its stores, or
        was a write of another process.
        """
        self._again = listener
        self._observer.answers.on_news = lambda name, after_s: listener(Key(PERSIST_SHARD.kind, *name), after_s)

    def reconcile(self, key: Key) -> float | None:
        """Bring the resource one step forward. Returns the seconds until the next reconcile; None when the resource is gone.

        A refused action makes the next reconcile due at once, which shows the refusal on the status. An error of observation or planning is
        shown on the status and raised; the caller repeats later. Raises StoreBusy when the shard's store has no room for a call now; the
        status stays, and the caller repeats soon. Idempotent.

        A shard that this reconcile creates is observed at once, while its state is in memory. Later, it would be read from blob.
        """
        started_s = self._env.monotonic_s()
        resource = self._accepted(key)
        if resource is None:
            self.forget(key)
            return None
        self._meet(key, str(resource["metadata"].get("uid")))
        if pausing.is_paused(resource):
            return self._paused(key, resource)
        try:
            planned = self._plan(key, resource)
            if planned is not None and _only_creates(planned.plan):
                planned = self._created(key, planned)
        except StoreBusy:
            raise
        except Exception as error:
            self._show(key, resource, error)
            raise
        if planned is None:
            self.forget(key)
            return None
        resource, meta, plan = planned.resource, planned.meta, planned.plan
        if pausing.is_paused(resource):  # paused after the first read
            return self._paused(key, resource)
        with self._lock:
            self._blind.pop(key, None)
        if _only_creates(plan):
            return _AFTER_NEWS_S  # it was created and is gone again
        if meta.deleting:
            self._metrics.forget(key.kind, key.namespace, key.name)
            self._metrics.resources.deleting(resource)
            if not plan.actions and plan.requeue_after_s is None:
                return self._wait_s(planned, started_s)
        yields_s = self._contested.yields_s(key, resource, plan.status, now_s=started_s)
        if yields_s > 0:
            self._metrics.refusals.labels(what="contested").inc()
            _LOG.warning(_CONTESTED, extra={"key": str(key), "seconds": round(yields_s)})
            return yields_s
        try:
            if self._write_status(key, resource, plan.status, planned) is None:
                self.forget(key)
                return None
        except ApiError as error:
            if error.status == _INVALID:
                self._show(key, resource, error)
            raise
        for note in plan.notes:
            self._post(key, meta, note)
        self._keep_only(key, plan.refused)
        is_changed = False
        for action in plan.actions:
            # `any` would skip actions, but every action must be carried out.
            is_changed = self._do(key, meta, action, self._actor.act) or is_changed
        if not is_changed:
            return self._wait_s(planned, started_s)
        return min(plan.requeue_after_s or 0.0, _AFTER_NEWS_S)

    def _meet(self, key: Key, uid: str) -> None:
        """Forget what is known about another resource of the same name. That resource was deleted and this one created, with no reconcile
        in between.
        """
        with self._lock:
            is_other = self._uids.get(key, uid) != uid
            self._uids[key] = uid
            if is_other:
                self._failures.pop(key, None)
                self._blind.pop(key, None)
        if is_other:
            self._metrics.forget(key.kind, key.namespace, key.name)

    def _paused(self, key: Key, resource: Resource) -> float | None:
        """Show that the resource is paused, and do nothing else. Returns the same as `reconcile`, so that ages in the metrics continue
        to grow.
        """
        if resource["metadata"].get("deletionTimestamp"):
            self._metrics.forget(key.kind, key.namespace, key.name)
            self._metrics.resources.deleting(resource)
        status = pausing.paused_status(resource, now_ms=self._env.now_ms())
        if self._write_status(key, resource, status) is None:
            self.forget(key)
            return None
        return self._settings.loop.poll_seconds * self._env.uniform(1.0, 1.1)

    def _created(self, key: Key, planned: _Planned) -> _Planned | None:
        """Create the shard. Returns the next plan, which is made from the first answer of its stores, or shows the refusal.

        SUBTLE: this is the only action without its intent on the status. The stores have the intent: the claim has registered the shard's
        id.
        """
        shard, answers = planned.shard, list[Seen]()
        assert shard is not None

        def create(action: Action, _: Meta) -> bool:
            assert isinstance(action, InitialiseShard)
            answers.append(self._observer.created(shard, action))
            return False

        self._do(key, planned.meta, planned.plan.actions[0], create)
        if answers:
            again, _ = self._plan_shard(planned.resource, shard, self._refused(key), Sight.ASKED, answers[0])
            if _needed(again.plan, planned.resource) <= Sight.ASKED:
                return again
        return self._plan(key, planned.resource)

    def _wait_s(self, planned: _Planned, started_s: float) -> float:
        """The seconds until the next reconcile, if this one, which began at `started_s`, changed nothing that the next one must show."""
        plan = planned.plan
        if plan.requeue_after_s is None:
            # Nothing is left to do for a resource that is being deleted. No list shows its end, which a watch may miss.
            return self._settings.loop.resync_seconds * self._env.uniform(1.0, 1.1)
        if plan.is_periodic:
            # News brings a shard back sooner.
            loop = self._settings.loop
            quiet_s = max(loop.poll_seconds, loop.idle_seconds) if plan.is_settled else loop.idle_seconds
            idle_s = quiet_s if planned.is_heard else 0.0
            wait_s = max(plan.requeue_after_s, idle_s) * self._env.uniform(1.0, 1.1)
        else:
            # The time of this reconcile counts towards the delay.
            wait_s = max(0.0, plan.requeue_after_s - (self._env.monotonic_s() - started_s))
        shard_id = plan.status.get("shardId")
        return min(wait_s, planned.canary(shard_id)) if planned.canary is not None and shard_id else wait_s

    def _accepted(self, key: Key) -> Resource | None:
        """The resource with a status; None when it is gone. A shard is as it was last seen. kstatus treats a resource without a status as
        ready. The resource definition gives a new resource a status. Under an older definition, this call writes the first status.
        """
        kind = BY_KIND[key.kind]
        resource = self._informed.resource(kind, key.namespace, key.name) or self._live(key)
        if resource is None or resource.get("status") or resource["metadata"].get("deletionTimestamp"):
            return resource
        generation = int(resource["metadata"].get("generation", 1))
        first = conditions.with_outcome({}, _ACCEPTED, (), generation=generation, now_ms=self._env.now_ms())
        return self._write_status(key, resource, first)

    def _live(self, key: Key) -> Resource | None:
        """The resource as it is stored now."""
        found = self._cluster.get(BY_KIND[key.kind], key.namespace, key.name)
        if found is None:
            self._informed.forget(key.kind, key.namespace, key.name)
        else:
            self._informed.note(found)
        return found

    def _do(self, key: Key, meta: Meta, action: Action, act: Callable[[Action, Meta], bool]) -> bool:
        """Carry out one action with `act`. Returns whether the next plan must run at once, to show a refusal, its end, or a new shard."""
        what = action_key(action)
        with self._lock:
            before = self._failures.get(key, {}).get(what)
        if key.kind == PERSIST_SHARD.kind and not isinstance(action, ShardAction | KeepFinalizer):
            # The action concerns a child. The doubt comes before the request, because its answer may be lost.
            self._informed.doubt(meta.uid)
        try:
            done = act(action, meta)
        except StoreBusy:
            raise
        except Exception as error:  # noqa: BLE001 - the resource's status shows every error, and the other actions follow
            now_ms = self._env.now_ms()
            failure = refused.as_failure(error, before, generation=meta.generation, now_ms=now_ms)
            with self._lock:
                self._failures.setdefault(key, {})[what] = failure
            if failure.place:
                _LOG.info("action waits", extra={"key": str(key), "action": what, "why": failure.message})
                return True
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
        return before is not None or isinstance(action, InitialiseShard | EvolveSchema)

    def _keep_only(self, key: Key, standing: frozenset[str]) -> None:
        with self._lock:
            failures = self._failures.get(key, {})
            for what in failures.keys() - standing - _SHOWN_BY_THE_SHARD:
                del failures[what]

    def _show(self, key: Key, resource: Resource, error: Exception) -> None:
        """Write conditions that show why there is no plan. Other parts of the status stay, because they were observed.

        A passing failure is shown from the second one in a row.
        """
        with self._lock:
            self._blind[key] = self._blind.get(key, 0) + 1
            if refused.is_passing(error) and self._blind[key] < _PASSING_SHOWN_MIN:
                return
        self._metrics.refusals.labels(what="plan").inc()
        status, generation = resource.get("status") or {}, int(resource["metadata"].get("generation", 1))
        shown = conditions.with_outcome(
            status,
            refused.outcome(error),
            status.get("conditions", ()),
            generation=generation,
            now_ms=self._env.now_ms(),
        )
        try:
            self._write_status(key, resource, shown)
        except ApiError as second:
            _LOG.warning("status not written", extra={"key": str(key), "error": str(second)})

    def _plan(self, key: Key, resource: Resource) -> _Planned | None:
        """The plan, with the resource from which it was made; None when the resource is gone.

        A routine plan of a shard is made from remembered observations. If it would change anything, it is made again with the sight that
        the change needs (`Sight`). The sight does not cover the resource itself, which is also read live before a child is started or
        stopped.
        """
        failures = self._refused(key)
        if key.kind != PERSIST_SHARD.kind:
            sink = Sink.of(_defaulted(resource))
            found, now_ms = self._observer.sink(sink, failures), self._env.now_ms()
            plan = plan_sink(sink, found, now_ms=now_ms, settings=self._settings)
            return _Planned(resource, sink.meta, plan, found.runs)
        shard = Shard.of(_defaulted(resource))
        planned, sight = self._plan_shard(resource, shard, failures, Sight.REMEMBERED)
        needed = _needed(planned.plan, resource)
        if needed is Sight.LIVE:
            live = self._live(key)
            if live is None:
                return None
            is_same = live["metadata"]["resourceVersion"] == resource["metadata"]["resourceVersion"]
            if not (is_same and sight is Sight.LIVE):
                planned, _ = self._plan_shard(live, Shard.of(_defaulted(live)), failures, needed)
        elif needed > sight:
            planned, _ = self._plan_shard(resource, shard, failures, needed)
        return planned

    def _refused(self, key: Key) -> Mapping[str, ActionFailure]:
        with self._lock:
            return dict(self._failures.get(key, {}))

    def _plan_shard(
        self,
        resource: Resource,
        shard: Shard,
        failures: Mapping[str, ActionFailure],
        sight: Sight,
        answer: Seen | None = None,
    ) -> tuple[_Planned, Sight]:
        """The plan of `resource`, and its sight. `shard`: the parsed `resource`. `answer`: see Observer.shard."""
        found = self._observer.shard(shard, failures, sight=sight, answer=answer)
        plan = plan_shard(shard, found.observed, now_ms=self._env.now_ms(), settings=self._settings)
        plan = reclaiming.with_finalizer(plan, shard)
        seen = found.observed.inspected
        inspection = seen if isinstance(seen, Inspection) else None
        labels = dict(found.observed.namespace_labels)
        canary = partial(self._canary.visit, shard, namespace_labels=labels) if self._canary.is_it(shard.meta) else None
        visit = canary if inspection is not None else None
        planned = _Planned(resource, shard.meta, plan, found.observed.runs, found.is_heard, inspection, visit, shard)
        return planned, found.sight

    def _write_status(
        self, key: Key, resource: Resource, status: Mapping[str, Any], planned: _Planned | None = None
    ) -> Resource | None:
        """Export `status`, with the newer numbers of `planned`, and write it if it differs. Returns the resource with the status; None when
        the resource is gone. Raises ApiError, without a write, when the stored resource is newer than the one that was read, because the
        write would lose the intents of another process.
        """
        # The series of a resource end when its deletion begins. The time of the deletion has its own series.
        is_shown = not resource["metadata"].get("deletionTimestamp")
        if is_shown and key.kind == "PersistShard":
            self._metrics.set_shard(
                key.namespace,
                key.name,
                status,
                now_ms=self._env.now_ms(),
                spec=spec_of(resource) if planned is None or planned.shard is None else planned.shard.spec,
                inspection=None if planned is None else planned.inspection,
            )
        elif is_shown:
            self._metrics.set_sink(key.namespace, key.name, status)
        if is_shown:
            self._metrics.resources.show(resource, status)
        if (resource.get("status") or {}) == status:
            return resource
        version, name, stored = resource["metadata"]["resourceVersion"], (key.kind, key.namespace, key.name), None
        self._informed.begin_write(*name)
        try:
            stored = self._cluster.apply_status(BY_KIND[key.kind], key.namespace, key.name, status, version=version)
        except ApiError:
            # The copy may be old. The next reconcile reads the resource live.
            self._informed.forget(*name)
            self._metrics.refusals.labels(what="status").inc()
            raise
        finally:
            if self._informed.end_write(*name, stored):
                self._again(key, 0.0)
        if stored is not None:
            self._contested.wrote(key, resource, stored, now_s=self._env.monotonic_s())
            if is_shown:
                self._metrics.resources.written(resource, status, () if planned is None else planned.runs)
        return stored

    def forget(self, key: Key) -> None:
        """Forget everything about a resource that is gone, or that another replica reconciles now. Its series end. Idempotent."""
        self._informed.forget(key.kind, key.namespace, key.name)
        if key.kind == PERSIST_SHARD.kind:
            self._observer.answers.forget((key.namespace, key.name))
        self._metrics.forget(key.kind, key.namespace, key.name)
        self._contested.forget(key)
        with self._lock:
            self._failures.pop(key, None)
            self._blind.pop(key, None)
            self._uids.pop(key, None)

    def _post(self, key: Key, meta: Meta, note: Note) -> None:
        """Post an Event, one for equal notes within a minute. A failure is only logged, because the status has everything that matters."""
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
            "message": printable(note.message[:1024]),
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


def _defaulted(resource: Resource) -> Resource:
    """The resource with the defaults of its schema. A resource definition that is older than this operator lacks newer fields."""
    # The status is left out, because it has no defaults and is the larger part of the resource.
    status = resource.get("status") or {}
    return {
        **load_schemas().default({name: one for name, one in resource.items() if name != "status"}),
        "status": status,
    }


def _only_creates(plan: Plan) -> bool:
    return len(plan.actions) == 1 and isinstance(plan.actions[0], InitialiseShard) and not plan.notes


def _needed(plan: Plan, resource: Resource) -> Sight:
    """The sight with which `plan` for `resource` must be made."""
    if not all(isinstance(one, ShardAction) for one in plan.actions):
        return Sight.LIVE
    is_calm = not (plan.actions or plan.notes) and (resource.get("status") or {}) == plan.status
    return Sight.REMEMBERED if is_calm else Sight.ASKED
