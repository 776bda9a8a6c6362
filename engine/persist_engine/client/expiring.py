"""The end of a handle that holds leases."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Self

from persist_engine.base.errors import Unavailable
from persist_engine.model.ids import ShardId

_log = logging.getLogger(__name__)


class Expiring(ABC):
    """A context manager that calls `expire` on exit. When another error is being raised, an Unavailable error of `expire` is only logged:
    the other error matters more, and leases lapse anyway.
    """

    @property
    @abstractmethod
    def shard_id(self) -> ShardId:
        """The id of the shard."""

    @abstractmethod
    def expire(self) -> None:
        """Releases everything that the handle holds. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        try:
            self.expire()
        except Unavailable as unavailable:
            if error is None:
                raise
            _log.warning("could not expire %s: %s", self, unavailable, extra={"shard": self.shard_id})
