"""Maintenance on demand, whether it is due or not, with an exact plan beforehand.

A plan comes from state (compaction) or from the log (collection), and making it changes nothing. The execution is the ordinary work, with
the same guarantees: it is safe to repeat, to race and to kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from persist_engine.base.versioned import SeqNo
from persist_engine.codec.keys import blob_key
from persist_engine.model.queries import latest_rollup, rollup_at_or_below, seqno_since
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import MergeReq
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import ShardState
from persist_engine.shard.machine import Machine
from persist_engine.work.attempts import Attempts
from persist_engine.work.audit.uncollected import Uncollected
from persist_engine.work.compact import OnBytesRead, compact, compact_due
from persist_engine.work.gc import OnProgress, collectable, gc_and_truncate
from persist_engine.work.merging import Merger
from persist_engine.work.outcome import Ending, Outcome
from persist_engine.work.rollup import write_rollup

#: The limit on exertions. The first completes the merges in progress, and the next one merges everything into one level. More are needed
#: when since has passed the since of a merge in progress, or when the last batches are empty. Random histories needed at most five.
EXERTIONS_MAX = 8
#: The limit on rounds of `collect_fully`: one more than needed, in case another process overtakes a collection.
COLLECTIONS_MAX = 4


@dataclass(frozen=True, slots=True)
class Planned:
    """One planned action, its target, and the bytes that it concerns (None: unknown or none)."""

    do: str
    what: str
    size_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the names of the fields as keys."""
        return asdict(self)


# -- compaction --------------------------------------------------------------------------------------------------------


def plan_compaction(state: ShardState, *, full: bool, min_version: str | None = None) -> list[Planned]:
    """The merges that `force_compaction` would do on `state`, whether claimed or not. `min_version` is the process's
    `settings.compaction.claim_min_version`.
    """
    trace = state.trace
    for fuel in _exertions(trace) if full else ():
        trace, _, _ = trace.exert(fuel)
    requests = trace.fueled_requests(claimed_before_ms=state.walltime_ms << 1, min_version=min_version)
    return [_planned(request) for request in requests]


def force_compaction(
    machine: Machine, *, full: bool, on_read: OnBytesRead | None = None, merger: Merger | None = None
) -> list[Outcome]:
    """Compacts every spine batch that is not compact, however small. With `full`, merges all of them into one first, so that one batch is
    left (parts stay within their target size). `merger` decides where chunks are merged; None merges them in this process.

    Claims of other processes count as abandoned only after `settings.compaction.claim_ms`. Does nothing when compaction is disabled.
    """
    if not full or not machine.settings.compaction.enabled:
        return [*compact_due(machine, on_read=on_read, merger=merger)]
    ours: set[SpineId] = set()
    for fuel in _exertions(machine.refresh().trace):
        # The requests of an exertion are claimed for its caller, so `compact_due` would skip them.
        ours.update(request.id for request in machine.spine_exert(fuel)[1].requests)
    left = [batch for batch in machine.state.trace.spine_batches() if batch.id in ours and not batch.is_compact]
    attempts = Attempts(machine.shard_id)
    done: list[Outcome] = []
    for batch in left:
        with attempts.of(f"compaction {batch.id} {batch.desc}"):
            done.append(compact(machine, batch.request(), on_read=on_read, merger=merger))
    with attempts.of("claims of compactions"):
        done += compact_due(machine, on_read=on_read, attempts=attempts, merger=merger)
    attempts.end()
    return done


def _exertions(trace: Trace) -> Iterator[int]:
    """The fuel for each of a few exertions. Each is enough for all merges."""
    for _ in range(EXERTIONS_MAX):
        filled = [batch for batch in trace.spine_batches() if batch.sizes.rows]
        if len(filled) <= 1 and all(batch.desc.since == trace.since for batch in filled):
            return
        fuel = 2 * max(trace.rows, 1)
        yield fuel
        trace, _, worked = trace.exert(fuel)
        if not worked:
            return


