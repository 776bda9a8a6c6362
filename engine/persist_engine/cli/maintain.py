"""`persist maintain`: rollup, garbage collection, compaction, verification and orphan scan of one shard. Each command writes a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from persist_engine.base.wording import counted
from persist_engine.cli import maintain_audits
from persist_engine.cli.maintain_reclaim import reclaim
from persist_engine.cli.maintain_run import run_work
from persist_engine.cli.options import (
    MEMORY_MIB,
    RECORD_DAYS,
    AsJson,
    ClaimAge,
    MemoryMib,
    NamedShardArgument,
    RecordDays,
    ReportFile,
    ShardOption,
    Stores,
    asked_shard,
    on_stores,
)
from persist_engine.cli.output import Bar, reading
from persist_engine.cli.tend import tend

if TYPE_CHECKING:
    from persist_engine.shard.machine import Machine
    from persist_engine.work.outcome import Outcome

EPILOG = """Examples:

persist maintain rollup SHARD

persist maintain compact --shard SHARD --report report.json --json

Safe to repeat, to run beside writers and readers, and to kill at any point."""

app = typer.Typer(
    help="Do the work that appends leave behind: rollup, gc, compact, or auto for all of it. Check what is stored: verify, orphans.",
    epilog=EPILOG,
    no_args_is_help=True,
)
app.command()(tend)
app.command()(maintain_audits.verify)
app.command()(maintain_audits.orphans)
app.command()(reclaim)


@app.command()
@on_stores
def rollup(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    report: ReportFile = None,
    record_days: RecordDays = RECORD_DAYS,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Write a full copy of the shard's metadata, so that opening it is fast and older versions can go."""

    def work(machine: Machine, _bar: Bar) -> list[Outcome]:
        from persist_engine.work.rollup import write_rollup

        return [write_rollup(machine)]

    asked = asked_shard(shard_argument, shard)
    run_work("Rollup", asked, work, stores=stores, report=report, as_json=as_json, record_days=record_days)


@app.command()
@on_stores
def gc(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    report: ReportFile = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Write rollups too, until nothing is left that the newest version has released."),
    ] = False,
    record_days: RecordDays = RECORD_DAYS,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Delete blobs and versions that no reader can reach any more, up to the newest rollup that no reader holds."""

    def work(machine: Machine, bar: Bar) -> list[Outcome]:
        from persist_engine.work.gc import gc_and_truncate
        from persist_engine.work.repair.force import collect_fully

        if full:
            return collect_fully(machine, on_progress=_collecting(bar))
        return [gc_and_truncate(machine, on_progress=_collecting(bar))]

    asked = asked_shard(shard_argument, shard)
    run_work("GC", asked, work, stores=stores, report=report, as_json=as_json, record_days=record_days)


@app.command()
@on_stores
def compact(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    report: ReportFile = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Do at most this many compactions.")] = 1024,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Merge all batches into one, which removes everything that was retracted before since."
        ),
    ] = False,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Leave out merges that would read more than this many bytes in total.")
    ] = None,
    claim_age: ClaimAge = 0.0,
    memory: MemoryMib = MEMORY_MIB,
    record_days: RecordDays = RECORD_DAYS,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Merge small parts into few, with times advanced to the shard's since. Contents stay the same at every readable
    time.
    """

    def work(machine: Machine, bar: Bar) -> list[Outcome]:
        from persist_engine.work.compact import compact_due
        from persist_engine.work.repair.force import force_compaction

        if full:
            return force_compaction(machine, full=True, on_read=reading(bar))

        return [*compact_due(machine, max_requests, max_bytes=max_bytes, on_read=reading(bar))]

    if full and max_bytes is not None:
        raise typer.BadParameter("--full merges everything at once: leave out --max-bytes")
    asked = asked_shard(shard_argument, shard)
    claim_ms = round(claim_age * 1000)
    run_work(
        "Compaction",
        asked,
        work,
        stores=stores,
        report=report,
        as_json=as_json,
        claim_ms=claim_ms,
        memory_mib=memory,
        record_days=record_days,
    )


@app.command()
@on_stores
def auto(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    report: ReportFile = None,
    memory: MemoryMib = MEMORY_MIB,
    record_days: RecordDays = RECORD_DAYS,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Do all work that the shard's state says is due. The report lists the work that was done."""

    def work(machine: Machine, bar: Bar) -> list[Outcome]:
        from persist_engine.work.perform import perform_due

        return perform_due(machine, on_read=reading(bar), on_progress=_collecting(bar))

    asked = asked_shard(shard_argument, shard)
    run_work(
        "Auto",
        asked,
        work,
        stores=stores,
        report=report,
        as_json=as_json,
        claim_ms=0,
        memory_mib=memory,
        record_days=record_days,
    )


def _collecting(bar: Bar) -> Callable[[int, int, int], None]:
    """A function that shows the progress of a collection."""

    def show(done: int, total: int, deleted: int) -> None:
        bar(done, total, f"{counted(deleted, 'blob')} deleted")

    return show
