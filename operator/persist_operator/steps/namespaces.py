"""Labels of namespaces, for storage profiles that select by labels. Without such a profile the operator sends no request, because it would
need one more right.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from persist_engine.base.env import Env

from persist_operator.api.shard import Shard
from persist_operator.cluster.port import NAMESPACE, Cluster
from persist_operator.settings import OperatorSettings

#: A removed label stays in effect for at most this time. A namespace takes one request in this time, for any number of shards.
_FRESH_S = 10.0


class NamespaceLabels:
    """A cache of namespaces' labels. Thread-safe."""

    def __init__(self, cluster: Cluster, settings: OperatorSettings, env: Env) -> None:
        self._cluster, self._settings, self._env = cluster, settings, env
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Mapping[str, str]]] = {}

    def of(self, shard: Shard) -> Mapping[str, str]:
        """The labels of the shard's namespace, at most ten seconds old; empty when the shard's profile does not select by labels. Raises
        ApiError.
        """
        namespace = shard.meta.namespace
        profile = self._settings.storage_profiles.get(shard.profile_name(self._settings))
        if profile is None or not profile.allowed_namespaces.match_labels:
            return {}
        now_s = self._env.monotonic_s()
        with self._lock:
            read_s, labels = self._known.get(namespace, (None, {}))
        if read_s is not None and now_s - read_s < _FRESH_S:
            return labels
        found = self._cluster.get(NAMESPACE, "", namespace)
        labels = {} if found is None else dict(found["metadata"].get("labels") or {})
        with self._lock:
            self._known = {name: one for name, one in self._known.items() if now_s - one[0] < _FRESH_S}
            self._known[namespace] = (now_s, labels)
        return labels
