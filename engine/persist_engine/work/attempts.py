"""Pieces of work that do not wait for one another: each is tried, whatever becomes of the others, and all that failed is told.

Owns what failed; knows nothing of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.errors import PersistError, Unavailable
from persist_engine.model.ids import ShardId


class Attempts:
    """Of one round of work on one shard. Not thread-safe."""

    def __init__(self, shard_id: ShardId) -> None:
        self._shard_id = shard_id
        self._failed: list[tuple[str, Exception]] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Keep the error that ends the block, for `end`. A store that is away ends the round: the others would only wait for
        it as long again.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told at the end
            self._failed.append((what, error))
            if isinstance(error, Unavailable):
                self.end()

    def end(self) -> None:
        """Raise what was kept, if anything: the kind of the first, naming the shard, each piece and what ended it. An
        ExceptionGroup where one is no PersistError.
        """
        if not self._failed:
            return
        errors = [error for _, error in self._failed]
        told = "; ".join(f"{what}: {type(error).__name__}: {error}" for what, error in self._failed)
        text = f"{len(errors)} of what was due on shard {self._shard_id} failed, the rest was done: {told}"
        if any(isinstance(error, Unavailable) for error in errors):
            text = f"maintenance of shard {self._shard_id} ended early: {told}"
        first = errors[0]
        if not isinstance(first, PersistError) or not all(isinstance(error, PersistError) for error in errors):
            raise ExceptionGroup(text, errors)
        cause = first if len(errors) == 1 else ExceptionGroup("all of them", errors)
        raise type(first)(text, **first.detail) from cause
