"""A TCP proxy that loses what passes through it: between a client and a real server, on a free port of 127.0.0.1.

Owns the fate of each exchange (what the client sends, up to what the server answers): it may be reset before anything of
it is delivered, delivered and its answer lost, or delayed; while `partitioned`, nothing passes at all, while `trickling`
some bytes a second. A lost answer is seen by the client as a reset connection. Decisions are drawn from a seed in the order
in which exchanges begin, which real threads decide: a proxy is a source of trouble, not of repeatable trouble.
"""

from __future__ import annotations

import contextlib
import enum
import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

_CHUNK_BYTES = 1 << 16
#: How soon a thread sees that the proxy was closed or a partition began.
_TICK_S = 0.05
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Trouble:
    """Probabilities per exchange; the rest passes."""

    reset: float = 0.0
    lose_answer: float = 0.0
    delay: float = 0.0
    delay_s_max: float = 0.05


FINE = Trouble()


class _Fate(enum.Enum):
    FORWARD = "forward"
    RESET = "reset"
    LOSE_ANSWER = "lose answer"


class FaultProxy:
    """Forwards to a port of 127.0.0.1; at first without trouble. A context manager: leaving it closes every connection."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._rng = random.Random(0)  # noqa: S311 - repeatable on purpose
        self._on_exchange: Callable[[int], None] = _nobody_cares
        self._lock = threading.Lock()
        self._trouble = FINE
        self._is_partitioned = self._is_trickling = False
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.exchanges = self.resets = self.lost_answers = self.delays = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def begin(self, trouble: Trouble, *, seed: int, on_exchange: Callable[[int], None] | None = None) -> None:
        """Have `trouble` from the next exchange on, and count from zero. `on_exchange` is told the number of each exchange
        as it begins, from the thread of its connection.
        """
        with self._lock:
            self._trouble = trouble
            self._rng.seed(seed)
            self._on_exchange = on_exchange or _nobody_cares
            self.exchanges = self.resets = self.lost_answers = self.delays = 0

    def calm_down(self) -> None:
        """No more trouble; the counts stay."""
        with self._lock:
            self._trouble = FINE
            self._on_exchange = _nobody_cares

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """While open nothing passes, in either direction; connections stay as they are."""
        self._is_partitioned = True
        try:
            yield
        finally:
            self._is_partitioned = False

    @contextmanager
    def trickling(self) -> Iterator[None]:
        """While open what passes does so byte by byte, in both directions: never silent, never done."""
        self._is_trickling = True
        try:
            yield
        finally:
            self._is_trickling = False

    def close(self) -> None:
        """Reset every connection and stop listening. Idempotent."""
        self._closed.set()
        self._listener.close()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- private ------------------------------------------------------------------------------------------------------

    def _spawn(self, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=f"proxy-{self._target_port}", daemon=True)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                if not select.select([self._listener], [], [], _TICK_S)[0]:
                    continue
                client, _ = self._listener.accept()
            except (OSError, ValueError):  # closed meanwhile
                return
            self._spawn(lambda client=client: self._serve(client))  # type: ignore[misc]  # bound early

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=5)
            except OSError:
                _reset(client)
                return
            with server:
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with contextlib.suppress(OSError):
                    self._relay(client, server)
                _reset(client)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        fate, answered = _Fate.FORWARD, True
        while not self._closed.is_set():
            ready = select.select([client, server], [], [], _TICK_S)[0]
            if self._is_partitioned:
                self._closed.wait(_TICK_S)
                continue
            if client in ready:
                data = client.recv(_CHUNK_BYTES)
                if not data:
                    return
                if answered:  # what was sent before has its answer: a new exchange begins
                    fate, answered = self._decide(), False
                if fate is _Fate.RESET:
                    return
                self._pass_on(server, data)
            elif server in ready:
                data = server.recv(_CHUNK_BYTES)
                if not data or fate is _Fate.LOSE_ANSWER:
                    return
                answered = True
                self._pass_on(client, data)

    def _pass_on(self, end: socket.socket, data: bytes) -> None:
        done = 0
        while self._is_trickling and done < len(data) and not self._closed.wait(_TICK_S):
            end.sendall(data[done : done + 1])
            done += 1
        end.sendall(data[done:])

    def _decide(self) -> _Fate:
        with self._lock:
            self.exchanges += 1
            number, trouble, on_exchange = self.exchanges, self._trouble, self._on_exchange
            draw, delay_s = self._rng.random(), 0.0
            if self._rng.random() < trouble.delay:
                self.delays += 1
                delay_s = self._rng.uniform(0, trouble.delay_s_max)
            fate = _Fate.FORWARD
            if draw < trouble.reset:
                self.resets += 1
                fate = _Fate.RESET
            elif draw < trouble.reset + trouble.lose_answer:
                self.lost_answers += 1
                fate = _Fate.LOSE_ANSWER
        on_exchange(number)
        if delay_s:
            self._closed.wait(delay_s)
        return fate


def _nobody_cares(_: int) -> None:
    """Of the exchanges."""


def _reset(connection: socket.socket) -> None:
    """Close so that the peer sees a reset, not an orderly end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
