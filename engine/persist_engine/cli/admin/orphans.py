"""`persist admin orphans`: lists blobs that no version names and, with --commit, deletes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.errors import InvalidUsage, PersistError
from persist_engine.base.wording import counted, sized
from persist_engine.cli.maintain_audits import OLDER_THAN_S_MIN
from persist_engine.cli.options import (
    UNREADABLE,
    AsJson,
    Commit,
    NamedShardArgument,
    ShardOption,
    Stores,
    asked_or_all,
    connected,
    ended_with,
    on_stores,
    shard_called,
)
from persist_engine.cli.output import ago, print_json, print_rows, progress_bar, say_unchanged

if TYPE_CHECKING:
    from persist_engine.client.client import PersistClient
    from persist_engine.model.ids import ShardId
    from persist_engine.work.audit.orphans import Orphans

EPILOG = """Examples:

persist admin orphans SHARD                              (lists what it would delete)

persist admin orphans SHARD --older-than 3d --commit

persist admin orphans --max-deletes 10000 --commit       (all shards; go on with --resume-after)"""

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(text: str) -> int:
    """`7d`, `12h`, `90m`, `3600s` or `3600` in seconds. Raises InvalidUsage for anything else."""
    found = re.fullmatch(r"(\d{1,9})([smhd]?)", text)
    if found is None:
        raise InvalidUsage(f"not a duration: {text!r}, expected a number and s, m, h or d, as in 7d")
    return int(found[1]) * _UNITS_S[found[2] or "s"]


@on_stores
def orphans(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    older_than: Annotated[
        str,
        typer.Option(
            help="Only blobs that were staged longer ago. Batches staged before that are refused from then on."
        ),
    ] = "7d",
    max_deletes: Annotated[int | None, typer.Option(min=1, help="Stop after this many deletes.")] = None,
    resume_after: Annotated[
        str | None, typer.Option(help="Skip the shards up to this one, where an earlier run stopped.")
    ] = None,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Find blobs that no version names and that none will ever name. Without SHARD: all shards, in the order of their ids.

    With --commit the command first gives each shard a floor: a batch that was staged before the floor can no longer be appended, so no
    version will ever name a deleted blob. Blobs of shards that consensus does not know are never deleted; `persist admin usage` shows them.
    """
    from persist_engine.model.ids import ShardId

    older_than_s = seconds_of(older_than)
    if older_than_s < OLDER_THAN_S_MIN:
        raise InvalidUsage(f"--older-than must be at least {ago(OLDER_THAN_S_MIN * 1000)}: slow writers need that time")
    asked = asked_or_all(shard_argument, shard)
    after = None if resume_after is None else ShardId(resume_after)
    found: list[Orphans] = []
    problems: list[PersistError] = []
    done = resume_after
    with connected(stores) as client:
        one = None if asked is None else shard_called(client, asked)
        shard_ids = [one] if one is not None else sorted(client.shards())
        left = max_deletes
        stopped = False
        for shard_id in (each for each in shard_ids if after is None or each > after):
            stopped = left == 0
            if not stopped:
                try:
                    scanned = _scanned(client, shard_id, older_than_s * 1000, left, commit=commit, quiet=as_json)
                except UNREADABLE as error:
                    if one is not None:
                        raise
                    problems.append(error)  # the command goes on with the other shards
                    done = shard_id
                    continue
                found.append(scanned)
                left = None if left is None else left - scanned.deleted
                stopped = not scanned.is_complete
            if stopped:
                break
            done = shard_id
    _show(found, older_than_s, commit=commit, stopped=stopped, resume_after=done, as_json=as_json)
    ended_with(problems)


def _scanned(
    client: PersistClient, shard_id: ShardId, older_than_ms: int, left: int | None, *, commit: bool, quiet: bool
) -> Orphans:
    from persist_engine.work.audit.orphans import scan_orphans

    with progress_bar(f"scan {shard_id}", quiet=quiet) as bar:
        return scan_orphans(
            client.machine(shard_id),
            older_than_ms=older_than_ms,
            commit=commit,
            max_deletes=left,
            on_listed=lambda listed, deleted: bar(
                listed, listed, f"{counted(listed, 'blob')}, {counted(deleted, 'delete')}"
            ),
        )


def _show(
    found: list[Orphans], older_than_s: int, *, commit: bool, stopped: bool, resume_after: str | None, as_json: bool
) -> None:
    if as_json:
        shards = [each.to_json() for each in found]
        again = resume_after if stopped else None
        report = {"committed": commit, "older_than_s": older_than_s, "stopped": stopped, "resume_after": again}
        print_json(report | {"shards": shards})
        return
    rows: list[tuple[object, ...]] = [
        (orphan.key, orphan.kind, sized(orphan.size_bytes)) for each in found for orphan in each.orphans
    ]
    if rows:
        print_rows(("orphan", "kind", "size"), rows)
    columns = ("shard", "orphans", "size", "deleted", "too young")
    print_rows(columns, [(s.shard_id, s.found, sized(s.found_bytes), s.deleted, s.young) for s in found])
    if stopped:
        again = "the same again" if resume_after is None else f"--resume-after {resume_after}"
        typer.echo(f"stopped at the limit of deletes: go on with {again}", err=True)
    if not commit:
        say_unchanged(to="delete them")
