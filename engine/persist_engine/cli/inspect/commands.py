"""`persist inspect`: shows what a location holds, and a shard's metadata, log and blobs. Changes nothing and registers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.versioned import SeqNo
from persist_engine.cli.admin.owners import fields_of
from persist_engine.cli.inspect.rollup import rollup, shown_state
from persist_engine.cli.options import (
    UNREADABLE,
    AsJson,
    NamedShardArgument,
    ShardOption,
    Stores,
    asked_shard,
    connected,
    ended_with,
    on_stores,
    shard_called,
)
from persist_engine.cli.output import plain, print_json, print_pairs, print_rows

if TYPE_CHECKING:
    from persist_engine.client.client import PersistClient
    from persist_engine.model.ids import ShardId
    from persist_engine.model.state import ShardState
    from persist_engine.shard.machine import Machine

EPILOG = """Examples:

persist inspect shards --long

persist inspect shard SHARD --json

persist inspect state SHARD --seqno 17

persist inspect blobs SHARD --unreferenced

persist inspect rollup SHARD/v17/r...                    (needs no log)"""

app = typer.Typer(
    help="Look into a location or one shard: shards, shard, state, diffs, batches, blobs, rollup.",
    epilog=EPILOG,
    no_args_is_help=True,
)
app.command()(rollup)


@app.command()
@on_stores
def shards(
    *,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also show since, upper, rows and bytes, which reads each state.")
    ] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List the shards of a location. A shard that cannot be read is listed without numbers, and the command exits with the code of that
    error.
    """
    with connected(stores) as client:
        found = sorted(client.shards())
        names = ("shard", "seqno", "since", "upper", "updates", "parts", "bytes", "readers", "writers")
        rows: list[tuple[object, ...]] = []
        problems: list[PersistError] = []
        for shard_id in found:
            try:
                rows.append(_shard_row(client, shard_id) if long else (shard_id,))
            except UNREADABLE as error:
                rows.append((shard_id, *(None for _ in names[1:])))
                problems.append(error)
    columns = names if long else names[:1]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_rows(columns, rows)
    ended_with(problems)


def _shard_row(client: PersistClient, shard_id: ShardId) -> tuple[object, ...]:
    seen = client.inspect(shard_id)
    frontiers = ("closed" if time is None else time for time in (seen.since, seen.upper))
    return (
        shard_id,
        seen.seqno,
        *frontiers,
        seen.updates,
        seen.parts,
        seen.data_bytes,
        len(seen.readers),
        len(seen.writers),
    )


@app.command()
@on_stores
def shard(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show one shard in numbers: frontiers, schema, data, versions, debt, its store, its owner, its holds."""
    from persist_engine.model.retention import remark

    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        seen = client.inspect(shard_id)
        store_id, owner = client.store_id, client.owner_of(shard_id)
    if as_json:
        print_json(seen.to_json() | {"store_id": store_id, "owner": fields_of(owner)})
        return
    value: dict[str, Any] = plain(seen) | {"store_id": store_id, "owner": owner}
    value["retention"] = remark(seen.retain_ms, seen.since, seen.upper)
    readers, writers = value.pop("readers"), value.pop("writers")
    value["progress"] = ", ".join(f"{sink} to {upper}" for sink, upper in value["progress"].items()) or None
    print_pairs(value)
    for holders in (readers, writers):
        if holders:
            print_rows(tuple(holders[0]), [tuple(holder.values()) for holder in holders])


@app.command()
@on_stores
def state(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    seqno: Annotated[
        int | None, typer.Option("--seqno", help="Show this version, one of those that `inspect diffs` lists.")
    ] = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show the whole metadata at the newest version or at an older one. The output is always JSON."""
    del as_json
    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        machine = client.machine(shard_id)
        seen = machine.refresh() if seqno is None else _state_at(machine, seqno)
    print_json(shown_state(seen))


def _state_at(machine: Machine, seqno: int) -> ShardState:
    walk = machine.versions.fetch_all_live_states(machine.shard_id, through=SeqNo(seqno))
    assert walk is not None, "the machine found it"
    earliest = walk.seqno
    while walk.seqno < seqno and walk.advance() is not None:
        pass
    if walk.seqno != seqno:
        text = f"version {seqno} of shard {machine.shard_id} is not live: those from {earliest} to"
        raise InvalidUsage(f"{text} {machine.refresh().seqno} are")
    return walk.state


@app.command()
@on_stores
def diffs(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List the live versions in consensus, and what each changed."""
    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        found = client.metadata(shard_id, "versions")
    rows = [row | {"changed": dict(row["changed"])} for row in found.to_pylist()]
    if as_json:
        print_json(rows)
    else:
        shown = [tuple(_counts(cell) if isinstance(cell, dict) else cell for cell in row.values()) for row in rows]
        print_rows(found.column_names, shown)


def _counts(changed: dict[str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in changed.items())


@app.command()
@on_stores
def batches(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List the parts of all batches, oldest first: the run, how many rows and bytes, and where they are."""
    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        found = client.metadata(shard_id, "parts")
    if as_json:
        print_json(found.to_pylist())
    else:
        print_rows(found.column_names, [tuple(row.values()) for row in found.to_pylist()])


@app.command()
@on_stores
def blobs(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    unreferenced: Annotated[
        bool,
        typer.Option(
            "--unreferenced", help="Only blobs that no live version names: leaked ones, or ones being written now."
        ),
    ] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """List the shard's blobs, and which of them the live versions name."""
    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        rows = list(_blob_rows(client, shard_id))
    if unreferenced:
        rows = [row for row in rows if row[3] == "none"]
    columns = ("key", "kind", "bytes", "named_by")
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_rows(columns, rows)


def _blob_rows(client: PersistClient, shard_id: ShardId) -> Iterator[tuple[str, str, int, str]]:
    """Rows of (key, kind, bytes, named by). A blob is named by the newest state, only by older live states (garbage for a later GC), or
    by none.
    """
    from persist_engine.codec.keys import belongs_to_no_version, blob_key, shard_prefix, staging_notes_prefix
    from persist_engine.model.diff.state_diff import deleted_blobs, live_blobs
    from persist_engine.parts.listings import with_nested

    machine = client.machine(shard_id)
    # The listing comes first. A blob that is written and linked in the meantime is then missing from the listing. Otherwise it would be
    # listed as unreferenced.
    listed = sorted(machine.blob.list_prefix(shard_prefix(shard_id)), key=lambda info: info.key)
    walk = machine.versions.fetch_all_live_states(shard_id)
    assert walk is not None
    older = set(live_blobs(walk.state))
    while (diff := walk.advance()) is not None:
        older.update(deleted_blobs(diff))
    named = {blob_key(shard_id, ref.partial_key): ref.kind for ref in with_nested(machine, live_blobs(walk.state))}
    held = {blob_key(shard_id, ref.partial_key): ref.kind for ref in with_nested(machine, older)}
    for info in listed:
        if belongs_to_no_version(info.key, shard_id):
            continue
        is_rollup = info.key.removeprefix(shard_prefix(shard_id)).startswith("v")
        is_note = info.key.startswith(staging_notes_prefix(shard_id))
        unnamed = "rollup" if is_rollup else "staging note" if is_note else "part"
        kind = named.get(info.key) or held.get(info.key) or unnamed
        by = "newest" if info.key in named else "older" if info.key in held else "none"
        yield info.key, kind, info.size_bytes, by
