"""`persist read`: shows the contents of a shard at one time, or the changes between two times, on the terminal or in a file."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import dated
from persist_engine.cli.options import (
    AsJson,
    NamedShardArgument,
    ShardOption,
    Stores,
    asked_shard,
    connected,
    on_stores,
    shard_called,
)
from persist_engine.cli.output import Bar, print_json, print_rows, progress_bar
from persist_engine.cli.times import TIME_HELP, AsOf, one_time, refuse_instants, written_time

if TYPE_CHECKING:
    import pyarrow as pa

    from persist_engine.client.read.change_splits import Shape as ChangesShape
    from persist_engine.client.read.changes import Changes
    from persist_engine.client.read.handle import ReadHandle
    from persist_engine.client.read.snapshot import Snapshot

EPILOG = """Examples:

persist read SHARD

persist read SHARD --as-of 1357016400000 --format csv --output flights.csv

persist read SHARD --where "carrier IN ('AA', 'UA') AND delay >= 30" --columns carrier,flight,delay

persist read SHARD --where "delay IS NULL" --count

persist read SHARD --from -1h

persist read SHARD --from 2013-01-01T05:00:00Z --to latest

persist read SHARD > all.tsv

persist read SHARD --format arrow | python report.py"""

#: Rows of a table on a terminal when no limit is given.
TABLE_ROWS = 50


From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="TIME",
        help=f"Show each change after this time instead of the contents: {TIME_HELP}. `start`: from the shard's since on.",
    ),
]


class Format(enum.StrEnum):
    """A format in which rows are written."""

    TABLE = "table"
    ARROW = "arrow"
    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to `persist`."""
    app.command(name=name, epilog=EPILOG)(read)


