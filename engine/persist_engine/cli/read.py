"""`persist read`: the contents of a shard at one time, on the terminal or into a file."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.options import (
    GIVE_UP_S,
    AsJson,
    BlobUrl,
    ConsensusUrl,
    GiveUp,
    ShardArgument,
    ShardOption,
    connected,
    one_shard,
)
from persist_engine.cli.output import Bar, progress_bar

if TYPE_CHECKING:
    import pyarrow as pa

    from persist_engine.client.client import PersistClient
    from persist_engine.client.snapshot import Snapshot
    from persist_engine.model.ids import ShardId

EPILOG = """Examples:

persist read SHARD

persist read SHARD --as-of 1357016400000 --format csv --output flights.csv

persist read SHARD --format arrow | python report.py"""

#: Rows of a table on the terminal when no limit is given.
TABLE_ROWS = 50


class Format(enum.StrEnum):
    """How rows are written."""

    TABLE = "table"
    ARROW = "arrow"
    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


def read(
    shard_argument: ShardArgument = None,
    *,
    shard: ShardOption = None,
    blob: BlobUrl = None,
    consensus: ConsensusUrl = None,
    as_of: Annotated[str, typer.Option(help="A time, or `latest`: the newest that is complete.")] = "latest",
    format: Annotated[Format, typer.Option(help="arrow is an IPC stream.")] = Format.TABLE,  # noqa: A002 - the option's name
    output: Annotated[str, typer.Option("--output", "-o", help="File to write; - is standard output.")] = "-",
    limit: Annotated[int | None, typer.Option(min=0, help="Stop after this many rows.")] = None,
    updates: Annotated[
        bool, typer.Option("--updates", help="Columns key, val, time, diff instead of the fields side by side.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for `as_of` to be written.")] = 0.0,
    give_up: GiveUp = GIVE_UP_S,
    as_json: AsJson = False,
) -> None:
    """Read a shard as of one time: key fields, then value fields; a row whose diff is n comes n times.

    Streams in bounded memory, whatever the size. --json is --format jsonl. A file appears only when it is complete.
    """
    shard_id = one_shard(shard_argument, shard)
    chosen = Format.JSONL if as_json and format is Format.TABLE else format
    if chosen is Format.TABLE and limit is None:
        limit = TABLE_ROWS
    from persist_engine.cli.export import writing

    with (
        connected(blob, consensus, give_up) as client,
        client.open_leased_reader(shard_id, purpose="persist read") as reader,
    ):
        time = _time(client, shard_id, as_of)
        answer = reader.snapshot(time, timeout_s=wait)
        from persist_engine.client.snapshot import SinceAhead

        if isinstance(answer, SinceAhead):
            text = f"cannot read {shard_id} at {time}: the earliest time that can be told is {answer.since}"
            raise InvalidUsage(text, as_of=time, since=answer.since)
        with answer as snapshot, progress_bar("read", quiet=output == "-") as bar:
            batches = _rows(snapshot, bar, flat=not updates)
            first = next(batches, None)
            schema = _schema(snapshot, flat=not updates) if first is None else first.schema
            everything = batches if first is None else itertools.chain([first], batches)
            with writing(chosen.value, None if output == "-" else Path(output), schema) as write:
                for batch in _limited(everything, limit):
                    write(batch)


def _time(client: PersistClient, shard_id: ShardId, text: str) -> int:
    """What `--as-of` says, as a time."""
    from persist_engine.model.frontier import DATA_TIME_MAX

    if text != "latest":
        if not text.isdecimal():
            raise InvalidUsage(f"--as-of must be a time or `latest`, not {text!r}")
        return int(text)
    upper = client.recent_upper(shard_id)
    if upper.time == 0:
        raise InvalidUsage(f"shard {shard_id} has no complete time yet: nothing was appended (its upper is 0)")
    # A closed shard is complete at every time.
    return DATA_TIME_MAX if upper.time is None else min(upper.time - 1, DATA_TIME_MAX)


def _rows(snapshot: Snapshot, bar: Bar, *, flat: bool) -> Iterator[pa.RecordBatch]:
    from persist_engine.cli.export import flattened

    fetched = 0

    def on_fetched(count: int) -> None:
        nonlocal fetched
        fetched += count
        bar(fetched, max(1, snapshot.bytes_estimate), f"{fetched / 1e6:,.1f} MB")

    for batch in snapshot.to_batches(on_fetched=on_fetched):
        yield flattened(batch) if flat else batch


def _schema(snapshot: Snapshot, *, flat: bool) -> pa.Schema:
    from persist_engine.cli.export import flattened

    empty = snapshot.schema.updates_schema.empty_table().to_batches()
    import pyarrow as pa

    batch = empty[0] if empty else pa.RecordBatch.from_pylist([], schema=snapshot.schema.updates_schema)
    return flattened(batch).schema if flat else batch.schema


def _limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    left = limit
    for batch in batches:
        if left is None:
            yield batch
            continue
        if left <= 0:
            return
        yield batch.slice(0, left)
        left -= batch.num_rows
