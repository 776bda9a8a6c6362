"""The commands of `persist admin` that inspect: holds (this one can also end holds), usage, verify, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.errors import (
    CorruptData,
    Incompatible,
    InvariantViolated,
    PersistError,
    ShardNotFound,
)
from persist_engine.base.wording import counted, dated, sized
from persist_engine.cli.exit_codes import EXIT_CORRUPT
from persist_engine.cli.options import (
    UNREADABLE,
    AsJson,
    Commit,
    NamedShardArgument,
    ShardOption,
    Stores,
    asked_or_all,
    asked_shard,
    connected,
    ended_with,
    on_stores,
    shard_called,
)
from persist_engine.cli.output import ago, print_json, print_rows, progress_bar, say_unchanged
from persist_engine.cli.times import AsOf, one_time, written_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from persist_engine.client.client import PersistClient
    from persist_engine.model.ids import ShardId
    from persist_engine.shard.machine import Machine
    from persist_engine.work.audit.finding import Verification
    from persist_engine.work.holds import EndedHold

HOLDS_EPILOG = "Examples: persist admin holds SHARD --json; persist admin holds SHARD --expire r... --commit"
USAGE_EPILOG = "Examples: persist admin usage (all shards); persist admin usage SHARD --referenced"
VERIFY_EPILOG = "Examples: persist admin verify (all shards); persist admin verify SHARD --sample 10"
EXPORT_EPILOG = "Examples: persist admin export SHARD --to backup; persist admin export SHARD --to all --history"


@on_stores
def holds(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    expire: Annotated[
        list[str] | None,
        typer.Option("--expire", help="End the hold of this reader; its process gets Fenced. May be repeated."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --expire: also end a critical reader. Its owner loses its place for good."),
    ] = False,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show every reader, every writer and the retention, oldest hold first: what each holds and since when, and what blocks since or
    collection.
    """
    from persist_engine.work.holds import expire_holds, holds_of

    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        machine = client.machine(shard_id)
        ended = expire_holds(machine, expire or (), force=force, commit=commit)
        if ended:
            _show_ended(shard_id, ended, committed=commit, as_json=as_json)
            return
        found = holds_of(machine)
    if as_json:
        print_json(found.to_json())
        return
    if not found.holds:
        typer.echo("no holds: nothing holds back since or collection", err=True)
        return
    rows = []
    for hold in found.holds:
        blocks = [name for name, does in (("since", hold.blocks_since), ("gc", hold.blocks_collection)) if does]
        age = ago(found.now_ms - hold.held_from_ms)
        if hold.lease_ends_ms is None:
            lease = "never lapses"
        else:
            lease = "lapsed" if hold.has_lapsed else f"ends in {ago(hold.lease_ends_ms - found.now_ms)}"
        held = f"upper {dated(hold.upper)}" if hold.kind == "writer" else f"since {dated(hold.since)}"
        held += "" if hold.seqno is None else f", v{hold.seqno}"
        when = f"{age} or more" if hold.is_older else age
        rows.append((hold.kind, hold.purpose, hold.hostname, held, when, " ".join(blocks), lease, hold.id))
    print_rows(("kind", "purpose", "host", "holds", "for", "blocks", "lease", "id"), rows)


def _show_ended(shard_id: ShardId, ended: list[EndedHold], *, committed: bool, as_json: bool) -> None:
    if as_json:
        print_json({"shard_id": shard_id, "expired": [each.to_json() for each in ended], "committed": committed})
        return
    rows = [(each.kind, each.purpose, each.hostname, each.id) for each in ended]
    print_rows(("expired" if committed else "would expire", "purpose", "host", "id"), rows)
    if not committed:
        say_unchanged()


