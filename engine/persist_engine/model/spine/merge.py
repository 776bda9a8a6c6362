"""Swaps the result of a physical compaction into the spine (spec 12).

Owns the matching (exact, subset, by id range, by single runs) and its guards. It never changes a level or the remaining work of
a merge in progress (spec 12.6). A false "not applied" would make the compactor delete linked blobs; a false "applied" would only
leak blobs. Every doubtful case is therefore refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from persist_engine.base.errors import check
from persist_engine.model.batch import HollowBatch, RunMeta, RunPart
from persist_engine.model.frontier import Description
from persist_engine.model.ids import RunId
from persist_engine.model.spine.flat import SpineId
from persist_engine.model.spine.spine import IdBatch, MergeOutcome, MergeRes, Sizes, Spine, SpineBatch


def apply_merge_res(spine: Spine, res: MergeRes, *, checked: bool) -> tuple[Spine, MergeOutcome]:
    """Replace parts (all, or a range) of the newest matching spine batch by the output. Returns the same spine if refused.

    The result is refused in three cases. No batch with this range (for single runs: no batch with all of them) still holds the
    inputs, if those are known. The output's since is beyond the batch's. The output has more rows than it replaces. With
    `checked`, raises InvariantViolated if sums of diffs prove that the output lost or invented updates.
    """
    if res.runs is not None:
        return _apply_to_runs(spine, res, frozenset(res.runs), checked=checked)
    refusal = MergeOutcome.NOT_APPLIED_NO_MATCH
    for batch in reversed(tuple(spine.batches())):
        span = _find(batch, res.output.desc, res.input)
        if span is None:
            continue
        if not res.output.desc.since <= batch.desc.since:
            refusal = MergeOutcome.NOT_APPLIED_INVALID_SINCE
            continue
        replaced = batch.parts[span.start : span.stop]
        if res.inputs is not None and not _same_parts([part for _, part in replaced], res.inputs):
            continue
        if res.output.rows > Sizes.total(replaced).rows:
            return spine, MergeOutcome.NOT_APPLIED_TOO_MANY_UPDATES
        if checked:
            _check_diff_sums(replaced, res.output)
        if len(replaced) == len(batch.parts):
            # SUBTLE: the batch takes the output's description, so its since may move back to the output's older one.
            return spine.with_batch(
                SpineBatch.single(batch.id, res.output, level=batch.level)
            ), MergeOutcome.APPLIED_EXACT
        return spine.with_batch(_with_span(batch, span, res.output)), MergeOutcome.APPLIED_SUBSET
    return spine, refusal


def _apply_to_runs(
    spine: Spine, res: MergeRes, wanted: frozenset[RunId], *, checked: bool
) -> tuple[Spine, MergeOutcome]:
    """Replace the named runs of one hollow batch by the output's runs. The batch keeps its description, so the output must have
    been written under it.
    """
    for batch in spine.batches():
        index = next((i for i, (part_id, _) in enumerate(batch.parts) if part_id == res.input), None)
        if index is None:
            continue
        whole = batch.parts[index][1]
        kept = [run for run in whole.runs() if run[0].run_id not in wanted]
        replaced = _of_runs(whole, [run for run in whole.runs() if run[0].run_id in wanted])
        holds_all = {meta.run_id for meta in replaced.run_metas} == wanted
        if res.output.desc != whole.desc or not holds_all:
            break
        if res.inputs is not None and not _same_parts([replaced], res.inputs):
            break
        if res.output.rows > replaced.rows:
            return spine, MergeOutcome.NOT_APPLIED_TOO_MANY_UPDATES
        if checked:
            _check_diff_sums(((batch.id, replaced),), res.output)
        joined = _of_runs(whole, [*kept, *res.output.runs()])
        # `rows` of a truncated batch may be less than its parts hold, because it bounds the visible rows.
        joined = replace(joined, rows=min(joined.rows, whole.rows))
        old = (batch.parts[index],)
        parts = (*batch.parts[:index], (old[0][0], joined), *batch.parts[index + 1 :])
        sizes = batch.sizes - Sizes.total(old) + Sizes.of(joined)
        return spine.with_batch(replace(batch, parts=parts, sizes=sizes)), MergeOutcome.APPLIED_PARTIAL
    return spine, MergeOutcome.NOT_APPLIED_NO_MATCH


def _of_runs(batch: HollowBatch, runs: Sequence[tuple[RunMeta, tuple[RunPart, ...]]]) -> HollowBatch:
    """Return a batch of only `runs`, under the description of `batch`."""
    return HollowBatch.of_runs(batch.desc, sum(part.rows for _, parts in runs for part in parts), runs)


def wrapped_sum(sums: Iterable[int | None]) -> int | None:
    """Sum modulo 2**64, like the sums of parts, because the true sum may exceed int64. None if any summand is unknown."""
    total = 0
    for each in sums:
        if each is None:
            return None
        total += each
    return wrapped(total)


def wrapped(total: int) -> int:
    """Return `total` modulo 2**64, as an int64."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def empty_out(spine: Spine, desc: Description) -> Spine:
    """Replace the hollow batch under `desc` by an empty one, unchecked. For tombstones, which have no readers."""
    for batch in spine.batches():
        span = _find(batch, desc, None)
        if span is not None:
            return spine.with_batch(_with_span(batch, span, HollowBatch.empty(desc)))
    check(condition=False, message=f"no batch {desc} to empty out")
    return spine


