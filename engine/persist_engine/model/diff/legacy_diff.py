"""Applies diffs to a trace whose structure was never stored (spec 8.5 c, 8.6, 8.7).

Owns the heuristics. Without stored structure, two replicas may group empty batches differently. A diff that names batches
exactly may then not match, although it is meaningful for both. Each path is counted: fast_append, fast_empty, fast_compaction,
lenient, slow, reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.model.batch import HollowBatch
from persist_engine.model.diff.field_diff import Delete, FieldDiff, Insert, Update, applied_to_dict, updated_value
from persist_engine.model.diff.trace_diff import TraceDiff, apply_flat
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.model.spine import flatten
from persist_engine.model.spine.trace import MergeRes, Trace

_Count = Callable[[str], None]
_Diffs = list[FieldDiff[HollowBatch, None]]


def apply_unstructured(trace: Trace, diff: TraceDiff, count: _Count) -> Trace:
    """Return the trace after `diff`. Raises InvariantViolated if no path matches. A diff with structure makes the trace structured."""
    since = updated_value("since", trace.since, diff.since)
    trace = _apply_batches(trace.downgrade_since(since), list(diff.legacy_batches), count)
    if diff.has_structure():
        # The flat batches are in place. The rest of the diff places them in the spine.
        trace = Trace.unflatten(apply_flat(trace.flatten(), replace(diff, since=(), legacy_batches=())))
    return trace


def _apply_batches(trace: Trace, diffs: _Diffs, count: _Count) -> Trace:
    diffs = [diff for diff in diffs if not isinstance(diff, Update)]  # updates from unit to unit change nothing
    if not diffs:
        return trace
    appended = next((diff for diff in diffs if isinstance(diff, Insert) and diff.key.desc.lower == trace.upper), None)
    if appended is not None:
        diffs = [diff for diff in diffs if diff is not appended]
        if not diffs:
            count("fast_append")
            return trace.push_without_requests(appended.key)
        # A commit that appended may also have merged empty batches. The append goes first, as in the original commit.
        trace = trace.push_without_requests(appended.key)
    extended = _extended_empty(diffs)
    if extended is not None and extended.lower == trace.upper:
        count("fast_empty")
        return trace.push_without_requests(HollowBatch.empty(extended))
    inserts = [diff.key for diff in diffs if isinstance(diff, Insert)]
    if len(inserts) == 1:
        return _apply_compaction(trace, inserts[0], count)
    return _apply_slow(trace, diffs, count)


def _extended_empty(diffs: _Diffs) -> Description | None:
    """Return the appended interval if the diff replaces an empty batch by a longer empty one, else None."""
    if len(diffs) != 2:
        return None
    deletes = [diff.key for diff in diffs if isinstance(diff, Delete)]
    inserts = [diff.key for diff in diffs if isinstance(diff, Insert)]
    if len(deletes) != 1 or len(inserts) != 1:
        return None
    old, new = deletes[0], inserts[0]
    if old.rows or new.rows or old.desc.lower != new.desc.lower or not old.desc.upper < new.desc.upper:
        return None
    return Description(old.desc.upper, new.desc.upper, MINIMUM)


def _apply_compaction(trace: Trace, output: HollowBatch, count: _Count) -> Trace:
    """Apply one insert with any number of deletes: the merge result of another process."""
    trace, outcome = trace.apply_merge_res(MergeRes(output, None), checked=False)
    if outcome.applied:
        count("fast_compaction")
        return trace
    batches = lenient_replacement(list(trace.batches()), output)
    count("lenient")
    return _rebuilt(trace, batches)


def lenient_replacement(batches: list[HollowBatch], output: HollowBatch) -> list[HollowBatch]:
    """Return `batches` with everything that overlaps `output` replaced by it. Empty batches that extend beyond it are cut.

    Raises InvariantViolated if a batch with data extends beyond it, nothing overlaps, or the result does not tile [minimum, upper).
    """
    lower, upper = output.desc.lower, output.desc.upper
    overlapping = [batch for batch in batches if not (batch.desc.upper <= lower or upper <= batch.desc.lower)]
    check(bool(overlapping), f"replacement {output.desc} overlaps no batch")
    rest = [batch for batch in batches if batch not in overlapping]
    first, last = overlapping[0].desc, overlapping[-1].desc
    if first.lower < lower:
        check(overlapping[0].rows == 0, f"replacement {output.desc} would cut batch {first}, which has data")
        rest.append(HollowBatch.empty(Description(first.lower, lower, first.since)))
    if upper < last.upper:
        check(overlapping[-1].rows == 0, f"replacement {output.desc} would cut batch {last}, which has data")
        rest.append(HollowBatch.empty(Description(upper, last.upper, last.since)))
    out = sorted([*rest, output], key=flatten.legacy_order)
    end = MINIMUM
    for batch in out:
        check(batch.desc.lower == end, f"replacement {output.desc} leaves a gap at {end}")
        end = batch.desc.upper
    return out


def _apply_slow(trace: Trace, diffs: _Diffs, count: _Count) -> Trace:
    """Apply strictly to the set of batches; if that fails, to the set as a rebuilt trace would group it."""
    batches: dict[HollowBatch, None] = dict.fromkeys(trace.batches())
    try:
        applied_to_dict("legacy_batches", batches, diffs)
    except InvariantViolated:
        batches = dict.fromkeys(_rebuilt(trace, trace.batches()).batches())
        applied_to_dict("legacy_batches", batches, diffs)
        count("reconstruction")
        return _rebuilt(trace, batches)
    count("slow")
    return _rebuilt(trace, batches)


def _rebuilt(trace: Trace, batches: Iterable[HollowBatch]) -> Trace:
    """Rebuild the trace from `batches`, keeping since and the structure flag."""
    return Trace(flatten.pushed(trace.since, sorted(batches, key=flatten.legacy_order)), structured=trace.structured)
