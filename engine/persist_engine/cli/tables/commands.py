"""`persist ls|create|append|upsert|delete|overwrite|describe|history|optimize|vacuum|rename|drop`: tables by name."""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.wording import dated, sized
from persist_engine.cli.options import UNREADABLE, AsJson, Stores, completing, connected, ended_with, on_stores, soon
from persist_engine.cli.output import print_json, print_pairs, print_rows, progress_bar, reading
from persist_engine.cli.times import number_or_text

if TYPE_CHECKING:
    import pyarrow as pa

    from persist_engine.table.columns import Coerce
    from persist_engine.table.database import Database
    from persist_engine.table.table import Table
    from persist_engine.table.writing import Written
    from persist_engine.work.outcome import Outcome

#: A command waits this long for the maintenance that its write left. The next write is offered the rest.
MAINTENANCE_S = 60.0
WRITE_EPILOG = """Examples:

persist append orders orders.csv more.parquet

duckdb -jsonlines -c "from read_csv('in.csv')" | persist upsert orders - --format jsonl --order-by changed

Columns are matched by name. If any does not fit, the error names each of these, and nothing is written."""


class InputFormat(enum.StrEnum):
    """The format of input rows. The readers are in files.py, which loads Arrow."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"


class Coercion(enum.StrEnum):
    """How nanoseconds are converted: the values of table.columns.Coerce."""

    US = "us"
    TRUNCATE = "truncate"


class ClockName(enum.StrEnum):
    """The clock of a table: the values of model.state.Clock."""

    MS = "ms"
    COUNTER = "counter"


def complete_table(ctx: typer.Context, incomplete: str) -> list[str]:
    """The tables of the location that begin with `incomplete`, for the shell. None when the stores do not answer soon."""

    def look() -> list[str]:
        with connected(completing(ctx)) as client:
            from persist_engine.table.names import listed

            return [each.name for each in listed(client) if each.name.startswith(incomplete)]

    return soon(look)


TableArgument = Annotated[
    str,
    typer.Argument(metavar="TABLE", help="NAME, NAMESPACE.NAME, or the id of a shard.", autocompletion=complete_table),
]
Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...", help="CSV, JSON lines, Parquet, Arrow, also with .gz or .zst; - is standard input."
    ),
]
InputFormatOption = Annotated[
    InputFormat | None,
    typer.Option("--format", help="By default the names of the files show it. arrow is an IPC stream."),
]
Where = Annotated[str, typer.Option(help="Only the rows that match this condition of SQL.")]
TxnOption = Annotated[
    str | None,
    typer.Option("--txn", metavar="APP:NUMBER", help="Write once: if the number was committed before, write nothing."),
]
CommitInfoOption = Annotated[
    list[str] | None,
    typer.Option(
        "--commit-info", metavar="NAME=TEXT", help="A note on the write that `persist history` shows; repeatable."
    ),
]
CoerceOption = Annotated[
    Coercion | None,
    typer.Option(help="Instants in nanoseconds: accept those that lose no digit (us), or cut digits off (truncate)."),
]
#: The panel of the help that lists these commands.
PANEL = "Tables"


def register(app: typer.Typer, name: str) -> None:
    """Adds one of the commands to `persist`."""
    plain: list[Callable[..., None]] = [ls, create, describe, history, optimize, vacuum, delete, rename, drop]
    writing: list[Callable[..., None]] = [append, upsert, overwrite]
    command = next(each for each in writing + plain if each.__name__ == name)
    app.command(rich_help_panel=PANEL, epilog=WRITE_EPILOG if command in writing else None)(command)


@on_stores
def ls(
    namespace: Annotated[str | None, typer.Argument(help="List only the tables of this namespace.")] = None,
    *,
    long: Annotated[bool, typer.Option("--long", "-l", help="Also show the last write, updates and bytes.")] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List tables: those of SQL and Python, and the shards of an operator's resources by their names."""
    columns = ("name", "id", "retain", "last_write", "updates", "bytes") if long else ("name", "id")
    rows: list[tuple[object, ...]] = []
    problems: list[PersistError] = []
    with connected(stores) as client:
        from persist_engine.table.names import listed

        for each in listed(client):
            if each.owner is None or namespace not in {None, each.owner.namespace}:
                continue
            more: tuple[object, ...] = ()
            try:
                if long:
                    with _database(client) as db:
                        info = db.table(each.name).describe()
                    last = info.last_write if as_json else info.in_words()["last_write"]
                    more = (info.retain, last, info.updates, info.bytes)
            except UNREADABLE as error:
                problems.append(error)
                more = (None,) * 4
            rows.append((each.name, str(each.shard_id), *more))
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_rows(columns, rows)
    ended_with(problems)


