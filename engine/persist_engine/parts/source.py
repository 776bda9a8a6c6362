"""Turns part descriptors into rows: gets the blob, verifies it, decodes it and cuts it to its registered bounds (spec
10.8).

This module knows nothing of state, leases or handles. The caller holds the lease that keeps the blobs alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from persist_engine.base.errors import CorruptData, MissingBlob
from persist_engine.base.metrics import Metrics
from persist_engine.base.retry import Retry
from persist_engine.codec.inline_part import PartInMemory, decode_inline
from persist_engine.codec.keys import blob_key
from persist_engine.codec.part import OpenedPart, as_it_is, open_part
from persist_engine.codec.row_groups import Footer, Pieces
from persist_engine.model.batch import ColumnStats, Footing, HollowBatch, HollowPart, Part, PartStats
from persist_engine.model.frontier import MINIMUM, Antichain, Description
from persist_engine.model.ids import ShardId
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.listings import expand
from persist_engine.rows import updates
from persist_engine.rows.filter import Filter, Lacks, nothing_lacks
from persist_engine.rows.part_stats import stats_name
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob import Blob

if TYPE_CHECKING:
    from persist_engine.codec.bloom import PartFilters

#: What `PartSource.get` returns and `PartSource.open` takes.
Fetched = bytes | Pieces
#: A smaller part is fetched whole, because two calls of a store take longer than its bytes.
CUT_BYTES_MIN = 64 << 10


def is_cut(part: Part, key_range: KeyRange | None) -> bool:
    """Whether a read of `key_range` fetches only some row groups of `part`."""
    if key_range is None or not isinstance(part, HollowPart) or part.footer is None:
        return False
    return part.size_bytes > CUT_BYTES_MIN and not key_range.covers(part)


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where the parts of one shard are stored and how they are read."""

    shard_id: ShardId
    blob: Blob
    schema: Schema
    retry: Retry
    metrics: Metrics
    schema_id: int | None = None
    """The id of `schema`. It is set when parts of newer schemas may occur; these are shown without their newer fields."""
    path: str = "snapshot"
    """The purpose of the read, as a label in metrics."""
    key_range: KeyRange | None = None
    """The range of the wanted rows. If a part has other rows, only some of its row groups are fetched. The reader must still filter
    rows.
    """
    where: Filter | None = None
    """The condition on the wanted rows. Row groups whose first key field rules it out are not fetched. The reader must still filter
    rows.
    """
    on_missing: Callable[[], None] | None = None
    """Called when a blob is missing. It raises an error when the caller's lease has ended, because then no data is lost."""

    def expanded(self, batches: Iterable[HollowBatch]) -> tuple[HollowBatch, ...]:
        """`batches` with the parts that their listings name: see `listings.expand`, whose errors this raises."""
        try:
            return expand(self, batches)
        except MissingBlob:
            if self.on_missing is not None:
                self.on_missing()
            raise

    def is_newer(self, part: Part) -> bool:
        """Whether `part` was written under a newer schema than that of this read. Its rows are then in another order."""
        return self.schema_id is not None and part.schema_id is not None and part.schema_id > self.schema_id

    def get(self, part: Part, desc: Description) -> Fetched:
        """The part's bytes as stored in blob, or the row groups that may hold wanted rows. Retries storage errors. Raises
        MissingBlob, and CorruptData for a row group or the footer; both name the key.
        """
        if not isinstance(part, HollowPart):
            return part.data
        key = blob_key(self.shard_id, part.key)
        self.metrics.count("fetched_parts", path=self.path)
        if is_cut(part, self.key_range) or self._is_narrowed(part):
            assert part.footer is not None
            return self._pieces(part, part.footer, partial(self._range, key, desc), key)
        return self._fetched(key, desc, lambda: self.blob.get(key))

    def ends_as_written(self, part: HollowPart, desc: Description) -> bool:
        """Whether the blob exists, and its footer and Bloom filters are those of `part`. Then a reader that does not know the checksum in
        state, but checks those of Parquet's pages, gets the rows of this part and skips none of them. Fetches no rows. Retries storage
        errors.
        """
        footing = part.footer
        if footing is None:
            return False
        key = blob_key(self.shard_id, part.key)
        try:
            # Request one byte more than there should be, because such a reader looks for the footer at the end of the file.
            get = partial(self._range, key, desc)
            _, filters = _tail(part, footing, lambda start, size: get(start, size + 1), key, footing.filters_bytes)
        except (CorruptData, MissingBlob):
            return False
        return filters is not None or not footing.filters_bytes

    def _is_narrowed(self, part: HollowPart) -> bool:
        """Whether `where` may rule out some row groups of `part`: it depends on the first key field or on a column with a Bloom filter, and
        the statistics of the part do not already prove it for all rows.
        """
        if self.where is None or part.footer is None or part.size_bytes <= CUT_BYTES_MIN:
            return False
        is_of_key = f"key.{self.schema.key.field(0).name}" in self.where.columns
        return (is_of_key or self._has_filters(part.footer)) and not self.where.must_pass(part)

    def _has_filters(self, footing: Footing) -> bool:
        """Whether the part has Bloom filters for a column that `where` compares with single values."""
        return self.where is not None and not self.where.looked_up.isdisjoint(footing.filtered)

    def _pieces(self, part: HollowPart, footing: Footing, get: Callable[[int, int], bytes], key: str) -> Pieces:
        before = footing.filters_bytes if self._has_filters(footing) else 0
        footer, filters = _tail(part, footing, get, key, before)
        groups = [
            number
            for number, each in enumerate(footer.groups)
            if self._may_hold(
                part, footer.column, each.stats, nothing_lacks if filters is None else partial(filters.lacks, number)
            )
        ]
        return footer.fetched(groups, get, size_bytes=part.size_bytes, key=key)

    def _may_hold(self, part: HollowPart, column: str, stats: ColumnStats, lacks: Lacks) -> bool:
        """Whether a row group with these statistics of a key field may hold wanted rows. `lacks` says which values are not in it."""
        wanted = self.key_range
        if wanted is not None and wanted.column == column and not wanted.may_be_within(stats):
            return False
        if self.where is None:
            return True
        return self.where.may_pass(replace(part, stats=PartStats(((stats_name(("key", column)), stats),))), lacks)

    def _range(self, key: str, desc: Description, start: int, size_bytes: int) -> bytes:
        return self._fetched(key, desc, lambda: self.blob.get_range(key, start, size_bytes))

    def _fetched(self, key: str, desc: Description, get: Callable[[], bytes | None]) -> bytes:
        started_s = self.retry.env.monotonic_s()
        data = self.retry.external("fetch_part", get, shard=self.shard_id)
        if data is None:
            if self.on_missing is not None:
                self.on_missing()
            raise MissingBlob(f"blob {key} is missing though a live state names it (batch {desc})", key=key)
        self.metrics.observe_s("fetched", self.retry.env.monotonic_s() - started_s, path=self.path)
        self.metrics.count("fetched_bytes", len(data), path=self.path)
        self.metrics.count("shard_blob_gets", shard=self.shard_id)
        return data

    def open(self, data: Fetched, part: Part, desc: Description, *, columns: Sequence[str] | None = None) -> PartToRead:
        """Opens the part. Verifies its bytes against the checksum in state (or in the part itself when it is inline),
        and its description against the one that its batch registered. Raises CorruptData, which names the key. With
        `columns`, other columns and fields may be left out; `columns` must include time and diff.
        """
        opened: OpenedPart | PartInMemory
        if isinstance(part, HollowPart):
            key = blob_key(self.shard_id, part.key)
            opened = open_part(
                data,
                key=key,
                schema=self.schema,
                format_name=part.format,
                expected_checksum=part.checksum,
                may_be_newer=self.is_newer(part),
                columns=columns,
            )
        else:
            key = f"{self.shard_id} inline part of {desc}"
            assert isinstance(data, bytes), "an inline part has no pieces"
            inline = decode_inline(
                data, format_name=part.format, key=key, schema=self.schema, may_be_newer=self.is_newer(part)
            )
            opened = PartInMemory(inline.desc, inline.table)
        if opened.rows != part.rows:
            raise CorruptData(f"{key}: {opened.rows} rows, state says {part.rows}", key=key)
        _check_description(opened.desc, desc, part, key)
        self.metrics.count("fetched_good_bytes", opened.decoded_bytes, path=self.path)
        if part.ts_rewrite is not None:
            self.metrics.count("fetched_rewritten_rows", part.rows, path=self.path)
        return PartToRead(opened, desc, part.ts_rewrite)

    def decode(self, data: Fetched, part: Part, desc: Description) -> Iterator[pa.Table]:
        """The part's rows as its batch registered them, one row group at a time."""
        opened = self.open(data, part, desc)
        for group in range(opened.groups):
            yield opened.read_group(group)


