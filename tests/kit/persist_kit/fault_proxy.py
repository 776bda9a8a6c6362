"""A faulty TCP proxy between a client and a real server, on a free port of 127.0.0.1.

The proxy decides the fate of each exchange (a request with its answer). It may reset the connection before the request is delivered,
deliver the request and lose the answer, or delay the exchange. While `partitioned`, nothing passes; while `trickling`, a few bytes per
second pass. The client sees a lost answer as a reset connection. Decisions are drawn from a seed in the order in which exchanges begin.
Real threads determine that order, so a run is not repeatable.
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
#: How often a thread checks whether the proxy was closed or a partition began.
_TICK_S = 0.05
#: The longest that a server takes for a connection, or for bytes that it is sent.
_SILENCE_S = 60.0
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Trouble:
    """Probabilities per exchange. The remaining exchanges pass."""

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
    """Forwards to a port of 127.0.0.1, at first without faults. A context manager that closes every connection on exit."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._rng = random.Random(0)  # noqa: S311 - repeatable on purpose
        self._on_exchange: Callable[[int], None] = _ignore
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
        """Injects `trouble` from the next exchange on, and resets the counts. The thread of each connection calls `on_exchange` with the
        number of each exchange as it begins.
        """
        with self._lock:
            self._trouble = trouble
            self._rng.seed(seed)
            self._on_exchange = on_exchange or _ignore
            self.exchanges = self.resets = self.lost_answers = self.delays = 0

    def calm_down(self) -> None:
        """Stops injecting faults. Keeps the counts."""
        with self._lock:
            self._trouble = FINE
            self._on_exchange = _ignore

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """In the block nothing passes in either direction. Connections stay open."""
        self._is_partitioned = True
        try:
            yield
        finally:
            self._is_partitioned = False

    @contextmanager
    def trickling(self) -> Iterator[None]:
        """In the block data passes slowly, byte by byte, in both directions: connections are neither silent nor done."""
        self._is_trickling = True
        try:
            yield
        finally:
            self._is_trickling = False

    def close(self) -> None:
        """Resets every connection and stops listening. Idempotent."""
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
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=_SILENCE_S)
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
                if answered:  # the previous request has its answer, so a new exchange begins
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


def _ignore(_: int) -> None:
    """The default for `on_exchange`."""


def _reset(connection: socket.socket) -> None:
    """Makes the close of the connection appear as a reset to the peer."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
