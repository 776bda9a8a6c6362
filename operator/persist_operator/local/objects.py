"""Resources of the local runner as files: one JSON document each, in the shape that the API server returns.

Owns `<state>/objects/<Kind>/<name>.json`. A write is atomic and durable (temporary name, then rename, each synced). So a killed runner or a
power loss leaves the old document or the new one, and a written intent stays. Only one process writes at a time, so a request during the
work of a runner is not lost.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from persist_engine.base.env import Env
from persist_engine.base.errors import CorruptData

from persist_operator.api import times
from persist_operator.api.names import API_VERSION

Document = dict[str, Any]
#: The kinds, and the words for each on a command line.
KINDS = {"PersistShard": ("pshard", "persistshard", "persistshards"), "SparkSink": ("ssink", "sparksink", "sparksinks")}
#: The state folder when the user names none.
STATE = Path(".persist")
#: The namespace of all local resources.
NAMESPACE = "local"
_NAME_MAX = 63


class Objects:
    """Resources by kind and name. Safe between processes."""

    def __init__(self, state: Path, env: Env) -> None:
        self._root = state / "objects"
        self._env = env

    def apply(self, document: Mapping[str, Any]) -> tuple[Document, str]:
        """Create or update a resource from a validated, defaulted document; returns it and `created`, `configured` or `unchanged`.

        Creation draws the uid. A change of the spec raises the generation. The status stays. Annotations of `document` are added to
        those of the resource.
        """
        kind, name = document["kind"], document["metadata"]["name"]
        with self._locked():
            old = self.get(kind, name)
            metadata = self._created(name) if old is None else dict(old["metadata"])
            metadata["annotations"] = metadata.get("annotations", {}) | (document["metadata"].get("annotations") or {})
            if old is not None and old["spec"] != document["spec"]:
                metadata["generation"] += 1
            new = {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": document["spec"]}
            new["status"] = (old or {}).get("status") or {}
            if new == old:
                return old, "unchanged"
            self._write(new)
        return new, "created" if old is None else "configured"

    def annotate(self, kind: str, name: str, annotation: str, value: str) -> bool:
        """Set one annotation; False when the resource does not exist."""
        with self._locked():
            document = self.get(kind, name)
            if document is None:
                return False
            annotations = document["metadata"].get("annotations", {}) | {annotation: value}
            self._write(document | {"metadata": document["metadata"] | {"annotations": annotations}})
        return True

    def mark_deleted(self, kind: str, name: str, finalizers: tuple[str, ...]) -> None:
        """Mark the resource as being deleted, with these finalizers. Idempotent; no effect when it does not exist."""
        with self._locked():
            document = self.get(kind, name)
            if document is not None and not document["metadata"].get("deletionTimestamp"):
                marks = {"deletionTimestamp": times.to_text(self._env.now_ms()), "finalizers": list(finalizers)}
                self._write(document | {"metadata": document["metadata"] | marks})

    def remove(self, kind: str, name: str) -> None:
        """Remove the resource. Idempotent."""
        with self._locked():
            path = self._path(kind, name)
            with suppress(FileNotFoundError):
                path.unlink()
                _sync(path.parent)

    def get(self, kind: str, name: str) -> Document | None:
        """The resource; None when there is none, and for a name that no resource can have."""
        if len(name) > _NAME_MAX or not name.isprintable() or "/" in name:
            return None
        return _read(self._path(kind, name))

    def every(self, kind: str) -> Iterator[Document]:
        """All resources of a kind, by name. One that another process removes meanwhile may be left out. Raises OSError for a folder that
        cannot be read.
        """
        for path in files_in(self._root / kind):
            found = _read(path) if path.suffix == ".json" else None
            if found is not None:
                yield found

    def set_status(self, kind: str, name: str, status: Mapping[str, Any]) -> None:
        """Replace the status; no effect when the resource does not exist."""
        with self._locked():
            document = self.get(kind, name)
            if document is not None and document.get("status") != status:
                self._write(document | {"status": dict(status)})

    def _created(self, name: str) -> Document:
        digits = self._env.random_bytes(16).hex()
        return {
            "namespace": NAMESPACE,
            "name": name,
            "uid": f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}",
            "generation": 1,
            "creationTimestamp": times.to_text(self._env.now_ms()),
        }

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, kind: str, name: str) -> Path:
        return self._root / kind / f"{name}.json"

    def _write(self, document: Document) -> None:
        path = self._path(document["kind"], document["metadata"]["name"])
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self._root, self._root.parent):
                _sync(folder)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)


def files_in(folder: Path) -> list[Path]:
    """The entries of a folder, by name. None without a folder. Raises OSError when it cannot be read: `glob` would find nothing there."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync(path: Path) -> None:
    """Make the contents of a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> Document | None:
    """Reads a resource; None when there is no file. Raises CorruptData, which names the file, when it holds no resource."""
    try:
        found: Document = json.loads(path.read_text(encoding="utf-8"))
        _ = found["metadata"]["name"], found["spec"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError) as error:
        remedy = "remove the file, and apply the resource again, with spec.shardId if its shard is to stay"
        raise CorruptData(
            f"{path} holds no resource: {type(error).__name__}: {error}; {remedy}", key=str(path)
        ) from error
    return found
