"""`persist admin retention`: how far a shard's since stays behind its upper, even when readers release older times."""

from __future__ import annotations

from typing import Annotated

import typer

from persist_engine.cli.options import (
    AsJson,
    Commit,
    NamedShardArgument,
    ShardOption,
    Stores,
    asked_shard,
    connected,
    on_stores,
    shard_called,
)
from persist_engine.cli.output import print_json, print_pairs, say_unchanged

EPILOG = "Examples: persist admin retention SHARD; persist admin retention SHARD 30d --commit; persist admin retention SHARD none --commit"


@on_stores
def retention(
    shard_argument: NamedShardArgument = None,
    value: Annotated[
        str | None,
        typer.Argument(metavar="[7d|none]", help="What to set: days, hours (h), minutes (m), seconds, ms; or none."),
    ] = None,
    *,
    shard: ShardOption = None,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show the shard's retention and since, or set the retention. A longer one does not bring back times that since has passed.

    It counts in the shard's own times, as milliseconds. A shard of an operator has no retention: `retention.sinceLagSeconds` of its
    PersistShard holds since.
    """
    from persist_engine.model.retention import current, in_words, planned, retention_of

    if shard is not None and value is None and shard_argument is not None and not shard_argument.startswith("s"):
        shard_argument, value = None, shard_argument  # the shard was given as an option: the argument is the value
    asked = asked_shard(shard_argument, shard)
    wanted = None if value is None else retention_of(value)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        machine = client.machine(shard_id)
        found = before = current(machine.refresh())
        owner = client.owner_of(shard_id)
        if value is not None:
            found = planned(machine.state, wanted)
        if value is not None and commit:
            client.set_retention(shard_id, wanted)
            found = current(machine.state)
    shown = (
        {"shard_id": shard_id}
        | found.to_json()
        | ({} if value is None else {"was_ms": before.retain_ms, "committed": commit})
    )
    if as_json:
        print_json(shown)
        return
    print_pairs({"shard_id": shard_id, "retention": in_words(found.retain_ms)} | shown)
    if value is not None and owner is not None and wanted is not None:
        typer.echo(f"{owner} owns this shard: its operator ends this retention and goes by its own", err=True)
    if value is not None and not commit:
        say_unchanged()
