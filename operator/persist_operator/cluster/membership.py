"""The living replicas of one operator, and the slices of the keys that each of them reconciles.

Each replica renews its own Lease and lists all Leases. As in `lease`, no clock is compared with another: a replica is gone when its
Lease has not changed for the Lease's duration by the observer's monotonic clock, or at once when it released the Lease. Every replica
computes the same division from the same members, so they need not agree on it. While two replicas see different members, a slice may
have two owners or none for some seconds. The safety of shards does not depend on it (docs/adr/0018-slices.md).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.cluster.port import LEASE, ApiError, Cluster, Resource
from persist_operator.settings import LeaderSettings, ShardingSettings

#: The number of slices. All replicas must divide in the same way, so it is not a setting. It must never change while replicas of two
#: versions run.
SLICES = 64
#: The longest duration of a Lease that counts. It is longer than any duration during a rollout from one setting to another.
_DURATION_MAX_S = 120.0
#: A new replica owns nothing for this number of polls. By then the other replicas have seen it, and have released its slices.
_SETTLE_POLLS = 2.5


def slice_of(namespace: str, name: str) -> int:
    """The slice of a resource. A sink and a shard of one name share it."""
    digest = hashlib.blake2b(f"{namespace}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SLICES


@functools.lru_cache(maxsize=8)
def divided(members: frozenset[str]) -> Mapping[int, str]:
    """The owner of each slice; empty without members. It is rendezvous hashing with a bound: each slice goes to the member with the highest
    weight that still has room. No member has more than its share, rounded up. When a member comes or goes, few other slices move.
    """
    left = dict.fromkeys(members, -(-SLICES // max(1, len(members))))
    owners = {}
    for number in range(SLICES) if members else ():
        owner = max((member for member in members if left[member]), key=lambda member: _weight(member, number))
        left[owner] -= 1
        owners[number] = owner
    return owners


def _weight(member: str, number: int) -> bytes:
    return hashlib.blake2b(f"{number}/{member}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class _Seen:
    version: str
    since_s: float
    duration_s: float
    is_released: bool


class Membership:
    """One replica. One thread calls `tick` and `leave`; any thread may read the properties."""

    def __init__(
        self,
        cluster: Cluster,
        leader: LeaderSettings,
        settings: ShardingSettings,
        env: Env,
        *,
        member: str,
        pod_uid: str | None = None,
    ) -> None:
        """`member` is the name of the pod. With `pod_uid`, the Lease belongs to the pod, and Kubernetes collects it with the pod."""
        self._cluster, self._settings, self._env = cluster, settings, env
        self._member, self._pod_uid = member, pod_uid
        self._namespace, self._group = leader.namespace, leader.lease_name
        self._seen: dict[str, _Seen] = {}
        self._tried_s = float("-inf")
        self._renewed_s: float | None = None
        self._joined_s = float("inf")

    @property
    def is_member(self) -> bool:
        """Whether this replica renewed its Lease within the duration. If not, the others may have taken its slices."""
        renewed_s = self._renewed_s  # read once, because `tick` may run in another thread
        return renewed_s is not None and self._env.monotonic_s() - renewed_s < self._settings.lease_seconds

    def tick(self) -> frozenset[int]:
        """Renew the Lease if that is due, look at the other Leases, and return the slices of this replica. Takes one to three requests.
        After an ApiError the last division is valid until the own Lease ends.
        """
        now_s = self._env.monotonic_s()
        try:
            if now_s - self._tried_s >= self._settings.renew_seconds or not self.is_member:
                self._tried_s = now_s
                self._renew(now_s)
            self._look()
        except ApiError:
            pass
        return self._slices()

    def leave(self) -> None:
        """Release the Lease, so that the others take the slices at their next poll. Ignores ApiError."""
        self._renewed_s = None
        try:
            lease = self._cluster.get(LEASE, self._namespace, self._lease_name)
            if lease is not None:
                lease["spec"] = {**(lease.get("spec") or {}), "holderIdentity": ""}
                self._cluster.replace(LEASE, lease)
        except ApiError:
            pass

    @property
    def _lease_name(self) -> str:
        return f"{self._group}-{self._member}"

    def _renew(self, before_s: float) -> None:
        """Write the own Lease. `before_s`: the time before the request. The Lease was renewed no earlier."""
        was_member = self.is_member
        lease = self._cluster.get(LEASE, self._namespace, self._lease_name)
        if lease is None:
            is_written = self._cluster.create(LEASE, self._manifest())
        else:
            acquired = (lease.get("spec") or {}).get("acquireTime") if was_member else None
            is_written = self._cluster.replace(LEASE, {**lease, "spec": self._spec(acquired)})
        if is_written:
            self._renewed_s = before_s
            if not was_member:
                self._joined_s = self._env.monotonic_s()

    def _look(self) -> None:
        """Record which Leases changed since the last look."""
        labels = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_MEMBER_OF: self._group}
        found, now_s = self._cluster.find(LEASE, self._namespace, labels), self._env.monotonic_s()
        seen = {}
        for lease in found:
            name, version = lease["metadata"]["name"], lease["metadata"]["resourceVersion"]
            spec, before = lease.get("spec"), self._seen.get(name)
            spec = spec if isinstance(spec, Mapping) else {}
            seen[name] = _Seen(
                version=version,
                since_s=before.since_s if before is not None and before.version == version else now_s,
                duration_s=self._duration_s(spec.get("leaseDurationSeconds")),
                is_released=not spec.get("holderIdentity"),
            )
        self._seen = seen

    def _duration_s(self, claimed: Any) -> float:
        """The duration that a Lease claims, within bounds. The own setting if it is not a number, because a stray Lease must not stop the
        replicas.
        """
        is_number = isinstance(claimed, int | float) and not isinstance(claimed, bool) and claimed > 0
        return min(float(claimed), _DURATION_MAX_S) if is_number else self._settings.lease_seconds

    def _slices(self) -> frozenset[int]:
        now_s = self._env.monotonic_s()
        if not self.is_member or now_s - self._joined_s < _SETTLE_POLLS * self._settings.poll_seconds:
            return frozenset()
        alive = {
            name for name, one in self._seen.items() if not one.is_released and now_s - one.since_s < one.duration_s
        }
        owners = divided(frozenset({*alive, self._lease_name}))
        return frozenset(number for number, owner in owners.items() if owner == self._lease_name)

    def _manifest(self) -> Resource:
        head: dict[str, Any] = {
            "namespace": self._namespace,
            "name": self._lease_name,
            "labels": {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_MEMBER_OF: self._group},
        }
        if self._pod_uid:
            owner = {"apiVersion": "v1", "kind": "Pod", "name": self._member, "uid": self._pod_uid}
            head["ownerReferences"] = [owner]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": head, "spec": self._spec(None)}

    def _spec(self, acquired: str | None) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._env.now_ms() / 1000, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "holderIdentity": self._member,
            "leaseDurationSeconds": max(1, round(self._settings.lease_seconds)),
            "acquireTime": acquired or now,
            "renewTime": now,
        }
