"""kopf as an informer and nothing else: raw events of our kinds and children go to the controller.

No change-detecting handlers, timers, daemons or finalizers: kopf then writes nothing to any object (see docs/adr/0003-kopf.md). kopf
runs in a thread of its own, so that signals stay with the process, and is begun anew when it ends: it looks for resource
definitions only once, and ends when one of its watches fails, as it does when definitions are removed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import kopf
from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.cluster.port import PERSIST_SHARD, SPARK_SINK, ApiError, Cluster
from persist_operator.settings import OperatorSettings

_LOG = logging.getLogger(__name__)
_OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
_KINDS = (PERSIST_SHARD, SPARK_SINK)
#: Pause between two looks for resource definitions: definitions that are installed later are watched within seconds.
_LOOK_S = 2.0
#: Pause before kopf is begun anew, doubled up to the second with each early end.
_AGAIN_S = (1.0, 30.0)
#: kopf that ran this long before it ended had nothing against being begun.
_STEADY_S = 60.0


class Watches:
    """The watches of this process. `start` once, `stop` once. Any thread may ask the rest."""

    def __init__(
        self,
        changed: Callable[[Mapping[str, Any]], None],
        cluster: Cluster,
        settings: OperatorSettings,
        env: Env,
        *,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` gets every event: it must be quick and must not raise. `on_restart` is called when kopf is begun anew."""
        self._changed, self._cluster, self._settings, self._env = changed, cluster, settings, env
        self._on_restart = on_restart
        self._stopping, self._ready = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._end: Callable[[], object] = lambda: None
        self._waits_for = "the first look for resource definitions"
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to look for the resource definitions, then to watch. Returns at once."""
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """End the watches; whether they ended within `timeout_s`. What hangs is left to the end of the process."""
        self._stopping.set()
        with self._lock:
            self._end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the watches run or are about to."""
        return self._thread.is_alive()

    @property
    def waits_for(self) -> str | None:
        """What has to happen before everything is watched, for people; None when it is."""
        return None if self._ready.is_set() else self._waits_for

    def _run(self) -> None:
        pause_s = _AGAIN_S[0]
        while self._is_served_before_stop():
            began_s = self._env.monotonic_s()
            try:
                asyncio.run(self._watch())
            except Exception:  # noqa: BLE001 - kopf ends with whatever ended a watch; the watches go on
                _LOG.exception("the watches ended")
            self._waits_for = "the watches, which ended and are begun anew"
            self._ready.clear()
            if self._env.monotonic_s() - began_s >= _STEADY_S:
                pause_s = _AGAIN_S[0]
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _AGAIN_S[1])
            self._on_restart()

    def _is_served_before_stop(self) -> bool:
        """Wait until the API server serves both kinds; False when `stop` came first."""
        said = ""
        while not self._stopping.is_set():
            try:
                served = self._cluster.served(names.API_VERSION)
                missing = [f"{one.plural}.{names.GROUP}" for one in _KINDS if one.plural not in served]
                self._waits_for = f"the resource definitions {', '.join(missing)}" if missing else "the first list"
            except ApiError as error:
                missing, self._waits_for = ["?"], f"the API server: {error}"
            if not missing:
                return True
            if said != self._waits_for:
                said = self._waits_for
                _LOG.warning("cannot watch yet, waiting for %s", said)
            self._stopping.wait(_LOOK_S)
        return False

    async def _watch(self) -> None:
        # Of the kinds of flags that kopf takes only this one needs no thread: one that waits for a flag outlives kopf,
        # and keeps the event loop from closing.
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._lock:
            if self._stopping.is_set():
                return
            self._end = lambda: loop.call_soon_threadsafe(stop.set)
        try:
            await kopf.operator(
                registry=_registry(self._changed),
                settings=_kopf_settings(),
                standalone=True,
                clusterwide=not self._settings.namespaces,
                namespaces=list(self._settings.namespaces),
                stop_flag=stop,
                ready_flag=self._ready,
            )
        finally:
            with self._lock:
                self._end = lambda: None


def _registry(changed: Callable[[Mapping[str, Any]], None]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def on_event(body: kopf.Body, **_: Any) -> None:
        changed(dict(body))

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
    # Only our children come over the wire, not every pod of the cluster.
    settings.watching.label_selectors["", "v1", "pods"] = _OURS
    settings.watching.label_selectors["batch", "v1", "jobs"] = _OURS
    settings.posting.enabled = False
    # No watch on CRDs and namespaces: it needs rights on the whole cluster that the operator does not want.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{names.GROUP}/unused"
    return settings
