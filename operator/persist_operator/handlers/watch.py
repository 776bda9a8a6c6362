"""kopf as an informer only: raw events of the operator's kinds and children go to the controller.

There are no change-detecting handlers, timers, daemons or finalizers, so that kopf writes to no object (see docs/adr/0003-kopf.md). kopf
runs in its own thread, so that the process handles signals itself. It is started again when it ends: kopf looks for resource
definitions only once, and ends when one of its watches fails, for example because definitions were removed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import kopf
from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK, ApiError, Cluster
from persist_operator.settings import OperatorSettings

_LOG = logging.getLogger(__name__)
_OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
_KINDS = (PERSIST_SHARD, SPARK_SINK)
#: Pause between two checks for resource definitions, so that the watches start within seconds of their installation.
_LOOK_S = 2.0
#: First and longest pause before kopf is started again; the pause doubles with each early end.
_AGAIN_S = (1.0, 30.0)
#: An end is early when kopf ran for less than this.
_STEADY_S = 60.0
#: The time that kopf has to end, and the number of times that its tasks are cancelled after that, a second apart.
_END_S, _CANCELS = 3.0, 5


class Changed(Protocol):
    """Takes the events. Must be quick and must not raise."""

    def __call__(self, resource: Mapping[str, Any], *, is_gone: bool) -> None:
        """The resource as it is now; with `is_gone`, as it was last."""


class _NoEssence(kopf.DiffBaseStorage):
    """Stores nothing. kopf would copy each resource twice and compare it with one of its annotations, for change handlers, which do not
    exist here.
    """

    def build(self, **_: Any) -> Any:
        """See kopf."""
        return None

    def fetch(self, **_: Any) -> Any:
        """See kopf."""
        return None

    def store(self, **_: Any) -> None:
        """See kopf."""


class Watches:
    """The watches of this process. Call `start` once and `stop` once. Any thread may read the properties."""

    def __init__(
        self,
        changed: Changed,
        cluster: Cluster,
        settings: OperatorSettings,
        env: Env,
        *,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` gets every event. `on_restart` is called when kopf is started again."""
        self._changed, self._cluster, self._settings, self._env = changed, cluster, settings, env
        self._on_restart = on_restart
        self._stopping, self._ready = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._end: Callable[[], object] = lambda: None
        self._waits_for = "the first look for resource definitions"
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Wait for the resource definitions in a thread, then watch. Returns at once."""
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """End the watches. Returns whether they ended within `timeout_s`. Hanging watches end with the process."""
        self._stopping.set()
        with self._lock:
            self._end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the watches run or will be started."""
        return self._thread.is_alive()

    @property
    def waits_for(self) -> str | None:
        """What the watches wait for, as text for people; None when they watch everything."""
        return None if self._ready.is_set() else self._waits_for

    def _run(self) -> None:
        pause_s = _AGAIN_S[0]
        while self._is_served_before_stop():
            began_s = self._env.monotonic_s()
            try:
                self._watch()
            except Exception:  # noqa: BLE001 - kopf raises the error of any watch, but the watches must continue
                _LOG.exception("the watches ended")
            if self._env.monotonic_s() - began_s >= _STEADY_S:
                pause_s = _AGAIN_S[0]
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _AGAIN_S[1])
            self._on_restart()

    def _is_served_before_stop(self) -> bool:
        """Wait until the API server serves both kinds; False when `stop` came first."""
        logged = ""
        while not self._stopping.is_set():
            try:
                served = self._cluster.served(names.API_VERSION)
                missing = [f"{one.plural}.{names.GROUP}" for one in _KINDS if one.plural not in served]
                self._waits_for = f"the resource definitions {', '.join(missing)}" if missing else "the first list"
            except ApiError as error:
                missing, self._waits_for = ["?"], f"the API server: {error}"
            if not missing:
                return True
            if logged != self._waits_for:
                logged = self._waits_for
                _LOG.warning("cannot watch yet, waiting for %s", logged)
            self._stopping.wait(_LOOK_S)
        return False

    def _watch(self) -> None:
        """Run kopf in its own event loop, until `stop` or until one of its tasks ends. Raises the error with which kopf ended."""
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve(loop))
        finally:
            loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        # kopf accepts several kinds of flags. Only this kind needs no thread. A thread that waits for a flag would outlive kopf.
        stop = asyncio.Event()
        with self._lock:
            if self._stopping.is_set():
                return
            self._end = lambda: loop.call_soon_threadsafe(stop.set)
        before = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=_registry(self._changed),
            settings=_kopf_settings(),
            standalone=True,
            clusterwide=not self._settings.namespaces,
            namespaces=list(self._settings.namespaces),
            stop_flag=stop,
            ready_flag=self._ready,
        )
        running = asyncio.create_task(kopf.run_tasks(tasks, ignored=before))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with self._lock:
            self._end = lambda: None
        self._waits_for = "the watches, which ended and are started again"
        self._ready.clear()
        # kopf cancels each of its tasks once. If a task treats the cancellation as the end of a request, kopf waits for it for ever.
        await asyncio.wait({running}, timeout=_END_S)
        for _ in range(_CANCELS):
            left = asyncio.all_tasks() - before
            if not left:
                break
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)
        for task in (*tasks, running):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def _registry(changed: Changed) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def on_event(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf names it so
        changed(dict(body), is_gone=type == "DELETED")

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**kwargs)

    for plural in ("persistshards", "sparksinks"):
        kopf.on.event(names.GROUP, names.VERSION, plural, registry=registry, id=f"{plural}-changed")(on_event)
    labels = {names.LABEL_MANAGED_BY: names.MANAGER}
    kopf.on.event("", "v1", "pods", labels=labels, registry=registry, id="pods-changed")(on_event)
    kopf.on.event("batch", "v1", "jobs", labels=labels, registry=registry, id="jobs-changed")(on_event)
    return registry


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.networking.request_timeout = 20
    settings.networking.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.chunk_size = 500
    # The API server sends only events of the operator's children, not of every pod in the cluster.
    settings.watching.label_selectors["", "v1", "pods"] = _OURS
    settings.watching.label_selectors["batch", "v1", "jobs"] = _OURS
    settings.posting.enabled = False
    # There is no watch on CRDs and namespaces, because it would need rights on the whole cluster.
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoEssence()
    settings.persistence.finalizer = f"{names.GROUP}/unused"
    return settings
