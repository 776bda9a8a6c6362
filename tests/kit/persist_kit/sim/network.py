"""The network between a process and the stores: delays, losses, lost answers, calls that take effect long after their caller gave up, and
crashes of the calling process.

Decides the fate of every store call. `persist_engine.testing.faults` defines the four ways to fail; this module adds time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

from persist_engine.base.errors import Indeterminate
from persist_engine.storage.blob import Blob, BlobInfo
from persist_engine.testing.faults import Faults, FaultyBlob

from persist_kit.sim.scheduler import Killed, Process, Scheduler

T = TypeVar("T")


@dataclass(frozen=True)
class Weather:
    """Probabilities per store call; delays in virtual milliseconds."""

    happens: float = 1.0
    answers: float = 1.0
    late: float = 0.0
    """The share of the unanswered calls that take effect later, when the caller may have moved on."""
    late_ms_max: float = 300.0
    slow: float = 0.0
    """Calls that take up to `slow_ms_max` instead of almost no time."""
    slow_ms_max: float = 60.0
    crash: float = 0.0
    """The calling process crashes, just before the call or just after it."""
    freeze: float = 0.0
    """The calling process's machine sleeps for up to `freeze_ms_max`."""
    freeze_ms_max: float = 1500.0
    step: float = 0.0
    """The wall clock of the calling process jumps by up to `step_ms_max` in either direction."""
    step_ms_max: int = 1000


CALM = Weather()


class Network(Faults):
    """Faults with time: every store call is a scheduling point before it takes effect and before it answers."""

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        super().__init__(scheduler.rng.randrange(1 << 32))
        self._scheduler = scheduler
        self._weather = weather
        self.crashes = self.freezes = self.late_calls = self.calls = 0
        self.on_crash: Callable[[Process], None] = lambda _: None
        self.set_rates(happens=weather.happens, answers=weather.answers)

    def calm_down(self) -> None:
        """From now on every call takes effect and is answered, without delay. Late calls still arrive."""
        self._weather = CALM
        self.heal()

    def call(self, verb: str, key: str, address: str, run: Callable[[], T]) -> T:
        """See Faults. Raises Killed when the calling process dies."""
        scheduler, weather = self._scheduler, self._weather
        if scheduler.current.process.is_dead:  # it unwinds, and dies only once
            raise Killed
        self.calls += 1
        self._disturb(weather)
        scheduler.pause(self._delay_ms(weather))
        what = f"{verb} {_short(key)}"
        behalf = scheduler.current.doing, scheduler.current.command
        happens, answers = self._decide(verb, key)
        if not answers and scheduler.rng.random() < weather.late:
            delay_ms = scheduler.rng.uniform(0, weather.late_ms_max)
            scheduler.note(f"{what}: no answer, {delay_ms:.0f} ms late")
            self.late_calls += 1
            scheduler.later(delay_ms, lambda: self._carry_out(f"late {what}", run, behalf))
            raise Indeterminate(f"{what} at {address}: time-out, still under way", key=key)
        answer = self._carry_out(what, run, behalf) if happens else None
        if not (happens and answers):
            scheduler.note(f"{what}: happened {happens}, answered {answers}")
        if weather.crash and scheduler.rng.random() < weather.crash / 2:
            self.crash()
        scheduler.pause(self._delay_ms(weather))
        if happens and answers:
            return cast(T, answer)
        raise self.failure(verb, key, address, answers=answers)

    def _carry_out(self, what: str, run: Callable[[], T], behalf: tuple[object, str]) -> T:
        scheduler = self._scheduler
        scheduler.acting, scheduler.command = behalf
        try:
            answer = run()
        finally:
            scheduler.acting, scheduler.command = None, ""
        scheduler.note(f"{what}: {_short_answer(answer)}")
        return answer

    def _disturb(self, weather: Weather) -> None:
        """Draws a freeze or a clock step for the calling process."""
        rng, process = self._scheduler.rng, self._scheduler.current.process
        if weather.crash and rng.random() < weather.crash / 2:
            self.crash()
        if weather.freeze and rng.random() < weather.freeze:
            asleep_ms = rng.uniform(0, weather.freeze_ms_max)
            process.frozen_until_ms = self._scheduler.now_ms + asleep_ms
            self.freezes += 1
            self._scheduler.note(f"{process.name} sleeps for {asleep_ms:.0f} ms")
        if weather.step and rng.random() < weather.step:
            process.skew_ms = rng.randint(-weather.step_ms_max, weather.step_ms_max)
            self._scheduler.note(f"clock of {process.name} is {process.skew_ms:+d} ms off")

    def crash(self) -> NoReturn:
        """Crashes the calling process, unless another of its tasks did so already: a process starts again once."""
        process = self._scheduler.current.process
        if process.is_dead:
            raise Killed
        self.crashes += 1
        self._scheduler.note(f"{process.name} CRASHES")
        self._scheduler.kill(process)
        self.on_crash(process)
        raise Killed

    def _delay_ms(self, weather: Weather) -> float:
        rng = self._scheduler.rng
        if weather.slow and rng.random() < weather.slow:
            return rng.uniform(1, weather.slow_ms_max)
        return float(rng.randrange(3))


class PagedBlob(FaultyBlob):
    """The blob store of one process. With `is_paged`, many listings have two pages from two moments. So a listing may still have a blob
    that was deleted meanwhile, and may lack a new blob although it has a newer one.
    """

    def __init__(self, inner: Blob, network: Network, rng: random.Random, *, is_paged: bool) -> None:
        super().__init__(inner, network)
        self._rng, self._is_paged = rng, is_paged

    def list_prefix(self, prefix: str) -> Iterator[BlobInfo]:
        """See Blob."""
        found = list(super().list_prefix(prefix))
        if len(found) < 2 or not self._is_paged or self._rng.random() < 0.4:
            return iter(found)
        first = found[: self._rng.randrange(1, len(found))]
        return iter([*first, *(info for info in super().list_prefix(prefix) if info.key > first[-1].key)])


def _short(key: str) -> str:
    """The key in short form: without the shard id, because there is only one shard, and with only the ends of other ids."""
    _, _, partial = key.partition("/")
    return (partial if len(partial) < 24 else f"{partial[:14]}..{partial[-6:]}") or "log"


def _short_answer(answer: object) -> str:
    if isinstance(answer, bytes):
        return f"{len(answer)} B"
    if isinstance(answer, list):
        return f"{len(answer)} entries"
    return getattr(answer, "name", str(answer)).lower()
