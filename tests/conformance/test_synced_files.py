"""What outlives a power loss: the syncs of files and of the directories that name them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Indeterminate
from persist_engine.storage.blob_file import FileBlob
from persist_engine.storage.consensus_sqlite import SqliteConsensus


@pytest.fixture
def blob(tmp_path):
    return FileBlob(tmp_path / "blobs", env=SystemEnv())


class Syncs:
    """The paths that this process syncs, in order: the one call of the operating system that shows what outlives a power loss."""

    def __init__(self, monkeypatch):
        self.directories, self.files, self.is_broken_for_directories = [], [], False
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._synced)

    def _synced(self, handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_dir() and self.is_broken_for_directories:
            raise OSError(5, "Input/output error")
        (self.directories if path.is_dir() else self.files).append(path)
        self._fsync(handle)


@pytest.fixture
def syncs(monkeypatch):
    return Syncs(monkeypatch)


def test_a_failed_directory_sync_is_indeterminate(blob, syncs):
    """The object is there, but a power loss may take it away."""
    syncs.is_broken_for_directories = True
    with pytest.raises(Indeterminate, match="s1/p1"):
        blob.set("s1/p1", b"x")
    assert blob.get("s1/p1") == b"x"


def test_the_object_and_every_directory_up_to_the_root_are_synced(tmp_path, blob, syncs):
    """A power loss after `set` must not find the object, its name, or its folder's, unwritten."""
    blob.set("s1/n1/p1", b"x")
    root = tmp_path / "blobs"
    assert [path.parent for path in syncs.files] == [root / ".tmp"]
    assert syncs.directories == [root / "s1/n1", root / "s1", root]


@pytest.mark.parametrize(
    "opened", [lambda root: FileBlob(root, env=SystemEnv()), lambda root: SqliteConsensus(root / "c.db")]
)
def test_the_directories_that_opening_makes_are_durable_too(tmp_path, syncs, opened):
    """A power loss could take the store's own directory, with all that was made durable in it."""
    opened(tmp_path / "new" / "store").close()
    assert set(syncs.directories) >= {tmp_path, tmp_path / "new"}


def test_a_directory_that_has_not_changed_is_not_synced_again(tmp_path, syncs):
    """Even of a clean one, a sync waits for the disk. But whatever was made in it meanwhile, by any process, is not lost."""
    env = LateEnv()
    blob = FileBlob(tmp_path / "blobs", env=env)
    root, synced = tmp_path / "blobs", syncs.directories
    blob.set("s1/n1/p1", b"x")
    synced.clear()
    blob.set("s1/n2/p2", b"x")
    assert synced == [root / "s1/n2", root / "s1", root], "what changed a moment ago may change again at the same time"
    env.late_ms = 60_000
    blob.set("s1/n3/p3", b"x")
    synced.clear()
    change(root / "s1" / "n3")
    blob.set("s1/n3/p4", b"x")
    assert synced == [root / "s1/n3"]
    change(root / "s1")
    blob.set("s1/n3/p5", b"x")
    assert synced[-1] == root / "s1"
    blob.delete("s1/n3/p5")
    assert root / "s1/n3" in synced[-2:]


class LateEnv(SystemEnv):
    """A clock that is late by `late_ms`."""

    late_ms = 0

    def now_ms(self):
        return super().now_ms() + self.late_ms


def change(directory):
    """As another process might: until it shows."""
    before = directory.stat().st_ctime_ns
    other = directory / "other"
    while directory.stat().st_ctime_ns == before:
        other.mkdir()
        other.rmdir()
