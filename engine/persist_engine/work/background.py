"""Background maintenance in a writing process: threads do the work that its appends return (spec 13.2, 14.4).

    append ──▶ Upkeep.offer(maintenance) ─┬─▶ rollup, GC     merged into waiting work, one at a time per handle
                                          └─▶ compactions    a queue of 20 per handle, 5 at once per client

This is opt-in: an append returns its maintenance as a value, and the caller offers it here or performs it (`work.perform`). Dropped work
stays claimed until `compaction.claim_ms` has passed. A later append then returns it again, usually as larger work. Follow-up work takes the
same path. This module must not know handles.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

from persist_engine.base.errors import PersistError, Unavailable
from persist_engine.base.settings import CompactionSettings
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.spine.spine import MergeReq
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine
from persist_engine.work.compact import compact
from persist_engine.work.perform import is_admitted, perform

_log = logging.getLogger(__name__)

#: The number of rollups and collections that one client runs at once. They are short and mostly wait for the stores.
ROUTINE_THREADS = 2

Work = Literal["compaction", "routine"]


class CompactionSwitch:
    """Switches background compaction of this process on and off. All clients that receive the switch share it. Thread-safe. Turning it off
    drops waiting compactions; running ones continue.
    """

    def __init__(self) -> None:
        self._is_off = threading.Event()

    @property
    def is_on(self) -> bool:
        """The current position of the switch."""
        return not self._is_off.is_set()

    def turn_off(self) -> None:
        """Drops requests from now on."""
        self._is_off.set()

    def turn_on(self) -> None:
        """Accepts requests again from now on."""
        self._is_off.clear()


class BackgroundMaintenance:
    """The maintenance threads of one client. They start when there is work. Thread-safe. A context manager that closes on exit.

    Errors of the work are logged and counted, never raised; the work is offered again when its claim lapses. A process that exits without
    `close` first does the accepted routine work. Its compactions end without a change, because their own threads end before.
    """

    def __init__(self, settings: CompactionSettings, switch: CompactionSwitch | None = None) -> None:
        self._switch = switch or CompactionSwitch()
        self._concurrency = settings.concurrency
        threads: dict[Work, int] = {"compaction": settings.concurrency, "routine": ROUTINE_THREADS}
        self._pools = {
            work: ThreadPoolExecutor(count, thread_name_prefix=f"persist-{work}") for work, count in threads.items()
        }
        self._changed = threading.Condition()
        self._under_way = dict.fromkeys(threads, 0)
        self._is_closed = False

    def of(self, machine: Machine) -> Upkeep:
        """A queue for the maintenance that one handle's appends return."""
        return Upkeep(self, machine)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits until all accepted work and its follow-up work is done. False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._under_way.values()), timeout_s)

    def close(self) -> None:
        """Drops waiting work and stops running compactions between two tables (and deletes their output). Waits for a running rollup or
        collection, and returns when no thread works. An unreachable store delays this for as long as its calls are retried. Close this
        before its client. Idempotent.
        """
        with self._changed:
            self._is_closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=True)

    def __enter__(self) -> BackgroundMaintenance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls of its queues -------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether work must end."""
        return self._is_closed

    @property
    def is_switched_on(self) -> bool:
        """Whether compactions may start."""
        return self._switch.is_on

    def submit(self, work: Work, machine: Machine, job: Callable[[], None]) -> bool:
        """Runs the job when a thread is free. False when closed, or when no thread can be started."""
        with self._changed:
            if self._is_closed:
                return False
            if work == "compaction" and self._under_way[work] >= self._concurrency:
                machine.metrics.count("compaction_concurrency_waits")
            self._under_way[work] += 1
            taken = threading.Lock()
            try:
                self._pools[work].submit(self._do, work, machine, job, taken)
            except RuntimeError:  # the interpreter ends, or no thread starts and the job stays queued
                if taken.acquire(blocking=False):
                    self._under_way[work] -= 1
                    return False
            return True

    def _do(self, work: Work, machine: Machine, job: Callable[[], None], taken: threading.Lock) -> None:
        if not taken.acquire(blocking=False):
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a thread has no caller
            if isinstance(error, RuntimeError) and "shutdown" in str(error) and self._has_ended():
                return
            machine.metrics.count("background_failed", work=work)
            survived = isinstance(error, Unavailable)
            level, known = (logging.WARNING if survived else logging.ERROR), isinstance(error, PersistError)
            text, extra = "background %s of shard %s failed: %s", {"shard": machine.shard_id}
            _log.log(level, text, work, machine.shard_id, error, extra=extra, exc_info=not known)
        finally:
            with self._changed:
                self._under_way[work] -= 1
                self._changed.notify_all()

    def _has_ended(self) -> bool:
        """Whether no pool takes work any more: it was closed, or the process ends."""
        try:
            self._pools["routine"].submit(int)
        except RuntimeError:
            return True
        return False


class Upkeep:
    """The maintenance of one handle. Thread-safe. Made by `BackgroundMaintenance.of`."""

    def __init__(self, background: BackgroundMaintenance, machine: Machine) -> None:
        self._background, self._machine = background, machine
        self._lock = threading.Lock()
        self._routine = NO_MAINTENANCE
        self._is_routine_under_way = False
        self._waiting = 0

    def offer(self, maintenance: Maintenance) -> None:
        """Accepts the maintenance that a command returned, and returns at once. Drops and counts a compaction when it is not worthwhile,
        the queue is full or compaction is switched off. Drops all work once closed.
        """
        routine = replace(maintenance, requests=())
        if not routine.is_empty():
            self._offer_routine(routine)
        for req in maintenance.requests:
            if is_admitted(self._machine, req):
                self._offer_compaction(req)

    def _offer_routine(self, routine: Maintenance) -> None:
        with self._lock:
            if self._routine.gc is not None and routine.gc is not None:
                self._machine.metrics.count("gc_merged")
            self._routine = self._routine.merge(routine)
            if self._is_routine_under_way:
                return
            self._is_routine_under_way = True
        if not self._background.submit("routine", self._machine, self._do_routine):
            with self._lock:
                self._routine, self._is_routine_under_way = NO_MAINTENANCE, False

    def _do_routine(self) -> None:
        try:
            while not self._background.is_closed():
                with self._lock:
                    routine, self._routine = self._routine, NO_MAINTENANCE
                    if routine.is_empty():
                        self._is_routine_under_way = False
                        return
                perform(self._machine, routine)
        except BaseException:
            with self._lock:
                self._is_routine_under_way = False
            raise

    def _offer_compaction(self, req: MergeReq) -> None:
        with self._lock:
            is_full = self._waiting >= self._machine.settings.compaction.queue_max
            self._waiting += not is_full
        if is_full:
            self._drop("queue_full")
            return
        enqueued_s = self._machine.env.monotonic_s()
        if not self._background.submit("compaction", self._machine, lambda: self._compact(req, enqueued_s)):
            with self._lock:
                self._waiting -= 1
            self._drop("closed")

    def _compact(self, req: MergeReq, enqueued_s: float) -> None:
        machine = self._machine
        with self._lock:
            self._waiting -= 1
        machine.metrics.observe_s("compaction_queued", machine.env.monotonic_s() - enqueued_s)
        if self._background.is_closed():
            self._drop("closed")
        elif not self._background.is_switched_on:
            self._drop("disabled")
        else:
            outcome = compact(machine, req, is_stopped=self._background.is_closed)
            self.offer(outcome.maintenance)

    def _drop(self, reason: str) -> None:
        self._machine.metrics.count("compaction_skipped", reason=reason)
