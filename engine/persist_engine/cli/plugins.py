"""Sub-commands of other distributions. Each is an entry point of the group `persist.commands` that names a Typer application.

A plugin is imported only when its command is used, so that help stays fast and a broken plugin affects only its own command.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from persist_engine.cli.startup import let_pandas_in, loaded

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "persist.commands"


def plugin_entry_points() -> dict[str, EntryPoint]:
    """The entry point for each name of a command."""
    from importlib.metadata import entry_points  # slow: it loads a parser of mail

    return {entry.name: entry for entry in entry_points(group=GROUP)}


@cache
def parser_of(app: typer.Typer) -> Any:
    """The parser of an application. It is made once in a process, because that takes 45 ms for all of `persist`. It lacks commands that are
    registered later.
    """
    return typer.main.get_command(app)


class PluginGroup(TyperGroup):
    """A group that also offers the commands of plugins. Its own commands win."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Its own commands first, then those of plugins in the order of their names."""
        own = list(super().list_commands(ctx))
        return own + sorted(name for name in plugin_entry_points() if name not in own)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Its own command, or a stand-in for the command of a plugin. The stand-in knows only the name, which help lists."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = plugin_entry_points().get(cmd_name)
        if entry is None:
            return None
        source = entry.dist.name if entry.dist is not None else entry.value
        stand_in = typer.Typer(name=cmd_name, help=f"See `persist {cmd_name} --help` (from {source}).")
        stand_in.callback(invoke_without_command=True)(_nothing)
        return typer.main.get_command(stand_in)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command to run. Loads the plugin if it is a plugin's."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or super().get_command(ctx, name) is not None:
            return name, command, rest
        entry = plugin_entry_points().get(name)
        if entry is None:
            return name, command, rest
        let_pandas_in()
        found = parser_of(entry.load())
        found.name = name
        loaded()
        return name, found, rest


def _nothing() -> None:
    """The function of a stand-in for a plugin. It is never called."""
