"""The two ends of a transition."""

from __future__ import annotations

from dataclasses import dataclass

from persist_engine.model.commands import Answer
from persist_engine.model.state import ShardState


@dataclass(frozen=True, slots=True)
class Applied:
    """Commit `state`, then give `answer`."""

    state: ShardState
    answer: Answer


@dataclass(frozen=True, slots=True)
class Refused:
    """Give `answer`; there is nothing to commit."""

    answer: Answer
