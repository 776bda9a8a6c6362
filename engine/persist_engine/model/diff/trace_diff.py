"""The difference between two traces, and its application (spec 8.5).

Owns the structured path. `changes` inspects only spine batches that the two traces do not share. `apply_structured` rebuilds
only those, and reuses spine batches that merely moved as a whole. The cost of both is proportional to the changes (amortised
over merges). `legacy_diff` owns the path without structure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from persist_engine.base.errors import InvariantViolated, check
from persist_engine.model.batch import HollowBatch
from persist_engine.model.diff.field_diff import (
    Delete,
    FieldDiff,
    Insert,
    applied_to_dict,
    dict_diffs,
    field_diff,
    updated_value,
)
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.spine import flatten
from persist_engine.model.spine.flat import FlatTrace, SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.spine.lazy_parts import joined
from persist_engine.model.spine.spine import IdBatch, Sizes, Spine, SpineBatch, validate_tiling
from persist_engine.model.spine.trace import Trace


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The five collections of a flat trace, as diffs. The fields are those of `StateDiff`."""

    since: tuple[FieldDiff[None, Antichain], ...] = ()
    legacy_batches: tuple[FieldDiff[HollowBatch, None], ...] = ()
    hollow_batches: tuple[FieldDiff[SpineId, HollowBatch], ...] = ()
    spine_batches: tuple[FieldDiff[SpineId, ThinSpineBatch], ...] = ()
    merges: tuple[FieldDiff[SpineId, ThinMerge], ...] = ()

    def has_structure(self) -> bool:
        """Whether anything besides since and flat batches changes."""
        return bool(self.hollow_batches or self.spine_batches or self.merges)

    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self.since or self.legacy_batches or self.has_structure())


def changes(before: Trace, after: Trace) -> TraceDiff:
    """Return the diff from `before` to `after`. A structured trace stays structured."""
    if before is after:
        return TraceDiff()
    since = field_diff(None, before.since, after.since)
    old_parts, new_parts, old_thin, new_thin = _unshared(before, after)
    old_legacy, old_hollow = _split(old_parts)
    new_legacy, new_hollow = _split(new_parts)
    legacy = legacy_diffs(old_legacy, new_legacy)
    if not after.structured:
        check(not before.structured, "a structured trace lost its structure")
        return TraceDiff(since, legacy)
    olds, news = before.spine.levels if before.structured else (), after.spine.levels
    shared = {id(level) for level in olds} & {id(level) for level in news}
    return TraceDiff(
        since,
        legacy,
        dict_diffs(old_hollow, new_hollow),
        dict_diffs(old_thin, new_thin),
        dict_diffs(
            flatten.thin_merges(level for level in olds if id(level) not in shared),
            flatten.thin_merges(level for level in news if id(level) not in shared),
        ),
    )


def legacy_diffs(old: list[HollowBatch], new: list[HollowBatch]) -> tuple[FieldDiff[HollowBatch, None], ...]:
    """Return the deletes and inserts that turn one set of batches into the other, sorted by batch, deletes first."""
    if not old and len(new) <= 1:  # the usual append, which has nothing to compare or sort
        return tuple(Insert(batch, None) for batch in new)
    deletes: list[FieldDiff[HollowBatch, None]] = [Delete(batch, None) for batch in set(old) - set(new)]
    inserts: list[FieldDiff[HollowBatch, None]] = [Insert(batch, None) for batch in set(new) - set(old)]
    return tuple(sorted(deletes + inserts, key=lambda diff: (flatten.legacy_order(diff.key), isinstance(diff, Insert))))


_Unshared = tuple[list[IdBatch], list[IdBatch], dict[SpineId, ThinSpineBatch], dict[SpineId, ThinSpineBatch]]


