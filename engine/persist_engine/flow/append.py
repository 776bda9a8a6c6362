"""Append: gather what all workers staged under one description and commit it at once (spec 17.4). One machine a sink.
Pure: events in, instructions out. A batch is whatever the shell calls one; the machine only hands it on.

                    newer lower: delete what is stashed                    appended
     ┌────────────┐ ─────────────────────────────────▶ ┌──────────┐  ───────────────────▶ wait for a newer lower
     │ gathering  │                                    │committing│  upper < lower: raise it, commit again
     └────────────┘ ◀───────────────────────────────── └──────────┘  upper > lower: another replica won, delete
                    frontier past lower, described: Commit

Losing is no error: what is still missing shows as desired minus persisted, and is written by the next description.
Every batch that comes in goes out exactly once: appended, deleted, or left alone where nobody knows whether it was.
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
    """Compare-and-append `batches`; answer with `on_appended` or `on_mismatch`. With `raise_first`, append nothing
    until the shard's upper is at or past `lower` before: it is behind, and nothing belongs in between.
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
    """Delete these batches: nobody will append them."""

    batches: tuple[B, ...]

    def __str__(self) -> str:
        return f"delete {_names(self.batches)}"


def _names(batches: tuple[B, ...]) -> str:
    return " ".join(map(str, batches)) or "nothing"


class Append(Generic[B]):
    """State: the greatest lower seen, its description and batches as far as they came, and the commit under way."""

    def __init__(self) -> None:
        self._lower = MINIMUM
        self._described: Describe | None = None
        self._stash: list[B] = []
        self._staged_before = MINIMUM
        self._committing: Commit[B] | None = None

    @property
    def lower(self) -> Antichain:
        """Older descriptions and batches are stale."""
        return self._lower

    def on_description(self, described: Describe) -> list[Commit[B] | Delete[B]]:
        """Mint described a batch."""
        out = self._see(described.lower)
        if described.lower == self._lower:
            self._described = described
        return out + self._commit()

    def on_batch(self, lower: Antichain, batch: B) -> list[Commit[B] | Delete[B]]:
        """A worker staged `batch` under the description with this lower."""
        out = self._see(lower)
        if lower < self._lower:
            # (seed) Stale batches were skipped here and their blobs leaked (bug 30).
            return [*out, Delete((batch,))]
        self._stash.append(batch)
        return out + self._commit()

    def on_batches_frontier(self, frontier: Antichain) -> list[Commit[B] | Delete[B]]:
        """No worker will stage a batch with a lower before `frontier` any more."""
        self._staged_before = self._staged_before.join(frontier)
        return self._commit()

    def on_appended(self) -> list[Commit[B] | Delete[B]]:
        """The commit under way is part of the shard."""
        self._taken()
        return self._commit()

    def on_mismatch(self, current: Antichain) -> list[Commit[B] | Delete[B]]:
        """The commit under way found the shard's upper at `current`; nothing was appended."""
        commit = self._taken()
        check(current != commit.lower, f"an append at {commit.lower} was refused by the upper it expected")
        if current < commit.lower and commit.lower == self._lower:
            self._committing = Commit(commit.lower, commit.upper, commit.batches, raise_first=True)
            return [self._committing]
        out: list[Commit[B] | Delete[B]] = [Delete(commit.batches)] if commit.batches else []
        if not current < commit.lower:
            out += self._see(current)
        return out + self._commit()

    def on_unknown(self, current: Antichain) -> list[Commit[B] | Delete[B]]:
        """Nobody can tell any more whether the commit under way was appended; the shard's upper is at `current`, past its
        lower. Its batches are left alone, the shard may name them; what became of them shows when it is read back.
        """
        commit = self._taken()
        check(commit.lower < current, f"an append at {commit.lower} was surely not appended: the upper is {current}")
        return self._see(current) + self._commit()

    def on_close(self) -> list[Commit[B] | Delete[B]]:
        """The sink ends: what is stashed will not be appended. What is being committed is on its way."""
        return self._discard()

    def _see(self, lower: Antichain) -> list[Commit[B] | Delete[B]]:
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
        check(commit is not None, "an append was answered that nobody asked for")
        assert commit is not None
        return commit
