"""The remedies for a condition as commands of `persist local`: the planner's hints, and the one command that the engine's errors
name. Pure.
"""

from __future__ import annotations

from persist_operator.api import names
from persist_operator.plan.hints import Approve, Expire, Hint, Recover, Request, Restart, Restore, TakeOver, Words


def local_words(name: str) -> Words:
    """The words for hints about the resource `name`."""

    def words(hint: Hint) -> str:
        match hint:
            case Restart():
                return f"mend the input, then `persist local run {name}`"
            case Request(verb):
                return f"run `persist local request {verb} {name}`"
            case Approve(plan_id):
                return f"run `persist local request {names.APPROVE} {name} --plan {plan_id}`"
            case Recover():
                return f"`persist local admin recover {name}`"
            case Restore():
                return f"bring back what the bucket kept with `persist local admin restore {name} --commit`"
            case Expire():
                return f"`persist local admin holds {name} {hint.options}`"
            case TakeOver(shard_id):
                annotation = f"{names.ANNOTATION_TAKE_OVER}: {shard_id}"
                return f"add the annotation {annotation} to this resource, and run `persist local up -f FILE`"

    return words


def by_name(text: str, shard_id: str | None, name: str) -> str:
    """The text of an engine error, with the shard's id replaced by `name`, because `persist local admin` knows no ids."""
    return text.replace(f"`persist admin recover {shard_id}`", local_words(name)(Recover(str(shard_id))))
