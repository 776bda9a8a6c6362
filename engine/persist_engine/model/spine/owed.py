"""Determines since when a shard may hold updates that were retracted and are still physically present.

An update is owed a deletion from the moment at which its retraction was written, or takes effect, whichever is later. Every run records
the earliest of these moments among its waiting retractions (`RunMeta.waits_from_ms`): a builder when it stages them, a compaction when it
writes its output (spec 13.12). This module owns the rule for outputs and the questions about a trace. All answers are bounds: never later
than the truth. Must not know: older versions, which may name blobs that the newest one does not (work.audit.uncollected).

SUBTLE: an *older* net negative row, which retracts something that was never there, can cancel a later update. Such an update counts only
when a run that holds both is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from persist_engine.base.wording import is_instant
from persist_engine.model.batch import NOTHING_WAITS, HollowBatch, HollowPart, RunPart
from persist_engine.model.frontier import MINIMUM, Antichain, Description
from persist_engine.model.spine.trace import Trace


def waits_from_ms(trace: Trace) -> int | None:
    """Return the time since which the oldest retraction in `trace` waits; None if none does. O(levels) after the first call on a batch."""
    return _known(min((batch.waits_from_ms for batch in trace.spine_batches()), default=NOTHING_WAITS))


def waits_after_merge_ms(trace: Trace, *, now_ms: int) -> int | None:
    """Return what `waits_from_ms` would be if all batches were merged into one now, at the trace's since. None: nothing would wait."""
    waits = waits_from_ms(trace)
    if waits is None or is_merged(trace):
        return waits
    desc = Description(MINIMUM, trace.upper, trace.since)
    return _known(_after_whole_merge(tuple(_inputs(trace)), desc, now_ms=now_ms))


def is_merged(trace: Trace) -> bool:
    """Whether all rows are one run at the trace's since, so that another compaction changes nothing."""
    filled = [batch for batch in trace.spine_batches() if batch.sizes.rows]
    return all(batch.is_compact and batch.desc.since == trace.since for batch in filled) and len(filled) <= 1


def waits_of_output(
    replaced: Sequence[HollowBatch], desc: Description, parts: Sequence[RunPart], *, all_runs: bool, now_ms: int
) -> int:
    """Return `RunMeta.waits_from_ms` of a compaction's output under `desc`. `all_runs` means that it replaces everything under `desc`.

    A merge of everything from the minimum on leaves no retraction at or before its since. Any other merge may leave retractions, because
    an older batch may hold what they retract.
    """
    least = [_least_diff(part) for part in parts]
    if all(diff is not None and diff > 0 for diff in least):
        return NOTHING_WAITS
    oldest_ms = min((batch.waits_from_ms for batch in replaced), default=NOTHING_WAITS)
    if desc.lower != MINIMUM or not all_runs:
        return oldest_ms
    if not _ends_before(desc.upper, desc.since):
        return _after_whole_merge(replaced, desc, now_ms=now_ms)
    # No retraction waits for since. If a row with a negative diff is left, it retracts something that was never there.
    return oldest_ms if any(diff is not None and diff < 0 for diff in least) else NOTHING_WAITS


def _after_whole_merge(replaced: Sequence[HollowBatch], desc: Description, *, now_ms: int) -> int:
    left = [batch.waits_from_ms for batch in replaced if not _ends_before(batch.desc.upper, desc.since)]
    oldest_ms = min(left, default=NOTHING_WAITS)
    since = desc.since.time
    if oldest_ms != NOTHING_WAITS and since is not None and is_instant(since) and since <= now_ms:
        # The retractions that are left take effect after since, and the shard's times may be wall-clock times.
        return max(oldest_ms, since)
    return oldest_ms


def _ends_before(upper: Antichain, since: Antichain) -> bool:
    """Whether every time before `upper` is at or before `since`."""
    if since.time is None:
        return True
    return upper.time is not None and upper.time - 1 <= since.time


def _inputs(trace: Trace) -> Iterable[HollowBatch]:
    """The hollow batches that may have retractions which still wait after a merge. Does not decode batches that end at or before since."""
    for batch in trace.spine_batches():
        if not _ends_before(batch.desc.upper, trace.since):
            yield from (hollow for _, hollow in batch.parts)


def _least_diff(part: RunPart) -> int | None:
    return part.stats.diff_min if isinstance(part, HollowPart) and part.stats is not None else None


def _known(at_ms: int) -> int | None:
    return None if at_ms == NOTHING_WAITS else at_ms
