"""`persist admin deletions`: shows which blobs maintenance deleted, when and why, according to the records in the blob store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import counted, dated
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
from persist_engine.cli.output import print_json, print_rows
from persist_engine.cli.times import TIME_HELP, one_time

if TYPE_CHECKING:
    from persist_engine.work.deletions import Recorded

EPILOG = "Examples: persist admin deletions SHARD --since -7d; persist admin deletions SHARD --blobs; persist admin deletions SHARD --json"


@on_stores
def deletions(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help=f"Records written at or after this time of the clock: {TIME_HELP}.")
    ] = "0",
    blobs: Annotated[bool, typer.Option("--blobs", help="One line for each blob, not for each record.")] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show which blobs were deleted, when and by which run. Records are kept for a limited time (`gc.recordDays` of a PersistShard, 90 days
    by default). `Unknown` means that a run ended before it could record which of its blobs it deleted.
    """
    from persist_engine.work.deletions import recorded

    since_ms = one_time(since, "--since")
    if since_ms is None:
        raise InvalidUsage("--since takes a time of the clock, such as -7d; `latest` is not one")
    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        found = recorded(client.machine(shard_called(client, asked)), since_ms=since_ms)
    if as_json:
        print_json([_document(one) for one in found])
        return
    if blobs:
        rows: list[tuple[object, ...]] = [
            (_gone(one), one.record.cause, key) for one in found for key in one.record.keys
        ]
        print_rows(("gone at", "cause", "blob"), rows)
    else:
        rows = [
            (
                dated(one.record.begun_ms),
                _gone(one),
                one.record.cause,
                len(one.record.keys),
                one.record.seqno,
                one.record.hostname,
                one.key,
            )
            for one in found
        ]
        print_rows(("begun", "gone at", "cause", "blobs", "version", "host", "record"), rows)
    total = sum(len(one.record.keys) for one in found)
    typer.echo(f"{counted(len(found), 'record')} of {counted(total, 'deleted blob')}", err=True)


def _gone(one: Recorded) -> str:
    return "Unknown" if one.record.gone_ms is None else dated(one.record.gone_ms)


def _document(one: Recorded) -> dict[str, Any]:
    record = one.record
    return {
        "record": one.key,
        "cause": record.cause,
        "outcome": "Unknown" if record.gone_ms is None else "Deleted",
        "seqno": int(record.seqno),
        "hostname": record.hostname,
        "begun_ms": record.begun_ms,
        "gone_ms": record.gone_ms,
        "blobs": list(record.keys),
    }