@on_stores
def usage(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    referenced: Annotated[
        bool,
        typer.Option(
            "--referenced", help="Count only what the newest versions name. Reads metadata and lists no blobs."
        ),
    ] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Show what the blob store holds for each shard: needed, held, on its way, or leaked. Without SHARD: all shards."""
    asked = asked_or_all(shard_argument, shard)
    with connected(stores) as client:
        shard_id = None if asked is None else shard_called(client, asked)
        if referenced:
            _referenced(client, [shard_id] if shard_id is not None else sorted(client.shards()), as_json=as_json)
            return
        from persist_engine.codec.keys import shard_prefix
        from persist_engine.work.audit.references import Bucket
        from persist_engine.work.audit.usage import audit_usage

        with progress_bar("list", quiet=as_json) as bar:
            found = audit_usage(
                client.versions.blob,
                _machine_of(client),
                retry=client.versions.retry,
                metrics=client.versions.metrics,
                prefix="" if shard_id is None else shard_prefix(shard_id),
                on_listed=lambda blobs, size: bar(blobs, blobs, f"{counted(blobs, 'blob')}, {sized(size)}"),
            )
        if shard_id is not None and shard_id not in found.shards:
            client.machine(shard_id)  # neither store knows the shard: this raises ShardNotFound
    if as_json:
        print_json(found.to_json())
        return
    rows: list[tuple[object, ...]] = [
        (
            each.shard_id,
            *(each.bytes[bucket] for bucket in Bucket),
            each.total_bytes,
            _remark(each.problem, each.exists),
        )
        for _, each in sorted(found.shards.items())
    ]
    if found.foreign_blobs:
        rows.append(
            ("(none of ours)", *(None for _ in Bucket), found.foreign_bytes, counted(found.foreign_blobs, "blob"))
        )
    columns = ("shard", *(bucket.value for bucket in Bucket), "total_bytes", "remark")
    print_rows(columns, rows, counts=lambda _name: True)  # every number is a count of bytes


def _remark(problem: str | None, exists: bool) -> str | None:  # noqa: FBT001 - two columns of one row
    return problem if exists else "consensus does not know it"


def _referenced(client: PersistClient, shard_ids: list[ShardId], *, as_json: bool) -> None:
    from persist_engine.work.audit.usage import ReferencedUsage, referenced_usage

    found: list[ReferencedUsage] = []
    problems: list[PersistError] = []
    for shard_id in shard_ids:
        try:
            found.append(referenced_usage(client.machine(shard_id)))
        except UNREADABLE as error:
            problems.append(error)
    columns = ("shard_id", "parts_bytes", "rollups_bytes", "inline_bytes", "consensus_bytes")
    rows = [tuple(getattr(each, column) for column in columns) for each in found]
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_rows(columns, rows)
    ended_with(problems)


def _machine_of(client: PersistClient) -> Callable[[ShardId], Machine | None]:
    from persist_engine.base.errors import ShardNotFound

    def machine_of(shard_id: ShardId) -> Machine | None:
        try:
            return client.machine(shard_id)
        except ShardNotFound:
            return None

    return machine_of


@on_stores
def verify(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    sample: Annotated[
        float, typer.Option(min=0, max=100, help="Read the contents of this percentage of the parts.")
    ] = 100.0,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Check that everything that live versions name exists, decodes, and is what they say. Without SHARD: all shards.

    Exits with code 74 when something is lost or wrong. Looks for missing parts among all parts, whatever the sample.
    """
    from persist_engine.work.audit.verify import lost_shard, shards_without_log

    asked = asked_or_all(shard_argument, shard)
    with connected(stores) as client:
        shard_id = None if asked is None else shard_called(client, asked)
        shard_ids = sorted(client.shards()) if shard_id is None else [shard_id]
        if shard_id is None:
            # This also finds shards that were created in the meantime. They have their log by the time they are verified.
            shard_ids += shards_without_log(client.versions, shard_ids)
        found: list[Verification] = []
        problems: list[PersistError] = []
        for each in shard_ids:
            try:
                found.append(_verified(client, each, sample / 100, quiet=as_json))
            except ShardNotFound:
                lost = lost_shard(client.versions, each)
                if lost is not None:
                    found.append(lost)
                elif shard_id is not None:
                    raise
            except Incompatible as error:
                if shard_id is not None:
                    raise
                problems.append(error)
    if as_json:
        reports = [each.to_json() for each in found]
        print_json(reports if shard_id is None else reports[0])
    else:
        findings = [finding for each in found for finding in each.findings]
        if findings:
            columns = ("severity", "kind", "key", "what")
            print_rows(columns, [(f.severity.value, f.kind.value, f.key, f.message) for f in findings])
        numbers = ("shard_id", "versions", "rollups", "parts", "parts_read", "rows", "bytes_read")
        rows = [(*(getattr(each, name) for name in numbers), len(each.findings)) for each in found]
        print_rows((*numbers, "findings"), rows)
    if any(each.is_corrupt for each in found):
        raise typer.Exit(EXIT_CORRUPT)
    ended_with(problems)


def _verified(client: PersistClient, shard_id: ShardId, sample: float, *, quiet: bool) -> Verification:
    from persist_engine.work.audit.runs import unreadable
    from persist_engine.work.audit.verify import verify_shard

    try:
        machine = client.machine(shard_id)
    except (CorruptData, InvariantViolated) as error:
        return unreadable(shard_id, error)
    with progress_bar(f"verify {shard_id}", quiet=quiet) as bar:
        return verify_shard(
            machine, sample=sample, on_checked=lambda done, total, read: bar(done, total, f"{sized(read)} read")
        )


@on_stores
def export(
    shard_argument: NamedShardArgument = None,
    *,
    to: Annotated[Path, typer.Option("--to", help="Directory to make; must not exist or be empty.")],
    shard: ShardOption = None,
    as_of: AsOf = "latest",
    history: Annotated[
        bool, typer.Option("--history", help="Every update since the earliest readable time, instead of one time.")
    ] = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Write a whole shard as Parquet files and a manifest with their checksums. The directory appears only when it is complete."""
    from persist_engine.client.export import MANIFEST, export_shard

    asked = asked_shard(shard_argument, shard)
    time = one_time(as_of, "--as-of")
    with connected(stores) as client, progress_bar("export", quiet=as_json) as bar:
        shard_id = shard_called(client, asked)
        if time is not None and not history:
            written_time(client, shard_id, as_of, "--as-of")
        manifest = export_shard(
            client,
            shard_id,
            to,
            as_of=None if history else "latest" if time is None else time,
            on_read=lambda done, total: bar(done, total, sized(done)),
        )
    if as_json:
        print_json(manifest.to_json())
        return
    rows = [(file.name, file.rows, file.size_bytes, file.sha256) for file in manifest.files]
    print_rows(("file", "rows", "bytes", "sha256"), [*rows, (MANIFEST, manifest.rows, manifest.size_bytes, None)])