def _find(batch: SpineBatch, desc: Description, by_id: SpineId | None) -> range | None:
    """Return the range of parts of `batch` that the output covers exactly; None if it does not align with their bounds."""
    if by_id is not None:
        if not batch.id.covers(by_id):
            return None
        start = next((i for i, (part_id, _) in enumerate(batch.parts) if part_id.lo == by_id.lo), None)
        last = next((i for i, (part_id, _) in enumerate(batch.parts) if part_id.hi == by_id.hi), None)
    else:
        if not (batch.desc.lower <= desc.lower and desc.upper <= batch.desc.upper):
            return None
        lasts = reversed(range(len(batch.parts)))
        start = next((i for i, (_, part) in enumerate(batch.parts) if part.desc.lower == desc.lower), None)
        last = next((i for i in lasts if batch.parts[i][1].desc.upper == desc.upper), None)
    if start is None or last is None or last < start:
        return None
    if batch.parts[start][1].desc.lower != desc.lower or batch.parts[last][1].desc.upper != desc.upper:
        return None
    return range(start, last + 1)


def _same_parts(replaced: Sequence[HollowBatch], inputs: Sequence[HollowBatch]) -> bool:
    """Whether the current parts are the compacted ones. SUBTLE: replaced inputs never return, and neither does an output.
    Suppose that a first attempt was applied, another result replaced its output, and its blobs were collected. Then a repeated
    attempt must not link those blobs again.
    """
    return [part for batch in replaced for part in batch.parts] == [part for batch in inputs for part in batch.parts]


def _with_span(batch: SpineBatch, span: range, output: HollowBatch) -> SpineBatch:
    replaced = batch.parts[span.start : span.stop]
    new_id = SpineId(replaced[0][0].lo, replaced[-1][0].hi)
    parts = (*batch.parts[: span.start], (new_id, output), *batch.parts[span.stop :])
    return replace(batch, parts=parts, sizes=batch.sizes - Sizes.total(replaced) + Sizes.of(output))


def _check_diff_sums(replaced: tuple[IdBatch, ...], output: HollowBatch) -> None:
    """Check that compaction kept the sum of diffs. Truncated runs include invisible rows, so their sums prove nothing (spec 20, bug 20)."""
    batches = [batch for _, batch in replaced]
    if any(meta.truncated for batch in (*batches, output) for meta in batch.run_metas):
        return
    old = wrapped_sum(part.diffs_sum for batch in batches for part in batch.parts)
    new = wrapped_sum(part.diffs_sum for part in output.parts)
    if new is None:
        check(old is None, f"compaction of {output.desc} lost the known sum of diffs {old}")
    elif old is not None:
        check(old == new, f"compaction of {output.desc} changed the sum of diffs from {old} to {new}")
