"""Finds out which frames a classic Spark session can still read, from Python and the JVM. Knows nothing about shards.

A frame can be read as long as the JVM can reach the frame's loaded relation: through a DataFrame, a derived DataFrame, a view, a cached
plan or an RDD. All of them refer to the same schema object of the loaded table, so a weak reference to that object shows when none of them
is left.
"""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import PersistError
from persist_engine.storage.addresses import folder_of
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.readwriter import DataFrameReader, DataFrameWriter
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter
from pyspark.sql.utils import to_str

from persist_spark.catalog.session_tables import SessionTables
from persist_spark.held_frames import HeldFrames
from persist_spark.keeper import Keeper
from persist_spark.options import Options
from persist_spark.partitions import sink_settings
from persist_spark.source.loaded import FORMAT, FRAME_OPTION, new_name
from persist_spark.source.names import stores_of, with_shard_id
from persist_spark.source.native import COLLECTIONS, java_class, native_frame

_PART_BYTES = 128 << 20
#: The error codes for a shortage of files in this process or on this machine, of memory, buffers or ports.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EAGAIN}


class ClassicSession:
    """The session around `context`, as its keeper uses it. Thread-safe."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        jvm: Any = context._jvm
        self._jvm = jvm
        self._queue = java_class(jvm, "java.lang.ref.ReferenceQueue")()
        self._names = java_class(jvm, "java.util.concurrent.ConcurrentHashMap")()

    def watch(self, name: str, held_by: Any) -> None:
        """Reports `name` in `dead_frames` when the JVM can no longer reach `held_by`. Everything that can read the frame must refer to
        `held_by`.
        """
        self._names.put(java_class(self._jvm, "java.lang.ref.WeakReference")(held_by, self._queue), name)

    def is_over(self) -> bool:
        """Whether the context was stopped, from Python or in the JVM, or the JVM has ended."""
        try:
            return self._context._jsc is None or bool(self._context._jsc.sc().isStopped())
        except (Py4JError, OSError) as error:
            return not _is_short_of(error)
        except AttributeError:
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


def _is_short_of(error: BaseException | None) -> bool:
    """Whether this process lacked a resource for a call of the JVM, such as a file. Such an error does not mean that the JVM has ended."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return True
        error = getattr(error, "cause", None) or error.__context__
    return False


@dataclass(slots=True)
class _Kept:
    session: ClassicSession
    keeper: Keeper
    tables: SessionTables
    stores: Mapping[str, str]
    """The newest default options of loads. They apply to sessions without their own defaults, such as those of streaming batches."""


_kept: dict[SparkContext, _Kept] = {}
_kept_lock = threading.Lock()


def keeper_of(context: SparkContext, stores: Mapping[str, str]) -> Keeper:
    """The keeper of the sessions around `context`. The first call starts it. From then on every `spark.read.format("persist").load()` of
    this process names its frame, so that the keeper learns when the frame ends. `stores`: the default options of loads.
    """
    with _kept_lock:
        for known in [known for known, kept in _kept.items() if kept.keeper.is_closed]:
            del _kept[known]
        if context not in _kept:
            session, env = ClassicSession(context), SystemEnv()
            held = HeldFrames(settings=sink_settings(_PART_BYTES), env=env)
            keeper = Keeper(session, held)
            tables = SessionTables(held, keeper.address)
            keeper.on_close = tables.close
            _kept[context] = _Kept(session, keeper, tables, stores)
            _name_frames_at_load()
            _look_in_own_session()
        _kept[context].stores = stores
        return _kept[context].keeper


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Makes `spark` the active session of the thread within the block. Spark looks for Python formats in the active session, even if the
    request concerns another session.
    """
    sessions = java_class(spark._jvm, "org.apache.spark.sql.classic.SparkSession")
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def _look_in_own_session() -> None:
    """Makes Spark look for a format in the session that loads or writes.

    SUBTLE: replaces the calls in which Spark looks for a format, once per process. Spark looks in the active session of the thread, so it
    finds no Python format in a thread without an active session.
    """
    for kind, name in ((DataFrameWriter, "save"), (DataStreamReader, "load"), (DataStreamWriter, "start")):
        original = getattr(kind, name)
        if not hasattr(original, "__wrapped__"):
            setattr(kind, name, _active_in(original))


def _active_in(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        with active(self._spark):
            return original(self, *arguments, **options)

    return call


def _name_frames_at_load() -> None:
    """Makes each load name its frame.

    SUBTLE: replaces `DataFrameReader.load`, once per process. Spark has no hook that shows a Python data source which JVM objects a load
    created. Without the replacement, a frame could only be released at the end of the session.
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
            if schema is None and (fast := _fast(self, kept, name, {**options, "path": path})) is not None:
                return fast
            with active(self._spark):
                frame = original(self, path, format, schema, **{**options, FRAME_OPTION: name})
            if self._jreader.userSpecifiedSchema().isDefined():
                _plan(frame)
            kept.session.watch(name, _loaded_as(frame).table().schema())
        except BaseException:
            kept.keeper.forget(name)
            raise
        return frame

    DataFrameReader.load = load


def _fast(reader: DataFrameReader, kept: _Kept, name: str, more: Mapping[str, Any]) -> DataFrame | None:
    """The frame `name`, read by Spark's own reader or as a table of the catalog. None when the format must read it, or must explain why it
    cannot be loaded.
    """
    if reader._jreader.userSpecifiedSchema().isDefined():
        return None
    known = stores_of(reader._spark)
    stores = kept.stores if known is None else known
    given = {**stores, **_options_of(reader), **{key.lower(): to_str(value) for key, value in more.items()}}
    try:
        given = with_shard_id({key: value for key, value in given.items() if value is not None})
        plain = kept.keeper.plain(name, given)
    except PersistError:
        return None
    if plain is not None:
        native = native_frame(reader._spark, plain)
        if native is None:
            return None
        kept.session.watch(name, native.held_by)
        return native.frame
    options = Options.parse(given)
    is_plain = options.is_of_plain_rows and options.columns is None and options.where is None
    # Spark shows a scan's options, and the blob store is one of them. A table of the catalog brings nothing for a store of files.
    if not is_plain or "@" in options.location.blob or folder_of(options.location.blob) is not None:
        return None
    return kept.tables.frame(reader._spark, options)


def _options_of(reader: DataFrameReader) -> dict[str, str]:
    """The options that were set on `reader`, by name in lower case."""
    jvm: Any = reader._spark._jvm
    given = java_class(jvm, COLLECTIONS).asJava(reader._jreader.extraOptions())
    return {str(name).lower(): str(given[name]) for name in given}


def _loaded_as(frame: DataFrame) -> Any:
    """The JVM relation of a frame that was just loaded."""
    return frame._jdf.queryExecution().analyzed().collectLeaves().head()


def _plan(frame: DataFrame) -> None:
    """Plans the scans of `frame` now. With a user's schema, Spark creates the Python source only for the first plan, and the frame's time
    must be chosen before.
    """
    relation = _loaded_as(frame)
    relation.table().newScanBuilder(relation.options()).build().toBatch().planInputPartitions()
