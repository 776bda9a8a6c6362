"""The program `kubectl-persist`, which kubectl finds as `kubectl persist`: its commands, the form of errors, and its exit codes.

Exit codes: 0 done; 1 any error, and a run that failed; 2 with --wait, the time ran out; 64 usage. `read`, `deletions` and `holds --expire`
have the exit codes of the engine, and `uninstall-check` has its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.version import APPLIER_VERSION
from typer.core import TyperGroup

from persist_operator.api.redact import one_line
from persist_operator.kubectl import ask, logs, reading, report, show, uninstall
from persist_operator.kubectl.options import Ended

_EXIT_USAGE, _EXIT_INTERRUPTED, _EXIT_PIPE = 64, 130, 141
_PARSER_EXIT_USAGE = 2
#: The environment variable that shows the traceback of an unexpected error instead of one line, as for `persist`.
_TRACEBACK = "PERSIST_TRACEBACK"
EPILOG = """Examples:

kubectl persist status flights

kubectl persist compact flights --wait --timeout 900

kubectl persist top -A

kubectl persist report -n team

Exit codes: 0 done, 1 any error and a run that failed, 2 --wait took too long, 64 usage. `read`, `deletions` and `holds --expire`: as of
`persist`."""


class _OutputClosed(Exception):
    """The reader of the output closed it."""


class _Root(TyperGroup):
    """All commands. A closed pipe raises our own exception, because the parser would make exit code 1 of it."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command, and print all of its output."""
        with _named():
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the command line, which prints the help and the version."""
        with _named():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _named():
            return super().invoke(ctx)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _OutputClosed from error


app = typer.Typer(
    cls=_Root,
    name="kubectl persist",
    help="Look at PersistShards and SparkSinks in a cluster, and ask the operator for runs. Uses your kubeconfig and your rights.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _command in {
    "status": show.status,
    "plan": show.plan,
    "approve": ask.approve,
    "compact": ask.compact,
    "gc": ask.gc,
    "rollup": ask.rollup,
    "verify": ask.verify,
    "orphans": ask.orphans,
    "accept-log": ask.accept_log,
    "restart": ask.restart,
    "promote": ask.promote,
    "suspend": ask.suspend,
    "resume": ask.resume,
    "adopt": ask.adopt,
    "holds": show.holds,
    "history": show.history,
    "top": show.top,
    "logs": logs.logs,
    "report": report.report,
    "uninstall-check": uninstall.uninstall_check,
}.items():
    app.command(_name)(_command)
app.command("read", context_settings=reading.PASSED_ON)(reading.read)
app.command("deletions", context_settings=reading.PASSED_ON)(reading.deletions)


def _show_version(value: bool) -> None:  # noqa: FBT001 - how the parser calls it
    if value:
        typer.echo(f"kubectl persist {APPLIER_VERSION}")
        raise typer.Exit


@app.callback()
def persist(
    ctx: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look at PersistShards and SparkSinks in a cluster, and ask the operator for runs. Uses your kubeconfig and your rights."""
    del version
    if os.environ.get("NO_COLOR"):
        ctx.color = False


@cache
def _parser() -> Any:
    """The parser. Made once in a process, because it takes 11 ms."""
    return typer.main.get_command(app)


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    # The parent process may have closed both streams.
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    try:
        _parser()(prog_name="kubectl persist")
    except InvalidUsage as error:
        _end(str(error), _EXIT_USAGE)
    except PersistError as error:
        _end(str(error), 1)
    except Ended as ended:
        sys.exit(ended.code)
    except SystemExit as ended:
        # A refusal of the parser (unknown commands and options) is a usage error, whatever its own code is.
        sys.exit(_EXIT_USAGE if ended.code == _PARSER_EXIT_USAGE else ended.code)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except _OutputClosed:  # prints nothing, as kubectl does
        _drop_output()
        sys.exit(_EXIT_PIPE)
    except OSError as error:  # from files and streams of this machine; errors of the cluster are PersistErrors
        _drop_output()
        _end(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except Exception as error:  # a bug, or an answer of an unknown form; reported in one line like every other error
        if os.environ.get(_TRACEBACK):
            raise
        _end(f"{type(error).__name__}: {error}; this is a bug of kubectl persist, {_TRACEBACK}=1 shows where", 1)
    sys.exit(0)


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def _drop_output() -> None:
    """Keep Python from flushing at exit the text that the output did not take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(text: str, code: int) -> NoReturn:
    """Print one line on stderr, without secrets, and exit with the code."""
    sys.stderr.write(f"error: {one_line(text)}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
