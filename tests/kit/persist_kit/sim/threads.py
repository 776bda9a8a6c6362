"""Threads, locks and pools in simulated time. They replace the engine's own while a simulation runs.

This module turns the engine's use of `threading` and of pools into scheduling points. Invariant: in the block of `simulated_threads`
nothing in the engine really waits. The replacement is process-wide, so there is one simulation at a time.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Self, TypeVar

import persist_engine.client.client
import persist_engine.client.read.handle
import persist_engine.client.read.leased
import persist_engine.client.write.batch
import persist_engine.client.write.handle
import persist_engine.client.write.notes
import persist_engine.dataflow.sink.actors
import persist_engine.dataflow.sink.handle
import persist_engine.dataflow.sink.readback
import persist_engine.dataflow.upsert.handle
import persist_engine.parts.contents
import persist_engine.parts.listings
import persist_engine.parts.read_ahead
import persist_engine.parts.source
import persist_engine.shard.applier
import persist_engine.shard.log_reader
import persist_engine.shard.news
import persist_engine.shard.watch
import persist_engine.table.database
import persist_engine.table.feed
import persist_engine.table.readers
import persist_engine.table.table
import persist_engine.table.writing
import persist_engine.work.audit.orphans
import persist_engine.work.audit.verify
import persist_engine.work.background
import persist_engine.work.gc
import persist_engine.work.heartbeat
import persist_engine.work.merging
import pyarrow as pa
from persist_engine.codec.inline_part import PartInMemory
from persist_engine.codec.part import OpenedPart, open_part
from persist_engine.rows.schema import Schema

import persist_kit.sim.witness
from persist_kit.sim.locks import SimEvent, SimThread, SimThreading
from persist_kit.sim.scheduler import Killed, Process, Scheduler

T = TypeVar("T")

#: The time after which the handles of an idle table expire. It is short, because histories are short.
_IDLE_S = 0.3
_WITH_THREADING: tuple[ModuleType, ...] = (
    persist_engine.client.client,
    persist_engine.client.read.leased,
    persist_engine.client.read.handle,
    persist_engine.dataflow.sink.handle,
    persist_engine.dataflow.sink.actors,
    persist_engine.dataflow.sink.readback,
    persist_engine.dataflow.upsert.handle,
    persist_engine.client.write.handle,
    persist_engine.shard.applier,
    persist_engine.shard.news,
    persist_engine.shard.watch,
    persist_engine.table.database,
    persist_engine.table.feed,
    persist_engine.table.readers,
    persist_engine.table.table,
    persist_engine.table.writing,
    persist_engine.work.background,
    persist_engine.work.heartbeat,
)
_WITH_WEAK_OWNERS: tuple[ModuleType, ...] = (persist_engine.client.read.handle, persist_engine.work.heartbeat)
#: Pure functions of immutable bytes. Their results are cached, because every simulated process decodes the same bytes.
_REMEMBERED: tuple[tuple[ModuleType, str], ...] = (
    (persist_engine.shard.log_reader, "decode_state_diff"),
    (persist_engine.shard.log_reader, "decode_rollup"),
    (persist_kit.sim.witness, "decode_state_diff"),
    (persist_kit.sim.witness, "decode_rollup"),
)
_WITH_POOLS: tuple[ModuleType, ...] = (
    persist_engine.client.write.batch,
    persist_engine.client.write.notes,
    persist_engine.parts.contents,
    persist_engine.parts.read_ahead,
    persist_engine.parts.listings,
    persist_engine.work.merging,
    persist_engine.work.gc,
    persist_engine.work.audit.orphans,
    persist_engine.work.audit.verify,
)
#: Like _WITH_POOLS, for modules with pools that work beside the submitting task.
_WITH_TASK_POOLS: tuple[ModuleType, ...] = (persist_engine.work.background,)


class StrongReferences:
    """Replaces the module `weakref` in the engine where it decides about releases. Here no object is ever collected. The moment of a
    garbage collection depends on the past of the process, and the result of a seed must not depend on that.
    """

    WeakSet = set

    @staticmethod
    def WeakMethod(method: Callable[..., T]) -> Callable[[], Callable[..., T]]:  # noqa: N802 - as weakref.WeakMethod
        """See weakref."""
        return lambda: method

    @staticmethod
    def finalize(*_: object) -> SimpleNamespace:
        """See weakref."""
        return SimpleNamespace(atexit=False)


class InlinePool:
    """Like ThreadPoolExecutor, but the submitting task does the work when it submits it, which is one of the orders of a real pool. The
    work's store calls are scheduling points like all others.
    """

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See Executor."""
        future: Future[T] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 - a pool keeps every error in the future
            future.set_exception(error)
        return future

    def map(self, call: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
        """See Executor. All work is submitted before the first result is returned."""
        futures = [self.submit(call, item) for item in items]
        return (future.result() for future in futures)

    def shutdown(self, *_: object, **__: object) -> None:
        """Does nothing, because no work is pending."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class TaskPool:
    """Like ThreadPoolExecutor, with tasks beside the submitting task, for work without a waiting caller."""

    def __init__(self, scheduler: Scheduler, threads: int, **_: object) -> None:
        self._scheduler = scheduler
        self._threads = threads
        self._jobs: deque[Callable[[], object]] = deque()
        self._busy = 0
        self._idle = SimEvent(scheduler)
        self._idle.set()

    def submit(self, call: Callable[..., object], /, *args: object) -> None:
        """See Executor. An error of `call` ends the history."""
        self._jobs.append(partial(call, *args))
        if self._busy < self._threads:
            self._busy += 1
            self._idle.clear()
            SimThread(self._scheduler, target=self._work, name="pool").start()

    def shutdown(self, *, wait: bool) -> None:
        """See Executor."""
        if wait:
            self._idle.wait()

    def _work(self) -> None:
        try:
            while self._jobs:
                self._jobs.popleft()()
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()


class SimEnv:
    """The Env of one process, with virtual time, its own clock skew and its own randomness."""

    def __init__(self, scheduler: Scheduler, process: Process, *, seed: str, start_ms: int = 1_700_000_000_000) -> None:
        self._scheduler, self._process = scheduler, process
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._start_ms = start_ms

    def now_ms(self) -> int:
        """See Env."""
        return self._start_ms + int(self._scheduler.now_ms) + self._process.skew_ms

    def monotonic_s(self) -> float:
        """See Env."""
        return self._scheduler.now_ms / 1000

    def sleep(self, seconds: float) -> None:
        """See Env."""
        self._scheduler.pause(max(1.0, seconds * 1000))

    def wait(self, event: Any, seconds: float) -> bool:
        """See Env; `event` is a SimEvent."""
        return bool(event.wait(seconds))

    def random_bytes(self, count: int) -> bytes:
        """See Env."""
        return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        """See Env."""
        return self._random.uniform(low, high)

    def hostname(self) -> str:
        """See Env."""
        return self._process.name


class _Alarm(logging.Handler):
    """Ends the history when the engine logs an error, unless a disaster explains it."""

    def __init__(self, scheduler: Scheduler, is_expected: Callable[[object], bool]) -> None:
        super().__init__(logging.ERROR)
        self._scheduler, self._is_expected = scheduler, is_expected

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if self._scheduler.is_over:
            return
        if isinstance(record.args, tuple) and any(map(self._is_expected, record.args)):
            self._scheduler.note(f"logged: {record.getMessage()}")
        else:
            self._scheduler.fail(record.getMessage())


@contextmanager
def simulated_threads(scheduler: Scheduler, is_expected: Callable[[object], bool]) -> Iterator[None]:
    """In the block, the engine's threads, locks and pools are those of `scheduler`. Its log is silent except for errors (lost data or a
    broken rule, where there is no caller to raise to). An error ends the history unless `is_expected` accepts it.
    """
    shim = SimThreading(scheduler)
    replaced: list[tuple[ModuleType, str, Any]] = [(module, "threading", shim) for module in _WITH_THREADING]
    replaced_pools = [(module, "ThreadPoolExecutor", InlinePool) for module in _WITH_POOLS]
    replaced += replaced_pools
    replaced += [(module, "ThreadPoolExecutor", partial(TaskPool, scheduler)) for module in _WITH_TASK_POOLS]
    replaced += [(module, "weakref", StrongReferences) for module in _WITH_WEAK_OWNERS]
    known: dict[Any, Any] = {}
    replaced += [(module, name, _remembering(getattr(module, name), known)) for module, name in _REMEMBERED]
    replaced.append((persist_engine.table.readers, "IDLE_S", _IDLE_S))
    replaced.append((persist_engine.parts.source, "open_part", _remembering_rows(open_part)))
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    logger = logging.getLogger("persist_engine")
    level, alarm = logger.level, _Alarm(scheduler, is_expected)
    logger.setLevel(logging.ERROR)
    logger.addHandler(alarm)
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(alarm)
        for module, name, original in before:
            setattr(module, name, original)


def _remembering(decode: Callable[..., T], known: dict[Any, T]) -> Callable[..., T]:
    def remembered(data: bytes, *, key: str, **how: Any) -> T:
        asked = (decode, key, data, *how.items())
        value = known.get(asked)
        if value is None:
            value = known[asked] = decode(data, key=key, **how)
        return value

    return remembered


def _remembering_rows(open_: Callable[..., OpenedPart]) -> Callable[..., PartInMemory]:
    """Like `_remembering`, with all rows decoded."""
    known: dict[Any, PartInMemory] = {}

    def remembered(data: bytes, *, schema: Schema, **options: Any) -> PartInMemory:
        asked = (data, schema.key, schema.val, repr(options))
        part = known.get(asked)
        if part is None:
            opened = open_(data, schema=schema, **options)
            table = pa.concat_tables([opened.read_group(group) for group in range(opened.groups)])
            part = known[asked] = PartInMemory(opened.desc, table)
        return part

    return remembered
