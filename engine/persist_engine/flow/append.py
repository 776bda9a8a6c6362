"""Append: gathers the batches that all workers staged under one description and commits them at once (spec 17.4). One machine
per sink. Pure: events in, instructions out. The shell defines what a batch is; the machine only passes it on.

                    newer lower: delete the stash                          appended
     ┌────────────┐ ─────────────────────────────────▶ ┌──────────┐  ───────────────────▶ wait for a newer lower
     │ gathering  │                                    │committing│  upper < lower: raise it, commit again
     └────────────┘ ◀───────────────────────────────── └──────────┘  upper > lower: another replica won, delete
                    frontier past lower, described: Commit

A lost append is no error: the missing updates remain in desired minus persisted, and the next description writes them.
Every received batch ends exactly once: it is appended, deleted, or left alone if its outcome is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from persist_engine.base.errors import check
from persist_engine.flow.mint import Describe
from persist_engine.model.frontier import MINIMUM, Antichain

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Commit(Generic[B]):
    """Compare-and-append `batches`, and then call `on_appended`, `on_mismatch` or `on_unknown`. With `raise_first`, first raise
    the shard's upper to `lower` by an empty append: the shard is behind, and no data belongs in between.
    """

    lower: Antichain
    upper: Antichain
    batches: tuple[B, ...]
    raise_first: bool = False

    def __str__(self) -> str:
        raised = "raise upper, " if self.raise_first else ""
        return f"{raised}commit [{self.lower}, {self.upper}) {_names(self.batches)}"


@dataclass(frozen=True, slots=True)
class Delete(Generic[B]):
    """Delete these batches. They will not be appended."""

    batches: tuple[B, ...]

    def __str__(self) -> str:
        return f"delete {_names(self.batches)}"


def _names(batches: tuple[B, ...]) -> str:
    return " ".join(map(str, batches)) or "nothing"


class Append(Generic[B]):
    """State: the greatest lower so far, its description and batches as far as they arrived, and the commit in progress."""

    def __init__(self) -> None:
        self._lower = MINIMUM
        self._described: Describe | None = None
        self._stash: list[B] = []
        self._staged_before = MINIMUM
        self._committing: Commit[B] | None = None

    @property
    def lower(self) -> Antichain:
        """The greatest lower so far. Descriptions and batches with an older lower are stale."""
        return self._lower

    def on_description(self, described: Describe) -> list[Commit[B] | Delete[B]]:
        """Mint described a batch."""
        out = self._raise_lower(described.lower)
        if described.lower == self._lower:
            self._described = described
        return out + self._commit()

    def on_batch(self, lower: Antichain, batch: B) -> list[Commit[B] | Delete[B]]:
        """A worker staged `batch` under the description with this lower."""
        out = self._raise_lower(lower)
        if lower < self._lower:
            # Stale batches were once skipped here, and their blobs leaked (spec 20, bug 30).
            return [*out, Delete((batch,))]
        self._stash.append(batch)
        return out + self._commit()

    def on_batches_frontier(self, frontier: Antichain) -> list[Commit[B] | Delete[B]]:
        """No worker will stage a batch with a lower before `frontier` any more."""
        self._staged_before = self._staged_before.join(frontier)
        return self._commit()

    def on_appended(self) -> list[Commit[B] | Delete[B]]:
        """The commit in progress was appended to the shard."""
        self._taken()
        return self._commit()

    def on_mismatch(self, current: Antichain) -> list[Commit[B] | Delete[B]]:
        """The commit in progress found the shard's upper at `current`. Nothing was appended."""
        commit = self._taken()
        check(current != commit.lower, f"an append at {commit.lower} was refused by the upper it expected")
        if current < commit.lower and commit.lower == self._lower:
            self._committing = Commit(commit.lower, commit.upper, commit.batches, raise_first=True)
            return [self._committing]
        out: list[Commit[B] | Delete[B]] = [Delete(commit.batches)] if commit.batches else []
        if not current < commit.lower:
            out += self._raise_lower(current)
        return out + self._commit()

    def on_unknown(self, current: Antichain) -> list[Commit[B] | Delete[B]]:
        """The outcome of the commit in progress can no longer be determined; the shard's upper is `current`, past the commit's
        lower. Its batches are left alone, because the shard may reference them. Reading the shard back shows the outcome.
        """
        commit = self._taken()
        check(commit.lower < current, f"an append at {commit.lower} was certainly not appended: the upper is {current}")
        return self._raise_lower(current) + self._commit()

    def on_close(self) -> list[Commit[B] | Delete[B]]:
        """The sink ends. The stash will not be appended; a commit in progress continues."""
        return self._discard()

    def _raise_lower(self, lower: Antichain) -> list[Commit[B] | Delete[B]]:
        """A newer lower makes everything gathered so far stale."""
        if not self._lower < lower:
            return []
        self._lower = lower
        return self._discard()

    def _discard(self) -> list[Commit[B] | Delete[B]]:
        stale, self._stash, self._described = tuple(self._stash), [], None
        return [Delete(stale)] if stale else []

    def _commit(self) -> list[Commit[B] | Delete[B]]:
        described = self._described
        if self._committing is not None or described is None or not described.lower < self._staged_before:
            return []
        self._committing = Commit(described.lower, described.upper, tuple(self._stash))
        self._stash, self._described = [], None
        return [self._committing]

    def _taken(self) -> Commit[B]:
        commit, self._committing = self._committing, None
        check(commit is not None, "an append was answered, but none was in progress")
        assert commit is not None
        return commit
