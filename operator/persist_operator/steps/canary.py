"""The canary: a PersistShard that the operator itself writes and reads, as a part of the resource's reconcile.

It proves the whole path: the resource was seen and passed the queue, its shard is claimed and answers, a commit of rows succeeds, and a
read finds them. Its series show the age of the last successful round trip, whatever holds up a later one.
"""

from __future__ import annotations

import logging
import threading

from persist_engine.base.env import Env
from persist_engine.base.errors import PersistError

from persist_operator.api.resource import Meta
from persist_operator.api.shard import Shard
from persist_operator.bridge import Bridge
from persist_operator.plan import ownership
from persist_operator.settings import OperatorSettings
from persist_operator.steps.metrics import OperatorMetrics

_LOG = logging.getLogger(__name__)


class Canary:
    """The round trips of one process. Thread-safe."""

    def __init__(self, bridge: Bridge, settings: OperatorSettings, env: Env, metrics: OperatorMetrics) -> None:
        self._bridge, self._settings, self._env, self._metrics = bridge, settings, env, metrics
        self._lock = threading.Lock()
        self._next_s = 0.0
        namespace, _, name = settings.canary.resource.partition("/")
        self._labels = (namespace, name)
        if settings.canary.resource:
            # The time begins with the process, so that a canary that never succeeds is also late.
            metrics.canary_success.labels(*self._labels).set(env.now_ms() / 1000)

    def is_it(self, meta: Meta) -> bool:
        """Whether this resource is the canary."""
        return meta.key == self._settings.canary.resource

    def visit(self, shard: Shard, shard_id: str, namespace_labels: dict[str, str]) -> float:
        """Make a round trip if one is due. `shard`: the canary, just observed. Returns the seconds until the next round trip. A failure is
        counted and logged, but raises nothing, because an alert shows it.
        """
        started_s = self._env.monotonic_s()
        with self._lock:
            if started_s < self._next_s:
                return self._next_s - started_s
            self._next_s = started_s + self._settings.canary.interval_seconds
        now_ms, owner = self._env.now_ms(), ownership.owner_of(shard, self._settings)
        try:
            location = shard.location(self._settings, namespace_labels)
            self._bridge.round_trip(location, owner, shard_id, time_ms=now_ms)
        except PersistError as error:
            self._metrics.canary_failures.labels(*self._labels).inc()
            _LOG.warning("the canary failed", extra={"key": shard.meta.key, "error": str(error)})
        else:
            self._metrics.canary_seconds.labels(*self._labels).observe(self._env.monotonic_s() - started_s)
            self._metrics.canary_success.labels(*self._labels).set(self._env.now_ms() / 1000)
        return self._settings.canary.interval_seconds
