"""The starts of children by all replicas that no list may show yet. They are JSON in an annotation of one Lease, written by the Lease's
version.

A replica reads the annotation, decides, and writes its own start before it creates the child. Another start in between makes the write
fail, and the replica decides again. An entry expires. The clocks of replicas may differ by some seconds, and the expiry has room for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from persist_engine.base.env import Env

from persist_operator.api import names
from persist_operator.cluster.port import LEASE, Cluster, Resource
from persist_operator.plan.waiting.places import Place
from persist_operator.settings import LeaderSettings

_FIELDS = ("namespace", "name", "kind", "store")


@dataclass(frozen=True, slots=True)
class Started:
    """The starts, and the Lease as it was read; None when there was none."""

    places: Mapping[tuple[str, str], Place]
    entries: tuple[Mapping[str, Any], ...]
    lease: Resource | None


class SharedStarts:
    """Reads and writes them. Raises ApiError."""

    def __init__(self, cluster: Cluster, settings: LeaderSettings, env: Env, *, lasts_s: float) -> None:
        """An entry counts for `lasts_s`."""
        self._cluster, self._env, self._lasts_ms = cluster, env, round(lasts_s * 1000)
        self._namespace, self._name = settings.namespace, f"{settings.lease_name}-starts"

    def read(self) -> Started:
        """The starts that count now. An invalid annotation counts as an empty list. The lists of running pods still count."""
        lease = self._cluster.get(LEASE, self._namespace, self._name)
        notes = {} if lease is None else lease["metadata"].get("annotations") or {}
        try:
            found = json.loads(notes.get(names.ANNOTATION_STARTS) or "[]")
            entries = tuple(one for one in found if abs(self._env.now_ms() - int(one["atMs"])) < self._lasts_ms)
            starts = [Place(**{field: one[field] for field in _FIELDS}) for one in entries]
            places = {one.key: one for one in starts}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            entries, places = (), {}
        return Started(places, entries, lease)

    def add(self, place: Place, seen: Started) -> bool:
        """Record a start. Returns False, and records nothing, when the Lease has changed since `seen`."""
        entry = {**{field: getattr(place, field) for field in _FIELDS}, "atMs": self._env.now_ms()}
        return self._write([*_without(seen.entries, place.key), entry], seen.lease)

    def remove(self, key: tuple[str, str]) -> None:
        """Remove the failed start of this namespace and name. It stays when the Lease changes meanwhile."""
        seen = self.read()
        kept = _without(seen.entries, key)
        if len(kept) < len(seen.entries):
            self._write(kept, seen.lease)

    def _write(self, entries: list[Mapping[str, Any]], lease: Resource | None) -> bool:
        text = json.dumps(entries, separators=(",", ":"))
        if lease is None:
            head = {"namespace": self._namespace, "name": self._name, "annotations": {names.ANNOTATION_STARTS: text}}
            manifest = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": head, "spec": {}}
            return self._cluster.create(LEASE, manifest)
        head = lease["metadata"]
        notes = {**(head.get("annotations") or {}), names.ANNOTATION_STARTS: text}
        return self._cluster.replace(LEASE, {**lease, "metadata": {**head, "annotations": notes}})


def _without(entries: Iterable[Mapping[str, Any]], key: tuple[str, str]) -> list[Mapping[str, Any]]:
    return [one for one in entries if (one["namespace"], one["name"]) != key]