def _unshared(before: Trace, after: Trace) -> _Unshared:
    """Return the parts and thin forms of the spine batches that the two traces do not share, before and after.

    Sharing is detected by identity. Equal batches that were created separately are compared and cancel out later.
    """
    olds, news = tuple(before.spine_batches()), tuple(after.spine_batches())
    shared = {id(batch) for batch in olds} & {id(batch) for batch in news} if before.structured else set()
    old = {batch.id: batch for batch in olds if id(batch) not in shared}
    new = {batch.id: batch for batch in news if id(batch) not in shared}
    old_parts: list[IdBatch] = []
    new_parts: list[IdBatch] = []
    old_thin: dict[SpineId, ThinSpineBatch] = {}
    new_thin: dict[SpineId, ThinSpineBatch] = {}
    same_structure = before.structured == after.structured
    for spine_id in old.keys() | new.keys():
        one, other = old.get(spine_id), new.get(spine_id)
        same_parts = one is not None and other is not None and one.parts is other.parts
        if not same_parts:
            old_parts += one.parts if one else ()
            new_parts += other.parts if other else ()
        if same_structure and same_parts and one and other and (one.level, one.desc) == (other.level, other.desc):
            continue
        if one is not None and before.structured:
            old_thin[spine_id] = flatten.thin(one)
        if other is not None:
            new_thin[spine_id] = flatten.thin(other)
    # A merge moves hollow batches from two spine batches into one. Batches that only moved need no comparison.
    moved = {id(part) for part in old_parts} & {id(part) for part in new_parts}
    if moved:
        old_parts = [part for part in old_parts if id(part) not in moved]
        new_parts = [part for part in new_parts if id(part) not in moved]
    return old_parts, new_parts, old_thin, new_thin


def _split(parts: list[IdBatch]) -> tuple[list[HollowBatch], dict[SpineId, HollowBatch]]:
    legacy = [batch for _, batch in parts if not flatten.is_zero_width(batch)]
    return legacy, {part_id: batch for part_id, batch in parts if flatten.is_zero_width(batch)}


def apply_structured(trace: Trace, diff: TraceDiff, count: Callable[[str], None]) -> Trace:
    """Return the trace after `diff`. Strict: raises InvariantViolated if the diff does not match.

    First rebuilds only what the diff names, and counts "structured". If that fails, because the writer grouped empty batches
    differently, flattens, changes and rebuilds the whole trace, and counts "structured_full".
    """
    try:
        spine = _apply_incremental(trace.spine, diff)
    except InvariantViolated:
        out = Trace.unflatten(apply_flat(trace.flatten(), diff))
        check(out.structured, "a structured trace would lose its structure")
        count("structured_full")
        return out
    count("structured")
    return Trace(spine, structured=True)


def apply_flat(flat: FlatTrace, diff: TraceDiff) -> FlatTrace:
    """Return the flat collections after `diff`. Strict. O(live batches)."""
    legacy: dict[HollowBatch, None] = dict.fromkeys(flat.legacy_batches)
    applied_to_dict("legacy_batches", legacy, diff.legacy_batches)
    hollow, thins, merges = dict(flat.hollow_batches), dict(flat.spine_batches), dict(flat.merges)
    applied_to_dict("hollow_batches", hollow, diff.hollow_batches)
    applied_to_dict("spine_batches", thins, diff.spine_batches)
    applied_to_dict("merges", merges, diff.merges)
    since = updated_value("since", flat.since, diff.since)
    return FlatTrace(since, tuple(sorted(legacy, key=flatten.legacy_order)), hollow, thins, merges)


def _apply_incremental(spine: Spine, diff: TraceDiff) -> Spine:
    """Rebuild only the spine batches that the diff names, and take apart only those whose hollow batches it names. A spine
    batch that is merged or sinks moves as a whole, however many hollow batches it has.
    """
    since = updated_value("since", spine.since, diff.since)
    batches = {batch.id: batch for batch in spine.batches()}
    opened = _opened(batches, diff)
    touched = opened | _named(batches, diff)
    thins = {spine_id: flatten.thin(batches[spine_id]) for spine_id in touched}
    applied_to_dict("spine_batches", thins, diff.spine_batches)
    check(thins.keys().isdisjoint(batches.keys() - touched), "spine_batches: insert over existing")

    legacy: dict[HollowBatch, None] = {}
    hollow: dict[SpineId, HollowBatch] = {}
    for spine_id in opened:
        for part_id, part in batches[spine_id].parts:
            if flatten.is_zero_width(part):
                hollow[part_id] = part
            else:
                legacy[part] = None
    applied_to_dict("legacy_batches", legacy, diff.legacy_batches)
    applied_to_dict("hollow_batches", hollow, diff.hollow_batches)

    by_desc = {batch.desc: batch for batch in legacy}
    check(len(by_desc) == len(legacy), "two batches of one description")
    whole = {spine_id.lo: batches[spine_id] for spine_id in touched - opened}
    rebuilt = [_rebuild(spine_id, stored, whole, by_desc, hollow) for spine_id, stored in thins.items()]
    check(not by_desc and not hollow and not whole, "batches of no spine batch")
    kept = [batch for spine_id, batch in batches.items() if spine_id not in touched]
    merges = flatten.thin_merges(spine.levels)
    applied_to_dict("merges", merges, diff.merges)
    out = flatten.assemble(since, sorted(kept + rebuilt, key=lambda batch: batch.id), merges)
    out.validate()
    return out


