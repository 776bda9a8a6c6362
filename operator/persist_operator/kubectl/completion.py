"""Names of resources for the shell, and the answers to kubectl, which calls the program `kubectl_complete-persist`.

A shell waits for the answer, so an error only means that there are no names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from persist_engine.base.errors import PersistError

#: kubectl's directive after the names: complete no files.
_NO_FILES = ":4"


def _names(ctx: typer.Context, incomplete: str, *plurals: str) -> list[str]:
    from persist_operator.kubectl.options import open_session

    given = ctx.params
    try:
        session = open_session(given.get("kubeconfig"), given.get("context"), given.get("namespace"))
        found = [
            str(one["metadata"]["name"])
            for plural, listed in (("shard", session.shards), ("sink", session.sinks))
            if plural in plurals
            for one in listed()
        ]
    except PersistError:
        return []
    return sorted({name for name in found if name.startswith(incomplete)})


def complete_shard(ctx: typer.Context, incomplete: str) -> list[str]:
    """PersistShards of the namespace that begin with `incomplete`."""
    return _names(ctx, incomplete, "shard")


def complete_sink(ctx: typer.Context, incomplete: str) -> list[str]:
    """SparkSinks of the namespace that begin with `incomplete`."""
    return _names(ctx, incomplete, "sink")


def complete_any(ctx: typer.Context, incomplete: str) -> list[str]:
    """Both."""
    return _names(ctx, incomplete, "shard", "sink")


def answers(command: Any, arguments: Sequence[str]) -> list[str]:
    """The answer for kubectl: one candidate a line, with its help after a tab, then a directive. The last argument is the word to
    complete.
    """
    from typer._click.shell_completion import ShellComplete

    class Kubectl(ShellComplete):
        """Needs neither a script nor variables, because kubectl calls the program with the words."""

        name, source_template = "kubectl", ""

        def source_vars(self) -> dict[str, Any]:
            return {}

        def get_completion_args(self) -> tuple[list[str], str]:
            *words, incomplete = arguments or [""]
            return words, incomplete

        def format_completion(self, item: Any) -> str:
            first = (item.help or "").strip().splitlines()[:1]
            return f"{item.value}\t{first[0]}" if first else str(item.value)

    text = Kubectl(command, {}, "kubectl persist", "").complete()
    return [*text.splitlines(), _NO_FILES]


def main() -> None:
    """The program `kubectl_complete-persist`."""
    from persist_operator.kubectl.main import app

    try:
        lines = answers(typer.main.get_command(app), sys.argv[1:])
    except Exception:  # noqa: BLE001 - after any error, the shell shows no names
        lines = [_NO_FILES]
    sys.stdout.write("\n".join(lines) + "\n")
