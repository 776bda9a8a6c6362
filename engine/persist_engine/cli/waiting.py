"""What people see of a command that waits for a store: one line on a terminal's stderr, soon."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from persist_engine.base.errors import StorageError

#: Who sees nothing for longer wonders what happens.
QUIET_S = 2.0
#: No retry pauses for so long: a failure after it begins another wait.
_LULL_S = 60.0


class Waiting:
    """Tells once for each wait what it is for. Thread-safe."""

    def __init__(self, stores: str, give_up_s: float) -> None:
        self._reason = f"no answer yet from {stores}"
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._began_s = self._failed_s = -math.inf
        self._is_told = False

    def told(self, what: str, error: StorageError) -> None:
        """Something failed, and is tried again."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._failed_s > _LULL_S:
                self._began_s, self._is_told = now_s, self._is_told and self._failed_s == -math.inf
            self._failed_s = now_s
            self._reason = f"{what}: {error}"
        if now_s - self._began_s >= QUIET_S:
            self.tell()

    def tell(self) -> None:
        """Print the line, unless it was printed for this wait."""
        with self._lock:
            if self._is_told:
                return
            self._is_told = True
            text = " ".join(self._reason.split())
        typer.echo(f"waiting, for {self._give_up_s:.0f} s at most (--give-up): {text}", err=True)


@contextmanager
def opening(waiting: Waiting) -> Iterator[None]:
    """Around what opens stores, which may hang without failing: the line comes after QUIET_S in any case."""
    timer = threading.Timer(QUIET_S, waiting.tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
