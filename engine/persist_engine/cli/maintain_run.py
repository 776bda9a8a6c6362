"""Runs the work of one `persist maintain` command and reports it on stdout, and as JSON in the file from which a pod's report is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persist_engine.base.env import process_cpu_ns
from persist_engine.base.errors import CorruptData, InvariantViolated, PersistError
from persist_engine.base.versioned import SeqNo
from persist_engine.cli.options import RECORD_DAYS, Stores, check_can_write, connected, shard_called
from persist_engine.cli.output import Bar, print_json, print_rows, progress_bar

if TYPE_CHECKING:
    from persist_engine.base.tally import StoreTally
    from persist_engine.model.ids import ShardId
    from persist_engine.shard.machine import Machine
    from persist_engine.work.outcome import Outcome

Work = Callable[["Machine", Bar], "list[Outcome]"]


def run_work(
    kind: str,
    asked: str,
    work: Work,
    *,
    stores: Stores,
    report: Path | None,
    as_json: bool,
    claim_ms: int | None = None,
    memory_mib: int | None = None,
    record_days: int = RECORD_DAYS,
    unreadable: Callable[[ShardId, CorruptData | InvariantViolated], Outcome] | None = None,
) -> None:
    """Does `work` on the shard whose id or name is `asked`, and reports it. Also reports a failure before raising it. `unreadable` gives
    the outcome for a shard whose state cannot be read. Without it that is a failure.
    """
    from persist_engine.base.tally import StoreTally

    check_can_write(report, "--report")
    started_s = time.monotonic()
    done, tally = _Done(), StoreTally()
    try:
        with connected(
            stores, claim_ms=claim_ms, memory_mib=memory_mib, record_days=record_days, tally=tally
        ) as client:
            asked = shard_id = shard_called(client, asked)
            try:
                machine = client.machine(shard_id)
            except (CorruptData, InvariantViolated) as error:
                if unreadable is None:
                    raise
                outcomes, seqno = [unreadable(shard_id, error)], SeqNo(0)
            else:
                with progress_bar(kind, quiet=as_json) as bar:
                    outcomes = work(machine, done.counted(bar))
                seqno = machine.state.seqno
    except PersistError as error:
        from persist_engine.work.outcome import failure_report

        duration_ms = round((time.monotonic() - started_s) * 1000)
        failed = failure_report(kind, asked, f"{error.kind.value}: {error}", duration_ms=duration_ms)
        # The bar of a compaction counts the bytes that were read. The failed run wasted them, but they cost the same.
        read = {"bytes_read": done.count} if kind == "Compaction" else {}
        _write_report(report, failed | read | {"cpu_ms": process_cpu_ns() // 1_000_000}, tally)
        raise
    from persist_engine.work.outcome import summary

    total: Any = [outcome.to_json() for outcome in outcomes]
    if kind != "Auto":
        total = summary(kind, shard_id, seqno, outcomes) | {"cpu_ms": process_cpu_ns() // 1_000_000}
    _write_report(report, total, tally)
    if as_json:
        print_json(total)
        return
    rows = [(o.type, o.ending.value, o.message, o.duration_ms) for o in outcomes]
    print_rows(("work", "outcome", "what", "ms"), rows or [(kind, "Skipped", "nothing was due", 0)])


class _Done:
    """Records the progress that the bar of the work shows."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, bar: Bar) -> Bar:
        """A bar that shows its progress on `bar` and also records it here."""

        def show(done: float, total: float, text: str = "") -> None:
            self.count = round(done)
            bar(done, total, text)

        return show


def _write_report(report: Path | None, value: Any, tally: StoreTally) -> None:
    if report is not None:
        full = tally.added_to(value) if isinstance(value, dict) else value
        report.write_text(json.dumps(full, ensure_ascii=False) + "\n")
