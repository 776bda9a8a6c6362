"""Maintenance in the background of a process that writes: what its appends hand back, done by threads (spec 13.2, 14.4).

    append ──▶ Upkeep.offer(maintenance) ─┬─▶ rollup, GC     merged into what already waits, one at a time per handle
                                          └─▶ compactions    a queue of 20 per handle, 5 at once per client

Opt-in: whoever appends gets the work as a value and hands it over, or does it himself (`work.perform`). What is dropped
here stays claimed until `compaction.claim_ms` has passed, and is then offered again by some append, larger by then.
Follow-up work takes the same way. Must not know handles.
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

#: Rollups and collections of one client at once: they are short, and wait for the stores most of the time.
ROUTINE_THREADS = 2

Work = Literal["compaction", "routine"]


class CompactionSwitch:
    """Whether this process compacts in the background: one for all clients that are given it. Thread-safe. What is
    running when it is turned off goes on; what waits is dropped.
    """

    def __init__(self) -> None:
        self._is_off = threading.Event()

    @property
    def is_on(self) -> bool:
        """As it stands now."""
        return not self._is_off.is_set()

    def turn_off(self) -> None:
        """From now on requests are dropped."""
        self._is_off.set()

    def turn_on(self) -> None:
        """From now on requests are taken again."""
        self._is_off.clear()


class BackgroundMaintenance:
    """The threads of one client, which start when there is work. Thread-safe. A context manager: leaving it closes it.

    Work that raises is logged and counted, never raised: it is offered again when its claim lapses. A process that ends
    without `close` first does all that was taken up.
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
        """A queue of its own for what one handle's appends hand back."""
        return Upkeep(self, machine)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was taken up is done, and what followed from it; false when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._under_way.values()), timeout_s)

    def close(self) -> None:
        """Abandon what waits, stop compactions that run between two tables (what they wrote is deleted), let a running
        rollup or collection end, and return when no thread works any more: a store that is away holds it up for as long as
        calls of it are retried. Close it before its client. Idempotent.
        """
        with self._changed:
            self._is_closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=True)

    def __enter__(self) -> BackgroundMaintenance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- of its queues -------------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether work is to end."""
        return self._is_closed

    @property
    def is_switched_on(self) -> bool:
        """Whether compactions may begin."""
        return self._switch.is_on

    def submit(self, work: Work, machine: Machine, job: Callable[[], None]) -> bool:
        """Have it done when a thread is free; false when closed, or when no thread can be had any more."""
        with self._changed:
            if self._is_closed:
                return False
            if work == "compaction" and self._under_way[work] >= self._concurrency:
                machine.metrics.count("compaction_concurrency_waits")
            self._under_way[work] += 1
            taken = threading.Lock()
            try:
                self._pools[work].submit(self._do, work, machine, job, taken)
            except RuntimeError:  # the interpreter ends; or there is no thread to be had, and it stands in the queue
                if taken.acquire(blocking=False):
                    self._under_way[work] -= 1
                    return False
            return True

    def _do(self, work: Work, machine: Machine, job: Callable[[], None], taken: threading.Lock) -> None:
        if not taken.acquire(blocking=False):
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
            machine.metrics.count("background_failed", work=work)
            survived = isinstance(error, Unavailable)
            level, known = (logging.WARNING if survived else logging.ERROR), isinstance(error, PersistError)
            text, extra = "background %s of shard %s failed: %s", {"shard": machine.shard_id}
            _log.log(level, text, work, machine.shard_id, error, extra=extra, exc_info=not known)
        finally:
            with self._changed:
                self._under_way[work] -= 1
                self._changed.notify_all()


class Upkeep:
    """The work of one handle on its way. Thread-safe. Made by `BackgroundMaintenance.of`."""

    def __init__(self, background: BackgroundMaintenance, machine: Machine) -> None:
        self._background, self._machine = background, machine
        self._lock = threading.Lock()
        self._routine = NO_MAINTENANCE
        self._is_routine_under_way = False
        self._waiting = 0

    def offer(self, maintenance: Maintenance) -> None:
        """Take up what a command handed back; returns at once. Compactions that are not worth it, that find the queue
        full or compaction switched off, and everything once closed, are dropped and counted.
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
