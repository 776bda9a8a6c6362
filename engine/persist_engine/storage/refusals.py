"""Why a store could not be opened: classifies network errors beneath an adapter's own error, for any driver.

Each adapter classifies the answers of its own server.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator


def is_untrusted(error: BaseException | None) -> bool:
    """Whether TLS failed because no known authority signed the certificate, or because the peer speaks another protocol."""
    import ssl  # stores of this machine do without

    # These say that the connection broke, and nothing about the peer.
    broken = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
    return any(isinstance(cause, ssl.SSLError) and not isinstance(cause, broken) for cause in _chain(error))


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether a name did not resolve: it is wrong, not known yet, or no name server answers."""
    return any(isinstance(cause, socket.gaierror) for cause in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
