"""A location on files and SQLite that lets tests damage its bytes, and a function that writes rows there."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId

from persist_kit.world import SCHEMA, row

#: Failing stores are given up soon, and every part is a blob.
SETTINGS = Settings(retry=RetrySettings(give_up_ms=300), batch=BatchSettings(inline_part_bytes_max=0))


class Disk:
    """A location on files and SQLite. Its methods access the stored bytes directly, without the engine."""

    def __init__(self, folder: Path) -> None:
        self.blobs, self.database = folder / "blobs", folder / "consensus.db"
        self.location = Location(blob=f"file://{self.blobs}", consensus=f"sqlite://{self.database}")
        self.args = ["--blob", self.location.blob, "--consensus", self.location.consensus, "--give-up", "0.3"]

    def client(self, settings: Settings = SETTINGS) -> PersistClient:
        """A new client, as in another process. Shards that it creates have no retention."""
        return PersistClient.open(self.location, settings=replace(settings, retain_ms=None))

    def paths(self, shard_id: ShardId, *, kind: str) -> list[Path]:
        """The shard's parts or rollups, oldest first."""
        letter = {"part": "n", "rollup": "v"}[kind]
        found = (path for path in (self.blobs / shard_id).glob(f"{letter}*/*") if path.is_file())
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def key(self, path: Path) -> str:
        """The blob key of the file."""
        return str(path.relative_to(self.blobs))

    def files(self) -> dict[str, bytes]:
        """Every blob by its key."""
        return {self.key(path): path.read_bytes() for path in self.blobs.rglob("*") if path.is_file()}

    def diffs(self, shard_id: ShardId) -> dict[int, bytes]:
        """The shard's log, by seqno."""
        with sqlite3.connect(self.database) as connection:
            rows = connection.execute(
                "SELECT sequence_number, data FROM consensus WHERE shard = ?", (shard_id,)
            ).fetchall()
        connection.close()
        return {int(seqno): bytes(data) for seqno, data in rows}

    def set_diffs(self, shard_id: ShardId, diffs: dict[int, bytes]) -> None:
        """Replaces the shard's log with these entries."""
        with sqlite3.connect(self.database) as connection:
            connection.execute("DELETE FROM consensus WHERE shard = ?", (shard_id,))
            rows = [(shard_id, seqno, data) for seqno, data in diffs.items()]
            connection.executemany("INSERT INTO consensus (shard, sequence_number, data) VALUES (?, ?, ?)", rows)
        connection.close()

    def everything(self, shard_id: ShardId) -> tuple[dict[str, bytes], dict[int, bytes]]:
        """All durable bytes of the shard: blobs and log."""
        return self.files(), self.diffs(shard_id)


@contextmanager
def files_bounded(size_bytes: int) -> Iterator[None]:
    """In the block, the operating system refuses this process's writes past `size_bytes` in a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(client: PersistClient, shard_id: ShardId, times: range) -> None:
    """Appends one row (t, "n<t>") at every time, each in its own append."""
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for time in times:
            at, after = Antichain.of(time), Antichain.of(time + 1)
            writer.compare_and_append([row(time, f"n{time}", time)], expected_upper=at, new_upper=after)
