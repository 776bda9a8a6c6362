"""Pointers without data: hollow batches, their runs and parts, and hollow rollups (spec 2.2 to 2.7)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from persist_engine.base.errors import check
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import RunId


class RunOrder(enum.Enum):
    """How rows lie within a run. STRUCTURED: sorted by (key fields, val fields, time) as Arrow sorts them, consolidated."""

    UNORDERED = "unordered"
    CODEC = "codec"
    STRUCTURED = "structured"


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """Bounds of one top-level column of key or val, for skipping parts. `lower`/`upper` are the scalar's JSON text in the
    schema codec's form, or None when unknown (trimmed, or all null). Conservative: every row lies within.
    """

    null_count: int
    lower: str | None
    upper: str | None


@dataclass(frozen=True, slots=True)
class PartStats:
    """Statistics of one part: row bounds per column, named `key.<field>` and `val.<field>`; and the bounds of time."""

    columns: tuple[tuple[str, ColumnStats], ...] = ()
    time_min: int | None = None
    time_max: int | None = None


@dataclass(frozen=True, slots=True)
class HollowPart:
    """One blob of updates. `key` is the partial key `<writer key>/<part id>` (codec.keys makes the whole one).

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

    @property
    def hollow_bytes(self) -> int:
        """Bytes in blob."""
        return self.size_bytes

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return 0


@dataclass(frozen=True, slots=True)
class InlinePart:
    """Updates small enough to sit in state: the encoded part itself. `format` says how: as one Arrow record batch
    (codec.inline_part), or as the Parquet file that a blob would hold (0.1.0, and what only Parquet makes small).
    """

    data: bytes
    rows: int
    diffs_sum: int | None
    ts_rewrite: Antichain | None = None
    schema_id: int | None = None
    format: str = "parquet/1"

    @property
    def hollow_bytes(self) -> int:
        """Bytes in blob."""
        return 0

    @property
    def inline_bytes(self) -> int:
        """Bytes in state."""
        return len(self.data)


Part = HollowPart | InlinePart


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
    """An ordered list of parts cut into runs, under one description.

    `rows` bounds the number of updates from above. `run_splits` are sorted indices into `parts` with a run boundary before each;
    `run_metas` has one entry per run. No parts: no runs. Prints as `[3,7)@2 2 parts`.
    """

    desc: Description
    rows: int
    parts: tuple[Part, ...] = ()
    run_splits: tuple[int, ...] = ()
    run_metas: tuple[RunMeta, ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(all(a < b for a, b in zip((0, *self.run_splits), self.run_splits, strict=False)), "run splits must rise")
        check(not self.run_splits or self.run_splits[-1] < len(self.parts), "run split past the last part")
        runs = len(self.run_splits) + 1 if self.parts else 0
        check(len(self.run_metas) == runs, f"{len(self.run_metas)} run metas for {runs} runs")

    @classmethod
    def empty(cls, desc: Description) -> HollowBatch:
        """The batch that says: nothing happened in `desc`."""
        return cls(desc, 0)

    def is_empty(self) -> bool:
        """Whether there are no parts. NB: the spine's emptiness is rows == 0 (spec 11.14); the two can differ."""
        return not self.parts

    def runs(self) -> Iterator[tuple[RunMeta, tuple[Part, ...]]]:
        """The runs in order, each with its parts."""
        bounds = (0, *self.run_splits, len(self.parts))
        for index, meta in enumerate(self.run_metas):
            yield meta, self.parts[bounds[index] : bounds[index + 1]]

    @property
    def size_bytes(self) -> int:
        """Bytes in blob and inline together."""
        return sum(part.hollow_bytes + part.inline_bytes for part in self.parts)

    @property
    def inline_bytes(self) -> int:
        """Bytes held in state."""
        return sum(part.inline_bytes for part in self.parts)

    def blob_keys(self) -> Iterator[str]:
        """Partial keys of all blobs that this batch names."""
        for part in self.parts:
            if isinstance(part, HollowPart):
                yield part.key

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