def _rebuild(
    spine_id: SpineId,
    stored: ThinSpineBatch,
    whole: dict[int, SpineBatch],
    by_desc: dict[Description, HollowBatch],
    hollow: dict[SpineId, HollowBatch],
) -> SpineBatch:
    """Build one spine batch from whole former spine batches and loose hollow batches. Removes what it uses from its arguments."""
    pieces: list[SpineBatch] = []
    loose: list[IdBatch] = []
    index = 0
    while index < len(stored.parts):
        part_id, desc = stored.parts[index], stored.descs[index]
        moved = whole.pop(part_id.lo, None)
        if moved is None:
            batch = hollow.pop(part_id, None) if desc.lower == desc.upper else by_desc.pop(desc, None)
            if batch is None or batch.desc != desc:
                raise InvariantViolated(f"no batch {desc} for part {part_id} of {spine_id}")
            loose.append((part_id, batch))
            index += 1
            continue
        known, end = flatten.thin(moved), index + len(moved.parts)
        if stored.parts[index:end] != known.parts or stored.descs[index:end] != known.descs:
            raise InvariantViolated(f"spine batch {moved.id} differs from its form within {spine_id}")
        pieces += [*_gathered(loose, stored), moved]
        loose, index = [], end
    pieces += _gathered(loose, stored)
    if len(pieces) == 1 and (pieces[0].id, pieces[0].desc) == (spine_id, stored.desc):
        return pieces[0].at_level(stored.level).known_as(stored)
    return _joined(spine_id, stored, pieces)


def _gathered(loose: list[IdBatch], stored: ThinSpineBatch) -> list[SpineBatch]:
    """Return consecutive hollow batches as a spine batch of their own; nothing if there are none."""
    if not loose:
        return []
    (first_id, first), (last_id, last) = loose[0], loose[-1]
    desc = Description(first.desc.lower, last.desc.upper, stored.desc.since)
    parts = tuple(loose)
    batch = SpineBatch(SpineId(first_id.lo, last_id.hi), desc, stored.level, parts, Sizes.total(parts))
    validate_tiling(batch)
    return [batch]


def _joined(spine_id: SpineId, stored: ThinSpineBatch, pieces: list[SpineBatch]) -> SpineBatch:
    """Join several spine batches into one. Raises InvariantViolated unless they tile it."""
    sizes = Sizes()
    next_id, upper = spine_id.lo, stored.desc.lower
    for piece in pieces:
        if piece.id.lo != next_id or piece.desc.lower != upper:
            raise InvariantViolated(f"{piece} within {spine_id} does not follow id {next_id} and upper {upper}")
        sizes += piece.sizes
        next_id, upper = piece.id.hi, piece.desc.upper
    if next_id != spine_id.hi or upper != stored.desc.upper:
        raise InvariantViolated(f"parts of spine batch {spine_id} end at id {next_id} and {upper}")
    parts = joined([piece.parts for piece in pieces])
    return SpineBatch(spine_id, stored.desc, stored.level, parts, sizes).known_as(stored)


def _named(batches: dict[SpineId, SpineBatch], diff: TraceDiff) -> set[SpineId]:
    """Return the spine batches that the diff changes or deletes. Raises InvariantViolated if one does not exist."""
    named = {change.key for change in diff.spine_batches if not isinstance(change, Insert)}
    check(named <= batches.keys(), f"spine_batches: no spine batch {sorted(named - batches.keys())[:1]}")
    return named


def _opened(batches: dict[SpineId, SpineBatch], diff: TraceDiff) -> set[SpineId]:
    """Return the spine batches that hold hollow batches named by the diff, or that would hold those it inserts."""
    times = [change.key.desc.lower for change in diff.legacy_batches]
    ids = [change.key for change in diff.hollow_batches]
    return {
        batch.id
        for batch in batches.values()
        if _any_within(times, batch) or any(batch.id.covers(part_id) for part_id in ids)
    }


def _any_within(times: list[Antichain], batch: SpineBatch) -> bool:
    return any(batch.desc.lower <= time < batch.desc.upper for time in times)
