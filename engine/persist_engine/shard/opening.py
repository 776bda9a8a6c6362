"""Opening a store: waits for failures that may end soon, with a warning, and raises on wrong configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from persist_engine.base.errors import StorageError, StoreRefused
from persist_engine.base.retry import Backoff, Retry
from persist_engine.storage.refusals import is_unknown_host

_log = logging.getLogger(__name__)
#: A host name that does not resolve for this long counts as wrong. A cluster's own names appear within seconds.
UNKNOWN_HOST_S = 15.0

T = TypeVar("T")


def open_store(retry: Retry, what: str, call: Callable[[], T]) -> T:
    """Repeats `call` until it succeeds, like `Retry.external`, but warns at the first failure. Adapters raise StoreRefused; this function
    raises it too when the host name does not resolve for UNKNOWN_HOST_S.
    """
    started_s = retry.env.monotonic_s()
    backoff: Backoff | None = None
    while True:
        try:
            answer = call()
        except StorageError as error:
            if is_unknown_host(error) and retry.env.monotonic_s() - started_s >= UNKNOWN_HOST_S:
                raise StoreRefused(f"{what}: {error}: the name did not resolve for {UNKNOWN_HOST_S:.0f} s") from error
            if backoff is None:
                _log.warning("%s failed, waiting for it: %s", what, error)
                backoff = retry.backoff(what, shard="", kind="external")
            backoff.wait(error)
        else:
            if backoff is not None:
                backoff.answered()
            return answer
