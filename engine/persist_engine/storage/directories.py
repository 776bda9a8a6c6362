"""Directories that outlive a power loss: what both stores on local disk make and sync. Names no store."""

from __future__ import annotations

import os
from pathlib import Path


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
