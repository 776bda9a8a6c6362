"""The commands of `persist admin` on owners. They show which resource has which shard under which name, and change that by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.errors import InvalidUsage, ShardNotFound
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
from persist_engine.cli.output import print_json, print_pairs, print_rows, say_unchanged

if TYPE_CHECKING:
    from persist_engine.model.ownership import Owner

OWNER_EPILOG = (
    "Examples: persist admin owner SHARD; persist admin owner SHARD --take-over my-operator/team/flights --commit; "
    "persist admin owner SHARD --release --commit"
)
NAMES_EPILOG = "Example: persist admin names --json"


@on_stores
def owner(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    release: Annotated[
        bool, typer.Option("--release", help="Remove the owner. The owner's name then leads to no shard.")
    ] = False,
    take_over: Annotated[
        str | None,
        typer.Option(
            "--take-over",
            metavar="OPERATOR/NAMESPACE/NAME",
            help="Make this resource the owner, also if another one owns the shard. Write a / within a part as %2F.",
        ),
    ] = None,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show which resource of which operator owns the shard. No other operator advances, shows or maintains it.

    A resource that still exists does not adopt a shard that was released under it: take the shard over, or delete the resource first.
    """
    from persist_engine.model.ownership import Owner

    if release and take_over is not None:
        raise InvalidUsage("--release and --take-over exclude each other")
    asked = asked_shard(shard_argument, shard)
    wanted = None if take_over is None else Owner.parse(take_over)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        held = client.owner_of(shard_id)
        if client.versions.live_diff_bounds(shard_id) is None and (held is None or wanted is not None):
            raise ShardNotFound(f"shard {shard_id} does not exist in {client.versions.consensus.address()}")
        if commit and release:
            client.disown(shard_id)
        if commit and wanted is not None:
            client.adopt(wanted, shard_id, shard_id, take_over=True)
        store_id = client.store_id
    new = None if release else wanted or held
    shown = {"shard_id": shard_id, "store_id": store_id, "owner": held}
    changes = {"new_owner": new, "committed": commit} if release or wanted is not None else {}
    if as_json:
        print_json({**shown, "owner": fields_of(held)} | ({**changes, "new_owner": fields_of(new)} if changes else {}))
        return
    print_pairs(shown | changes)
    if changes and not commit:
        say_unchanged()


@on_stores
def names(
    *,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List every resource that has, or had, a shard of this location, and the present owner of that shard."""
    with connected(stores) as client:
        found = sorted((str(name), name, shard_id) for name, shard_id in client.names())
        rows = [(name, shard_id, client.owner_of(shard_id)) for _, name, shard_id in found]
    if as_json:
        print_json([{**asdict(name), "shard_id": shard_id, "owner": fields_of(held)} for name, shard_id, held in rows])
        return
    columns = ("operator_id", "namespace", "name", "shard_id", "owner")
    print_rows(
        columns,
        [
            (name.operator_id, name.namespace, name.name, shard_id, "itself" if held == name else held)
            for name, shard_id, held in rows
        ],
    )


def fields_of(owner: Owner | None) -> dict[str, str] | None:
    """The owner as JSON. None when there is none."""
    return None if owner is None else asdict(owner)
