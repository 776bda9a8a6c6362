"""`persist admin proof`: shows that everything that was retracted before a time is gone, or names what is left."""

from __future__ import annotations

from typing import Annotated

import typer

from persist_engine.base.errors import InvalidUsage
from persist_engine.base.wording import counted, dated
from persist_engine.cli.exit_codes import EXIT_NOT_PROVEN
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

EPILOG = (
    "Examples: persist admin proof SHARD --before -1d; persist admin proof SHARD --before 2026-11-01T00:00:00Z --json"
)


@on_stores
def proof(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    before: Annotated[
        str, typer.Option(metavar="TIME", help=f"Retractions up to this time of the clock: {TIME_HELP}.")
    ] = "-1s",
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show that everything that was retracted before a time is gone from blobs, log and kept object versions, or name exactly what is left.

    Exits with code 0 when it is gone, and with code 3 when something is left or may be left. Changes nothing and reads no rows.
    """
    from persist_engine.work.audit.proof import prove

    before_ms = one_time(before, "--before")
    if before_ms is None:
        raise InvalidUsage("--before takes a time of the clock, such as -1h; `latest` is not one")
    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        found = prove(client.machine(shard_id), before_ms=before_ms)
    if as_json:
        print_json(found.to_json())
    else:
        if found.remains:
            columns = ("where", "kind", "owed since", "why", "held by", "remedy")
            rows = [
                (
                    one.where,
                    one.kind,
                    "" if one.since_ms is None else dated(one.since_ms),
                    one.why,
                    one.held_by,
                    one.remedy,
                )
                for one in found.remains
            ]
            print_rows(columns, rows)
        seen = (
            f"{counted(found.blobs, 'blob')}, {counted(found.rollups, 'rollup')} among them, "
            f"{counted(found.versions, 'version')} of the log, {counted(found.kept, 'kept object version')}"
        )
        verdict = "proven" if found.proven else f"NOT proven, {counted(found.remains_count, 'place')} left"
        typer.echo(f"{verdict}: retracted before {dated(before_ms)}, at v{found.seqno}; looked at {seen}", err=True)
    if not found.proven:
        raise typer.Exit(EXIT_NOT_PROVEN)
