"""The frame that a load of the format `persist` chose, and the options by which its processes name it.

Spark starts a Python process for each load and for each plan. It imports this module, so this one imports neither Arrow nor the engine's
handles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from persist_engine.base.env import SystemEnv
from pyspark.sql import types as T  # noqa: N812 - what every Spark user calls it

from persist_spark.options import Options

FORMAT = "persist"
#: The option that carries the name of the frame from a load to its planner. Internal, as are the next three.
FRAME_OPTION = "persist.frame"
#: The option with which a load shows one row with the times of the frame, instead of the frame.
LOOK_OPTION = "persist.look"
#: The option of a frame that was empty at its load, which keeps it empty.
EMPTY_OPTION = "persist.empty"
#: The option with the schema of a frame at its load, as two DDL texts in JSON, so that later loads have the same columns.
SCHEMA_OPTION = "persist.schema"
#: The option with the first time of a stream's changes, in lower case.
STARTING = "startingtime"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFrame:
    """A loaded frame. Its contents never change."""

    as_of: int | None
    """The time of its contents, or the last time of its changes. None: there is nothing to read, and the frame is empty."""
    row_type: T.StructType
    ddl: tuple[str, str]
    """The schema of the shard that gives the frame its columns: key and value."""
    start: int | None = None
    """The first time of its changes. None: the frame shows contents."""

    @property
    def readable_from(self) -> int:
        """The greatest since at which the frame can be opened."""
        assert self.as_of is not None
        return self.as_of if self.start is None else max(0, self.start - 1)

    def pinned(self, options: Options) -> Options:
        """Options with which every load shows this frame. The frame must not be empty."""
        assert self.as_of is not None
        if options.feed is None or self.start is None:
            return replace(options, as_of=self.as_of)
        return replace(options, feed=replace(options.feed, start=self.start, end=self.as_of + 1))


def new_name() -> str:
    """A unique name for a frame."""
    return SystemEnv().random_bytes(16).hex()


def is_of_stream(options: Mapping[str, str]) -> bool:
    """Whether the options, with names in lower case, are those of `readStream`. Spark asks for the columns in the same way for both."""
    return STARTING in options or ("rows" in options and "from" not in options)
