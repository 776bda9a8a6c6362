"""Chooses ranges of the first key column that partition the rows of batches into pieces of about the same size.

Statistics of parts only decide how well the pieces are balanced. A row belongs to the range that contains it (`key_range`), so every choice
is correct. This module fetches nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_engine.codec.row_groups import group_bytes
from persist_engine.model.batch import HollowBatch, HollowPart
from persist_engine.parts.key_range import KeyRange
from persist_engine.parts.source import CUT_BYTES_MIN
from persist_engine.rows.part_stats import bound
from persist_engine.rows.schema import Schema

#: The limit on what all ranges together fetch, in percent of the bytes of the parts. It applies while ranges have fewer than
#: RANGE_BYTES_MIN. Fetching FETCH_BYTES_MORE too much is always allowed, so that a small shard is split into as many ranges as requested.
FETCH_PERCENT_MAX, FETCH_BYTES_MORE = 120, 1 << 20
RANGE_BYTES_MIN = 32 << 20


def choose_ranges(batches: Sequence[HollowBatch], schema: Schema, count: int) -> list[KeyRange | None]:
    """At most `count` ranges that partition all keys, of about the same number of rows. [None] when there are no statistics for a split.

    Integers, dates and timestamps are split at any value, on the assumption that rows are evenly distributed within a part. Other types are
    split only at the beginning of a part.
    """
    column = schema.key.field(0)
    spans = _spans(batches, column)
    if count == 1 or not spans or pa.types.is_struct(column.type) or pa.types.is_boolean(column.type):
        return [None]
    bounds = _even_bounds(spans, column.type, count) if _is_linear(column.type) else _part_bounds(spans, count)
    edges = [None, *bounds, None]
    return [KeyRange(column.name, lower, upper) for lower, upper in itertools.pairwise(edges)]


def affordable_ranges(batches: Sequence[HollowBatch], schema: Schema, count: int) -> list[KeyRange | None]:
    """Like `choose_ranges`, but returns fewer ranges if that many would fetch more than FETCH_PERCENT_MAX of the bytes of the parts. When
    several pieces share a part, each fetches the footer and about one row group too much. The number of ranges never falls below what
    RANGE_BYTES_MIN asks for, whatever they fetch, so that a large read stays parallel.
    """
    ranges = choose_ranges(batches, schema, count)
    parts = [part for batch in batches for part in batch.part_list() if isinstance(part, HollowPart)]
    held = sum(part.size_bytes for part in parts)
    least = -(-held // RANGE_BYTES_MIN)
    if len(ranges) <= max(1, least):
        return ranges
    cuts = [(part, sum(each is None or each.may_hold(part) for each in ranges)) for part in parts]
    numbers = range(len(ranges), least, -1)
    most = max(held * FETCH_PERCENT_MAX // 100, held + FETCH_BYTES_MORE)
    fitting = (n for n in numbers if _to_fetch(cuts, (n - 1) / (len(ranges) - 1)) <= most)
    affordable = max(1, next(fitting, least))
    return ranges if affordable == len(ranges) else choose_ranges(batches, schema, affordable)


def _to_fetch(cuts: Sequence[tuple[HollowPart, int]], share: float) -> float:
    """An estimate of the bytes that the pieces fetch if only `share` of the bounds between them is kept. `cuts` holds each part with the
    number of pieces that contain rows of it.
    """
    total = 0.0
    for part, pieces in cuts:
        left = 1 + (pieces - 1) * share
        whole = part.size_bytes * left
        if left > 1 and part.footer is not None and part.size_bytes > CUT_BYTES_MIN:
            waste = part.footer.size_bytes + group_bytes(part.rows, part.size_bytes)
            whole = min(whole, part.size_bytes + (left - 1) * waste)
        total += whole
    return total


_Span = tuple[pa.Scalar, pa.Scalar | None, int]


def _spans(batches: Sequence[HollowBatch], column: pa.Field) -> list[_Span]:
    """For each part with statistics: the least value of the column, the greatest if known, and the number of rows."""
    spans: list[_Span] = []
    for part in itertools.chain.from_iterable(batch.part_list() for batch in batches):
        if not isinstance(part, HollowPart) or part.stats is None:
            continue
        stats = dict(part.stats.columns).get(f"key.{column.name}")
        if stats is not None and stats.lower is not None:
            upper = None if stats.upper is None else bound(stats.upper, column.type)
            spans.append((bound(stats.lower, column.type), upper, part.rows))
    return spans


def _is_linear(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_timestamp(data_type) or pa.types.is_date32(data_type))


def _part_bounds(spans: list[_Span], count: int) -> list[pa.Scalar]:
    """Bounds chosen from the parts' least values, one every rows/count rows."""
    lowers = pa.chunked_array([pa.array([span[0]], type=span[0].type) for span in spans])
    order = pc.sort_indices(lowers).to_numpy()
    rows = np.cumsum(np.array([spans[index][2] for index in order], dtype=np.float64))
    before = rows - np.array([spans[index][2] for index in order])
    wanted = rows[-1] * np.arange(1, count) / count
    picked = np.searchsorted(before, wanted, side="left")
    values = pc.unique(lowers.take(pa.array(order[picked[picked < len(order)]])))
    return [value for value in values if bool(pc.greater(value, lowers[order[0]]).as_py())]


def _even_bounds(spans: list[_Span], data_type: pa.DataType, count: int) -> list[pa.Scalar]:
    """Bounds below which 1/count, 2/count, ... of the rows lie, if each part's rows are spread evenly over its span."""
    storage = pa.int32() if pa.types.is_date32(data_type) else pa.int64()
    whole = [
        (_as_int(low, storage), _as_int(low if high is None else high, storage) + 1, rows) for low, high, rows in spans
    ]
    edges = sorted({edge for low, end, _ in whole for edge in (low, end)})
    index = {edge: at for at, edge in enumerate(edges)}
    slope = np.zeros(len(edges))
    for low, end, rows in whole:
        slope[index[low]] += rows / (end - low)
        slope[index[end]] -= rows / (end - low)
    # The bounds are Python integers, because they must be exact. Products of timestamp spans and rows exceed the exact range of floats.
    widths = np.array([float(b - a) for a, b in itertools.pairwise(edges)])
    below = np.concatenate([[0.0], np.cumsum(np.maximum(np.cumsum(slope)[:-1], 0.0) * widths)])
    bounds: list[int] = []
    for step in range(1, count):
        wanted = below[-1] * step / count
        at = min(int(np.searchsorted(below, wanted, side="right")) - 1, len(edges) - 2)
        height = below[at + 1] - below[at]
        share = 0.0 if height <= 0 else (wanted - below[at]) / height
        cut = edges[at] + int((edges[at + 1] - edges[at]) * share)
        if edges[0] < cut < edges[-1] and (not bounds or cut > bounds[-1]):
            bounds.append(cut)
    return [pa.scalar(cut, storage).cast(data_type) for cut in bounds]


def _as_int(value: pa.Scalar, storage: pa.DataType) -> int:
    return int(value.cast(storage).as_py())
