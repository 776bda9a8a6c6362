"""`persist admin recover` begins the log of a shard anew from the newest rollup in blob when consensus lost the log.
`persist admin recover-store` makes two stores a pair again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.wording import counted, dated
from persist_engine.cli.exit_codes import EXIT_CORRUPT
from persist_engine.cli.options import (
    AsJson,
    Commit,
    ShardArgument,
    ShardOption,
    Stores,
    blobs_of,
    connected,
    log_of,
    on_stores,
    one_shard,
)
from persist_engine.cli.output import print_json, print_rows, say_unchanged

if TYPE_CHECKING:
    from persist_engine.work.repair.recover import Recovered

STORE_EPILOG = "Example: persist admin recover-store --commit"
EPILOG = """Examples:

persist admin recover SHARD                          (shows what is left, and what is gone for good)

persist admin recover SHARD --last-seqno 4711 --commit

persist admin recover SHARD --replace-log --commit   (consensus was rolled back: gives up the log that it holds)"""


@on_stores
def recover(
    shard_argument: ShardArgument = None,
    *,
    shard: ShardOption = None,
    rollup: Annotated[
        str | None, typer.Option("--rollup", help="Key of the rollup to begin from, instead of the newest.")
    ] = None,
    last_seqno: Annotated[
        int | None,
        typer.Option("--last-seqno", min=1, help="Newest version known from elsewhere, as status.log.seqno."),
    ] = None,
    replace_log: Annotated[bool, typer.Option("--replace-log", help="Give up the log that consensus holds.")] = False,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Begin the log of a shard anew from the newest rollup when consensus lost it, and show which versions are gone.

    First restore consensus if you can: a rollup is older than the newest version, and nothing brings back what came after
    it. Stop all writers first. Processes that knew the lost log are refused afterwards and have to be restarted. Deletes
    nothing. Exits with code 74 when blobs are missing: `persist admin restore` may bring them back once there is a log.
    """
    from persist_engine.work.repair.recover import recover_shard

    shard_id = one_shard(shard_argument, shard)
    with connected(stores) as client:
        found = recover_shard(
            client.versions,
            shard_id,
            commit=commit,
            replace_log=replace_log,
            rollup=rollup,
            last_seqno=last_seqno,
        )
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, is_wanted=found.needed or rollup is not None)
    if found.missing:
        raise typer.Exit(EXIT_CORRUPT)


def _show(found: Recovered, *, is_wanted: bool) -> None:
    base, log = found.base, found.log
    held = "none" if log is None else f"v{log.earliest} to v{log.head}, born as {log.birth or 'unreadable'}"
    through = "on; the last one is not known" if found.gone_through is None else f"to v{found.gone_through}"
    rows = [
        ("log in consensus", held),
        ("rollup", f"{base.key}: v{base.seqno}, {counted(base.updates, 'update')} in {counted(base.parts, 'part')}"),
        ("since, upper", f"{dated(base.since)}, {dated(base.upper)}"),
    ]
    if is_wanted:
        rows.append(("gone for good", f"versions from v{found.gone_from} {through}"))
        rows.append(("not named by it", f"{counted(found.left_over_count, 'part')} of those versions, or never linked"))
    rows += [("left over", key) for key in found.left_over if is_wanted]
    rows += [("missing", key) for key in found.missing]
    rows += [("not taken", f"{each.key}: v{each.seqno}, born as {each.birth}") for each in found.others]
    rows += [("cannot be read", key) for key in found.unreadable]
    if found.seqno is not None:
        rows.append(("begun anew", f"v{found.seqno}, born as {found.birth}"))
    print_rows(("what", "value"), rows)
    if not is_wanted:
        typer.echo("nothing to do: the log is there, and no rollup is newer", err=True)
    elif found.seqno is None:
        more = "" if log is None else " --replace-log"
        say_unchanged(f"--commit{more}", to="begin the log anew from that rollup")


@on_stores
def recover_store(
    *,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Make two stores a pair again when one of them forgot that it was (StoreLost), such as a Redis that was emptied.

    First check both addresses, and restore the store that lost its data if you can. The command lists the shards that no longer have
    a log: `persist admin recover SHARD` is for those. It does not join stores of two different pairs.
    """
    from persist_engine.work.repair.rejoin import rejoin

    with blobs_of(stores) as (blobs, retry), log_of(stores.consensus, retry) as log:
        found = retry.external("recover store", lambda: rejoin(blobs, log, commit=commit))
    if as_json:
        print_json(found.to_json())
        return
    rows = [
        ("pair", found.store_id),
        ("forgotten by", found.forgot or "neither of the two"),
        ("shards in consensus", str(found.shards_in_consensus)),
    ]
    rows += [("without a log", shard_id) for shard_id in found.shards_without_log]
    print_rows(("what", "value"), rows)
    if found.forgot is not None and not commit:
        say_unchanged(to=f"write it into the {found.forgot} store")