@on_stores
def read(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    as_of: AsOf = "latest",
    format: Annotated[  # noqa: A002 - the option's name
        Format | None,
        typer.Option(help="By default the name of the output shows it; otherwise a table. arrow is an IPC stream."),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is standard output.")] = "-",
    limit: Annotated[
        int | None, typer.Option(min=0, help="Stop after this many rows; a table on a terminal ends after 50.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="Only rows that match this condition of SQL on fields of the key or the value."),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Show only these fields; names with commas between them.")] = None,
    since: From = None,
    upto: Annotated[
        str, typer.Option("--to", metavar="TIME", help="With --from: show changes up to and at this time, or `latest`.")
    ] = "latest",
    count: Annotated[bool, typer.Option("--count", help="Show only how many rows there are.")] = False,
    updates: Annotated[
        bool,
        typer.Option("--updates", help="Show the columns key, val, time, diff instead of the fields side by side."),
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the time to be written.")] = 0.0,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Read a shard, by its id or its name, at one time: key fields, then value fields. A row whose diff is n comes n times.

    With --from, read what happened since then: the time, the kind (insert, delete, update_before, update_after), and the row.

    Streams in bounded memory, whatever the size. --json means --format jsonl. A file appears only when it is complete.
    """
    asked = asked_shard(shard_argument, shard)
    if since is None and upto != "latest":
        raise InvalidUsage("--to needs --from: give both, or --as-of")
    if since is not None and (as_of != "latest" or count):
        raise InvalidUsage(f"--from shows changes: it does not go with {'--count' if count else '--as-of'}")
    shape = _Shape(where, None if columns is None else [name.strip() for name in columns.split(",")], flat=not updates)
    path = None if output == "-" else Path(output)
    chosen = format or _format(path, as_json=as_json)
    # A file or a pipe gets all rows.
    is_shortened = limit is None and path is None and chosen is Format.TABLE and sys.stdout.isatty()
    with ExitStack() as stack:
        client = stack.enter_context(connected(stores))
        shard_id = shard_called(client, asked)
        refuse_instants(client, shard_id, **{"from": since, "to": upto, "as-of": as_of})
        reader = stack.enter_context(client.open_leased_reader(shard_id, purpose="persist read"))
        answer: Snapshot | Changes
        if since is not None:
            last = written_time(client, shard_id, upto, "--to", wait_s=wait)
            answer = shape.changes(reader, _after(since, last, upto), last, wait)
        else:
            time = written_time(client, shard_id, as_of, "--as-of", wait_s=wait)
            answer = snapshot = shape.snapshot(reader, time, wait)
            if count:
                _print_count(snapshot.count(), as_json=as_json)
                return
        with answer as contents:
            has_more = shape.write(contents, chosen, path, TABLE_ROWS if is_shortened else limit)
            if has_more and is_shortened:
                typer.echo(f"{shape.shown_of(contents)}, --limit N for more; a file or a pipe gets all", err=True)


def _format(path: Path | None, *, as_json: bool) -> Format:
    """The format to write when --format is not given."""
    if as_json:
        return Format.JSONL
    suffix = "" if path is None else path.suffix.removeprefix(".")
    return next((each for each in Format if each.value == suffix), Format.TABLE)


class _Shape:
    """Which rows and columns are shown, and how. With `flat` the fields of key and value are side by side."""

    def __init__(self, where: str | None, columns: list[str] | None, *, flat: bool) -> None:
        self._where, self._columns, self._flat = where, columns, flat

    def snapshot(self, reader: ReadHandle, time: int, wait_s: float) -> Snapshot:
        """The contents at `time`. Raises InvalidUsage, which names the earliest readable time, when `time` is earlier."""
        from persist_engine.client.read.snapshot import SinceAhead

        answer = reader.snapshot(time, where=self._where, columns=self._columns, timeout_s=wait_s)
        if isinstance(answer, SinceAhead):
            raise InvalidUsage(answer.refused("cannot read"), as_of=time, since=answer.since)
        return answer

    def changes(self, reader: ReadHandle, after: int | None, upto: int, wait_s: float) -> Changes:
        """The changes after `after`, up to and at `upto`. Raises InvalidUsage like `snapshot`."""
        from persist_engine.client.read.snapshot import SinceAhead

        shape: ChangesShape = "rows" if self._flat else "updates"
        answer = reader.changes(after, upto, shape=shape, where=self._where, columns=self._columns, timeout_s=wait_s)
        if isinstance(answer, SinceAhead):
            text = "the start" if after is None else dated(after)
            said = f"cannot show the changes after {text}: the earliest readable time is {dated(answer.since.time)}"
            raise InvalidUsage(said, since=answer.since)
        return answer

    def shown_of(self, contents: Snapshot | Changes) -> str:
        """How many rows of `contents` a shortened table shows, in words. Counts all rows when that is cheap."""
        from persist_engine.client.read.snapshot import Snapshot

        if self._flat and self._where is None and isinstance(contents, Snapshot):
            return f"{TABLE_ROWS} of {contents.count():,} rows"
        return f"the first {TABLE_ROWS} rows"

    def write(self, contents: Snapshot | Changes, chosen: Format, path: Path | None, limit: int | None) -> bool:
        """Writes all rows, or the first `limit`. Returns whether there are more."""
        from persist_engine.cli.export import writing

        with progress_bar("read", quiet=path is None) as bar:
            batches = map(self._shown, _fetched(contents, bar))
            schema = self._shown(_empty(contents.updates_schema)).schema
            with writing(chosen.value, path, schema) as write:
                left = limit
                for batch in batches:
                    if left is None:
                        write(batch)
                        continue
                    if left:
                        write(batch.slice(0, left))
                    if batch.num_rows > left:
                        return True
                    left -= batch.num_rows
        return False

    def _shown(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        from persist_engine.cli.export import flattened, flattened_changes

        if not self._flat:
            return batch
        return flattened_changes(batch) if "change" in batch.schema.names else flattened(batch)


def _print_count(rows: int, *, as_json: bool) -> None:
    if as_json:
        print_json({"rows": rows})
    else:
        print_rows(("rows",), [(rows,)])


def _after(since: str, last: int, upto: str) -> int | None:
    """The time after which changes are shown. None means from the shard's since on. It is `last` for a later time with `--to latest`, which
    shows no changes.
    """
    after = None if since == "start" else one_time(since, "--from")
    if since == "latest" or (after is not None and upto == "latest" and after > last):
        return last
    return after


def _fetched(contents: Snapshot | Changes, bar: Bar) -> Iterator[pa.RecordBatch]:
    fetched = 0
    total = max(1, contents.bytes_estimate)

    def on_fetched(count: int) -> None:
        nonlocal fetched
        fetched += count
        bar(fetched, total, f"{fetched / 1e6:,.1f} MB")

    yield from contents.to_batches(on_fetched=on_fetched)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([], schema=schema)
