"""Does the work that commits leave behind, until nothing is left (spec 14.8). Owns the order only: rollup, GC, then
compactions.

A rollup first, since GC can truncate no further than one; compactions last, since they are the slowest and nobody
waits for them.
"""

from __future__ import annotations

from persist_engine.model.compaction_plan import compaction_worthwhile
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.spine import MergeReq
from persist_engine.model.views import latest_rollup, rollup_at_or_below, rollup_seqnos, seqno_since
from persist_engine.shard.applier import NO_MAINTENANCE
from persist_engine.shard.machine import Machine
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.outcome import Outcome
from persist_engine.work.rollup import write_rollup

#: Follow-up work shrinks with every round; this many rounds mean that commits of others keep handing us theirs.
ROUNDS_MAX = 32


def perform(machine: Machine, maintenance: Maintenance) -> list[Outcome]:
    """Do `maintenance` and what follows from doing it; what came of each piece, in order.

    Requests too small to be worth their while are left to a later merge. Safe to repeat and to race.
    """
    outcomes: list[Outcome] = []
    left = maintenance
    for _ in range(ROUNDS_MAX):
        if left.is_empty():
            break
        done: list[Outcome] = []
        if left.rollup is not None:
            done.append(write_rollup(machine))
        if left.gc is not None:
            # The assigned seqno was seqno_since when it was assigned; collecting up to today's does it and more.
            done.append(gc_and_truncate(machine))
        done += [compact(machine, req) for req in left.requests if _is_admitted(machine, req)]
        left = NO_MAINTENANCE
        for outcome in done:
            left = left.merge(outcome.maintenance)
        outcomes += done
    return outcomes


def _is_admitted(machine: Machine, req: MergeReq) -> bool:
    """Whether to do `req` (spec 13.2); what is not done is offered again, larger, when its neighbours merge with it."""
    refusal = None
    if not machine.settings.compaction.enabled:
        refusal = "disabled"
    elif not compaction_worthwhile(req, machine.settings):
        refusal = "skipped"
    if refusal is not None:
        machine.metrics.count("compaction", outcome=refusal)
    return refusal is None


def perform_due(machine: Machine) -> list[Outcome]:
    """Whatever the shard's state says is due, whoever it was assigned to: for shards that nobody maintains."""
    # Compactions first: what they let go of is collected in the same round.
    outcomes: list[Outcome] = [*compact_due(machine)]
    state = machine.refresh()
    newest, _ = latest_rollup(state)
    if state.seqno - newest >= machine.settings.maintenance.rollup_threshold:
        outcomes.append(write_rollup(machine))
        state = machine.refresh()
    target = rollup_at_or_below(state, seqno_since(state))
    if target is not None and target > rollup_seqnos(state)[0]:
        outcomes.append(gc_and_truncate(machine))
    return outcomes
