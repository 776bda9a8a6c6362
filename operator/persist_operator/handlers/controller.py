"""The workers of the queue. They map each change to the keys that it concerns, reconcile keys, and resync all resources periodically."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.bridge import StoreBusy
from persist_operator.cluster.informed import CHILDREN, KEPT, Informed
from persist_operator.cluster.membership import slice_of
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK, ApiError, Cluster
from persist_operator.handlers.queue import WorkQueue
from persist_operator.settings import OperatorSettings
from persist_operator.steps.leaked import leaked_pods, our_pods
from persist_operator.steps.metrics import OperatorMetrics
from persist_operator.steps.reconcile import Key, Reconciler

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
#: A key whose store was busy is due again within this time. Thousands of keys may wait, and checking whether the store has room costs
#: little.
_BUSY_S = 4.0
#: A lost race for a resource is tried again within this time, however often it was lost, because a client that changes the resource all the
#: time must not delay its status more and more.
_CONFLICT, CONFLICT_S = 409, 1.0
#: A worker is stuck when one reconcile takes longer than this. Every call of a reconcile has a limit, and their sum is less.
_STUCK_S = 600.0
#: Pause after a failed list. Lists fail until the resource definitions are installed.
_LIST_AGAIN_S = 5.0
#: The number of workers that never pause. Further workers are for concurrent waits for stores and the API server. While the process has no
#: processor time left, they would only contend for it, so each pauses before it takes a key.
BUSY_WORKERS = 4
PAUSE_S = 0.25
#: The interval at which the use of processor time is measured, and the share of a core from which on none is left.
_MEASURE_S, _BUSY_SHARE = 0.5, 0.75


class Pressure:
    """Measures whether the process uses almost all processor time that one interpreter can use of a core. Thread-safe."""

    def __init__(self, env: Env, cpu_s: Callable[[], float] = time.process_time) -> None:
        """`cpu_s` gives the seconds of processor time that the process has used."""
        self._env, self._cpu_s = env, cpu_s
        self._lock = threading.Lock()
        self._last = env.monotonic_s(), cpu_s()
        self._is_high = False

    def is_high(self) -> bool:
        """Whether the pressure was high over the last complete interval."""
        with self._lock:
            now_s, (since_s, cpu_s) = self._env.monotonic_s(), self._last
            if now_s - since_s >= _MEASURE_S:
                used_s = self._cpu_s()
                self._is_high = (used_s - cpu_s) / (now_s - since_s) >= _BUSY_SHARE
                self._last = now_s, used_s
            return self._is_high


class Controller:
    """Enqueues changes and runs the workers. Call `start` once and `stop` once."""

    def __init__(
        self,
        reconciler: Reconciler,
        cluster: Cluster,
        settings: OperatorSettings,
        env: Env,
        metrics: OperatorMetrics,
        *,
        may_act: Callable[[], bool] = lambda: True,
        informed: Informed | None = None,
    ) -> None:
        """`may_act`: whether this replica leads now. While it does not, keys wait. `informed` gets the resources of events and lists."""
        self._informed = informed or Informed()
        self._reconciler, self._cluster = reconciler, cluster
        self._settings, self._env, self._metrics = settings, env, metrics
        self._may_act = may_act
        loop = settings.loop
        self._queue: WorkQueue[Key] = WorkQueue(
            env,
            backoff_initial_s=loop.backoff_initial_seconds,
            backoff_max_s=loop.backoff_max_seconds,
            lane_of=lambda key: f"{key.kind}/{key.namespace}",  # no sink waits behind the shards of its namespace
        )
        self._lock = threading.Lock()
        self._sinks_of: dict[tuple[str, str], set[Key]] = {}
        #: None: all.
        self._slices: frozenset[int] | None = None
        self._seen: set[Key] = set()
        self._stopping, self._to_list = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._begun_s: dict[str, float] = {}
        self._busy: dict[Key, StoreBusy] = {}
        self._waits_for: str | None = "the first list of all resources"
        self._pressure = Pressure(env)

    def changed(self, resource: Mapping[str, Any], *, is_gone: bool = False) -> None:
        """Enqueue the keys that a changed resource or child concerns, after `informed` has recorded it. Never raises, for any contents of
        the resource. If this process has just read or written a shard in this version, only the sinks that use it are enqueued. Changes
        that concern only keys of other replicas are dropped.
        """
        owned = self._owned(resource)
        is_news = True
        if is_gone:
            self._informed.note_gone(resource)
        elif owned:
            is_news = self._informed.note(resource)
        for key in owned:
            if is_news or key.kind != resource.get("kind"):
                self._queue.add(key)

    def own(self, slices: frozenset[int]) -> None:
        """Reconcile only the keys of these slices from now on. Lists at once, to find new keys, and forgets keys outside of the slices. For
        one thread at a time. Without a call, every key is reconciled.
        """
        before, gained = self._slices, slices - (self._slices or frozenset())
        if gained:
            self._informed.unlist()
        self._slices = slices
        if gained:
            # A second call, because a list that began in between may lack resources of the new slices.
            self._informed.unlist()
            self._to_list.set()
        if before is None or before - slices:
            with self._lock:
                lost = [key for key in self._seen if not self._owns(key)]
            for key in lost:
                self._queue.add(key)  # a worker that has it now finishes first

    def news(self, key: Key, after_s: float) -> None:
        """Enqueue a shard that was changed in its stores. Never waits."""
        self._queue.add(key, after_s=after_s)

    def start(self) -> None:
        """Start the workers and the resync."""
        for index in range(self._settings.loop.workers):
            self._threads.append(
                threading.Thread(target=self._work, args=(index,), name=f"worker-{index}", daemon=True)
            )
        self._threads.append(threading.Thread(target=self._resync, name="resync", daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_s: float = 10.0) -> bool:
        """Begin no further reconcile, and wait for those under way. Returns whether all ended within `timeout_s`."""
        self._stopping.set()
        self._to_list.set()
        self._queue.close()
        until_s = self._env.monotonic_s() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - self._env.monotonic_s()))
        return not any(thread.is_alive() for thread in self._threads)

    def is_healthy(self) -> bool:
        """Whether all threads are alive and at least one worker is not stuck. The length of the queue does not count, because a restart
        does not help an operator that is busy or has slow stores.
        """
        if self._stopping.is_set():
            return True
        now_s, begun_s = self._env.monotonic_s(), dict(self._begun_s)
        stuck = sum(1 for since_s in begun_s.values() if now_s - since_s > _STUCK_S)
        return all(thread.is_alive() for thread in self._threads) and stuck < self._settings.loop.workers

    @property
    def waits_for(self) -> str | None:
        """The reason, for people, why not every resource was enqueued yet; None after the first complete list."""
        return self._waits_for

    def export(self) -> None:
        """Update the gauges of the queue."""
        self._metrics.queue_depth.set(self._queue.depth)
        self._metrics.queue_oldest.set(self._queue.oldest_s)

    def resync(self, *, is_periodic: bool = True) -> None:
        """List everything, to find changes that a watch missed. Enqueues new resources at once. The periodic resync also enqueues every
        other resource at some time before the next resync. Counts leaked pods.
        """
        pods, uids = our_pods(self._cluster, self._namespaces), set[str]()
        for kind in KEPT:
            for index, namespace in enumerate(self._namespaces):
                listing, found = self._informed.begin_list(kind, namespace), set()
                for page in self._cluster.pages(kind, namespace, {} if kind is PERSIST_SHARD else CHILDREN):
                    for resource in page:
                        head = resource["metadata"]
                        found.add((head["namespace"], head["name"]))
                        uids.add(head.get("uid", ""))
                        owned = self._owned(resource)
                        if owned:
                            is_news = self._informed.note(resource)
                            self._listed(owned, is_news=is_news or self._are_new(owned), is_periodic=is_periodic)
                self._informed.end_list(listing, found, is_last=index + 1 == len(self._namespaces))
        for namespace in self._namespaces:
            for page in self._cluster.pages(SPARK_SINK, namespace, {}):
                for resource in page:
                    uids.add(resource["metadata"].get("uid", ""))
                    owned = self._owned(resource)
                    self._listed(owned, is_news=self._are_new(owned), is_periodic=is_periodic)
        self._metrics.leaked_pods.set(leaked_pods(pods, uids))

    @property
    def _namespaces(self) -> tuple[str | None, ...]:
        return self._settings.namespaces or (None,)

    def _owns(self, key: Key) -> bool:
        slices = self._slices
        return slices is None or slice_of(key.namespace, key.name) in slices

    def _owned(self, resource: Mapping[str, Any]) -> list[Key]:
        return [key for key in self._concerned(resource) if self._owns(key)]

    def _are_new(self, keys: Iterable[Key]) -> bool:
        """Whether this replica has not reconciled one of them yet."""
        with self._lock:
            return any(key not in self._seen for key in keys)

    def _listed(self, owned: Iterable[Key], *, is_news: bool, is_periodic: bool) -> None:
        for key in owned if is_news or is_periodic else ():
            # The reconciles are spread, so that thousands of them do not come at once.
            after_s = 0.0 if is_news else self._env.uniform(0.0, self._settings.loop.resync_seconds)
            self._queue.add(key, after_s=after_s)

    def _concerned(self, resource: Mapping[str, Any]) -> Iterable[Key]:
        metadata, kind = resource.get("metadata") or {}, resource.get("kind")
        namespace, name = metadata.get("namespace", ""), metadata.get("name", "")
        if kind == PERSIST_SHARD.kind:
            with self._lock:
                return [Key(kind, namespace, name), *self._sinks_of.get((namespace, name), ())]
        if kind == SPARK_SINK.kind:
            key = Key(kind, namespace, name)
            spec = resource.get("spec") or {}
            read = (spec.get("input") or {}).get("shard")
            with self._lock:
                for shard in (spec.get("shardRef"), *([read] if read else [])):
                    self._sinks_of.setdefault((namespace, (shard or {}).get("name", "")), set()).add(key)
            return [key]
        labels = metadata.get("labels") or {}
        found = []
        if names.LABEL_SHARD in labels:
            found.append(Key(PERSIST_SHARD.kind, namespace, labels[names.LABEL_SHARD]))
        if names.LABEL_SINK in labels:
            found.append(Key(SPARK_SINK.kind, namespace, labels[names.LABEL_SINK]))
        return found

    def _work(self, index: int) -> None:
        while not self._stopping.is_set():
            if index >= BUSY_WORKERS and self._pressure.is_high():
                self._stopping.wait(PAUSE_S)
            key = self._queue.take(timeout_s=_POLL_S)
            if key is not None:
                self._begun_s[threading.current_thread().name] = self._env.monotonic_s()
                self._one(key)
                del self._begun_s[threading.current_thread().name]

    def _one(self, key: Key) -> None:
        if not self._owns(key):
            self._leave(key)
            return
        if not self._may_act():
            # The process slept, or the Lease cannot be renewed. Another replica may lead already.
            self._queue.add(key, after_s=_POLL_S)
            self._queue.done(key)
            return
        if not self._has_room(key):
            self._queue.add(key, after_s=self._env.uniform(_POLL_S, _BUSY_S))
            self._queue.done(key)
            return
        with self._lock:
            self._seen.add(key)
        started_s, result, failed, pause_s, longest_s = self._env.monotonic_s(), "ok", False, 0.0, float("inf")
        try:
            after_s = self._reconciler.reconcile(key)
            if after_s is None:
                self._forget(key)
            else:
                # The time is not changed, because the reconcile knows what is due then, and what may be spread over time.
                self._queue.add(key, after_s=after_s)
        except StoreBusy as error:
            result = "store_busy"
            with self._lock:
                self._busy[key] = error.with_traceback(None)  # the frames would keep the resource
            self._queue.add(key, after_s=self._env.uniform(_POLL_S, _BUSY_S))
        except ApiError as error:
            result, failed, pause_s = "api_error", True, error.retry_after_s
            if error.status == _CONFLICT:
                longest_s = CONFLICT_S
            _LOG.warning("reconcile failed", extra={"key": str(key), "error": str(error)})
        except Exception:  # noqa: BLE001 - any other error would end the worker's thread
            # A bug must not stop the worker or the other resources. The metric and the log show it, the backoff limits it.
            result, failed = "error", True
            _LOG.exception("reconcile raised", extra={"key": str(key)})
        finally:
            self._queue.done(key, failed=failed, pause_s=pause_s, longest_s=longest_s)
            self._metrics.reconciles.labels(kind=key.kind, result=result).inc()
            self._metrics.reconcile_seconds.labels(kind=key.kind).observe(self._env.monotonic_s() - started_s)

    def _has_room(self, key: Key) -> bool:
        """Whether the store has room again, for a key that found it busy. Without this check, a reconcile with the same end would take some
        milliseconds, and many keys wait for a busy store.
        """
        with self._lock:
            busy = self._busy.get(key)
            if busy is not None and busy.is_over():
                del self._busy[key]
                return True
            return busy is None

    def _leave(self, key: Key) -> None:
        """Stop reconciling a key that another replica reconciles. `resync` brings it back when this replica owns it again."""
        with self._lock:
            is_known = key in self._seen
            self._seen.discard(key)
            self._busy.pop(key, None)
        if is_known:
            self._reconciler.forget(key)
        self._queue.done(key)

    def _forget(self, key: Key) -> None:
        """Remove a sink that is gone from the index. The sinks of a shard that is gone stay in it. Their own reconciles find that out."""
        with self._lock:
            self._seen.discard(key)
            self._busy.pop(key, None)
        if key.kind != SPARK_SINK.kind:
            return
        with self._lock:
            for sinks in self._sinks_of.values():
                sinks.discard(key)

    def _resync(self) -> None:
        due_s = self._env.monotonic_s()
        while not self._stopping.is_set():
            is_periodic = self._env.monotonic_s() >= due_s
            if is_periodic:
                due_s += self._settings.loop.resync_seconds * self._env.uniform(0.9, 1.1)
            self._to_list.clear()
            if self._stopping.is_set():
                return
            again_s = due_s - self._env.monotonic_s()
            try:
                self.resync(is_periodic=is_periodic)
                self._waits_for = None
                self._metrics.last_resync.set(self._env.now_ms() / 1000)
            except ApiError as error:
                if self._waits_for is not None:
                    self._waits_for = f"the first list of all resources: {error}"
                _LOG.warning("resync failed", extra={"error": str(error)})
                again_s = min(again_s, max(_LIST_AGAIN_S, error.retry_after_s))
                due_s = min(due_s, self._env.monotonic_s() + again_s) if is_periodic else due_s
            self._to_list.wait(max(0.0, again_s))
