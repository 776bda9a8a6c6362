"""Copies of resources from the watches and lists: PersistShards, and the Jobs and Pods of their maintenance. Reading them takes no request.

A copy may be old, so it decides little. A status that was planned from it is written only if the API server still stores the version that
was read. A plan that starts or stops a child is made from live reads. A missing copy proves nothing: `resource` and `children` return None
for "unknown". Copies are kept as JSON text, which takes a tenth of the memory of Python objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persist_operator.api import names
from persist_operator.cluster.port import JOB, PERSIST_SHARD, POD, Kind, Resource
from persist_operator.manifests.maintenance import COMPONENT

#: The kinds with copies. Children come first, because a shard must not be planned before its children are known.
KEPT = (JOB, POD, PERSIST_SHARD)
#: The labels of the children with copies.
CHILDREN: Mapping[str, str] = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_COMPONENT: COMPONENT}
_Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Copy:
    version: int | None
    """None for a version that is not a number. These versions have no order, so the copy that comes last stays."""
    owner: str
    text: bytes

    def is_at_least(self, version: int | None) -> bool:
        return self.version is not None and version is not None and self.version >= version


@dataclass(frozen=True, slots=True)
class Listing:
    """A list under way. `before`: the copies from before its first request. `epoch`: the number of calls of `unlist` before it."""

    kind: Kind
    namespace: str | None
    before: Mapping[_Name, _Copy]
    epoch: int


class Informed:
    """The copies. Thread-safe. A kind is unknown before its first complete list."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[str, dict[_Name, _Copy]] = {kind.kind: {} for kind in KEPT}
        self._owned: dict[tuple[str, str], set[_Name]] = {}
        self._listed: set[str] = set()
        self._doubted: set[str] = set()
        self._epoch = 0
        #: The resources that this process is writing, each with the latest version that came meanwhile.
        self._writing: dict[tuple[str, _Name], int | None] = {}

    def note(self, resource: Mapping[str, Any]) -> bool:
        """Keep a copy of a resource that the API server sent. Returns whether it was news. False when this version, or a later one, is
        already kept, and during a write, because `end_write` will answer then.
        """
        kind, name, version = _identity(resource)
        if kind not in self._copies or (kind != PERSIST_SHARD.kind and not _is_child(resource)):
            return True
        if self._knows(kind, name, version):
            return False  # this saves the work of a copy, because most events show writes of this process
        copy = _copied(resource, version)
        with self._lock:
            known = self._copies[kind].get(name)
            if known is not None and known.is_at_least(version):
                return False
            self._put(kind, name, copy)
            self._doubted.discard(copy.owner)
            if version is None or (kind, name) not in self._writing:
                return True
            self._writing[kind, name] = version
            return False

    def begin_write(self, kind: str, namespace: str, name: str) -> None:
        """The caller must call this before the request that writes the resource, because a watch may bring the new version before
        the answer.
        """
        with self._lock:
            self._writing[kind, (namespace, name)] = None

    def end_write(self, kind: str, namespace: str, name: str, stored: Resource | None) -> bool:
        """Keep what the API server stored; None when it refused. Returns whether a watch meanwhile brought another version that is news."""
        version = None
        if stored is not None:
            self.note(stored)
            version = _identity(stored)[2]
        with self._lock:
            came = self._writing.pop((kind, (namespace, name)), None)
        return came is not None and (version is None or came > version)

    def note_gone(self, resource: Mapping[str, Any]) -> None:
        """Forget a resource after a watch reported its deletion. A later resource of the same name stays."""
        kind, name, version = _identity(resource)
        with self._lock:
            known = self._copies.get(kind, {}).get(name)
            self._doubted.discard(_owner(resource))
            if known is not None and (known.version is None or (version is not None and version >= known.version)):
                self._drop(kind, name)

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """Forget a copy that was found to be old. Idempotent."""
        with self._lock:
            if kind in self._copies:
                self._drop(kind, (namespace, name))

    def doubt(self, owner_uid: str) -> None:
        """Treat the children of this owner as unknown until a watch or a list shows one of them, because the operator has just
        changed them.
        """
        with self._lock:
            self._doubted.add(owner_uid)

    def resource(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        """The copy; None when it is unknown whether there is such a resource."""
        with self._lock:
            known = self._copies[kind.kind].get((namespace, name)) if kind.kind in self._listed else None
        return None if known is None else json.loads(known.text)

    def children(self, kind: Kind, owner_uid: str) -> list[Resource] | None:
        """All Jobs or Pods of maintenance of the owner with this uid, according to the watches; None when this is unknown."""
        with self._lock:
            if kind.kind not in self._listed or owner_uid in self._doubted:
                return None
            copies = self._copies[kind.kind]
            texts = [copies[name].text for name in sorted(self._owned.get((kind.kind, owner_uid), ()))]
        return [json.loads(text) for text in texts]

    def begin_list(self, kind: Kind, namespace: str | None) -> Listing:
        """The caller must call this before the first request of a live list of `kind`, then `note` every resource of the list, then
        `end_list`.
        """
        with self._lock:
            before = self._copies[kind.kind]
            return Listing(
                kind,
                namespace,
                {name: copy for name, copy in before.items() if namespace in {None, name[0]}},
                self._epoch,
            )

    def unlist(self) -> None:
        """Treat everything as unknown until lists that begin after this call are complete, because copies of more resources are
        wanted now.
        """
        with self._lock:
            self._epoch += 1
            self._listed.clear()

    def end_list(self, listing: Listing, found: set[_Name], *, is_last: bool) -> None:
        """Forget resources that the list lacks, unless they changed since the list began. `found`: the namespace and name of every resource
        in the list. `is_last`: the kind is complete, because this was the list of the only or the last namespace.
        """
        kind = listing.kind.kind
        with self._lock:
            for name, copy in listing.before.items():
                if name not in found and self._copies[kind].get(name) is copy:
                    self._drop(kind, name)
            if is_last and listing.epoch == self._epoch:
                self._listed.add(kind)

    def _knows(self, kind: str, name: _Name, version: int | None) -> bool:
        with self._lock:
            known = self._copies[kind].get(name)
            return known is not None and known.is_at_least(version)

    def _put(self, kind: str, name: _Name, copy: _Copy) -> None:
        self._drop(kind, name)
        self._copies[kind][name] = copy
        if copy.owner:
            self._owned.setdefault((kind, copy.owner), set()).add(name)

    def _drop(self, kind: str, name: _Name) -> None:
        known = self._copies[kind].pop(name, None)
        if known is not None and known.owner:
            others = self._owned[kind, known.owner]
            others.discard(name)
            if not others:
                del self._owned[kind, known.owner]


def _is_child(resource: Mapping[str, Any]) -> bool:
    return CHILDREN.items() <= ((resource.get("metadata") or {}).get("labels") or {}).items()


def _identity(resource: Mapping[str, Any]) -> tuple[str, _Name, int | None]:
    head = resource.get("metadata") or {}
    version = str(head.get("resourceVersion", ""))
    name = (str(head.get("namespace", "")), str(head.get("name", "")))
    return str(resource.get("kind", "")), name, int(version) if version.isdecimal() else None


def _owner(resource: Mapping[str, Any]) -> str:
    return str(((resource.get("metadata") or {}).get("labels") or {}).get(names.LABEL_OWNER_UID, ""))


def _copied(resource: Mapping[str, Any], version: int | None) -> _Copy:
    head = resource.get("metadata") or {}
    # The managed fields are often more than half of a resource, and no plan reads them.
    kept = {name: value for name, value in head.items() if name != "managedFields"}
    text = json.dumps({**resource, "metadata": kept}, separators=(",", ":")).encode()
    return _Copy(version, _owner(resource), text)
