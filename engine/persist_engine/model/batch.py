"""Pointers without data: hollow batches, their runs and parts, and hollow rollups (spec 2.2 to 2.7)."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import InvalidBatchBounds, InvalidRewrite, InvariantViolated, check
from persist_engine.model.frontier import DATA_TIME_MAX, MINIMUM, Antichain, Description
from persist_engine.model.ids import RunId, staged_ms


class RunOrder(enum.Enum):
    """How rows lie within a run. STRUCTURED: sorted by (key fields, val fields, time) as Arrow sorts them, consolidated."""

    UNORDERED = "unordered"
    CODEC = "codec"
    STRUCTURED = "structured"


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """Bounds of one field of key or val, for skipping parts. `lower`/`upper` are the scalar's JSON text in the
    schema codec's form, or None when unknown (trimmed, or all null). Conservative: every row lies within.
    """

    null_count: int
    lower: str | None
    upper: str | None


@dataclass(frozen=True, slots=True)
class PartStats:
    """Statistics of one part: row bounds per field, under the names of codec.part_stats; and the bounds of time."""

    columns: tuple[tuple[str, ColumnStats], ...] = ()
    time_min: int | None = None
    time_max: int | None = None


@dataclass(frozen=True, slots=True)
class HollowPart:
    """One blob of updates. `key` is the partial key `<writer key>/<part id>` (codec.keys makes the whole one).

    `diffs_sum` is modulo 2**64, and `sum_wraps` says where the sum itself does not fit int64.
    `key_lower` bounds every (key) from below in the part codec's order; b"" is always a lower bound. `checksum` is the text
    of codec.checksum over the whole blob, verified on every read. `ts_rewrite` advances times on read.
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
        """Bytes of the largest part it stands for: itself."""
        return self.size_bytes

    @property
    def part_count(self) -> int:
        """Parts it stands for: itself."""
        return 1

    @property
    def blob_count(self) -> int:
        """Blobs it stands for: itself."""
        return 1


@dataclass(frozen=True, slots=True)
class InlinePart:
    """Updates small enough to sit in state: the encoded part itself. `format` names the encoding (codec.inline_part)."""

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
        """Bytes of the largest part it stands for: itself."""
        return len(self.data)

    @property
    def part_count(self) -> int:
        """Parts it stands for: itself."""
        return 1

    @property
    def blob_count(self) -> int:
        """Blobs it stands for: none."""
        return 0


