"""Blob in a directory, one file per object, for one machine. Survives kill -9 and power loss.

An object is written under `.tmp/`, fsynced, renamed to its key, and made durable by fsyncing the directories above it. A reader
therefore sees the whole object or none. Directories that a delete leaves empty are removed; `set` tolerates losing that race.
SUBTLE: a key cannot be both an object and the directory of another (`a` and `a/b`). persist's keys never are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from persist_engine.base.env import Env
from persist_engine.base.errors import Determinate, Indeterminate, NoStore, NotKept
from persist_engine.storage.blob import BlobInfo, KeptBlob
from persist_engine.storage.checks import check_blob_key, check_blob_value, check_prefix, check_range
from persist_engine.storage.directories import make_directory, not_opened, sync_directory

#: The limit on attempts of a set that loses its directory to deletes. Each loss needs a delete by another process.
PLACE_ATTEMPTS_MAX = 100
#: A temporary file of this age is abandoned, because no write takes a day.
STALE_TEMP_MS = 24 * 60 * 60 * 1000
#: If a directory was last changed longer ago than this, its next change gives it a different time: no file system's clock is coarser.
SETTLED_MS = 2_000
#: The number of directories remembered as durable. When there are more, all are forgotten and synced again.
SYNCED_MAX = 10_000
_TEMP = ".tmp"


class FileBlob:
    """Opens the directory `root`, which several processes may share. Creates a missing directory; without `create`, raises
    NoStore instead. Raises StoreRefused for an impossible path.
    """

    def __init__(self, root: Path, *, env: Env, create: bool = True) -> None:
        self._root = root
        self._env = env
        self._synced: dict[Path, tuple[int, int]] = {}
        """The inode and change time of each directory at the moment when all its entries were last made durable."""
        try:
            if create:
                make_directory(root / _TEMP)
            else:
                self._check_exists()
            self._drop_stale_temps()
        except OSError as error:
            raise not_opened(self.address(), error) from error

    def _check_exists(self) -> None:
        """Raises NoStore if no blobs were ever stored here, and OSError if that cannot be determined. Changes nothing, because
        the directory may belong to something else.
        """
        try:
            (self._root / _TEMP).stat()
        except FileNotFoundError as error:
            if not self._root.exists():
                raise NoStore(
                    f"there is no directory {self.address()}: check the path; creating a table or shard there makes it"
                ) from error
            raise NoStore(
                f"{self.address()} is not a blob store: it has no {_TEMP}/ in it; check the path (if it is a copy of a store, create the "
                f"missing directory {_TEMP}/ in it)"
            ) from error

    def get(self, key: str) -> bytes | None:
        """See Blob."""
        return self._read("get", key, lambda file: file.read())

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes | None:
        """See Blob."""
        check_range(key, start, size_bytes)
        return self._read("get", key, lambda file: os.pread(file.fileno(), size_bytes, start))

    def _read(self, verb: str, key: str, read: Callable[[BinaryIO], bytes]) -> bytes | None:
        try:
            with self._path(key).open("rb") as file:
                return read(file)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_there(verb, key)
            return None
        except OSError as error:
            raise Determinate(f"{verb} {key} at {self.address()}: {_reason(error)}", key=key) from error

    def set(self, key: str, value: bytes) -> None:
        """See Blob. A full disk raises Determinate; a failed fsync of a directory raises Indeterminate."""
        check_blob_value(key, value)
        path = self._path(key)
        temp = self._root / _TEMP / self._env.random_bytes(16).hex()
        try:
            try:
                _write_durably(temp, value)
                self._place(temp, path)
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise Determinate(f"set {key} at {self.address()}: {_reason(error)}", key=key) from error
        try:
            self._sync_above(path)
        except OSError as error:
            raise Indeterminate(f"set {key} at {self.address()}: {_reason(error)}", key=key) from error

    def delete(self, key: str) -> int | None:
        """See Blob."""
        path = self._path(key)
        try:
            size = path.lstat().st_size
            path.unlink()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_there("delete", key)
            return None
        except OSError as error:
            # Some systems reveal a directory only by refusing to unlink it. In that case this key has no object.
            if path.is_dir():
                return None
            raise Determinate(f"delete {key} at {self.address()}: {_reason(error)}", key=key) from error
        try:
            self._sync_above(path)
        except OSError as error:
            raise Indeterminate(f"delete {key} at {self.address()}: {_reason(error)}", key=key) from error
        self._prune(path.parent)
        return size

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob. Objects created or deleted during the listing may be missing; all others are listed."""
        check_prefix(prefix)
        return self._walk(prefix.rpartition("/")[0], prefix)

    def list_kept(self, prefix: str) -> Iterator[KeptBlob]:
        """See Blob. This store keeps no deleted objects."""
        check_prefix(prefix)
        return iter(())

    def restore(self, key: str) -> None:
        """See Blob. This store keeps no deleted objects."""
        if not self._path(key).is_file():
            self._check_there("restore", key)
            raise NotKept(f"restore {key} at {self.address()}: deleted objects are not kept", key=key)

    def address(self) -> str:
        """See Blob."""
        return f"file://{self._root}"

    def close(self) -> None:
        """Releases nothing: no file stays open."""

    def _check_there(self, verb: str, key: str) -> None:
        """Raise Determinate if the whole directory is missing, for example unmounted: objects missing from it may well exist."""
        try:
            (self._root / _TEMP).stat()
        except OSError as error:
            raise Determinate(
                f"{verb} {key} at {self.address()}: the directory is missing, is it mounted?", key=key
            ) from error

    def _path(self, key: str) -> Path:
        check_blob_key(key)
        return self._root / key

    def _place(self, temp: Path, path: Path) -> None:
        for _ in range(PLACE_ATTEMPTS_MAX):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temp.replace(path)
            except (FileNotFoundError, FileExistsError):
                # A delete pruned a directory between the two steps, or while the parents were being created.
                if not temp.exists() or path.parent.is_file():
                    raise
            else:
                return
        raise FileNotFoundError(f"directory removed {PLACE_ATTEMPTS_MAX} times while writing")

    def _sync_above(self, path: Path) -> None:
        """Make the entries of every directory from the object's up to the root durable.

        Every write syncs all of them: another process may have created a directory and not synced it yet.
        """
        for directory in path.parents:
            # Not found: the object was deleted again and the directory pruned, so no entry is left to make durable.
            with contextlib.suppress(FileNotFoundError):
                self._sync(directory)
            if directory == self._root:
                return

    def _sync(self, directory: Path) -> None:
        """Make the directory's entries durable, unless it is unchanged since they were. Even an fsync of a clean directory
        would wait for the disk.
        """
        found = directory.stat()
        state = found.st_ino, found.st_ctime_ns  # before the sync: a concurrent change then shows next time
        if self._synced.get(directory) == state:
            return
        sync_directory(directory)
        if self._env.now_ms() - found.st_ctime_ns // 1_000_000 >= SETTLED_MS:
            if len(self._synced) >= SYNCED_MAX:
                self._synced.clear()
            self._synced[directory] = state

    def _prune(self, directory: Path) -> None:
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:
                return  # not empty, or removed by another process
            directory = directory.parent

    def _walk(self, below: str, prefix: str) -> Iterator[BlobInfo]:
        try:
            with os.scandir(self._root / below) as listing:
                # A folder stands where its keys do, which go on with a slash.
                entries = sorted(
                    listing, key=lambda one: f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name
                )
        except (FileNotFoundError, NotADirectoryError):
            self._check_there("list", prefix)
            return
        except OSError as error:
            raise Determinate(f"list {prefix!r} at {self.address()}: {_reason(error)}") from error
        for entry in entries:
            key = f"{below}/{entry.name}" if below else entry.name
            if entry.name == _TEMP and not below:
                continue
            if entry.is_dir(follow_symlinks=False):
                if key.startswith(prefix):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                try:
                    yield BlobInfo(key, entry.stat().st_size)
                except FileNotFoundError:
                    continue

    def _drop_stale_temps(self) -> None:
        oldest_ms = self._env.now_ms() - STALE_TEMP_MS
        for temp in (self._root / _TEMP).iterdir():
            with contextlib.suppress(OSError):  # gone, or left to a process that may
                if temp.stat().st_mtime_ns // 1_000_000 < oldest_ms:
                    temp.unlink()


def _write_durably(path: Path, value: bytes) -> None:
    with path.open("xb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
