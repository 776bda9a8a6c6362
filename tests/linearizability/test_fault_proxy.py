"""The proxy loses exactly what it says it loses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from persist_kit.fault_proxy import FaultProxy, Trouble

DEADLINE_S = 60.0


class Echo:
    """Answers what it is sent, and remembers it."""

    def __init__(self):
        self.heard = b""
        self.arrived = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection:
            while data := self._received(connection):
                with self.arrived:
                    self.heard += data
                    self.arrived.notify_all()
                connection.sendall(data)

    @staticmethod
    def _received(connection):
        try:
            return connection.recv(1 << 16)
        except OSError:
            return b""

    def close(self):
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def exchange(proxy: FaultProxy, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=DEADLINE_S) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


def test_without_trouble_everything_passes_and_is_counted(echo):
    with FaultProxy(echo.port) as proxy:
        seen: list[int] = []
        proxy.begin(Trouble(delay=1.0, delay_s_max=0.01), seed=1, on_exchange=seen.append)
        assert [exchange(proxy, b"one"), exchange(proxy, b"two")] == [b"one", b"two"]
        assert (proxy.exchanges, proxy.delays, seen) == (2, 2, [1, 2])


def test_a_reset_exchange_is_not_delivered(echo):
    with FaultProxy(echo.port) as proxy:
        proxy.begin(Trouble(reset=1.0), seed=1)
        with pytest.raises(ConnectionResetError):
            exchange(proxy, b"lost")
        proxy.calm_down()
        assert exchange(proxy, b"fine") == b"fine"
        assert (echo.heard, proxy.resets) == (b"fine", 1)


def test_a_lost_answer_was_delivered(echo):
    with FaultProxy(echo.port) as proxy:
        proxy.begin(Trouble(lose_answer=1.0), seed=1)
        with pytest.raises(ConnectionResetError):
            exchange(proxy, b"heard")
        with echo.arrived:
            assert echo.arrived.wait_for(lambda: echo.heard == b"heard", DEADLINE_S)
        assert proxy.lost_answers == 1


@pytest.mark.slow
def test_nothing_passes_a_partition_until_it_heals(echo):
    with FaultProxy(echo.port) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.settimeout(0.3)
        with proxy.partitioned():
            connection.sendall(b"held up")
            with pytest.raises(TimeoutError):
                connection.recv(10)
            assert echo.heard == b""
        connection.settimeout(DEADLINE_S)
        assert connection.recv(10) == b"held up"


def test_a_server_that_is_down_resets_its_clients():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # never listens, and keeps the port from other processes
        with FaultProxy(closed.getsockname()[1]) as proxy, pytest.raises(ConnectionResetError):
            exchange(proxy, b"unheard")


@pytest.mark.slow
def test_the_same_seed_draws_the_same_fates(echo):
    def fates(seed: int) -> list[bool]:
        with FaultProxy(echo.port) as proxy:
            proxy.begin(Trouble(reset=0.5), seed=seed)
            return [passes(proxy) for _ in range(20)]

    def passes(proxy: FaultProxy) -> bool:
        try:
            return exchange(proxy, b"x") == b"x"
        except ConnectionResetError:
            return False

    assert fates(1) == fates(1)
    assert len({tuple(fates(seed)) for seed in (1, 2)}) == 2
