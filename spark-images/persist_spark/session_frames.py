"""Finds out which frames a classic Spark session can still read, from Python and the JVM. Knows nothing of shards.

A frame can be read as long as the JVM can reach the relation that it was loaded as: through a DataFrame, a derived DataFrame, a view, a
cached plan or an RDD. All of them hold the same schema object of the loaded table, so a weak reference to that object shows when none is
left.
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
#: The option that carries the name of the frame from a load to its planner. Internal.
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
        """Reports `name` in `dead_frames` once the JVM can no longer reach the relation that `frame` was loaded as."""
        table = _loaded_as(frame).table()
        self._names.put(self._jvm.java.lang.ref.WeakReference(table.schema(), self._queue), name)

    def is_over(self) -> bool:
        """Whether the context was stopped, from Python or in the JVM, or the JVM has ended."""
        try:
            return self._context._jsc is None or bool(self._context._jsc.sc().isStopped())
        except (Py4JError, OSError, AttributeError):
            return True

    def dead_frames(self) -> Sequence[str]:
        """The names of the frames that the JVM's garbage collector found unreachable since the last call."""
        found: list[str] = []
        try:
            while (reference := self._queue.poll()) is not None:
                found.append(str(self._names.remove(reference)))
        except (Py4JError, OSError):
            pass  # the JVM has ended, which `is_over` reports
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    session: ClassicSession
    keeper: Keeper


_kept: dict[SparkContext, _Kept] = {}
_kept_lock = threading.Lock()


def keeper_of(context: SparkContext) -> Keeper:
    """The keeper of the sessions around `context`; the first call starts it. From then on every
    `spark.read.format("persist").load()` of this process names its frame, so that the keeper learns when the frame ends.
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
    """SUBTLE: replaces `DataFrameReader.load`, once per process. Spark has no hook through which a Python data source learns which JVM
    objects a load created. Without the replacement a frame could only be released at the end of the session.
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
    """The JVM relation of the frame, which was just loaded."""
    return frame._jdf.queryExecution().analyzed().collectLeaves().head()


def _plan(frame: DataFrame) -> None:
    """Plans the scans of `frame` now. With a user's schema, Spark creates the Python source only with the first plan, which is too late to
    choose the time that the frame shows.
    """
    relation = _loaded_as(frame)
    relation.table().newScanBuilder(relation.options()).build().toBatch().planInputPartitions()


def new_name() -> str:
    """A unique name for a frame."""
    return SystemEnv().random_bytes(16).hex()
