"""Keeps plans on the driver's machine, so that all actions on one frame of Spark Connect share one lease.

The server plans a frame anew for each action, in a Python worker that ends afterwards. Without kept plans, every action would leave a
reader with a lease of hours. A plan names blobs; it holds no rows and no credentials. Only this user can access the folder. If there is no
such folder, nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from persist_engine import __version__

_FOLDER = "persist-plans-{uid}"


def kept(
    frame: str,
    columns: str,
    planned: Callable[[], list[bytes]],
    *,
    now_ms: int,
    keep_ms: int,
    folder: Path | None = None,
) -> list[bytes]:
    """Returns the splits of `frame` with these columns. If they were planned less than `keep_ms` ago, it returns the kept splits. Otherwise
    it calls `planned` and keeps the result. `frame` is a name that only its session knows. `folder` None: a folder in the system's folder
    for temporary files.
    """
    place = _own(folder)
    if place is None:
        return planned()
    file = place / hashlib.sha256("\0".join((__version__, frame, columns)).encode()).hexdigest()
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(file.read_bytes())
        # Otherwise the plan is too old, or the clock was set back after it was kept.
        if found["until_ms"] - keep_ms <= now_ms < found["until_ms"]:
            return [b64decode(split) for split in found["splits"]]
    splits = planned()
    with suppress(OSError):
        _drop_expired(place, now_ms - keep_ms)
        _write(file, {"until_ms": now_ms + keep_ms, "splits": _texts(splits)})
    return splits


def _own(folder: Path | None) -> Path | None:
    """The folder, if no other user can read or write in it."""
    place = folder or Path(tempfile.gettempdir()) / _FOLDER.format(uid=os.getuid())
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return place if is_own else None


def _drop_expired(place: Path, before_ms: int) -> None:
    for path in place.iterdir():
        if path.lstat().st_mtime * 1000 < before_ms:
            path.unlink(missing_ok=True)


def _write(file: Path, content: object) -> None:
    """Writes the file atomically: it appears whole or not at all."""
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as out:
        json.dump(content, out)
    Path(name).replace(file)


def _texts(splits: Sequence[bytes]) -> list[str]:
    return [b64encode(split).decode() for split in splits]
