"""Pointers without data: hollow batches, their runs and parts, and hollow rollups (spec 2.2 to 2.7)."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import InvalidBatchBounds, InvalidRewrite, InvariantViolated, check
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain, Description
from persist_engine.model.ids import STAGED_MS_MAX, RunId, staged_ms

#: The value of `waits_from_ms` when no retraction waits to cancel what it retracts.
NOTHING_WAITS = STAGED_MS_MAX


class RunOrder(enum.Enum):
    """The order of rows in a run. STRUCTURED: sorted by (key fields, val fields, time) in Arrow's order, and consolidated."""

    UNORDERED = "unordered"
    CODEC = "codec"
    STRUCTURED = "structured"


class RunKind(enum.Enum):
    """What is known of the rows of a run that have the same key and value. DISTINCT: there is only one. BALANCED: their diffs add up to
    zero, so a read at or past all their times needs none of them.
    """

    ANY = "any"
    DISTINCT = "distinct"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """Bounds of one field of key or val, for skipping parts. `lower` and `upper` are the scalar's JSON text in the schema
    codec's form, or None if unknown (trimmed, or all null). Conservative: every row lies within the bounds.
    """

    null_count: int
    lower: str | None
    upper: str | None


@dataclass(frozen=True, slots=True)
class PartStats:
    """Statistics of one part: bounds per field, named as in rows.part_stats, bounds of time, and a lower bound of diffs."""

    columns: tuple[tuple[str, ColumnStats], ...] = ()
    time_min: int | None = None
    time_max: int | None = None
    diff_min: int | None = None


@dataclass(frozen=True, slots=True)
class Footing:
    """The last `size_bytes` bytes of a part, which describe its row groups, and their checksum (codec.row_groups). The
    `filters_bytes` before them hold the Bloom filters of the columns `filtered`, named `key.<field>` and `val.<field>` (codec.bloom).
    """

    size_bytes: int
    checksum: str
    filters_bytes: int = 0
    filtered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HollowPart:
    """One blob of updates. `key` is the partial key `<writer key>/<part id>`; codec.keys builds the full key.

    `diffs_sum` is the sum of diffs modulo 2**64; `sum_wraps` is set if the true sum does not fit int64. `key_lower` bounds
    every key from below in the order of the part codec; b"" is always a valid bound. `checksum` is the text of
    codec.damage.checksum over the whole blob; every read verifies it. A read advances times to `ts_rewrite`.
    """

    key: str
    size_bytes: int
    rows: int
    diffs_sum: int | None
    checksum: str
    key_lower: bytes = b""
    stats: PartStats | None = None
    ts_rewrite: Antichain | None = None
    schema_id: int | None = None
    format: str = "parquet/1"
    sum_wraps: bool = False
    footer: Footing | None = None
    """None means that no piece of the blob can be verified alone, so the blob is read whole."""

    @property
    def hollow_bytes(self) -> int:
        """Bytes in blob."""
        return self.size_bytes

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return 0

    @property
    def part_bytes_max(self) -> int:
        """Bytes of the largest part this entry represents: its own."""
        return self.size_bytes

    @property
    def part_count(self) -> int:
        """Number of parts this entry represents: one."""
        return 1

    @property
    def blob_count(self) -> int:
        """Number of blobs this entry represents: one."""
        return 1


@dataclass(frozen=True, slots=True)
class InlinePart:
    """Updates small enough for state: the encoded part itself. `format` names the encoding (codec.inline_part)."""

    data: bytes
    rows: int
    diffs_sum: int | None
    ts_rewrite: Antichain | None = None
    schema_id: int | None = None
    format: str = "arrow/1"
    sum_wraps: bool = False

    @property
    def hollow_bytes(self) -> int:
        """Bytes in blob."""
        return 0

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return len(self.data)

    @property
    def part_bytes_max(self) -> int:
        """Bytes of the largest part this entry represents: its own."""
        return len(self.data)

    @property
    def part_count(self) -> int:
        """Number of parts this entry represents: one."""
        return 1

    @property
    def blob_count(self) -> int:
        """Number of blobs this entry represents: none."""
        return 0


@dataclass(frozen=True, slots=True)
class HollowRun:
    """A blob that lists consecutive parts of one run, so that state needs one entry for all of them (spec 2.3).

    A listing may list further hollow runs. `key`, `size_bytes` and `checksum` describe the listing itself; the other fields
    summarize all parts below it at any depth. `oldest_key` is the key of the blob staged first among the listing and everything
    below it. `key_lower` bounds the parts' keys from below; `schema_id` is their newest. `ts_rewrite` applies to every part
    below and replaces the parts' own values. Invariant: only this listing references the blobs it lists, so they live and die
    with it.
    """

    key: str
    size_bytes: int
    checksum: str
    rows: int
    diffs_sum: int | None
    parts_bytes: int
    part_bytes_max: int
    part_count: int
    blob_count: int
    oldest_key: str
    key_lower: bytes = b""
    ts_rewrite: Antichain | None = None
    schema_id: int | None = None
    sum_wraps: bool = False

    @property
    def hollow_bytes(self) -> int:
        """Bytes in blob: of the listing and of everything below it."""
        return self.size_bytes + self.parts_bytes

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return 0


