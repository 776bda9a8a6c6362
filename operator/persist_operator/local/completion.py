"""Arguments that name resources and runs of a state folder, and their completions for the shell. When there is no answer, it gives no
names, and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import PersistError

from persist_operator.local.objects import KINDS, STATE, Objects
from persist_operator.local.processes import Processes
from persist_operator.views import tables


def complete_kind(ctx: typer.Context, incomplete: str) -> list[str]:
    """Words for the kinds that begin with `incomplete`. A list may also show other things."""
    also = ("runs", "all") if ctx.command.name == "get" else ()
    return [word for word in (*(words[0] for words in KINDS.values()), *also) if word.startswith(incomplete)]


def complete_resource(ctx: typer.Context, incomplete: str) -> list[str]:
    """Resources that begin with `incomplete`: of the kind that the line names, or of both."""
    kinds = [kind for kind, words in KINDS.items() if ctx.params.get("kind") in words]
    return _begin(incomplete, lambda: _resources(ctx, *(kinds or KINDS)))


def complete_shard(ctx: typer.Context, incomplete: str) -> list[str]:
    """Shards that begin with `incomplete`."""
    return _begin(incomplete, lambda: _resources(ctx, "PersistShard"))


def complete_sink(ctx: typer.Context, incomplete: str) -> list[str]:
    """Sinks that begin with `incomplete`."""
    return _begin(incomplete, lambda: _resources(ctx, "SparkSink"))


def complete_logged(ctx: typer.Context, incomplete: str) -> list[str]:
    """Sinks and runs that begin with `incomplete`."""

    def found() -> list[str]:
        env = SystemEnv()
        documents = [one for kind in KINDS for one in Objects(_state(ctx), env).every(kind)]
        runs = tables.runs(documents, Processes(_state(ctx), env).every())
        return [*_resources(ctx, "SparkSink"), *(str(run["name"]) for run in runs)]

    return _begin(incomplete, found)


def _state(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("state") or STATE)


def _resources(ctx: typer.Context, *kinds: str) -> list[str]:
    objects = Objects(_state(ctx), SystemEnv())
    return [str(one["metadata"]["name"]) for kind in kinds for one in objects.every(kind)]


def _begin(incomplete: str, found: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return sorted({name for name in found() if name.startswith(incomplete)})
    except (PersistError, OSError):  # OSError: files of another user
        return []


KindName = Annotated[str, typer.Argument(help="pshard or ssink.", autocompletion=complete_kind)]
ResourceName = Annotated[str, typer.Argument(help="Name of the resource.", autocompletion=complete_resource)]
OnlyName = Annotated[
    str | None, typer.Argument(help="Only the resource of this name.", autocompletion=complete_resource)
]
SinkName = Annotated[str, typer.Argument(help="Name of the sink.", autocompletion=complete_sink)]
LoggedName = Annotated[
    str,
    typer.Argument(help="A run (see `get runs`), or a sink: then its newest attempt.", autocompletion=complete_logged),
]
