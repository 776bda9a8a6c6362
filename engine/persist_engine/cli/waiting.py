"""The message of a command that waits for a store: one line on stderr of a terminal, after a short time."""

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

#: A person at a terminal sees a message after this much silence.
QUIET_S = 2.0
#: No retry pauses this long, so a failure after such a pause begins another wait.
_LULL_S = 60.0


class Waiting:
    """Prints one line for each wait, which gives the reason for it. Thread-safe."""

    def __init__(self, stores: str, give_up_s: float) -> None:
        self._reason = f"no answer yet from {stores}"
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._began_s = self._failed_s = -math.inf
        self._is_shown = False

    def failed(self, what: str, error: StorageError) -> None:
        """Records a failure that is being retried."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._failed_s > _LULL_S:
                self._began_s, self._is_shown = now_s, self._is_shown and self._failed_s == -math.inf
            self._failed_s = now_s
            self._reason = f"{what}: {error}"
        if now_s - self._began_s >= QUIET_S:
            self.tell()

    def tell(self) -> None:
        """Prints the line, unless it was printed for this wait."""
        with self._lock:
            if self._is_shown:
                return
            self._is_shown = True
            text = " ".join(self._reason.split())
        typer.echo(f"waiting, for {self._give_up_s:.0f} s at most (--give-up): {text}", err=True)


@contextmanager
def opening(waiting: Waiting) -> Iterator[None]:
    """Prints the line after QUIET_S while the block opens stores, because that may hang without failing."""
    timer = threading.Timer(QUIET_S, waiting.tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
