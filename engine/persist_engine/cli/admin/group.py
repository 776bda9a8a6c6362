"""`persist admin`: commands with which a person administers shards. Without `--commit` a command changes nothing and prints exactly what
it would do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_engine.base.wording import counted, sized
from persist_engine.cli.admin import audit as admin_audit
from persist_engine.cli.admin import deletions as admin_deletions
from persist_engine.cli.admin import orphans as admin_orphans
from persist_engine.cli.admin import owners as admin_owners
from persist_engine.cli.admin import proof as admin_proof
from persist_engine.cli.admin import recover as admin_recover
from persist_engine.cli.admin import retention as admin_retention
from persist_engine.cli.exit_codes import EXIT_CORRUPT
from persist_engine.cli.options import (
    MEMORY_MIB,
    AsJson,
    ClaimAge,
    Commit,
    MemoryMib,
    NamedShardArgument,
    ShardOption,
    Stores,
    asked_shard,
    connected,
    on_stores,
    shard_called,
)
from persist_engine.cli.output import print_json, print_rows, progress_bar, reading, say_unchanged

if TYPE_CHECKING:
    from persist_engine.work.outcome import Outcome
    from persist_engine.work.repair.force import Planned

EPILOG = """Examples:

persist admin holds SHARD

persist admin force-gc SHARD           (lists what it would delete)

persist admin force-gc SHARD --commit

persist admin verify SHARD --sample 10

Commands that change something do so only with --commit."""

app = typer.Typer(
    help="Administer shards: show holds and usage, verify, force maintenance, finalize, restore, recover, export.",
    epilog=EPILOG,
    no_args_is_help=True,
)


@app.command(epilog="Example: persist admin force-compaction SHARD --full --commit")
@on_stores
def force_compaction(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Merge all batches into one, not only those that are due.")
    ] = False,
    claim_age: ClaimAge = 0.0,
    memory: MemoryMib = MEMORY_MIB,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Compact everything that is not compact yet, however small. Contents stay the same at every readable time."""
    from persist_engine.work.repair.force import force_compaction as force
    from persist_engine.work.repair.force import plan_compaction

    asked = asked_shard(shard_argument, shard)
    with connected(stores, claim_ms=round(claim_age * 1000), memory_mib=memory) as client:
        shard_id = shard_called(client, asked)
        machine = client.machine(shard_id)
        if not commit:
            min_version = machine.settings.compaction.claim_min_version
            _show_plan(plan_compaction(machine.refresh(), full=full, min_version=min_version), as_json=as_json)
            return
        with progress_bar("compact", quiet=as_json) as bar:
            _done(force(machine, full=full, on_read=reading(bar)), as_json=as_json)


