"""`persist changes TABLE`: shows what happened to a table, in the order of time. With --follow it also shows later changes."""

from __future__ import annotations

import enum
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_engine.base.wording import dated
from persist_engine.cli.options import AsJson, Stores, connected, on_stores
from persist_engine.cli.output import inert
from persist_engine.cli.tables.commands import PANEL, TableArgument
from persist_engine.cli.times import TIME_HELP, number_or_text

if TYPE_CHECKING:
    import pyarrow as pa

EPILOG = """Examples:

persist changes orders --since -1h

persist changes orders --since latest --follow --json | jq ._after

A line of JSON has _change (insert, update, delete), _time, the key, and the row _before and _after."""
_START, _LATEST = "start", "latest"


class _Form(enum.StrEnum):
    TEXT = "text"
    JSONL = "jsonl"


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to `persist`."""
    app.command(name=name, rich_help_panel=PANEL, epilog=EPILOG)(changes)


@on_stores
def changes(
    table: TableArgument,
    *,
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME", help=f"Show what happened after this time: {TIME_HELP}. `start`: all that is readable."
        ),
    ] = _START,
    upto: Annotated[
        str | None,
        typer.Option("--to", metavar="TIME", help="Show changes up to and at this time; up to now by default."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Also show what is written from now on, until interrupted.")
    ] = False,
    where: Annotated[
        str | None,
        typer.Option(help="Only changes of rows that match this condition of SQL before or after the change."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Stop after this many changes.")] = None,
    form: Annotated[_Form, typer.Option("--format", help="text is for people, jsonl for programs.")] = _Form.TEXT,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show what happened to a table: each insert, update and delete, with the row before and after."""
    with connected(stores) as client:
        from persist_engine.cli.export import json_lines
        from persist_engine.table.database import Database

        is_text = form is _Form.TEXT and not as_json
        with Database(client, maintain=False) as db:
            it = db.table(table)
            key = it.key
            begin: Any = number_or_text(since)
            if since == _LATEST:
                newest = client.recent_upper(it.id).newest_complete
                begin = newest if newest >= 0 else _START
            end: Any = None if upto is None or (upto == _LATEST and not follow) else number_or_text(upto)
            with it.changes(begin, upto=end, follow=follow, where=where) as feed:
                for batch in feed.to_batches():
                    shown = batch if limit is None else batch.slice(0, limit)
                    sys.stdout.write(_lines(shown, key) if is_text else json_lines(shown))
                    sys.stdout.flush()
                    limit = None if limit is None else limit - shown.num_rows
                    if limit == 0:
                        return


def _lines(changes: pa.RecordBatch, key: tuple[str, ...]) -> str:
    """One line for each change: the time, the kind, the key, and the row or its new values."""
    from persist_engine.rows.nested.values import python_values

    columns = (python_values(changes.column(name)) for name in ("_time", "_change", "_before", "_after"))
    return "".join(_line(*row, key=key) for row in zip(*columns, strict=True))


def _line(
    time: int, kind: str, before: dict[str, Any] | None, after: dict[str, Any] | None, *, key: tuple[str, ...]
) -> str:
    row = after or before or {}
    named = [f"{name}={_json(row[name])}" for name in key]
    if before is None or after is None:
        fields = [f"{name}={_json(value)}" for name, value in row.items() if name not in key]
    else:
        fields = [
            f"{name}: {_json(before[name])} -> {_json(new)}" for name, new in after.items() if before[name] != new
        ]
    line = inert("  ".join((dated(time), f"{kind:6}", *named, *fields)))
    return line.replace("\n", "\\n") + "\n"  # only names may hold a line end: values are JSON


def _json(value: Any) -> str:
    """The value as JSON on one line, whatever characters it holds."""
    return json.dumps(_named(value), ensure_ascii=False, default=_text_of)


def _named(value: Any) -> Any:
    """`value` with the keys of maps as text at any depth, because JSON has no other keys."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _text_of(key): _named(each) for key, each in value.items()}
    return list(map(_named, value)) if isinstance(value, list) else value


def _text_of(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
