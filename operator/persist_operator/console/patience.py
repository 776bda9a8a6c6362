"""The protocol of the console's server. A client that does not finish its request in time loses its connection.

The server's own protocol waits for ever for the rest of a request. So a few hundred silent connections would take all of its descriptors.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

#: The time limit for a request. A browser sends a whole request of the console at once.
REQUEST_S = 10.0


class PatientForAWhile(H11Protocol):
    """See the module docstring. There is one object for each connection, and only the loop's thread uses it."""

    request_s = REQUEST_S
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        """The client has connected."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """A part of a request has arrived. All parts together have the time limit of one request."""
        super().data_received(data)
        if not self._is_waiting():
            self._stop()
        elif self._late is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop()
        super().connection_lost(exc)

    def _is_waiting(self) -> bool:
        """Whether the client must send more before it gets an answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _wait(self) -> None:
        self._late = self.loop.call_later(self.request_s, self._give_up)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self._is_waiting():
            self.transport.close()
