"""Hollow runs: blobs that list the parts of long runs. Writes, expands and deletes these listings (spec 2.3, 10.4).

    state   [ part | part | run ]              a run longer than `batch.run_parts_max` is split into listings, and those into
    blob                     `- [ part | run ]   listings again, until few enough entries remain
                                         `- [ part | part ]

This module owns the order of writes and deletes. A listing is written after the parts that it names and deleted after them, so that an
interrupted deletion can find what remains (spec 20, bug 35). It knows nothing of rows. Invariant: a blob named by a listing is named
nowhere else, so it lives exactly as long as the listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

from persist_engine.base.env import Env
from persist_engine.base.errors import CorruptData, Incompatible, MissingBlob
from persist_engine.base.retry import Retry
from persist_engine.base.settings import Settings
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.codec.batch import decode_run_listing, encode_run_listing
from persist_engine.codec.damage import checksum, is_known
from persist_engine.codec.keys import blob_key, part_key
from persist_engine.model.batch import HollowBatch, HollowRun, InlinePart, Part, RunOrder, RunPart
from persist_engine.model.diff.state_diff import BlobRef
from persist_engine.model.ids import PartId, ShardId, staged_ms
from persist_engine.model.spine.merge import wrapped_sum
from persist_engine.storage.blob import Blob

#: The number of listings fetched at once. They are small, so the store's latency dominates.
LISTING_THREADS = 8
#: The greatest nesting depth of listings. With two entries each, this is enough for 2**32 parts.
NESTING_MAX = 32


class RunStore(Protocol):
    """What the expansion of listings needs from a shard. Machine, PartStore and PartSource all provide it."""

    @property
    def shard_id(self) -> ShardId: ...

    @property
    def blob(self) -> Blob: ...

    @property
    def retry(self) -> Retry: ...


class RunWriter(RunStore, Protocol):
    """What writing listings needs in addition to RunStore."""

    @property
    def env(self) -> Env: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def staging_floor_ms(self) -> int: ...


def new_part_key(store: RunWriter) -> str:
    """A fresh partial key for a blob that is staged now. The time in it is never before the shard's staging floor, as far as this process
    knows the floor. Otherwise, if a fast clock set the floor or this clock is slow, the shard would refuse the blob for as long as the
    clocks differ.
    """
    staged_ms = max(store.env.now_ms(), store.staging_floor_ms)
    return part_key(APPLIER_VERSION, PartId.staged_at(staged_ms, store.env.random_bytes(10)))


# -- writing -----------------------------------------------------------------------------------------------------------


def spill_runs(store: RunWriter, batch: HollowBatch) -> HollowBatch:
    """Moves the parts of the long ordered runs of `batch` to listings, which are durable when this returns. Returns the batch that names
    the listings, or `batch` itself when no run is longer than `settings.batch.run_parts_max`.

    The parts must be durable. When a listing cannot be written, deletes the listings already written, but never the parts.
    """
    limit = store.settings.batch.run_parts_max
    if limit is None or len(batch.parts) <= limit:
        return batch
    written: list[str] = []
    try:
        runs = [
            (meta, parts if meta.order is RunOrder.UNORDERED else _spilled(store, parts, limit, written))
            for meta, parts in batch.runs()
        ]
    except BaseException:
        _delete(store, written)
        raise
    return HollowBatch.of_runs(batch.desc, batch.rows, runs)


def _spilled(store: RunWriter, parts: Sequence[RunPart], limit: int, written: list[str]) -> Sequence[RunPart]:
    while len(parts) > limit:
        stretches = [parts[start : start + limit] for start in range(0, len(parts), limit)]
        # A listing of one entry would be useless.
        parts = [stretch[0] if len(stretch) == 1 else _write(store, stretch, written) for stretch in stretches]
    return parts


def _write(store: RunWriter, parts: Sequence[RunPart], written: list[str]) -> HollowRun:
    data = encode_run_listing(store.shard_id, parts)
    key = new_part_key(store)
    whole_key = blob_key(store.shard_id, key)
    written.append(key)  # before the write, because a write with an unknown outcome may leave the blob
    store.retry.external("set run listing", lambda: store.blob.set(whole_key, data), shard=store.shard_id)
    return listing_of(parts, key=key, data=data)


def listing_of(parts: Sequence[RunPart], *, key: str, data: bytes) -> HollowRun:
    """The pointer to a listing of `parts`. `data` is the encoded listing, and `key` its partial key."""
    keys = [
        part.oldest_key if isinstance(part, HollowRun) else part.key
        for part in parts
        if not isinstance(part, InlinePart)
    ]
    total = sum(part.diffs_sum or 0 for part in parts)
    wrapped = wrapped_sum(part.diffs_sum for part in parts)
    return HollowRun(
        key=key,
        size_bytes=len(data),
        checksum=checksum(data),
        rows=sum(part.rows for part in parts),
        diffs_sum=wrapped,
        sum_wraps=wrapped is not None and (wrapped != total or any(part.sum_wraps for part in parts)),
        parts_bytes=sum(part.hollow_bytes for part in parts),
        part_bytes_max=max(part.part_bytes_max for part in parts),
        part_count=sum(part.part_count for part in parts),
        blob_count=1 + sum(part.blob_count for part in parts),
        oldest_key=min([key, *keys], key=staged_ms),
        schema_id=max((part.schema_id for part in parts if part.schema_id is not None), default=None),
        key_lower=min(b"" if isinstance(part, InlinePart) else part.key_lower for part in parts),
    )


# -- expanding -----------------------------------------------------------------------------------------------------------


def expand(store: RunStore, batches: Iterable[HollowBatch]) -> tuple[HollowBatch, ...]:
    """`batches` with every hollow run replaced by the parts below it, as readers and compaction need them.

    Fetches nothing for batches without hollow runs. Retries storage errors. Raises MissingBlob, Incompatible and CorruptData (for damage,
    another shard's listing, and a listing that names itself or contradicts state), which name the key.
    """
    some = tuple(batches)
    if not any(batch.has_hollow_runs for batch in some):
        return some
    with ThreadPoolExecutor(LISTING_THREADS, thread_name_prefix="persist-listing") as pool:
        return tuple(_Expansion(store, pool).of(batch) if batch.has_hollow_runs else batch for batch in some)


class _Expansion:
    """Expands the listings of one call, all listings of a level at once."""

    def __init__(self, store: RunStore, pool: ThreadPoolExecutor) -> None:
        self._store = store
        self._pool = pool

    def of(self, batch: HollowBatch) -> HollowBatch:
        seen: set[str] = set()
        runs = [(meta, self._parts(members, seen, depth=0)) for meta, members in batch.runs()]
        return HollowBatch.of_runs(batch.desc, batch.rows, runs)

    def _parts(self, members: Sequence[RunPart], seen: set[str], *, depth: int) -> list[Part]:
        runs = [member for member in members if isinstance(member, HollowRun)]
        if depth > NESTING_MAX and runs:
            key = blob_key(self._store.shard_id, runs[0].key)
            raise CorruptData(f"{key}: run listings nest deeper than {NESTING_MAX}", key=key)
        below_each = self._pool.map(partial(listed, self._store), runs)
        parts: list[Part] = []
        for member in members:
            if not isinstance(member, InlinePart):
                if member.key in seen:
                    key = blob_key(self._store.shard_id, member.key)
                    raise CorruptData(f"{key}: one batch names it twice, through its run listings", key=key)
                seen.add(member.key)
            if not isinstance(member, HollowRun):
                parts.append(member)
                continue
            below = self._parts(next(below_each), seen, depth=depth + 1)
            _check_sums(self._store.shard_id, member, below)
            parts += below
        return parts


def listed(store: RunStore, run: HollowRun) -> tuple[RunPart, ...]:
    """The entries that the listing of `run` names, one level deep. Raises the same errors as `expand`."""
    key = blob_key(store.shard_id, run.key)
    data = store.retry.external("get run listing", lambda: store.blob.get(key), shard=store.shard_id)
    if data is None:
        raise MissingBlob(f"run listing {key} is missing though a live state names it", key=key)
    if not is_known(run.checksum):
        raise Incompatible(f"{key}: this code cannot verify the checksum {run.checksum!r}", key=key)
    if (found := checksum(data)) != run.checksum:
        raise CorruptData(f"{key}: checksum of the run listing is {found}, state says {run.checksum}", key=key)
    parts = decode_run_listing(data, key=key, shard_id=store.shard_id)
    if run.ts_rewrite is None:
        return parts
    return tuple(replace(part, ts_rewrite=run.ts_rewrite) for part in parts)


def _check_sums(shard_id: ShardId, run: HollowRun, parts: Sequence[Part]) -> None:
    rows, size_bytes = sum(part.rows for part in parts), max(part.part_bytes_max for part in parts)
    if (rows, len(parts), size_bytes) != (run.rows, run.part_count, run.part_bytes_max):
        key = blob_key(shard_id, run.key)
        text = f"{rows} rows in {len(parts)} parts of up to {size_bytes} bytes"
        expected = f"{run.rows} in {run.part_count} of up to {run.part_bytes_max}"
        raise CorruptData(f"{key}: the run listing leads to {text}, state says {expected}", key=key)


# -- blobs below listings, and their deletion -----------------------------------------------------------------------------


def with_nested(
    store: RunStore, refs: Iterable[BlobRef], on_missing: Callable[[str], object] = lambda _: None
) -> Iterator[BlobRef]:
    """Yields `refs`, and then all blobs below the listings among them. Each blob comes once, and a listing before its entries. A listing is
    fetched only after it was yielded.

    `on_missing` receives the partial key of a missing listing. If a listing was deleted, nothing below it is left, because its entries were
    deleted first. Retries storage errors. Raises CorruptData and Incompatible, which name the key.
    """
    level = list(dict.fromkeys(refs))
    if not any(ref.kind == "run" for ref in level):
        yield from level
        return
    seen: set[BlobRef] = set()
    with ThreadPoolExecutor(LISTING_THREADS, thread_name_prefix="persist-listing") as pool:
        while level:
            fresh = [ref for ref in dict.fromkeys(level) if ref not in seen]
            yield from fresh
            seen.update(fresh)
            runs = [ref.partial_key for ref in fresh if ref.kind == "run"]
            level = []
            for key, below in zip(runs, pool.map(partial(_below, store), runs), strict=True):
                if below is None:
                    on_missing(key)
                level += below or ()


def deletion_waves(store: RunStore, run_keys: Iterable[str]) -> list[list[str]]:
    """The partial keys of the listings `run_keys` and of all blobs below them, in waves. The keys of a wave may be deleted in any order,
    but only after all earlier waves were deleted. Then entries are deleted before the listing that names them, so an interrupted deletion
    can be completed (spec 20, bug 35).
    """
    parts: list[str] = []
    levels: list[list[str]] = []
    seen: set[str] = set()
    runs = list(run_keys)
    with ThreadPoolExecutor(LISTING_THREADS, thread_name_prefix="persist-listing") as pool:
        while runs:
            seen.update(runs)
            levels.append(runs)
            below = [ref for refs in pool.map(partial(_below, store), runs) for ref in refs or ()]
            parts += [ref.partial_key for ref in below if ref.kind != "run"]
            runs = [
                key for key in dict.fromkeys(ref.partial_key for ref in below if ref.kind == "run") if key not in seen
            ]
    return [wave for wave in (parts, *reversed(levels)) if wave]


def _below(store: RunStore, partial_key: str) -> tuple[BlobRef, ...] | None:
    """The blobs that the listing names; None when the listing is missing."""
    key = blob_key(store.shard_id, partial_key)
    data = store.retry.external("get run listing", lambda: store.blob.get(key), shard=store.shard_id)
    if data is None:
        return None
    parts = decode_run_listing(data, key=key, shard_id=store.shard_id)
    kept = [part for part in parts if not isinstance(part, InlinePart)]
    return tuple(BlobRef("run" if isinstance(part, HollowRun) else "part", part.key) for part in kept)


def _delete(store: RunStore, partial_keys: Iterable[str]) -> None:
    for key in partial_keys:
        whole_key = blob_key(store.shard_id, key)
        store.retry.external("delete run listing", partial(store.blob.delete, whole_key), shard=store.shard_id)
