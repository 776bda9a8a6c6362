"""Classifies the network errors beneath an adapter's own error, for any driver, to say why a store could not be opened.

Each adapter classifies the answers of its own server.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from persist_engine.base.errors import StoreRefused

#: The advice when TLS fails because the certificate is not trusted.
TRUST = "name the file of the authority that signed the server's certificate (ca_file), or correct scheme and host"
#: How long to wait for a TLS handshake, which takes two round trips.
_HANDSHAKE_S = 2.0


def is_untrusted(error: BaseException | None) -> bool:
    """Whether TLS failed because no known authority signed the certificate, or because the peer speaks another protocol."""
    import ssl  # imported here, because stores on this machine do not need it

    # These errors mean that the connection broke. They say nothing about the peer.
    broken = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
    return any(isinstance(cause, ssl.SSLError) and not isinstance(cause, broken) for cause in _chain(error))


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether a name did not resolve: it is wrong, not known yet, or no name server answers."""
    return any(isinstance(cause, socket.gaierror) for cause in _chain(error))


def speaks_tls(host: str, port: int) -> bool:
    """Whether the server there begins a TLS handshake. Connects once, sends no data, and trusts nothing. False when it does not answer."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host.strip("[]"), port), _HANDSHAKE_S) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # the server refused this client with a TLS alert
    except (OSError, ValueError):
        return False


def check_pem(address: str, *, ca: str | None = None, cert: str | None = None, key: str | None = None) -> None:
    """Raises StoreRefused, which names the file, if OpenSSL cannot use one: `ca` with certificates, `cert` with a certificate and `key`
    with its private key. Does not check files that do not exist.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None and Path(ca).is_file():
        try:
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise StoreRefused(f"{address}: {ca} holds no certificates as PEM: {_reason(error)}") from error
    if cert is None or not Path(cert).is_file():
        return
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never ask at the terminal
    except (OSError, ValueError) as error:
        text = f"{cert} and {key or 'no file of a key'} are not a certificate and its private key as PEM, without a pass phrase"
        raise StoreRefused(f"{address}: {text}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
