"""kopf as an informer and nothing else: raw events of our kinds and children go to the controller.

No change-detecting handlers, timers, daemons or finalizers: kopf then writes nothing to any object (see docs/adr/0003-kopf.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from persist_operator.api import names
from persist_operator.settings import OperatorSettings

_OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"


def watch(
    changed: Callable[[Mapping[str, Any]], None],
    settings: OperatorSettings,
    *,
    stop: threading.Event,
    ready: threading.Event | None = None,
) -> None:
    """Watch until `stop` is set; blocks. Runs its own event loop. `changed` must be quick and must not raise."""
    kopf.run(
        registry=_registry(changed),
        settings=_kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=list(settings.namespaces),
        stop_flag=stop,
        ready_flag=ready,
    )


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
