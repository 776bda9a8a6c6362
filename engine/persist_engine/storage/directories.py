"""Directories that survive a power loss: creation and syncing for both stores on local disk. Names no store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from persist_engine.base.errors import Determinate, PersistError, StoreRefused

#: The system errors for a path that stays wrong until a person corrects it. Other errors may be transient.
_WRONG_PATH = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    }
)

#: A disk with less free space than this counts as full. SQLite creates files of 32 KiB.
FULL_BYTES = 64 << 10

_RIGHTS = "give this user the right to make and write files there, or correct the path"
_REMEDIES = {errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS, errno.EROFS: "mount it so that it can be written"}


def not_opened(address: str, error: OSError) -> PersistError:
    """Return the error for a store that the system did not open: StoreRefused if its path is wrong, otherwise Determinate."""
    text = f"open {address}: {error.strerror or error}"
    if error.errno not in _WRONG_PATH:
        return Determinate(text)
    return StoreRefused(f"{text}; {_REMEDIES.get(error.errno or 0, 'correct the path')}")


def is_full(path: Path) -> bool:
    """Whether the disk of a directory has almost no room for this user. False if that cannot be determined."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < FULL_BYTES


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, and make each durable in its parent directory. Otherwise a power loss could remove a
    directory together with durable contents. Raises OSError from the system.
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
