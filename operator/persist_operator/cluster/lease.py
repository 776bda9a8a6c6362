"""Leader election by a Lease: at most one leader, as long as the clocks run at about the same speed.

A candidate never compares its clock with the leader's. It takes over when the Lease has not changed for the duration of the Lease by the
candidate's own monotonic clock. The safety of shards does not depend on this, because every step of the operator is idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from persist_engine.base.env import Env

from persist_operator.cluster.port import LEASE, ApiError, Cluster
from persist_operator.settings import LeaderSettings


@dataclass(slots=True)
class _Observed:
    version: str
    since_s: float


class Election:
    """One candidate. One thread calls `tick`; any thread may read `is_leader`."""

    def __init__(self, cluster: Cluster, settings: LeaderSettings, identity: str, env: Env) -> None:
        self._cluster, self._settings, self._identity, self._env = cluster, settings, identity, env
        self._observed: _Observed | None = None
        self._renewed_s: float | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this candidate holds the Lease and renewed it within its duration."""
        renewed_s = self._renewed_s  # read once, because `tick` may run in another thread
        return renewed_s is not None and self._env.monotonic_s() - renewed_s < self._settings.lease_seconds

    def tick(self) -> bool:
        """Try to take or renew the Lease, in one or two requests. Returns whether this candidate leads. After an ApiError a leader still
        leads until the duration of the Lease is over.
        """
        before_s = self._env.monotonic_s()
        try:
            if self._take():
                # This is the time before the request. The Lease was renewed no earlier.
                self._renewed_s = before_s
            else:
                self._renewed_s = None
        except ApiError:
            pass
        return self.is_leader

    def release(self) -> None:
        """Release the Lease, so that the next candidate need not wait for its end. Ignores ApiError."""
        try:
            lease = self._cluster.get(LEASE, self._settings.namespace, self._settings.lease_name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] = {**lease["spec"], "holderIdentity": ""}
                self._cluster.replace(LEASE, lease)
        except ApiError:
            pass
        self._renewed_s = None

    def _take(self) -> bool:
        namespace, name = self._settings.namespace, self._settings.lease_name
        lease = self._cluster.get(LEASE, namespace, name)
        if lease is None:
            manifest = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"namespace": namespace, "name": name},
                "spec": self._spec(transitions=0),
            }
            return self._cluster.create(LEASE, manifest)
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in {"", self._identity} and not self._is_stale(lease):
            return False
        transitions = int(spec.get("leaseTransitions") or 0) + (0 if holder == self._identity else 1)
        acquired = spec.get("acquireTime") if holder == self._identity else None
        lease["spec"] = self._spec(transitions=transitions, acquired=acquired)
        return self._cluster.replace(LEASE, lease)

    def _is_stale(self, lease: dict[str, Any]) -> bool:
        version, now_s = lease["metadata"]["resourceVersion"], self._env.monotonic_s()
        if self._observed is None or self._observed.version != version:
            self._observed = _Observed(version, now_s)
        duration_s = float((lease.get("spec") or {}).get("leaseDurationSeconds") or self._settings.lease_seconds)
        return now_s - self._observed.since_s >= duration_s

    def _spec(self, *, transitions: int, acquired: str | None = None) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._env.now_ms() / 1000, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._settings.lease_seconds)),
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
