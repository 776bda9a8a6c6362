"""Which frames a classic Spark session can still read: what Python and the JVM know of it, and nothing of shards.

A frame can be read as long as the JVM can reach what it was loaded as: through a DataFrame, one derived from it, a view, a cached
plan, an RDD. All of them hold the one object that is the loaded table's schema, so a weak reference to that object tells.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from persist_engine.base.env import SystemEnv
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql.readwriter import DataFrameReader

from persist_spark.held_frames import HeldFrames
from persist_spark.keeper import Keeper
from persist_spark.partitions import sink_settings

FORMAT = "persist"
#: The option by which a load tells its planner the name of the frame. Not for users.
FRAME_OPTION = "persist.frame"
_PART_BYTES = 128 << 20


class ClassicSession:
    """A keeper's view of the session around `context`. Thread-safe."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        jvm: Any = context._jvm
        self._jvm = jvm
        self._queue = jvm.java.lang.ref.ReferenceQueue()
        self._names = jvm.java.util.concurrent.ConcurrentHashMap()

    def watch(self, name: str, frame: DataFrame) -> None:
        """Tell of `name` when the JVM cannot reach what `frame` was loaded as any more."""
        table = _loaded_as(frame).table()
        self._names.put(self._jvm.java.lang.ref.WeakReference(table.schema(), self._queue), name)

    def is_over(self) -> bool:
        """Whether the context was stopped, by Python or in the JVM, or the JVM has gone."""
        try:
            return self._context._jsc is None or bool(self._context._jsc.sc().isStopped())
        except (Py4JError, OSError, AttributeError):
            return True

    def dead_frames(self) -> Sequence[str]:
        """Names of frames that the JVM's garbage collector found unreachable since the last call."""
        found: list[str] = []
        try:
            while (reference := self._queue.poll()) is not None:
                found.append(str(self._names.remove(reference)))
        except (Py4JError, OSError):
            pass  # the JVM has gone: `is_over` says so
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    session: ClassicSession
    keeper: Keeper


_kept: dict[SparkContext, _Kept] = {}
_kept_lock = threading.Lock()


def keeper_of(context: SparkContext) -> Keeper:
    """The one keeper of the sessions around `context`, started by the first call. From then on every
    `spark.read.format("persist").load()` of this process names its frame, so that the keeper learns of its end.
    """
    with _kept_lock:
        for known in [known for known, kept in _kept.items() if kept.keeper.is_closed]:
            del _kept[known]
        if context not in _kept:
            session, env = ClassicSession(context), SystemEnv()
            held = HeldFrames(settings=sink_settings(_PART_BYTES), env=env)
            _kept[context] = _Kept(session, Keeper(session, held))
            _name_frames_at_load()
        return _kept[context].keeper


def _name_frames_at_load() -> None:
    """SUBTLE: replaces `DataFrameReader.load`, once for this process. Spark offers no hook by which a Python source learns what
    was made of it in the JVM, and without it a frame could be let go at the end of the session only.
    """
    original = DataFrameReader.load
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load(
        self: DataFrameReader,
        path: Any = None,
        format: Any = None,  # noqa: A002 - Spark's name for it
        schema: Any = None,
        **options: Any,
    ) -> DataFrame:
        kept = _kept.get(self._spark.sparkContext)
        if kept is None or (format or self._jreader.source()).lower() != FORMAT:
            return original(self, path, format, schema, **options)
        name = new_name()
        try:
            frame = original(self, path, format, schema, **{**options, FRAME_OPTION: name})
            if self._jreader.userSpecifiedSchema().isDefined():
                _plan(frame)
            kept.session.watch(name, frame)
        except BaseException:
            kept.keeper.forget(name)
            raise
        return frame

    DataFrameReader.load = load


def _loaded_as(frame: DataFrame) -> Any:
    """The JVM's relation that `frame`, just loaded, is."""
    return frame._jdf.queryExecution().analyzed().collectLeaves().head()


def _plan(frame: DataFrame) -> None:
    """Plan the scans of `frame`. Where the user gave a schema Spark makes the Python source with the first plan only: too late
    to choose the time that the frame shows.
    """
    relation = _loaded_as(frame)
    relation.table().newScanBuilder(relation.options()).build().toBatch().planInputPartitions()


def new_name() -> str:
    """A name for a frame that no other has."""
    return SystemEnv().random_bytes(16).hex()
