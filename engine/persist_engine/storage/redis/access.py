"""The options of redis-py for a client's access to Redis: user and password, trusted CAs, and the client's own certificate.

Settings in an address come first, then existing files of its credentials_dir. Without either, no password is sent, and the CAs of the
system are trusted. All files are read anew for every connection, so a rotated file needs no restart. No repr shows their contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.addresses import (
    REDIS_CA_FILE,
    REDIS_CERT_FILE,
    REDIS_KEY_FILE,
    REDIS_PASSWORD_FILE,
    REDIS_USERNAME_FILE,
    RedisAddress,
)
from persist_engine.storage.refusals import check_pem


class Credentials(redis.CredentialProvider):
    """The user and the password in files. If the password file is missing, a connection has no credentials if `optional`, else raises
    OSError.
    """

    def __init__(self, user: str | None, password_file: Path, *, user_file: Path | None, optional: bool) -> None:
        """`user` takes precedence over the text of `user_file`. Without both, the password is that of the default user."""
        self._user, self._user_file = user, user_file
        self._password_file, self._optional = password_file, optional

    def get_credentials(self) -> tuple[str, ...]:  # type: ignore[override]  # an empty tuple sends nothing
        """See redis-py."""
        if self._optional and not self._password_file.exists():
            return ()
        password = _text(self._password_file)
        user = self._user
        if user is None and self._user_file is not None and self._user_file.exists():
            user = _text(self._user_file)
        return (user, password) if user else (password,)


def access(at: RedisAddress) -> dict[str, Any]:
    """The options of connections to `at`. Raises InvalidUsage if a TLS file that the address names does not exist, and
    StoreRefused if OpenSSL cannot use one.
    """
    return _credentials(at) | (_tls(at) if at.tls else {})


def _credentials(at: RedisAddress) -> dict[str, Any]:
    if at.password_file:
        file = Path(at.password_file)
        return {"credential_provider": Credentials(at.user, file, user_file=None, optional=False)}
    if at.credentials_dir:
        folder = Path(at.credentials_dir)
        file, user_file = folder / REDIS_PASSWORD_FILE, folder / REDIS_USERNAME_FILE
        return {"credential_provider": Credentials(at.user, file, user_file=user_file, optional=True)}
    return {"username": at.user, "password": at.password} if at.password or at.user else {}


def _tls(at: RedisAddress) -> dict[str, Any]:
    def file(named: str | None, name: str) -> str | None:
        if named is not None and not Path(named).is_file():
            raise InvalidUsage(f"{at.shown}: there is no file {named}; correct the parameter, or mount the file")
        found = Path(at.credentials_dir or "", name)
        return named or (str(found) if at.credentials_dir and found.exists() else None)

    ca, cert = file(at.ca_file, REDIS_CA_FILE), file(at.cert_file, REDIS_CERT_FILE)
    key = file(at.key_file, REDIS_KEY_FILE)
    check_pem(at.shown, ca=ca, cert=cert, key=key)
    return {"connection_class": redis.SSLConnection, "ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}


def _text(file: Path) -> str:
    return file.read_text().rstrip("\r\n")
