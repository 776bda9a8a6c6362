"""Hints: the remedies for a condition, as values. A front end renders each hint with its own commands: the operator with `cluster_words`,
the local runner with its own function. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from persist_engine.model.ownership import Owner

from persist_operator.api import names


@dataclass(frozen=True, slots=True)
class Restart:
    """Run the sink of this resource again."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request one run, or one decision, for this resource. `verb`: see `persistshard.io/request-<verb>`."""

    verb: str


@dataclass(frozen=True, slots=True)
class Approve:
    """Approve the plan of this id for this resource."""

    plan_id: str


@dataclass(frozen=True, slots=True)
class Recover:
    """Inspect the remains of a lost shard, and recover it."""

    shard_id: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring back deleted blobs that a versioned bucket kept."""

    shard_id: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Make `owner`, which is this resource, the owner of the shard. `by_annotation`: the storage profile allows the annotation."""

    shard_id: str
    owner: Owner
    by_annotation: bool


@dataclass(frozen=True, slots=True)
class Expire:
    """End the hold of one reader of the shard."""

    shard_id: str
    reader_id: str
    is_critical: bool

    @property
    def options(self) -> str:
        """The options of `persist admin holds`. A critical reader also needs `--force`, because its owner relies on the hold."""
        return f"--expire {self.reader_id}{' --force' if self.is_critical else ''} --commit"


Hint = Restart | Request | Approve | Recover | TakeOver | Expire | Restore
Words = Callable[[Hint], str]


def cluster_words(hint: Hint) -> str:
    """The hint as annotations of the resource and as commands of `persist admin`."""
    match hint:
        case Restart():
            return cluster_words(Request("restart"))
        case Request(verb):
            return f"annotate the resource with {names.REQUEST_PREFIX}{verb}=<any new value>"
        case Approve(plan_id):
            return f"annotate the resource with {names.REQUEST_PREFIX}{names.APPROVE}={plan_id}"
        case Recover(shard_id):
            return f"`persist admin recover {shard_id}`"
        case Restore(shard_id):
            return f"bring back what the bucket kept with `persist admin restore {shard_id} --commit`"
        case Expire(shard_id):
            return f"`persist admin holds {shard_id} {hint.options}`"
        case TakeOver(shard_id, owner, by_annotation):
            annotation = f"annotate this resource {names.ANNOTATION_TAKE_OVER}={shard_id}, or " if by_annotation else ""
            return f"{annotation}run `persist admin owner {shard_id} --take-over {owner} --commit`"