@on_stores
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="NAME or NAMESPACE.NAME.")],
    *,
    key: Annotated[str, typer.Option(help="Columns of the key as DDL, or with --like their names.")],
    value: Annotated[str, typer.Option(help="The other columns as DDL.")] = "",
    like: Annotated[str | None, typer.Option(metavar="FILE", help="A Parquet file with the columns.")] = None,
    retain: Annotated[
        str,
        typer.Option(
            help="How long times stay readable: 7 days, 12h, none; with a counter 1000, none.",
            show_default="7 days; with a counter 1000",
        ),
    ] = "default",
    bloom: Annotated[
        str | None,
        typer.Option(metavar="COLUMNS", help="Make Bloom filters for these columns. They help reads of single values."),
    ] = None,
    coerce: CoerceOption = None,
    clock: Annotated[
        ClockName, typer.Option(help="The times of writes: ms since 1970, or a counter, for good.")
    ] = ClockName.MS,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Succeed if it exists with the same columns.")] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Create a table. Also creates the stores when they are new."""
    with connected(stores, create=True) as client, _database(client) as db:
        schema: Any = None
        if like is not None:
            import pyarrow as arrow
            import pyarrow.parquet as pq

            try:
                schema = pq.read_schema(like)
            except arrow.ArrowException as error:
                raise InvalidUsage(
                    f"{like} is not a Parquet file: give --like one, or give the columns as DDL"
                ) from error
            except OSError as error:
                raise InvalidUsage(f"cannot read {like}: {error.strerror or error}") from error
        filtered = [] if bloom is None else [each.strip() for each in bloom.split(",")]
        made = db.create(
            name,
            key,
            value,
            like=schema,
            retain=retain,
            bloom=filtered,
            coerce=_coerced(coerce),
            clock=clock.value,
            exist_ok=exist_ok,
        )
        _print({"name": made.name, "id": str(made.id)}, as_json=as_json)


@on_stores
def append(
    table: TableArgument,
    files: Files,
    *,
    format: InputFormatOption = None,  # noqa: A002 - the option's name
    coerce: CoerceOption = None,
    txn: TxnOption = None,
    commit_info: CommitInfoOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Add the rows of files, all in one commit."""
    with _writing(table, stores, as_json=as_json) as done:
        done(
            lambda it: it.append(
                _rows(it, files, format, "append"),
                coerce=_coerced(coerce),
                txn=_txn(txn),
                commit_info=_info(commit_info),
            )
        )


@on_stores
def upsert(
    table: TableArgument,
    files: Files,
    *,
    format: InputFormatOption = None,  # noqa: A002 - the option's name
    order_by: Annotated[
        str | None,
        typer.Option(help="The column that decides among several rows of a key: the row with the greatest value wins."),
    ] = None,
    coerce: CoerceOption = None,
    txn: TxnOption = None,
    commit_info: CommitInfoOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Make each row of files the only row of its key, all in one commit."""
    with _writing(table, stores, as_json=as_json) as done:
        done(
            lambda it: it.upsert(
                _rows(it, files, format, "upsert"),
                order_by=order_by,
                coerce=_coerced(coerce),
                txn=_txn(txn),
                commit_info=_info(commit_info),
            )
        )


@on_stores
def overwrite(
    table: TableArgument,
    files: Files,
    *,
    format: InputFormatOption = None,  # noqa: A002 - the option's name
    expected: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Write only if nothing was written after this time. `never`: only if nothing was ever written. `any`: always.",
        ),
    ] = "any",
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Accept files without a line, which removes all rows.")
    ] = False,
    coerce: CoerceOption = None,
    txn: TxnOption = None,
    commit_info: CommitInfoOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Replace the contents with the rows of files. Writes only the difference."""
    at = None if expected == "never" else number_or_text(expected)
    with _writing(table, stores, as_json=as_json) as done:

        def write(it: Table) -> Written:
            rows = _rows(it, files, format, "overwrite")
            sure = chain([it.schema.empty_table()], rows) if allow_empty else _not_empty(rows, files)
            return it.overwrite(
                sure, expected=at, coerce=_coerced(coerce), txn=_txn(txn), commit_info=_info(commit_info)
            )

        done(write)


@on_stores
def delete(
    table: TableArgument,
    *,
    where: Where,
    txn: TxnOption = None,
    commit_info: CommitInfoOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Remove rows. They stay readable at earlier times for as long as the table's retention says."""
    with _writing(table, stores, as_json=as_json) as done:
        done(lambda it: it.delete(where, txn=_txn(txn), commit_info=_info(commit_info)))


