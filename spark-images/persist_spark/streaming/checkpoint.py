"""The folder of Spark's checkpoint, which lasts as long as the driver. The driver writes it anew from the position that the shard stores.
The position is the only truth.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark.sql import SparkSession

from persist_spark.streaming.file_log import files_read
from persist_spark.streaming.position import NO_BATCH, Position

#: A file system in memory. Spark writes two files for each batch and waits for both. Each takes 40 to 50 ms on a disk, and 10 ms here.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a new folder is made in it, for this user alone
_SETTINGS = {
    # Renames replace Hadoop's FileContext, which is four times as slow. The driver can write the folder anew, so it needs less safety.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # How long `stop` waits for the query's thread. Spark's default is no limit.
    "spark.sql.streaming.stopTimeout": "10s",
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch that Spark is about to run."""

    batch: int
    offsets: str
    """The text of Spark's file offsets/<batch>."""

    @property
    def at_ms(self) -> int:
        """When Spark chose the rows of the batch."""
        return int(json.loads(self.offsets.split("\n", 2)[1])["batchTimestampMs"])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The folder of one query."""

    folder: Path
    file_age_ms: int | None = None
    """For a query over a folder of files: how much older than the newest file a file may be. None for other sources."""
    lines: int | None = None
    """How often the query names its one source, which SQL may do several times. Spark needs an offset for each. None if a function chose
    the sources.
    """

    def write(self, position: Position) -> None:
        """Writes the files that Spark needs to begin with the batch after `position`. The folder must be empty."""
        self._put("metadata", f'{{"id":"{position.query}"}}')
        for path, text in position.logs.items():
            self._put(f"sources/{path}", text)
        if position.batch == NO_BATCH or position.offsets is None:
            return
        # Spark also reads the batch before the last one. Its offsets do not matter, because the last batch is not repeated.
        last = self._last(position)
        for batch in range(max(0, last - 1), last + 1):
            self._put(f"offsets/{batch}", self._with_lines(position.offsets))
        self._put(f"commits/{last}", 'v1\n{"nextBatchWatermarkMs":0}')

    def write_interval(self, before: Position, after: Position, *, query: str) -> None:
        """Writes the files that Spark needs to begin with one batch of exactly the rows after `before`, up to `after`. To Spark it is a
        batch that was begun and not committed. The folder must be empty. `query` is the id of the query.
        """
        self.write(replace(before, query=query, logs=after.logs))
        assert after.offsets is not None
        self._put(f"offsets/{self._last(before) + 1}", self._with_lines(after.offsets))

    def planned(self, batch: int) -> Planned:
        """Reads what Spark wrote about the batch that it is about to run."""
        return Planned(batch, (self.folder / "offsets" / str(batch)).read_text(encoding="utf-8"))

    def logs(self, offsets: str | None) -> dict[str, str]:
        """The texts of the files that Spark's folder `sources` must hold after the batch that ends at `offsets`, by path. None: before the
        first batch.
        """
        root = self.folder / "sources"
        if self.file_age_ms is not None:
            # Before the first batch no file counts as read, although Spark may already have listed files.
            return {} if offsets is None else files_read(root, offsets=offsets, age_ms=self.file_age_ms)
        paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}

    def _last(self, position: Position) -> int:
        """The number of the last batch in the folder. Batch 0 over files counts as batch 1. For batch 0 Spark opens all its files again,
        and they may be gone, or outside the folder that the options name now.
        """
        is_first_of_files = self.file_age_ms is not None and position.batch == 0
        return 1 if is_first_of_files else position.batch

    def _with_lines(self, offsets: str) -> str:
        if self.lines is None:
            return offsets
        version, batch, line, *_ = offsets.splitlines()
        return "\n".join([version, batch, *[line] * self.lines])

    def _put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


#: Makes a folder for a query of the stream, like `temporary_checkpoint`.
Checkpoints = Callable[[], AbstractContextManager[Checkpoint]]


@contextmanager
def temporary_checkpoint(*, file_age_ms: int | None = None, lines: int | None = None) -> Iterator[Checkpoint]:
    """Yields an empty folder for this process alone, in memory if the system offers that, and removes it at the end."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f"persist-stream-{os.getpid()}-", dir=parent))
    try:
        yield Checkpoint(folder, file_age_ms, lines)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def configure(spark: SparkSession) -> None:
    """Makes the settings for a query with a temporary checkpoint. The user's own settings win."""
    for name, value in _SETTINGS.items():
        if spark.conf.get(name, None) is None:
            spark.conf.set(name, value)
