"""`persist`: looks into shards, maintains them, reads them. What maintenance pods run, and people.

Owns the exit codes and how errors look. Commands live in `inspect`, `maintain`, `admin` and `read`, and in plugins.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from persist_engine.base.errors import (
    CorruptData,
    Fenced,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    StorageError,
    Unavailable,
)
from persist_engine.cli import admin, inspect, maintain, read
from persist_engine.cli.options import ENVIRON, METRICS_FILE
from persist_engine.cli.plugins import PluginGroup

EXIT_USAGE = 64
EXIT_CORRUPT = 74
_PARSER_EXIT_USAGE = 2
#: The first that fits counts; subclasses before their parents.
EXIT_CODES: tuple[tuple[type[PersistError], int], ...] = (
    (InvalidUsage, EXIT_USAGE),
    (StorageError, 70),
    (Unavailable, 70),
    (Fenced, 71),
    (CorruptData, EXIT_CORRUPT),
    (Incompatible, 75),
    (InvariantViolated, 73),
    (PersistError, 1),
)
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

EPILOG = """Examples:

persist inspect shards --blob file:///data/blobs --consensus sqlite:///data/consensus.db

persist read SHARD --as-of latest --format parquet --output out.parquet

persist maintain auto SHARD

persist admin holds SHARD

Exit codes: 0 done, 64 usage, 70 store unavailable, 71 fenced, 73 broken invariant, 74 corrupt data, 75 newer data."""

app = typer.Typer(
    cls=PluginGroup,
    name="persist",
    help="Durable, versioned, time-varying collections: look into shards, maintain, administer and read them.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(inspect.app, name="inspect")
app.add_typer(maintain.app, name="maintain")
app.add_typer(admin.app, name="admin")
app.command(name="read", epilog=read.EPILOG)(read.read)


@app.callback()
def persist(
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            envvar="PERSIST_METRICS",
            help="Write what was counted to this file, in Prometheus' text format.",
        ),
    ] = None,
) -> None:
    """Durable, versioned, time-varying collections: look into shards, maintain, administer and read them."""
    METRICS_FILE.set(metrics)
    ENVIRON.set(os.environ)


def exit_code(error: PersistError) -> int:
    """What the process ends with for `error`."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    as_json = "--json" in sys.argv[1:]
    try:
        app(prog_name="persist")
    except PersistError as error:
        code = exit_code(error)
        text = " ".join(str(error).split())
        if as_json:
            report = {"error": text, "kind": error.kind.value, "exit_code": code}
            sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
        sys.stderr.write(f"error: {error.kind.value}: {text}\n")
        sys.exit(code)
    except SystemExit as ended:
        # What the parser refuses (unknown commands and options) is usage as well, whatever its own code is.
        sys.exit(EXIT_USAGE if ended.code == _PARSER_EXIT_USAGE else ended.code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left: say nothing, and keep Python from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_PIPE)
    sys.exit(0)