@app.command(epilog="Example: persist admin force-gc SHARD --commit")
@on_stores
def force_gc(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Write a rollup and collect all garbage that no reader holds. `persist admin holds` lists the readers that hold some."""
    from persist_engine.work.repair.force import force_gc as force
    from persist_engine.work.repair.force import plan_gc

    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        machine = client.machine(shard_id)
        if not commit:
            _show_plan(plan_gc(machine), as_json=as_json)
            return
        with progress_bar("collect", quiet=as_json) as bar:
            outcomes = force(
                machine, on_progress=lambda done, total, gone: bar(done, total, f"{counted(gone, 'blob')} deleted")
            )
        _done(outcomes, as_json=as_json)


@app.command(epilog="Example: persist admin finalize SHARD --close --commit")
@on_stores
def finalize(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    close: Annotated[
        bool, typer.Option("--close", help="First append the empty upper and let since become empty.")
    ] = False,
    release: Annotated[
        list[str] | None,
        typer.Option("--release", help="With --close: end the hold of this critical reader. May be repeated."),
    ] = None,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Delete all data of a closed shard for good. Refuses while since or upper is not empty, and names the readers that hold them.

    A finalized shard can never be read or written again. The command overrides no reader's hold: a leased reader has to
    end, and a critical reader has to be named with --release.
    """
    from persist_engine.base.errors import FinalizationError
    from persist_engine.client.closing import close_shard, finalize_shard, obstacles
    from persist_engine.model.ids import CriticalReaderId
    from persist_engine.model.retention import in_words
    from persist_engine.work.repair.force import Planned

    asked = asked_shard(shard_argument, shard)
    released = [CriticalReaderId(text) for text in release or ()]
    with connected(stores) as client:
        shard_id = shard_called(client, asked)
        if commit:
            with progress_bar("finalize", quiet=as_json):
                if close:
                    close_shard(client, shard_id, give_up=released)
                outcomes = finalize_shard(client, shard_id)
            _done(outcomes, as_json=as_json)
            return
        machine = client.machine(shard_id)
        state = machine.refresh()
        found = obstacles(state, now_ms=machine.env.now_ms(), close=close, give_up=released)
        if found:
            since, upper = state.trace.since, state.trace.upper
            text = f"cannot finalize {shard_id}: {'; '.join(found)}"
            raise FinalizationError(text, since=since, upper=upper, obstacles=found)
        plan = []
        if close:
            plan += [Planned("close", f"upper, now {state.trace.upper}, and since, now {state.trace.since}")]
            if state.retain_ms is not None:
                plan.append(Planned("end", f"the retention of {in_words(state.retain_ms)}"))
            plan += [Planned("release", f"critical reader {critical_id}") for critical_id in released]
        sizes = state.trace.sizes
        plan.append(
            Planned("delete", f"{counted(sizes.parts, 'part')}, {counted(sizes.rows, 'update')}", sizes.blob_bytes)
        )
        _show_plan([*plan, Planned("make a tombstone of", str(shard_id))], as_json=as_json)


@app.command(epilog="Example: persist admin restore SHARD --commit")
@on_stores
def restore(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    commit: Commit = False,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Restore deleted blobs that live versions name, if the store kept them (S3 with versioning).

    Exits with code 74 when something is missing that it could not restore, or did not restore.
    """
    from persist_engine.work.repair.restore import restore_shard

    asked = asked_shard(shard_argument, shard)
    with connected(stores) as client, progress_bar("look", quiet=as_json) as bar:
        shard_id = shard_called(client, asked)
        found = restore_shard(client.versions, shard_id, commit=commit, on_looked=bar)
    if as_json:
        print_json({"committed": commit} | found.to_json())
    else:
        rows: list[tuple[str, str, str]] = [("restored", key, "") for key in found.restored]
        rows += [("lost", key, reason) for key, reason in found.lost]
        rows += [("would restore", key, "") for key in found.missing if not commit]
        rows.append(("named", counted(found.named, "blob"), f"{counted(len(found.missing), 'blob')} missing"))
        print_rows(("what", "blob", "why"), rows)
    if len(found.restored) < len(found.missing):
        raise typer.Exit(EXIT_CORRUPT)


def _show_plan(plan: Iterable[Planned], *, as_json: bool) -> None:
    """Prints what the command would do."""
    planned = list(plan)
    if as_json:
        print_json({"committed": False, "plan": [each.to_json() for each in planned], "done": []})
        return
    rows: list[tuple[str, str, str]] = [
        (each.do, each.what, "" if each.size_bytes is None else sized(each.size_bytes)) for each in planned
    ]
    print_rows(("would", "what", "size"), rows or [("do", "nothing: there is nothing to do", "")])
    say_unchanged()


def _done(outcomes: Iterable[Outcome], *, as_json: bool) -> None:
    """Prints what the command did."""
    done = list(outcomes)
    if as_json:
        reports: list[dict[str, Any]] = [outcome.to_json() for outcome in done]
        print_json({"committed": True, "plan": [], "done": reports})
        return
    rows: list[tuple[object, ...]] = [(o.type, o.ending.value, o.message, o.duration_ms) for o in done]
    print_rows(("work", "outcome", "what", "ms"), rows or [("-", "Skipped", "there was nothing to do", 0)])


app.command(epilog=admin_audit.HOLDS_EPILOG)(admin_audit.holds)
app.command(epilog=admin_retention.EPILOG)(admin_retention.retention)
app.command(epilog=admin_audit.USAGE_EPILOG)(admin_audit.usage)
app.command(epilog=admin_audit.VERIFY_EPILOG)(admin_audit.verify)
app.command(epilog=admin_proof.EPILOG)(admin_proof.proof)
app.command(epilog=admin_deletions.EPILOG)(admin_deletions.deletions)
app.command(epilog=admin_audit.EXPORT_EPILOG)(admin_audit.export)
app.command(epilog=admin_orphans.EPILOG)(admin_orphans.orphans)
app.command(epilog=admin_recover.EPILOG)(admin_recover.recover)
app.command(epilog=admin_recover.STORE_EPILOG)(admin_recover.recover_store)
app.command(epilog=admin_owners.OWNER_EPILOG)(admin_owners.owner)
app.command(epilog=admin_owners.NAMES_EPILOG)(admin_owners.names)
