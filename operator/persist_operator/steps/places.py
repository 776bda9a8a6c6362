"""The places within the installation's limits. Counts the running pods by the lists of the API server, and lets starts wait for a place.

The count needs no memory of its own, so a restart of the operator changes nothing. Waiting starts are remembered only to order them. Each
start asks again, and a start that no longer asks is forgotten.

Replicas that share the resources also share the starts that no list may show yet. These starts are on a Lease, and each start writes the
Lease by its version. So two replicas never take the same place. Waiting starts are ordered only among the resources of one replica.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

from persist_engine.base.env import Env
from persist_engine.base.errors import PersistError

from persist_operator.api import names
from persist_operator.cluster.port import JOB, POD, ApiError, Cluster, Resource
from persist_operator.plan.observed import QUEUED
from persist_operator.plan.refusals import queue_wait_s
from persist_operator.plan.waiting.places import Place, PlaceKind, wait_of
from persist_operator.settings import OperatorSettings
from persist_operator.steps.shared_starts import SharedStarts, Started

#: How long a count of running pods is used. A count takes two lists of each namespace.
_COUNT_S = 5.0
#: How long a start counts as running before the API server must show it.
_STARTED_S = 30.0
_SLACK_S = 15.0
#: The number of times that a start decides, if another replica took a place in between.
_TRIES = 5
_ENDED = {"Succeeded", "Failed"}


class Queued(PersistError):
    """A start waits for a place. `place` is its place in the queue, from 1."""

    def __init__(self, message: str, *, place: int) -> None:
        super().__init__(message)
        self.place = place
        self.reason = QUEUED


class Places:
    """What runs and what waits. Thread-safe."""

    def __init__(self, cluster: Cluster, settings: OperatorSettings, env: Env) -> None:
        self._cluster, self._settings, self._env = cluster, settings, env
        self._lock = threading.Lock()
        is_shared = settings.sharding.enabled
        self._shared = SharedStarts(cluster, settings.leader, env, lasts_s=_STARTED_S) if is_shared else None
        self._counted_s: float | None = None
        self._running: dict[tuple[str, str], Place] = {}
        self._started: dict[tuple[str, str], tuple[float, Place]] = {}
        self._waiting: dict[tuple[str, str], tuple[float, Place]] = {}

    def enter(self, start: Place) -> None:
        """Takes a place for `start`, or raises Queued. Has no effect for a start that already runs, and without limits. Raises ApiError
        when the API server does not list the running pods.
        """
        if not self._settings.limits.are_set:
            return
        for _ in range(_TRIES):
            seen = None if self._shared is None else self._shared.read()
            if self._entered(start, seen):
                return
        raise Queued("place 1 in the queue; other replicas take places now", place=1)

    def leave(self, start: Place) -> None:
        """Give back the place of a start that failed. If the API server does not answer, the place expires."""
        with self._lock:
            self._started.pop(start.key, None)
        if self._shared is not None and self._settings.limits.are_set:
            with contextlib.suppress(ApiError):
                self._shared.remove(start.key)

    def _entered(self, start: Place, seen: Started | None) -> bool:
        """Like `enter`, with the starts of all replicas in `seen`. Returns False when another replica took a place meanwhile."""
        with self._lock:
            now_s = self._env.monotonic_s()
            if self._counted_s is None or now_s - self._counted_s >= _COUNT_S:
                self._running = {one.key: one for one in self._count()}
                self._counted_s = now_s
            self._started = {key: one for key, one in self._started.items() if now_s - one[0] < _STARTED_S}
            self._waiting = {key: one for key, one in self._waiting.items() if now_s < one[0]}
            if start.key in self._running:
                return True
            _, before = self._waiting.get(start.key, (0.0, None))
            start = replace(start, asked_ms=self._env.now_ms() if before is None else before.asked_ms)
            others = [one for key, (_, one) in self._waiting.items() if key != start.key]
            elsewhere = {} if seen is None else seen.places
            running = {**elsewhere, **{key: one for key, (_, one) in self._started.items()}, **self._running}
            running.pop(start.key, None)
            wait = wait_of(start, others, running.values(), self._settings.limits)
            if wait is None:
                if self._shared is not None and seen is not None and not self._shared.add(start, seen):
                    return False
                self._waiting.pop(start.key, None)
                self._started[start.key] = (now_s, start)
                return True
            self._waiting[start.key] = (now_s + queue_wait_s(wait.place) + _SLACK_S, start)
        raise Queued(f"place {wait.place} in the queue; {wait.limit} is reached", place=wait.place)

    def _count(self) -> Iterator[Place]:
        for namespace in self._settings.namespaces or (None,):
            managed = {names.LABEL_MANAGED_BY: names.MANAGER}
            drivers = {**managed, names.LABEL_COMPONENT: "sink", names.LABEL_ROLE: "driver"}
            for pod in self._cluster.find(POD, namespace, drivers):
                if (pod.get("status") or {}).get("phase") not in _ENDED:
                    yield _place(pod, "driver")
            for job in self._cluster.find(JOB, namespace, {**managed, names.LABEL_COMPONENT: "maintenance"}):
                found = (job.get("status") or {}).get("conditions") or ()
                if not any(one["type"] in {"Complete", "Failed"} and one["status"] == "True" for one in found):
                    kind = job["metadata"]["labels"].get(names.LABEL_KIND)
                    yield _place(job, "inspection" if kind == names.INSPECTION else "maintenance")


def _place(found: Resource, kind: PlaceKind) -> Place:
    head = found["metadata"]
    return Place(
        namespace=head["namespace"],
        name=head["name"],
        kind=kind,
        store=head["labels"].get(names.LABEL_STORE, ""),
    )
