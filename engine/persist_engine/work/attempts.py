"""Collects the failures of independent pieces of work: each piece is tried even if others fail, and all failures are reported together.

This module knows nothing of the work itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.errors import PersistError, Unavailable
from persist_engine.model.ids import ShardId


class Attempts:
    """The attempts of one round of work on one shard. Not thread-safe."""

    def __init__(self, shard_id: ShardId) -> None:
        self._shard_id = shard_id
        self._failed: list[tuple[str, Exception]] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Keeps an error that ends the block, for `end`. Unavailable ends the whole round, because each of the other pieces would wait for
        the store just as long.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised at the end
            self._failed.append((what, error))
            if isinstance(error, Unavailable):
                self.end()

    def end(self) -> None:
        """Raises the collected errors, if there are any, as one error. It has the type of the first error and names the shard, each failed
        piece and its cause. It is an ExceptionGroup when one of the errors is not a PersistError.
        """
        if not self._failed:
            return
        errors = [error for _, error in self._failed]
        causes = "; ".join(f"{what}: {type(error).__name__}: {error}" for what, error in self._failed)
        text = f"{len(errors)} of what was due on shard {self._shard_id} failed, the rest was done: {causes}"
        if any(isinstance(error, Unavailable) for error in errors):
            text = f"maintenance of shard {self._shard_id} ended early: {causes}"
        first = errors[0]
        if not isinstance(first, PersistError) or not all(isinstance(error, PersistError) for error in errors):
            raise ExceptionGroup(text, errors)
        cause = first if len(errors) == 1 else ExceptionGroup("all of them", errors)
        raise type(first)(text, **first.detail) from cause
