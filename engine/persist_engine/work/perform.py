"""Performs the work that commits leave, until nothing is left (spec 14.8). This module owns only the order: rollup, GC, then compactions.

Rollups run first, because GC truncates at most to a rollup. Compactions run last, because they are the slowest and no caller waits for
them.
"""

from __future__ import annotations

from functools import partial

from persist_engine.model.maintenance import Maintenance, collection_target, rollup_wanted
from persist_engine.model.spine.compaction_plan import compaction_worthwhile
from persist_engine.model.spine.spine import MergeReq
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine
from persist_engine.work.attempts import Attempts
from persist_engine.work.compact import OnBytesRead, compact, compact_due
from persist_engine.work.gc import OnProgress, gc_and_truncate
from persist_engine.work.outcome import Ending, Outcome
from persist_engine.work.rollup import write_rollup

#: The limit on rounds. Follow-up work shrinks with every round, so this many mean that commits of other processes keep adding work.
ROUNDS_MAX = 32


def perform(machine: Machine, maintenance: Maintenance) -> list[Outcome]:
    """Does `maintenance` and its follow-up work. Returns the result of each piece, in order.

    Requests too small to be worthwhile are left to a later merge. Safe to repeat and to race. When a piece fails, the others are still
    done; then the errors are raised as by `Attempts.end`.
    """
    outcomes: list[Outcome] = []
    attempts = Attempts(machine.shard_id)
    left = maintenance
    for _ in range(ROUNDS_MAX):
        if left.is_empty():
            break
        done: list[Outcome] = []
        if left.rollup is not None:
            with attempts.of("rollup"):
                done.append(write_rollup(machine))
        if left.gc is not None:
            # The assigned seqno was seqno_since at the time of the commit. A collection up to the present seqno_since covers it.
            with attempts.of("collection"):
                done.append(gc_and_truncate(machine))
        for req in left.requests:
            with attempts.of(f"compaction {req.id} {req.desc}"):
                if is_admitted(machine, req):
                    done.append(compact(machine, req))
        left = NO_MAINTENANCE
        for outcome in done:
            if left.gc is not None and outcome.maintenance.gc is not None:
                machine.metrics.count("gc_merged")
            left = left.merge(outcome.maintenance)
        outcomes += done
    attempts.end()
    return outcomes


def is_admitted(machine: Machine, req: MergeReq) -> bool:
    """Whether to do `req` (spec 13.2); counts the answer. A refused request is offered again, larger, when its neighbours merge with it."""
    machine.metrics.count("compaction_requested")
    reason = None
    if not machine.settings.compaction.enabled:
        reason = "disabled"
    elif not compaction_worthwhile(req, machine.settings):
        reason = "small"
    if reason is not None:
        machine.metrics.count("compaction_skipped", reason=reason)
    return reason is None


def perform_due(
    machine: Machine, *, on_read: OnBytesRead | None = None, on_progress: OnProgress | None = None
) -> list[Outcome]:
    """Does all work that is due by the shard's state, whichever process it was assigned to. For shards whose writers do no maintenance.

    A second call finds only what was committed meanwhile. Safe to repeat and to race. `on_read` receives bytes read by compactions, and
    `on_progress` the progress of collection. When a piece fails, the others are still done; then the errors are raised as by
    `Attempts.end`.
    """
    attempts = Attempts(machine.shard_id)
    outcomes: list[Outcome] = []
    collected = partial(gc_and_truncate, machine, on_progress=on_progress)
    # Collection comes before any commit, because on a full consensus store nothing else makes room.
    with attempts.of("collection of what is linked"):
        if collection_target(machine.refresh()) is not None:
            outcomes.append(collected())
    # Compactions come before the rest, so that the blobs that they release are collected in the same round.
    with attempts.of("claims of compactions"):
        outcomes += compact_due(machine, on_read=on_read, attempts=attempts)
    with attempts.of("rollup"):
        if rollup_wanted(machine.refresh(), machine.settings.maintenance):
            outcomes.append(write_rollup(machine))
    with attempts.of("collection"):
        if collection_target(machine.refresh()) is not None:
            outcomes.append(collected())
    attempts.end()
    return [outcome for outcome in outcomes if outcome.ending is not Ending.SKIPPED]