@dataclass(frozen=True, slots=True)
class PartToRead:
    """A verified part whose rows are shown as its batch registered them: times are rewritten first, then rows are cut
    to [lower, upper). Several threads may read groups at once and in any order.
    """

    _opened: OpenedPart | PartInMemory
    _registered: Description
    _ts_rewrite: Antichain | None

    @property
    def groups(self) -> int:
        """The number of row groups. This code writes groups of at most about ten MiB."""
        return self._opened.groups

    @property
    def group_bytes(self) -> int:
        """The approximate size of a group in memory."""
        return self._opened.decoded_bytes // max(1, self._opened.groups)

    @property
    def row_bytes(self) -> float:
        """The approximate size of a row in memory."""
        return self._opened.decoded_bytes / max(1, self._opened.rows)

    def read_group(self, group: int, *, seen: Callable[[int], int] = as_it_is, use_threads: bool = False) -> pa.Table:
        """The rows of one group. If all of them have the same time, the times may be returned already mapped by `seen`. So
        `seen` must be the function that the caller applies to all times afterwards, and `seen(seen(t))` must equal `seen(t)`.
        """
        seen = seen if self.is_whole else as_it_is
        return self._cut(self._opened.read_group(group, seen=seen, use_threads=use_threads))

    def stream(self, table_bytes: int, *, seen: Callable[[int], int] = as_it_is) -> Iterator[pa.Table]:
        """All rows, in tables of about `table_bytes`. `seen` is as in `read_group`."""
        seen = seen if self.is_whole else as_it_is
        return (self._cut(table) for table in self._opened.stream(table_bytes, seen=seen))

    @property
    def is_whole(self) -> bool:
        """Whether rows are registered exactly as they were written."""
        desc, written = self._registered, self._opened.desc
        return self._ts_rewrite is None and (written.lower, written.upper) == (desc.lower, desc.upper)

    def _cut(self, table: pa.Table) -> pa.Table:
        if self.is_whole:
            return table
        if self._ts_rewrite is not None:
            table = updates.advance_times(table, self._ts_rewrite)
        return updates.time_filter(table, self._registered.lower, self._registered.upper)


def _tail(
    part: HollowPart, footing: Footing, get: Callable[[int, int], bytes], key: str, before: int
) -> tuple[Footer, PartFilters | None]:
    """The footer, and the filters in the `before` bytes in front of it. `before` covers all filters or is 0, which reads none. Raises
    CorruptData for another footer.
    """
    start = part.size_bytes - footing.size_bytes - before
    tail = get(start, before + footing.size_bytes)
    footer = Footer.read(tail[before:], key=key, expected_checksum=footing.checksum)
    if not before:
        return footer, None
    from persist_engine.codec.bloom import PartFilters  # most shards have none

    return footer, PartFilters.read(tail[:before], start=start, metadata=footer.metadata)


def _check_description(written: Description, registered: Description, part: Part, key: str) -> None:
    """Checks spec 10.8: only user-written parts (since at the minimum) may have narrower bounds in state than in blob."""
    if (written.lower, written.upper) == (registered.lower, registered.upper):
        fits = written.since == registered.since
    else:
        upper_fits = part.ts_rewrite is not None or registered.upper <= written.upper
        fits = written.lower <= registered.lower and upper_fits and written.since == MINIMUM
    if not fits:
        raise CorruptData(f"{key}: written as {written}, registered as {registered}", key=key)