@dataclass(frozen=True, slots=True)
class HollowRun:
    """A blob that lists consecutive parts of one run, so that state holds one entry for all of them (spec 2.3).

    What it lists may be hollow runs again. `key`, `size_bytes` and `checksum` are the listing's own; all else sums up the
    parts below it, however deep. `oldest_key` is that of the blob that was staged first, of itself and all below.
    `key_lower` bounds their keys from below; `schema_id` is the newest of theirs. `ts_rewrite` holds for every part below
    it, in the place of what they say themselves. Invariant: a blob that is listed is named by this listing and nothing
    else, so it comes and goes with it.
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
        """Bytes in blob: of the listing and of all below it."""
        return self.size_bytes + self.parts_bytes

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return 0


#: What holds rows.
Part = HollowPart | InlinePart
#: What a run in state is made of.
RunPart = Part | HollowRun


@dataclass(frozen=True, slots=True)
class RunMeta:
    """What is known of one run. `truncated`: registered bounds are narrower than written, so diff sums count unseen rows."""

    order: RunOrder = RunOrder.STRUCTURED
    run_id: RunId | None = None
    schema_id: int | None = None
    rows: int | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class HollowBatch:
    """An ordered list of parts, or listings of them, cut into runs, under one description.

    `rows` bounds the number of updates from above. `run_splits` are sorted indices into `parts` with a run boundary before each;
    `run_metas` has one entry per run. No parts: no runs. Prints as `[3,7)@2 2 parts`.
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
        """The batch that says: nothing happened in `desc`."""
        return cls(desc, 0)

    def is_empty(self) -> bool:
        """Whether there are no parts. NB: the spine's emptiness is rows == 0 (spec 11.14); the two can differ."""
        return not self.parts

    def runs(self) -> Iterator[tuple[RunMeta, tuple[RunPart, ...]]]:
        """The runs in order, each with its parts."""
        bounds = (0, *self.run_splits, len(self.parts))
        for index, meta in enumerate(self.run_metas):
            yield meta, self.parts[bounds[index] : bounds[index + 1]]

    def part_runs(self) -> Iterator[tuple[RunMeta, tuple[Part, ...]]]:
        """As `runs`, of a batch whose hollow runs were expanded (shard.runs); InvariantViolated when one was not."""
        for meta, members in self.runs():
            parts = tuple(member for member in members if not isinstance(member, HollowRun))
            check(len(parts) == len(members), f"batch {self.desc} is read before its hollow runs were expanded")
            yield meta, parts

    def part_list(self) -> list[Part]:
        """The parts of all runs, as `part_runs` gives them."""
        return [part for _, parts in self.part_runs() for part in parts]

    @property
    def has_hollow_runs(self) -> bool:
        """Whether some of its parts are known only to a listing in blob."""
        return any(isinstance(part, HollowRun) for part in self.parts)

    @classmethod
    def of_runs(cls, desc: Description, rows: int, runs: Iterable[tuple[RunMeta, Sequence[RunPart]]]) -> HollowBatch:
        """Of runs with their parts; those without any are left out."""
        kept = [(meta, tuple(parts)) for meta, parts in runs if parts]
        ends = itertools.accumulate(len(parts) for _, parts in kept)
        splits = tuple(ends)[:-1]
        return cls(
            desc, rows, tuple(itertools.chain(*(run for _, run in kept))), splits, tuple(meta for meta, _ in kept)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes in blob and inline together."""
        return sum(part.hollow_bytes + part.inline_bytes for part in self.parts)

    @property
    def inline_bytes(self) -> int:
        """Bytes held in state."""
        return sum(part.inline_bytes for part in self.parts)

    def blob_keys(self) -> Iterator[str]:
        """Partial keys of all blobs that this batch itself names; what hollow runs list is theirs (shard.runs)."""
        for part in self.parts:
            if not isinstance(part, InlinePart):
                yield part.key

    @property
    def oldest_writer(self) -> str:
        """The least writer key (base.version) among its own blobs; "" where one tells no version, as those of the oldest
        writers do not; without blobs one behind all others.
        """
        keys = (key.partition("/")[0] if key.startswith("n") else "" for key in self.blob_keys())
        return min(keys, default="~")

    def staged_before(self, floor_ms: int | None) -> str | None:
        """The key of a part, here or below a hollow run, that was staged before `floor_ms`, if there is one."""
        if floor_ms is None:
            return None
        named = (part for part in self.parts if not isinstance(part, InlinePart))
        oldest = (part.oldest_key if isinstance(part, HollowRun) else part.key for part in named)
        return next((key for key in oldest if staged_ms(key) < floor_ms), None)

    def with_desc(self, desc: Description) -> HollowBatch:
        """The same parts under another description."""
        return replace(self, desc=desc)

    def __hash__(self) -> int:
        if self._hash == 0:
            object.__setattr__(
                self, "_hash", hash((self.desc, self.rows, self.parts, self.run_splits, self.run_metas)) or 1
            )
        return self._hash

    def __repr__(self) -> str:
        return f"{self.desc} {len(self.parts)} parts"


@dataclass(frozen=True, slots=True)
class HollowRollup:
    """Pointer to a full copy of state. `key` is partial (`v<seqno>/r<uuid>`). The very first rollup does not know its own size."""

    key: str
    size_bytes: int | None


def rewritten(batch: HollowBatch, frontier: Antichain, new_upper: Antichain) -> HollowBatch:
    """`batch` with all times advanced to `frontier` and registered up to `new_upper`. Idempotent.

    InvalidRewrite unless frontier < new_upper, updates may have the time `frontier`, neither steps back behind the batch's
    own bounds nor behind an earlier rewrite, and the batch is as a user wrote it (since at the minimum).
    """
    desc = batch.desc
    if frontier.time is not None and frontier.time > DATA_TIME_MAX:  # read, its rows would lie before it
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
    """Whether `batch` may be registered under [lower, upper). With any rewrite in the call nothing is cut off above: a
    rewritten update that is cut could not be told from one that was never there.
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
