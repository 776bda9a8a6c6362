"""The cost of the disk alone. Peers do not wait for the disk, so their figures are also shown with that wait added."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path


class NewFiles:
    """Makes new files below `folder` durable, together with the folders that contain them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[Path] = set()

    def sync_s(self) -> float:
        """Syncs every new file, then every folder that contains one. Returns the seconds of the syncs, without the search for the files."""
        new = {path for path in self._folder.rglob("*") if path.is_file()} - self._known
        self._known |= new
        began = time.perf_counter()
        for path in [*new, *{path.parent for path in new}]:
            _sync(path)
        return time.perf_counter() - began


class BareDisk:
    """The least work of a durable append on files and SQLite: one new file, fsynced with its folder, if there is data, and one SQLite
    commit that is as durable as ours.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._log = sqlite3.connect(folder / "log.db", isolation_level=None)
        self._log.execute("PRAGMA journal_mode=WAL")
        self._log.execute("PRAGMA synchronous=FULL")
        self._log.execute("CREATE TABLE log (number INTEGER PRIMARY KEY, data BLOB)")

    def append(self, file_bytes: bytes, log_bytes: bytes) -> None:
        """One durable append."""
        if file_bytes:
            path = self._folder / os.urandom(8).hex()
            path.write_bytes(file_bytes)
            _sync(path)
            _sync(self._folder)
        self._log.execute("INSERT INTO log (data) VALUES (?)", (log_bytes,))

    def close(self) -> None:
        """Closes the database."""
        self._log.close()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
