"""`persist maintain verify|orphans`: runs that check what is stored and write a report. `persist admin` has the same checks for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from persist_engine.base.errors import CorruptData, InvalidUsage, InvariantViolated
from persist_engine.base.versioned import SeqNo
from persist_engine.base.wording import counted, sized
from persist_engine.cli.maintain_run import run_work
from persist_engine.cli.options import (
    RECORD_DAYS,
    AsJson,
    NamedShardArgument,
    RecordDays,
    ReportFile,
    ShardOption,
    Stores,
    asked_shard,
    on_stores,
)
from persist_engine.cli.output import Bar

if TYPE_CHECKING:
    from persist_engine.model.ids import ShardId
    from persist_engine.shard.machine import Machine
    from persist_engine.work.outcome import Outcome

#: A writer appends a batch within an hour after it staged it, unless it waits on purpose. A shorter age would refuse writers that are
#: merely slow.
OLDER_THAN_S_MIN = 3600


@on_stores
def verify(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    mode: Annotated[
        Literal["Metadata", "Full"],
        typer.Option(help="Metadata: check that blobs exist and have the right size. Full: also read every part."),
    ] = "Metadata",
    report: ReportFile = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Check that everything that live versions name exists. The report says what was found. The exit code says only whether it could be
    checked.
    """
    asked = asked_shard(shard_argument, shard)

    def work(machine: Machine, bar: Bar) -> list[Outcome]:
        from persist_engine.work.audit.runs import verify_run

        return [verify_run(machine, mode, on_checked=lambda done, total, read: bar(done, total, f"{sized(read)} read"))]

    def unreadable(shard_id: ShardId, error: CorruptData | InvariantViolated) -> Outcome:
        from persist_engine.work.audit import runs

        return runs.outcome_of(runs.unreadable(shard_id, error), mode, seqno=SeqNo(0))

    run_work(
        "Verify",
        asked,
        work,
        stores=stores,
        report=report,
        as_json=as_json,
        unreadable=unreadable,
    )


@on_stores
def orphans(
    shard_argument: NamedShardArgument = None,
    *,
    shard: ShardOption = None,
    older_than_seconds: Annotated[
        int,
        typer.Option(
            help="Only blobs that were staged longer ago. Batches staged before that are refused once something is deleted."
        ),
    ] = 604_800,
    max_deletes: Annotated[
        int | None, typer.Option(min=1, help="Delete blobs, and stop after this many deletes. Without it, only count.")
    ] = None,
    record_days: RecordDays = RECORD_DAYS,
    report: ReportFile = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """Count blobs that no version names and that none will ever name. With --max-deletes, delete them. The next run continues where this
    one stopped.
    """
    if older_than_seconds < OLDER_THAN_S_MIN:
        raise InvalidUsage(f"--older-than-seconds must be at least {OLDER_THAN_S_MIN}: slow writers need that time")
    asked = asked_shard(shard_argument, shard)

    def work(machine: Machine, bar: Bar) -> list[Outcome]:
        from persist_engine.work.audit.runs import orphan_run

        def show(listed: int, deleted: int) -> None:
            bar(listed, listed, f"{counted(listed, 'blob')}, {counted(deleted, 'delete')}")

        return [orphan_run(machine, older_than_ms=1000 * older_than_seconds, max_deletes=max_deletes, on_listed=show)]

    run_work(
        "OrphanScan",
        asked,
        work,
        stores=stores,
        report=report,
        as_json=as_json,
        record_days=record_days,
    )
