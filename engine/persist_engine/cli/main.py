"""`persist`: inspects, maintains and reads shards. Maintenance pods run it, and so do people.

Owns how errors look. The commands are in `inspect`, `maintain`, `admin`, `read` and `tables`, and in plugins.
"""

from __future__ import annotations

import json
import locale
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from persist_engine import __version__
from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.secrets import without_secrets
from persist_engine.cli.exit_codes import EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USAGE, exit_code
from persist_engine.cli.options import ENVIRON, METRICS_FILE, PROFILE
from persist_engine.cli.plugins import PluginGroup, parser_of

#: The exit code of the parser of arguments.
_PARSER_EXIT_USAGE = 2
#: When this variable is in the environment, an unexpected error shows its traceback instead of one line.
TRACEBACK = "PERSIST_TRACEBACK"

EPILOG = """Examples:

persist inspect shards --blob file:///data/blobs --consensus sqlite:///data/consensus.db

persist append orders orders.csv

persist read SHARD --as-of latest --format parquet --output out.parquet

persist maintain auto SHARD

persist admin holds SHARD

Exit codes: 0 done, 1 any other error, 64 usage, 70 store unavailable, 71 fenced, 73 broken invariant, 74 corrupt data, 75 newer data."""


class _OutputClosed(Exception):
    """The program that read the output closed it."""


class _Root(PluginGroup):
    """All commands. Raises `_OutputClosed` for a closed pipe, because the parser would turn the original error into exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _OutputClosed from error


def _inspect() -> typer.Typer:
    from persist_engine.cli.inspect.commands import app

    return app


def _maintain() -> typer.Typer:
    from persist_engine.cli.maintain import app

    return app


def _admin() -> typer.Typer:
    from persist_engine.cli.admin.group import app

    return app


def _read(app: typer.Typer, name: str) -> None:
    from persist_engine.cli.read import register

    register(app, name)


def _tables(app: typer.Typer, name: str) -> None:
    from persist_engine.cli.tables.commands import register

    register(app, name)


def _changes(app: typer.Typer, name: str) -> None:
    from persist_engine.cli.tables.changes import register

    register(app, name)


_OF_TABLES = (
    *("append", "upsert", "overwrite"),
    *("ls", "create", "describe", "history", "optimize", "vacuum", "delete", "rename", "drop"),
)
#: The function that loads each group, and the function that loads and adds each command.
GROUPS = {"inspect": _inspect, "maintain": _maintain, "admin": _admin}
COMMANDS = {"read": _read, **dict.fromkeys(_OF_TABLES, _tables), "changes": _changes}
#: Options of `persist` itself that have a value.
_WITH_VALUE = frozenset({"--metrics", "--profile"})


def _show_version(value: bool) -> None:  # noqa: FBT001 - how the parser calls it
    if value:
        typer.echo(f"persist {__version__}")
        raise typer.Exit


def persist(
    *,
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            envvar="PERSIST_METRICS",
            help="Write what was counted to this file, in Prometheus' text format.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", envvar="PERSIST_PROFILE", help="The stores of this name in ~/.config/persist/profiles.toml."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Durable, versioned, time-varying collections: look into shards, maintain, administer and read them."""
    METRICS_FILE.set(metrics)
    PROFILE.set(profile)
    ENVIRON.set(os.environ)


@cache
def application(only: str | None = None) -> typer.Typer:
    """All commands. With `only`, just the command or group of this name, and no other is loaded."""
    app = typer.Typer(
        cls=_Root,
        name="persist",
        help="Durable, versioned, time-varying collections: look into shards, maintain, administer and read them.",
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(persist)
    for name, load in GROUPS.items():
        if only in {None, name}:
            app.add_typer(load(), name=name)
    for name, add in COMMANDS.items():
        if only in {None, name}:
            add(app, name)
    return app


def parser() -> Any:
    """The parser of all commands, which has the group of each name in `commands`."""
    return parser_of(application())


def _called(arguments: Sequence[str]) -> str | None:
    """The command or group of ours that a command line calls. None when that is not certain: for help, and for other or misspelt names."""
    left = iter(arguments)
    for each in left:
        if each in _WITH_VALUE:
            next(left, None)
        elif each.partition("=")[0] not in _WITH_VALUE:
            return each if each in GROUPS or each in COMMANDS else None
    return None


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    # The parent process may have closed both streams.
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        parser_of(application(_called(sys.argv[1:])))(prog_name="persist")
    except PersistError as error:
        sys.exit(_report(error.kind.value, str(error), exit_code(error)))
    except SystemExit as ended:
        # What the parser refuses (unknown commands and options) is usage as well, whatever code it exits with. It printed the message.
        if ended.code == _PARSER_EXIT_USAGE:
            message = getattr(ended.__context__, "format_message", lambda: "")()
            _report_json(InvalidUsage.kind.value, " ".join(message.split()), EXIT_USAGE)
            sys.exit(EXIT_USAGE)
        sys.exit(ended.code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except _OutputClosed:
        # The reader of our output closed it. Print nothing, and keep Python from flushing into the closed pipe at exit.
        _drop_output()
        sys.exit(EXIT_PIPE)
    except OSError as error:
        # This concerns files and streams of this machine, most often the output: errors of stores are PersistErrors. At exit Python must
        # not flush again what did not fit into the output.
        code = _report("OSError", f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
        _drop_output()
        sys.exit(code)
    except Exception as error:  # a bug of persist: reported in one line like every other error
        if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
            sys.exit(_report(InvalidUsage.kind.value, _beyond_locale(error), EXIT_USAGE))
        if os.environ.get(TRACEBACK):
            raise
        text = f"{type(error).__name__}: {error}; this is a bug of persist, {TRACEBACK}=1 shows where"
        sys.exit(_report("Unexpected", text, 1))
    sys.exit(0)


def _beyond_locale(error: UnicodeEncodeError) -> str:
    """The message for a text, most often a path, that has no bytes in the encoding of the locale."""
    named = without_secrets(ascii(error.object))[:200]
    return (
        f"{named} cannot be encoded in the locale {locale.setlocale(locale.LC_CTYPE)}, which has the encoding {error.encoding}: set "
        "LC_ALL=C.UTF-8, and do not set PYTHONUTF8=0"
    )


def _report(kind: str, text: str, code: int) -> int:
    """Prints an error as one line on stderr, and as JSON on stdout if --json was given. Returns `code`."""
    line = " ".join(text.split())
    sys.stderr.write(f"error: {kind}: {line}\n")
    _report_json(kind, line, code)
    return code


def _report_json(kind: str, line: str, code: int) -> None:
    if "--json" in sys.argv[1:]:
        with suppress(OSError):
            report = {"error": line, "kind": kind, "exit_code": code}
            sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
            sys.stdout.flush()


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def _drop_output() -> None:
    """Redirects stdout to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