@on_stores
def describe(
    table: TableArgument,
    *,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show one table in numbers and words. Reads no rows."""
    with connected(stores) as client, _database(client) as db:
        found = db.table(table).describe()
    _print(asdict(found) if as_json else found.in_words(), as_json=as_json)


@on_stores
def history(
    table: TableArgument,
    *,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many versions.")] = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List the versions that changed rows, schema or retention, newest first, as far back as the log goes."""
    with connected(stores) as client, _database(client) as db:
        found = db.table(table).history(limit)
    rows = found.to_pylist()
    for row in rows:
        row["committed"] = row["committed"].isoformat().replace("+00:00", "Z")
    if as_json:
        print_json([{**row, "commit_info": json.loads(row["commit_info"] or "null")} for row in rows])
    else:
        print_rows(found.column_names, [tuple(row.values()) for row in rows], times=lambda column: column == "time")


@on_stores
def optimize(
    table: TableArgument,
    *,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Merge small parts until one batch is left. Rows stay the same at every readable time."""
    with connected(stores, claim_ms=0) as client, _database(client) as db:
        with progress_bar("optimize", quiet=False) as bar:
            found = db.table(table).optimize(on_read=reading(bar))
        _print_outcomes(found, as_json=as_json)


@on_stores
def vacuum(
    table: TableArgument,
    *,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Delete what no reader can reach any more. Never deletes what a readable time needs."""
    with connected(stores) as client, _database(client) as db:
        _print_outcomes(db.table(table).vacuum(), as_json=as_json)


@on_stores
def rename(
    table: TableArgument,
    new: Annotated[str, typer.Argument(metavar="NEW", help="NAME or NAMESPACE.NAME.")],
    *,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Give a table of SQL or Python another name. Its rows and its id stay."""
    with connected(stores) as client, _database(client) as db:
        made = db.rename(table, new)
        _print({"name": made.name, "id": str(made.id)}, as_json=as_json)


@on_stores
def drop(
    table: TableArgument,
    *,
    purge: Annotated[bool, typer.Option("--purge", help="Delete the rows for good, at every time.")] = False,
    confirm: Annotated[str | None, typer.Option(metavar="TABLE", help="With --purge: repeat the name.")] = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Remove the name of a table of SQL or Python. Its rows stay under its id, which is printed."""
    if purge and confirm != table:
        raise InvalidUsage(f"--purge deletes the rows for good: confirm it with --confirm {shlex.quote(table)}")
    with connected(stores) as client, _database(client) as db:
        gone = db.drop(table, purge=purge, confirm=confirm)
        _print({"id": str(gone), "rows": "deleted" if purge else "kept"}, as_json=as_json)


@contextmanager
def _database(client: Any, *, maintain: bool = False) -> Iterator[Database]:
    """The tables of a client, which the owner of the client closes."""
    from persist_engine.table.database import Database
    from persist_engine.table.names import Hints

    hints = Hints(
        create=lambda name: (
            f"create it, as in `persist create {shlex.quote(name)} --key 'id BIGINT' --value 'name STRING'`"
        ),
        taken=lambda _: "write to it, or give --exist-ok",
    )
    with Database(client, maintain=maintain, hints=hints) as db:
        yield db


@contextmanager
def _writing(name: str, stores: Stores, *, as_json: bool) -> Iterator[Callable[[Callable[[Table], Written]], None]]:
    """Yields a function that runs one write and prints what it did. Afterwards does the maintenance that the write left."""
    with connected(stores) as client, _database(client, maintain=True) as db:

        def run(write: Callable[[Table], Written]) -> None:
            done = asdict(write(db.table(name)))
            if not as_json:
                done["time"] = None if done["time"] is None else dated(done["time"])
            _print(done, as_json=as_json)

        yield run
        db.drain(MAINTENANCE_S)


def _rows(table: Table, files: list[str], chosen: InputFormat | None, label: str) -> Iterator[pa.Table]:
    """The rows of files. Shows the progress of reading."""
    from persist_engine.cli.tables.files import batches_of

    with progress_bar(label, quiet=False) as bar:

        def show(rows: int, read: int, total: int) -> None:
            of = f", {sized(read)} of {sized(total)}" if total else ""
            bar(read, total or 1, f"{rows:,} rows{of}")

        yield from batches_of(files, chosen, table.schema, show)


def _not_empty(rows: Iterator[pa.Table], files: list[str]) -> Iterator[pa.Table]:
    """The same rows. Raises InvalidUsage when the files are empty, as after a program that failed before its first line. A file that names
    its columns and has no rows is not empty.
    """
    for first in rows:
        yield first
        yield from rows
        return
    names = "standard input" if files == ["-"] else ", ".join(files)
    raise InvalidUsage(
        f"{names} holds no line, so overwrite would remove all rows: give --allow-empty if you mean that"
    )


def _coerced(given: Coercion | None) -> Coerce | None:
    return None if given is None else given.value


def _info(given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    bad = next((each for each in given if not each.partition("=")[1] or each.startswith("=")), None)
    if bad is not None:
        raise InvalidUsage(f"--commit-info takes NAME=TEXT, as in job=nightly, not {bad[:40]!r}")
    return {name: text for name, _, text in (each.partition("=") for each in given)}


def _txn(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    app, colon, number = text.rpartition(":")
    if not colon or not app or not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise InvalidUsage(f"--txn takes APP:NUMBER, as in nightly:17, not {text[:40]!r}")
    return app, int(number)


def _print(pairs: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(pairs)
    else:
        print_pairs(pairs)


def _print_outcomes(outcomes: list[Outcome], *, as_json: bool) -> None:
    if as_json:
        print_json([outcome.to_json() for outcome in outcomes])
        return
    rows = [(each.type, each.ending.value, each.message, each.duration_ms) for each in outcomes]
    print_rows(("work", "outcome", "what", "ms"), rows or [("none", "Skipped", "nothing was due", 0)])
