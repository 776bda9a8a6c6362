"""Directories that outlive a power loss: what both stores on local disk make and sync. Names no store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from persist_engine.base.errors import Determinate, PersistError, StoreRefused

#: What the system says of a path that stays wrong until a person changes it, or the path. Anything else may be over soon.
_WRONG_PATH = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    }
)


def not_opened(address: str, error: OSError) -> PersistError:
    """What to raise for a store that the system did not open: StoreRefused when its path is wrong, else Determinate."""
    kind = StoreRefused if error.errno in _WRONG_PATH else Determinate
    return kind(f"open {address}: {error.strerror or error}")


def make_directory(path: Path) -> None:
    """Make `path` and what is missing above it, each durable in the one above: else a power loss could take it with all that
    was made durable within. OSError as of the system.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def sync_directory(path: Path) -> None:
    """Make the entries of `path` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