#: An entry that holds rows.
Part = HollowPart | InlinePart
#: An entry of a run in state.
RunPart = Part | HollowRun


@dataclass(frozen=True, slots=True)
class RunMeta:
    """Facts about one run. `truncated`: its registered bounds are narrower than written, so its diff sums include invisible rows.

    `waits_from_ms` is a bound: no waiting retraction in the run was written before it (model.spine.owed). NOTHING_WAITS means that no
    retraction waits, and None that this is unknown.
    """

    order: RunOrder = RunOrder.STRUCTURED
    run_id: RunId | None = None
    schema_id: int | None = None
    rows: int | None = None
    truncated: bool = False
    waits_from_ms: int | None = None
    kind: RunKind = RunKind.ANY

    @property
    def is_balanced(self) -> bool:
        """Whether the run is balanced and its bounds hide none of its rows, so that the visible rows cancel."""
        return self.kind is RunKind.BALANCED and not self.truncated


@dataclass(frozen=True, slots=True, repr=False)
class HollowBatch:
    """An ordered list of parts or listings, divided into runs, under one description.

    `rows` is an upper bound on the number of updates. `run_splits` are sorted indices into `parts`, each the first part of a
    new run. `run_metas` has one entry per run. A batch without parts has no runs. Prints as `[3,7)@2 2 parts`.
    """

    desc: Description
    rows: int
    parts: tuple[RunPart, ...] = ()
    run_splits: tuple[int, ...] = ()
    run_metas: tuple[RunMeta, ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        splits = self.run_splits
        if splits:
            check(all(a < b for a, b in zip((0, *splits), splits, strict=False)), "run splits must rise")
            check(splits[-1] < len(self.parts), "run split past the last part")
        runs = len(splits) + 1 if self.parts else 0
        if len(self.run_metas) != runs:
            raise InvariantViolated(f"{len(self.run_metas)} run metas for {runs} runs")

    @classmethod
    def empty(cls, desc: Description) -> HollowBatch:
        """Return the batch that records no updates in `desc`."""
        return cls(desc, 0)

    def is_empty(self) -> bool:
        """Whether there are no parts. A spine batch is empty when it has no rows (spec 11.14); the two can differ."""
        return not self.parts

    def runs(self) -> Iterator[tuple[RunMeta, tuple[RunPart, ...]]]:
        """Yield the runs in order, each with its parts."""
        bounds = (0, *self.run_splits, len(self.parts))
        for index, meta in enumerate(self.run_metas):
            yield meta, self.parts[bounds[index] : bounds[index + 1]]

    def part_runs(self) -> Iterator[tuple[RunMeta, tuple[Part, ...]]]:
        """Like `runs`, for a batch whose hollow runs were expanded (parts.listings). Raises InvariantViolated when one was not."""
        for meta, members in self.runs():
            parts = tuple(member for member in members if not isinstance(member, HollowRun))
            check(len(parts) == len(members), f"batch {self.desc} is read before its hollow runs were expanded")
            yield meta, parts

    def part_list(self) -> list[Part]:
        """Return the parts of all runs, in the order of `part_runs`."""
        return [part for _, parts in self.part_runs() for part in parts]

    @property
    def has_hollow_runs(self) -> bool:
        """Whether the batch has parts that only a listing in blob names."""
        return any(isinstance(part, HollowRun) for part in self.parts)

    @classmethod
    def of_runs(cls, desc: Description, rows: int, runs: Iterable[tuple[RunMeta, Sequence[RunPart]]]) -> HollowBatch:
        """Build a batch from runs and their parts. Runs without parts are left out."""
        kept = [(meta, tuple(parts)) for meta, parts in runs if parts]
        ends = itertools.accumulate(len(parts) for _, parts in kept)
        splits = tuple(ends)[:-1]
        return cls(
            desc, rows, tuple(itertools.chain(*(run for _, run in kept))), splits, tuple(meta for meta, _ in kept)
        )

    @property
    def mergeable_runs(self) -> int:
        """The number of runs that a compaction could merge. Balanced runs do not count, because they stay separate."""
        return sum(not meta.is_balanced for meta in self.run_metas)

    @property
    def size_bytes(self) -> int:
        """Bytes in blob plus bytes inline."""
        return sum(part.hollow_bytes + part.inline_bytes for part in self.parts)

    @property
    def net_updates(self) -> int:
        """The sum of the diffs of all updates. A part whose sum is unknown, or wraps, counts with its number of updates."""
        return sum(part.rows if part.diffs_sum is None or part.sum_wraps else part.diffs_sum for part in self.parts)

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return sum(part.inline_bytes for part in self.parts)

    def blob_keys(self) -> Iterator[str]:
        """Yield the partial keys of all blobs that the batch itself names. Blobs listed by hollow runs are not included."""
        for part in self.parts:
            if not isinstance(part, InlinePart):
                yield part.key

    @property
    def oldest_writer(self) -> str:
        """The least writer key (base.version) among its own blobs. It is "" if a key has no version, as keys of the oldest
        writers, and a text greater than every writer key if there are no blobs.
        """
        keys = (key.partition("/")[0] if key.startswith("n") else "" for key in self.blob_keys())
        return min(keys, default="~")

    @property
    def waits_from_ms(self) -> int:
        """The time since which the oldest retraction in it may wait to cancel what it retracts; NOTHING_WAITS if none does.

        A run without this fact counts from the staging of its oldest blob. So does a truncated run, because rows outside its
        bounds are present but not visible. Inline rows of such runs count from 0, because it is unknown when they were staged.
        """
        return min((_waits_from_ms(meta, parts) for meta, parts in self.runs()), default=NOTHING_WAITS)

    def staged_before(self, floor_ms: int | None) -> str | None:
        """Return the key of a part, here or below a hollow run, that was staged before `floor_ms`, or None."""
        if floor_ms is None:
            return None
        named = (part for part in self.parts if not isinstance(part, InlinePart))
        oldest = (part.oldest_key if isinstance(part, HollowRun) else part.key for part in named)
        return next((key for key in oldest if staged_ms(key) < floor_ms), None)

    def with_desc(self, desc: Description) -> HollowBatch:
        """Return the same parts under another description."""
        return replace(self, desc=desc)

    def __hash__(self) -> int:
        if self._hash == 0:
            object.__setattr__(
                self, "_hash", hash((self.desc, self.rows, self.parts, self.run_splits, self.run_metas)) or 1
            )
        return self._hash

    def __repr__(self) -> str:
        return f"{self.desc} {len(self.parts)} parts"


def _waits_from_ms(meta: RunMeta, parts: tuple[RunPart, ...]) -> int:
    if meta.waits_from_ms is not None and not meta.truncated:
        return meta.waits_from_ms
    staged = [
        0 if isinstance(part, InlinePart) else staged_ms(part.oldest_key if isinstance(part, HollowRun) else part.key)
        for part in parts
    ]
    known_ms = NOTHING_WAITS if meta.waits_from_ms is None else meta.waits_from_ms
    return min(known_ms, *staged)


@dataclass(frozen=True, slots=True)
class HollowRollup:
    """Pointer to a full copy of state. `key` is partial (`v<seqno>/r<uuid>`). Only the first rollup of a log has an unknown size."""

    key: str
    size_bytes: int | None


def rewritten(batch: HollowBatch, frontier: Antichain, new_upper: Antichain) -> HollowBatch:
    """Return `batch` with all times advanced to `frontier` and with `new_upper` as its registered upper. Idempotent.

    Raises InvalidRewrite unless frontier < new_upper, an update may have the time `frontier`, neither precedes the batch's own
    bounds or an earlier rewrite, and the batch is as a user wrote it (its since is the minimum).
    """
    desc = batch.desc
    if frontier.time is not None and frontier.time > DATA_TIME_MAX:  # reads would show an earlier time than this
        raise InvalidRewrite(f"batch {desc} rewritten to {frontier}: no update is later than {DATA_TIME_MAX}")
    if not frontier < new_upper:
        raise InvalidRewrite(f"batch {desc} rewritten to {frontier}, at or past its new upper {new_upper}")
    if not desc.upper <= new_upper:
        raise InvalidRewrite(f"batch {desc} rewritten to the upper {new_upper}, before its own")
    if not desc.lower <= frontier:
        raise InvalidRewrite(f"batch {desc} rewritten to {frontier}, before its lower")
    if desc.since != MINIMUM:
        raise InvalidRewrite(f"batch {desc} was compacted and cannot be rewritten")
    for part in batch.parts:
        if part.ts_rewrite is not None and not part.ts_rewrite <= frontier:
            raise InvalidRewrite(f"batch {desc} rewritten to {frontier}, before an earlier {part.ts_rewrite}")
    parts = tuple(replace(part, ts_rewrite=frontier) for part in batch.parts)
    return replace(batch, desc=Description(desc.lower, new_upper, desc.since), parts=parts)


def check_truncation(batch: HollowBatch, lower: Antichain, upper: Antichain, *, any_rewritten: bool) -> None:
    """Check that `batch` may be registered under [lower, upper). Raises InvalidBatchBounds or InvalidRewrite otherwise. If any
    batch of the call is rewritten, nothing may be cut off above: a rewritten update that was cut off would be indistinguishable
    from a missing one.
    """
    desc = batch.desc
    if any_rewritten:
        if upper != desc.upper:
            raise InvalidRewrite(f"rewritten batch {desc} appended with upper {upper}")
        for frontier in [part.ts_rewrite or desc.lower for part in batch.parts]:
            if not lower <= frontier:
                raise InvalidRewrite(
                    f"batch {desc} rewritten to {frontier}, before the lower {lower} it is appended with"
                )
    if not (desc.lower <= lower and upper <= desc.upper):
        raise InvalidBatchBounds(
            f"batch {desc} does not cover [{lower}, {upper})",
            batch_lower=desc.lower,
            batch_upper=desc.upper,
            append_lower=lower,
            append_upper=upper,
        )
