"""`persist inspect rollup`: shows what one rollup blob holds, by its key. It reads no log, for cases where the log is lost or in doubt."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_engine.base.errors import CorruptData, InvalidUsage, MissingBlob, PersistError
from persist_engine.cli.options import (
    GIVE_UP_S,
    AsJson,
    BlobUrl,
    GiveUp,
    ShardOption,
    Stores,
    blobs_of,
    completing,
    one_shard,
    words,
)
from persist_engine.cli.output import plain, print_json, print_pairs

if TYPE_CHECKING:
    from persist_engine.codec.keys import RollupKey
    from persist_engine.codec.state import Rollup
    from persist_engine.model.state import ShardState


def complete_rollup(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of rollups that begin with `incomplete`, for the shell. None before the shard is known, or when the store does not answer
    soon.
    """
    from persist_engine.codec.keys import rollups_prefix
    from persist_engine.model.ids import ShardId

    named, slash, _ = incomplete.partition("/")
    try:
        shard_id = ShardId(named if slash else ctx.params.get("shard") or named)
        with blobs_of(completing(ctx)) as (blobs, retry):
            keys = retry.external(
                "list rollups", lambda: [each.key for each in blobs.list_prefix(rollups_prefix(shard_id))]
            )
    except PersistError:
        return []
    return words(sorted(key for key in keys if key.startswith(incomplete)))


def rollup(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="As `inspect blobs` lists it, or, with --shard, as states and diffs name it.",
            autocompletion=complete_rollup,
        ),
    ],
    *,
    shard: ShardOption = None,
    blob: BlobUrl = None,
    give_up: GiveUp = GIVE_UP_S,
    as_json: AsJson = False,
) -> None:
    """Show what a rollup's blob holds: the metadata at one version, in numbers, or all of it with --json. Reads only that blob."""
    from persist_engine.codec.state import decode_rollup

    parsed = _parsed(key, shard)
    whole_key = f"{parsed.shard_id}/{parsed.partial}"
    with blobs_of(Stores(blob, give_up=give_up)) as (blobs, retry):
        data = retry.external("get rollup", lambda: blobs.get(whole_key), shard=parsed.shard_id)
        address = blobs.address()
    if data is None:
        text = (
            f"blob {whole_key} is missing at {address}: `persist inspect blobs {parsed.shard_id}` lists what there is"
        )
        raise MissingBlob(text, key=whole_key)
    held = decode_rollup(data, key=whole_key)
    if (held.state.shard_id, held.state.seqno) != (parsed.shard_id, parsed.seqno):
        raise CorruptData(
            f"rollup {whole_key} holds {held.state.seqno} of shard {held.state.shard_id}: its key holds the bytes of another rollup",
            key=whole_key,
        )
    if as_json:
        diffs = [{"seqno": int(diff.seqno), "bytes": len(diff.data)} for diff in held.diffs]
        print_json({"key": whole_key, "bytes": len(data)} | shown_state(held.state) | {"diffs": diffs})
    else:
        print_pairs(_numbers(whole_key, len(data), held))


def shown_state(state: ShardState) -> dict[str, Any]:
    """The whole metadata, in values that JSON can hold."""
    names = [field.name for field in fields(state) if field.name != "trace"]
    return {name: plain(getattr(state, name)) for name in names} | {"trace": plain(state.trace.flatten())}


def _parsed(key: str, shard: str | None) -> RollupKey:
    """The rollup that `key` names. Raises InvalidUsage when it names none."""
    from persist_engine.codec.keys import RollupKey, blob_key, parse_blob_key

    if key.count("/") == 1:
        key = blob_key(one_shard(None, shard), key)
    parsed = parse_blob_key(key)
    if not isinstance(parsed, RollupKey):
        raise InvalidUsage(f"{key} is the key of a part, not of a rollup: `persist read` shows what parts hold")
    return parsed


def _numbers(key: str, size_bytes: int, held: Rollup) -> dict[str, object]:
    state, trace = held.state, held.state.trace
    batches = tuple(trace.batches())
    return {
        "key": key,
        "bytes": size_bytes,
        "shard": state.shard_id,
        "seqno": int(state.seqno),
        "applier_version": state.applier_version,
        "walltime_ms": state.walltime_ms,
        "hostname": state.hostname,
        "since": "closed" if trace.since.time is None else trace.since.time,
        "upper": "closed" if trace.upper.time is None else trace.upper.time,
        "retain_ms": state.retain_ms,
        "batches": len(batches),
        "parts": sum(part.part_count for batch in batches for part in batch.parts),
        "updates": sum(batch.rows for batch in batches),
        "live_bytes": sum(batch.size_bytes for batch in batches),
        "schemas": len(state.schemas),
        "rollups": " ".join(rollup.key for rollup in state.rollups.values()),
        "leased_readers": len(state.leased_readers),
        "critical_readers": len(state.critical_readers),
        "writers": len(state.writers),
        "diffs": f"{held.diffs[0].seqno} to {held.diffs[-1].seqno}" if held.diffs else None,
    }
