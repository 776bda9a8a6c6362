"""Converts the spine to flat collections and back (spec 8.8, 8.9).

Owns both directions, and `assemble`, the last step, which incremental application of diffs shares. `unflatten(flatten(s)) ==
s`. A flat trace without spine batches predates stored structure; its hollow batches are pushed in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.model.batch import HollowBatch
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.spine.edit import SpineEdit
from persist_engine.model.spine.flat import FlatTrace, SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.spine.spine import LEVELS_MAX, Fueling, Level, Sizes, Spine, SpineBatch


def is_zero_width(batch: HollowBatch) -> bool:
    """Whether the batch spans no time, so that `exert` made it. Such batches are not unique by description, so they are stored by id."""
    return batch.desc.lower == batch.desc.upper


def thin(batch: SpineBatch) -> ThinSpineBatch:
    """Return the stored form of a spine batch."""
    return batch.thin()


def thin_merges(levels: Iterable[Level]) -> dict[SpineId, ThinMerge]:
    """Return claimed compactions and merges in progress at `levels`, by id."""
    merges: dict[SpineId, ThinMerge] = {}
    for level in levels:
        for batch in level.batches:
            if batch.active_compaction_start_ms is not None:
                merges[batch.id] = ThinMerge(batch.desc.since, 0, batch.active_compaction_start_ms)
        if level.merge is not None:
            merge_id = level.merge_id
            if merge_id in merges:
                raise InvariantViolated(f"merge {merge_id} appears twice")
            merges[merge_id] = ThinMerge(level.merge.since, level.merge.remaining_work)
    return merges


def legacy_order(batch: HollowBatch) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int, str]:
    """Total order of hollow batches (spec 2.2), with the empty frontier last. `repr` only orders batches of equal description."""
    desc = batch.desc
    return _order(desc.lower), _order(desc.upper), _order(desc.since), batch.rows, repr(batch.parts)


def _order(frontier: Antichain) -> tuple[int, int]:
    return (1, 0) if frontier.time is None else (0, frontier.time)


def _by_lower(batch: HollowBatch) -> tuple[tuple[int, int], tuple[int, int]]:
    return _order(batch.desc.lower), _order(batch.desc.upper)


def flatten(spine: Spine, *, structured: bool) -> FlatTrace:
    """Return the flat form of the whole spine; O(live batches)."""
    legacy: list[HollowBatch] = []
    hollow: dict[SpineId, HollowBatch] = {}
    thins: dict[SpineId, ThinSpineBatch] = {}
    for batch in spine.batches():
        thins[batch.id] = thin(batch)
        for part_id, part in batch.parts:
            if is_zero_width(part):
                check(part_id not in hollow, f"hollow batch {part_id} appears twice")
                hollow[part_id] = part
            else:
                legacy.append(part)
    legacy.sort(key=_by_lower)
    if not structured:
        check(not hollow, "a trace without structure holds batches of no width")
        return FlatTrace(spine.since, tuple(legacy))
    return FlatTrace(spine.since, tuple(legacy), hollow, thins, thin_merges(spine.levels))


def unflatten(flat: FlatTrace) -> tuple[Spine, bool]:
    """Return the spine and whether its structure was stored. Raises InvariantViolated if the collections are inconsistent."""
    structured = bool(flat.spine_batches) or not flat.legacy_batches
    legacy = deque(sorted(flat.legacy_batches, key=_by_lower))
    hollow = dict(flat.hollow_batches)
    if not structured:
        check(not hollow and not flat.merges, "a flat trace without spine batches has hollow batches or merges")
        return pushed(flat.since, legacy), False
    batches = []
    for spine_id in sorted(flat.spine_batches):
        stored = flat.spine_batches[spine_id]
        parts = tuple(
            (part_id, _take(part_id, desc, hollow, legacy))
            for part_id, desc in zip(stored.parts, stored.descs, strict=True)
        )
        batches.append(SpineBatch(spine_id, stored.desc, stored.level, parts, Sizes.total(parts)))
    check(not legacy, f"batches of no spine batch: {list(legacy)[:3]}")
    check(not hollow, f"hollow batches of no spine batch: {sorted(hollow)[:3]}")
    spine = assemble(flat.since, batches, flat.merges)
    spine.validate(deep=True)
    return spine, True


def pushed(since: Antichain, batches: Iterable[HollowBatch]) -> Spine:
    """Build a spine by pushing `batches` in order, as replicas without structure do."""
    edit = SpineEdit(Spine(since=since))
    for batch in batches:
        edit.push(batch)
    return edit.finish()[0]


def assemble(since: Antichain, batches: list[SpineBatch], merges: Mapping[SpineId, ThinMerge]) -> Spine:
    """Build a spine from `batches` (oldest first) with the claims and merges of `merges`; O(levels). Every merge must be used."""
    if not batches:
        check(not merges, f"merges in an empty spine: {sorted(merges)[:3]}")
        return Spine(since=since)
    top = batches[0].level
    check(0 <= top < LEVELS_MAX, f"spine batch {batches[0].id} lies at level {top} of {LEVELS_MAX}")
    rest = dict(merges)
    held: list[tuple[SpineBatch, ...]] = [() for _ in range(top + 1)]
    for batch in batches:
        # This runs for every applied diff, so messages are formatted only on failure.
        if not 0 <= batch.level < len(held):
            raise InvariantViolated(f"spine batch {batch.id} lies above the oldest, at level {batch.level}")
        claim = rest.pop(batch.id, None)
        start_ms = None if claim is None else claim.active_compaction_start_ms
        if (claim is None) != (start_ms is None):
            raise InvariantViolated(f"the claim on spine batch {batch.id} has no start")
        if batch.active_compaction_start_ms != start_ms:
            batch = batch.claimed(start_ms)  # noqa: PLW2901
        held[batch.level] = (*held[batch.level], batch)
    levels = []
    for index, pair in enumerate(held):
        level = Level(pair)
        if len(pair) == 2:
            stored = rest.pop(level.merge_id, None)
            if stored is None:
                raise InvariantViolated(f"level {index} holds two batches and merge {level.merge_id} is not stored")
            level = Level(pair, Fueling(stored.since, stored.remaining_work))
        levels.append(level)
    check(not rest, f"merges of no spine batch: {sorted(rest)[:3]}")
    return Spine(since, batches[-1].desc.upper, batches[-1].id.hi, tuple(levels))


def _take(
    part_id: SpineId, desc: Description, hollow: dict[SpineId, HollowBatch], legacy: deque[HollowBatch]
) -> HollowBatch:
    """Take the hollow batch of a part: by id, or the next in order of time. Empty batches are regrouped to `desc`, because a
    writer that stored them without ids may have grouped them differently.
    """
    if part_id in hollow:
        batch = hollow.pop(part_id)
        check(batch.desc == desc, f"hollow batch {part_id} is {batch.desc}, not {desc}")
        return batch
    check(bool(legacy), f"no batch left for part {part_id} {desc}")
    batch = legacy.popleft()
    if batch.desc == desc:
        return batch
    check(batch.desc.lower == desc.lower, f"part {part_id} {desc} meets batch {batch.desc}")
    upper, since = batch.desc.upper, batch.desc.since
    check(batch.is_empty(), f"part {part_id} {desc} meets batch {batch.desc} with data")
    while upper < desc.upper:
        check(bool(legacy) and legacy[0].is_empty(), f"part {part_id} {desc} ends early, at {upper}")
        following = legacy.popleft()
        check(following.desc.lower == upper, f"part {part_id} {desc} has a gap at {upper}")
        upper, since = following.desc.upper, following.desc.since
    if desc.upper < upper:
        legacy.appendleft(HollowBatch.empty(Description(desc.upper, upper, since)))
    return HollowBatch.empty(desc)
