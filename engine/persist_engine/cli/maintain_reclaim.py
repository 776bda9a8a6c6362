"""`persist maintain reclaim`: an operator runs it when a resource is deleted together with its shard. `persist admin finalize` is for
people.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from persist_engine.base.errors import PersistError
from persist_engine.cli.options import (
    RECORD_DAYS,
    AsJson,
    RecordDays,
    ReportFile,
    ShardArgument,
    ShardOption,
    Stores,
    check_can_write,
    connected,
    on_stores,
    one_shard,
)
from persist_engine.cli.output import print_json, print_rows


@on_stores
def reclaim(
    shard_argument: ShardArgument = None,
    *,
    owner: Annotated[str, typer.Option(help="OPERATOR/NAMESPACE/NAME: only a shard of this owner is reclaimed.")],
    own_hold: Annotated[
        str | None,
        typer.Option(
            help="End the hold of this critical reader of the owner. Without it, of those whose token is the owner's name."
        ),
    ] = None,
    shard: ShardOption = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also delete blobs that were never linked, and free the name.")
    ] = False,
    max_deletes: Annotated[
        int, typer.Option(min=1, help="Delete at most this many of these blobs in one run.")
    ] = 10_000,
    record_days: RecordDays = RECORD_DAYS,
    report: ReportFile = None,
    stores: Stores,
    as_json: AsJson = False,
) -> None:
    """End a shard for good and delete its data, unless a reader holds it. The shard is the given one, or else the one that the owner's name
    leads to. For operators; safe to repeat. The report has the verdict.
    """
    from persist_engine.client.reclaiming import reclaim as carry_out
    from persist_engine.model.ids import CriticalReaderId
    from persist_engine.model.ownership import Owner
    from persist_engine.work.outcome import failure_report

    check_can_write(report, "--report")
    is_named, started_s = (shard_argument or shard) is not None, time.monotonic()
    shard_id = one_shard(shard_argument, shard) if is_named else None
    mine, hold = Owner.parse(owner), None if own_hold is None else CriticalReaderId(own_hold)
    try:
        with connected(stores, record_days=record_days) as client:
            outcome = carry_out(client, shard_id, mine, own_hold=hold, purge=purge, max_deletes=max_deletes)
    except PersistError as error:
        if report is not None:
            took_ms = round((time.monotonic() - started_s) * 1000)
            failed = failure_report("Reclaim", shard_id or owner, f"{error.kind.value}: {error}", duration_ms=took_ms)
            report.write_text(json.dumps(failed) + "\n")
        raise
    document = outcome.to_json()
    if report is not None:
        report.write_text(json.dumps(document, ensure_ascii=False) + "\n")
    if as_json:
        print_json(document)
    else:
        print_rows(("verdict", "what"), [(outcome.verdict, outcome.message)])
