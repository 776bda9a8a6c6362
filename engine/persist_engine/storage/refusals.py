"""Why a store could not be opened, told from the errors beneath an adapter's own, whatever its driver: those of the network.

What a server says in its own words each adapter reads for itself.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

#: TLS errors of a connection that broke: nothing was decided about the peer.
_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def is_untrusted(error: BaseException | None) -> bool:
    """Whether TLS ended it: a certificate that no known authority signed, or a peer that speaks something else."""
    return any(isinstance(cause, ssl.SSLError) and not isinstance(cause, _BROKEN) for cause in _chain(error))


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether a name did not resolve: it is wrong, not known yet, or no name server answers."""
    return any(isinstance(cause, socket.gaierror) for cause in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
