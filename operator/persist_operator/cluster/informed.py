"""What the watches and lists brought: PersistShards, and the Jobs and Pods of their maintenance, without a request.

A copy may be old, so it decides little. A status that was planned from it is written only if the API server still stores the version that
was read. What starts or stops a child is planned from live reads. An absence is no answer: `resource` and `children` return None for "not
known". Copies are kept as JSON text, a tenth of the memory of Python objects.
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

#: The kinds of which copies are kept. Children come first: a shard must not be planned before its children are known.
KEPT = (JOB, POD, PERSIST_SHARD)
#: The labels of the children of which copies are kept.
CHILDREN: Mapping[str, str] = {names.LABEL_MANAGED_BY: names.MANAGER, names.LABEL_COMPONENT: COMPONENT}
_Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Copy:
    version: int | None
    """None for a version that is no number: such versions have no order, and the copy that comes last stays."""
    owner: str
    text: bytes

    def is_at_least(self, version: int | None) -> bool:
        return self.version is not None and version is not None and self.version >= version


@dataclass(frozen=True, slots=True)
class Listing:
    """A list under way. `before` has the copies from before its first request, `epoch` the number of calls of `unlist` before it."""

    kind: Kind
    namespace: str | None
    before: Mapping[_Name, _Copy]
    epoch: int


class Informed:
    """The copies. Thread-safe. Nothing is known of a kind before its first complete list."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[str, dict[_Name, _Copy]] = {kind.kind: {} for kind in KEPT}
        self._owned: dict[tuple[str, str], set[_Name]] = {}
        self._listed: set[str] = set()
        self._doubted: set[str] = set()
        self._epoch = 0
        #: The resources that this process writes now, each with the latest version that came meanwhile.
        self._writing: dict[tuple[str, _Name], int | None] = {}

    def note(self, resource: Mapping[str, Any]) -> bool:
        """Keep a copy of a resource that the API server sent. Whether it was news: False when this version, or a later one, is kept, and
        while `end_write` will say it.
        """
        kind, name, version = _identity(resource)
        if kind not in self._copies or (kind != PERSIST_SHARD.kind and not _is_child(resource)):
            return True
        if self._knows(kind, name, version):
            return False  # without the work of a copy: most events bring what this process wrote
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
        """Call before the request that writes the resource. A watch may bring the new version before the request has its answer."""
        with self._lock:
            self._writing[kind, (namespace, name)] = None

    def end_write(self, kind: str, namespace: str, name: str, stored: Resource | None) -> bool:
        """Keep what the API server stored; None when it refused. Whether a watch brought another version meanwhile that is news."""
        version = None
        if stored is not None:
            self.note(stored)
            version = _identity(stored)[2]
        with self._lock:
            came = self._writing.pop((kind, (namespace, name)), None)
        return came is not None and (version is None or came > version)

    def note_gone(self, resource: Mapping[str, Any]) -> None:
        """Forget a resource of which a watch says that it was deleted. A later resource of the name stays."""
        kind, name, version = _identity(resource)
        with self._lock:
            known = self._copies.get(kind, {}).get(name)
            self._doubted.discard(_owner(resource))
            if known is not None and (known.version is None or (version is not None and version >= known.version)):
                self._drop(kind, name)

    def forget(self, kind: str, namespace: str, name: str) -> None:
        """Forget the copy, which turned out to be old. Idempotent."""
        with self._lock:
            if kind in self._copies:
                self._drop(kind, (namespace, name))

    def doubt(self, owner_uid: str) -> None:
        """Let the children of this owner be unknown until a watch or a list shows one of them: the operator changed them just now."""
        with self._lock:
            self._doubted.add(owner_uid)

    def resource(self, kind: Kind, namespace: str, name: str) -> Resource | None:
        """The copy; None when it is not known whether there is such a resource."""
        with self._lock:
            known = self._copies[kind.kind].get((namespace, name)) if kind.kind in self._listed else None
        return None if known is None else json.loads(known.text)

    def children(self, kind: Kind, owner_uid: str) -> list[Resource] | None:
        """All Jobs or Pods of maintenance of the owner with this uid, as far as the watches say; None when that is not known."""
        with self._lock:
            if kind.kind not in self._listed or owner_uid in self._doubted:
                return None
            copies = self._copies[kind.kind]
            texts = [copies[name].text for name in sorted(self._owned.get((kind.kind, owner_uid), ()))]
        return [json.loads(text) for text in texts]

    def begin_list(self, kind: Kind, namespace: str | None) -> Listing:
        """Call before the first request of a live list of `kind`; `note` every resource of it, then `end_list`."""
        with self._lock:
            before = self._copies[kind.kind]
            return Listing(
                kind,
                namespace,
                {name: copy for name, copy in before.items() if namespace in {None, name[0]}},
                self._epoch,
            )

    def unlist(self) -> None:
        """Let nothing be known until lists that begin after this call are complete: copies of more resources are wanted from now on."""
        with self._lock:
            self._epoch += 1
            self._listed.clear()

    def end_list(self, listing: Listing, found: set[_Name], *, is_last: bool) -> None:
        """Forget what the list lacks, unless it changed since the list began. `found` has the namespace and name of every resource of the
        list. With `is_last`, the kind is complete: this was the list of the only or the last namespace.
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
    # The managed fields are often the greater half of a resource, and no plan reads them.
    kept = {name: value for name, value in head.items() if name != "managedFields"}
    text = json.dumps({**resource, "metadata": kept}, separators=(",", ":")).encode()
    return _Copy(version, _owner(resource), text)