def _planned(request: MergeReq) -> Planned:
    rows = sum(batch.rows for _, batch in request.inputs)
    runs = sum(len(batch.run_metas) for _, batch in request.inputs)
    size_bytes = sum(batch.size_bytes for _, batch in request.inputs)
    what = f"{request.id} {request.desc}: {len(request.inputs)} inputs, {runs} runs, {rows} rows"
    return Planned("compact", what, size_bytes)


# -- garbage collection ------------------------------------------------------------------------------------------------


def plan_gc(machine: Machine) -> list[Planned]:
    """What `force_gc` would do, blob by blob. Linearized. Reads the log up to the truncation point."""
    state = machine.refresh()
    target, writes = _target(state)
    plan = [Planned("write rollup", str(state.seqno))] if writes else []
    if target is None:
        return plan
    sizes = _sizes(machine)
    for step in collectable(machine, target):
        for blob in step.blobs:
            key = blob_key(machine.shard_id, blob.partial_key)
            plan.append(Planned(f"delete {blob.kind}", key, sizes.get(key)))
        plan.append(Planned("truncate", f"{step.versions} versions, up to {step.to}"))
    gone = [seqno for seqno in state.rollups if seqno < target]
    return plan + [Planned("unlink rollup", str(seqno)) for seqno in sorted(gone)]


def force_gc(machine: Machine, *, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Writes a rollup of the newest version, unless a hold makes it useless, then collects as far as readers allow.

    This unlinks older rollups. The next collection deletes their blobs, once it passes the version that unlinked them.
    """
    outcomes: list[Outcome] = []
    _, writes = _target(machine.refresh())
    if writes:
        outcomes.append(write_rollup(machine))
    outcomes.append(gc_and_truncate(machine, on_progress=on_progress))
    return [outcome for outcome in outcomes if outcome.ending is not Ending.SKIPPED]


def collect_fully(machine: Machine, *, on_progress: OnProgress | None = None) -> list[Outcome]:
    """Writes a rollup and collects, until nothing is left of what the newest version no longer names, as far as readers allow.

    It takes three rounds. The first rollup contains the log entries that released the content. The second rollup does not, and the first
    can be unlinked. After the third, the blob of the first can be deleted. Safe to repeat, to race and to kill.
    """
    outcomes: list[Outcome] = []
    for _ in range(COLLECTIONS_MAX):
        state = machine.refresh()
        newest, _ = latest_rollup(state)
        # Do this also while readers hold versions, but only once: when they release them, the next collection reaches this rollup.
        if state.seqno - newest > 1 and newest <= seqno_since(state):
            outcomes.append(write_rollup(machine))
        done = gc_and_truncate(machine, on_progress=on_progress)
        outcomes.append(done)
        bounds = machine.versions.live_diff_bounds(machine.shard_id)
        left = None if bounds is None else Uncollected().from_ms(machine, earliest=bounds.earliest)
        if done.ending is not Ending.SUCCEEDED or left is None:
            break
    return [outcome for outcome in outcomes if outcome.ending is not Ending.SKIPPED]


def _target(state: ShardState) -> tuple[SeqNo | None, bool]:
    """The version to which the log could be truncated (None if it begins there already), and whether that needs a new rollup."""
    newest, _ = latest_rollup(state)
    # Linking a rollup and removing older entries commit versions, too. These versions alone are no reason for another rollup.
    writes = seqno_since(state) == state.seqno and state.seqno - newest > 1
    if writes:
        return state.seqno, True
    target = rollup_at_or_below(state, seqno_since(state))
    return (target if target is not None and target > min(state.rollups) else None), False


def _sizes(machine: Machine) -> dict[str, int]:
    prefix = f"{machine.shard_id}/"
    listing = machine.retry.external("list", lambda: list(machine.blob.list_prefix(prefix)), shard=machine.shard_id)
    return {info.key: info.size_bytes for info in listing}
