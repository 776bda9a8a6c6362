"""Fetching parts: what state says is verified against what blob holds, times are rewritten before they are cut, filters follow."""

import contextlib
import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from persist_engine.base.env import SeededEnv
from persist_engine.base.errors import CorruptData, Incompatible, MissingBlob
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import RetrySettings
from persist_engine.codec import row_groups
from persist_engine.codec.inline_part import encode_inline
from persist_engine.codec.keys import blob_key, part_key
from persist_engine.codec.part import checksum, encode_part
from persist_engine.model.batch import HollowBatch, HollowPart, InlinePart, RunMeta, RunOrder
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import PartId, ShardId
from persist_engine.parts.fetch import (
    ChangesFilter,
    CompactionFilter,
    ListenFilter,
    Matching,
    PartSource,
    SnapshotFilter,
    read_consolidated,
    read_parts,
    runs_of,
)
from persist_engine.rows.columns import empty_struct
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import Compare
from persist_engine.rows.schema import Schema
from persist_engine.storage.blob_mem import MemBlob

SCHEMA = Schema.from_ddl("id BIGINT")
ENV = SeededEnv()
KEEP = CompactionFilter(Antichain.minimum())


def desc(lower, upper, since=0):
    return Description(Antichain(lower), Antichain(upper), Antichain(since))


@pytest.fixture
def source():
    retry = Retry(ENV, RetrySettings(), NoMetrics())
    return PartSource(ShardId.from_bytes(ENV.random_bytes(16)), MemBlob(), SCHEMA, retry, NoMetrics())


def table_of(rows):
    return pa.table(
        [
            pa.array([{"id": r[0]} for r in rows], SCHEMA.key_type),
            pa.array([{}] * len(rows), pa.struct([])),
            pa.array([r[1] for r in rows], pa.int64()),
            pa.array([r[2] for r in rows], pa.int64()),
        ],
        schema=SCHEMA.updates_schema,
    )


def encoded(rows, written):
    return encode_part(table_of(rows), desc=written, schema=SCHEMA)


def stored(source, rows, written):
    return set_part(source, encoded(rows, written), len(rows))


def set_part(source, data, rows):
    key = part_key("0.1.0", PartId.from_bytes(ENV.random_bytes(16)))
    source.blob.set(blob_key(source.shard_id, key), data)
    return HollowPart(key=key, size_bytes=len(data), rows=rows, diffs_sum=None, checksum=checksum(data))


def batch_of(registered, *parts, order=RunOrder.STRUCTURED):
    return HollowBatch(registered, sum(p.rows for p in parts), parts, (), (RunMeta(order=order),))


def rows_of(tables):
    return [(r["key"]["id"], r["time"], r["diff"]) for t in tables for r in t.to_pylist()]


def read(source, batch, row_filter=KEEP):
    return rows_of(read_consolidated(source, runs_of([batch]), row_filter, memory_bytes=1 << 20))


ROWS = [(1, 0, 1), (2, 3, 1), (3, 5, 1), (4, 9, 1)]


def test_rows_outside_the_registered_bounds_are_not_seen(source):
    """Spec 2.8, 10.8."""
    part = stored(source, ROWS, desc(0, 10))
    assert read(source, batch_of(desc(3, 9), part)) == [(2, 3, 1), (3, 5, 1)]


def test_times_are_rewritten_before_they_are_cut(source):
    part = dataclasses.replace(stored(source, ROWS, desc(0, 10)), ts_rewrite=Antichain.of(7))
    assert read(source, batch_of(desc(7, 20), part)) == [(1, 7, 1), (2, 7, 1), (3, 7, 1), (4, 9, 1)]


@pytest.mark.parametrize(
    ("written", "registered"),
    [
        (desc(2, 10), desc(0, 10)),
        (desc(0, 10), desc(0, 11)),
        (desc(0, 10, since=5), desc(0, 9, since=5)),
        (desc(0, 10, since=5), desc(0, 10)),
    ],
    ids=["lower", "upper", "compacted part cut", "since"],
)
def test_bounds_that_do_not_fit_what_was_written_are_corruption(source, written, registered):
    part = stored(source, [(1, 5, 1)], written)
    with pytest.raises(CorruptData, match=part.key):
        read(source, batch_of(registered, part))


def test_a_rewritten_part_whose_since_is_not_the_registered_one_is_corruption(source):
    """Spec 10.8: a rewrite changes no bound that would excuse it."""
    part = dataclasses.replace(stored(source, ROWS, desc(0, 10, since=5)), ts_rewrite=Antichain.of(7))
    assert read(source, batch_of(desc(0, 10, since=5), part))
    with pytest.raises(CorruptData, match=part.key):
        read(source, batch_of(desc(0, 10), part))


def test_a_row_count_or_checksum_that_state_does_not_know_is_corruption(source):
    part = stored(source, ROWS, desc(0, 10))
    for wrong in (dataclasses.replace(part, rows=3), dataclasses.replace(part, checksum="crc32:00000000")):
        with pytest.raises(CorruptData, match=part.key):
            read(source, batch_of(desc(0, 10), wrong))


def test_a_part_of_another_format_is_incompatible_whatever_its_bytes_are(source):
    part = dataclasses.replace(set_part(source, b"columns of some later release", 1), format="columns/1")
    with pytest.raises(Incompatible, match=f"{part.key} has format 'columns/1', this code reads 'parquet/1'") as caught:
        read(source, batch_of(desc(0, 10), part))
    assert caught.value.detail["key"] == blob_key(source.shard_id, part.key)


def test_a_missing_blob_is_named_and_truncated_bytes_are_corruption(source):
    part = stored(source, ROWS, desc(0, 10))
    key = blob_key(source.shard_id, part.key)
    data = source.blob.get(key)
    source.blob.set(key, data[: len(data) // 2])
    with pytest.raises(CorruptData, match=key):
        read(source, batch_of(desc(0, 10), part))
    source.blob.delete(key)
    with pytest.raises(MissingBlob, match=key):
        read(source, batch_of(desc(0, 10), part))


def test_inline_parts_read_like_blobs_and_damage_is_found(source):
    data = encode_inline(table_of(ROWS), desc=desc(0, 10), schema=SCHEMA, bytes_max=1 << 20)
    inline = InlinePart(data=data, rows=4, diffs_sum=4)
    assert read(source, batch_of(desc(0, 10), inline)) == ROWS
    damaged = data[:40] + bytes([data[40] ^ 0xFF]) + data[41:]
    with pytest.raises(CorruptData, match="inline part"):
        read(source, batch_of(desc(0, 10), dataclasses.replace(inline, data=damaged)))


def test_unordered_runs_are_sorted_part_by_part(source):
    first = stored(source, [(5, 1, 1), (1, 1, 1), (5, 1, 1)], desc(0, 10))
    second = stored(source, [(9, 1, 1), (1, 1, -1), (0, 2, 1)], desc(0, 10))
    batch = batch_of(desc(0, 10), first, second, order=RunOrder.UNORDERED)
    assert read(source, batch) == [(0, 2, 1), (5, 1, 2), (9, 1, 1)]


def test_parts_of_many_row_groups_stream_group_by_group(source, monkeypatch):
    monkeypatch.setattr(row_groups, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(row_groups, "DECODED_ROWS", 100)
    rows = [(i, 1, 1) for i in range(1050)]
    part = stored(source, rows, desc(0, 10))
    batch = batch_of(desc(0, 10), part)
    assert read(source, batch) == rows
    pieces = list(read_parts(source, batch, KEEP))
    assert [piece.num_rows for piece in pieces] == [100] * 10 + [50]
    assert rows_of(pieces) == rows


def test_filters_keep_what_their_reader_may_see(source):
    """Spec 13.8."""
    part = stored(source, ROWS, desc(0, 10))
    batch = batch_of(desc(0, 10), part)
    assert read(source, batch, SnapshotFilter(5)) == [(1, 5, 1), (2, 5, 1), (3, 5, 1)]
    assert read(source, batch, CompactionFilter(Antichain.of(4))) == [(1, 4, 1), (2, 4, 1), (3, 5, 1), (4, 9, 1)]
    assert read(source, batch, CompactionFilter(Antichain.empty())) == ROWS
    assert rows_of(read_parts(source, batch, ListenFilter(as_of=3, lower=3))) == [(3, 5, 1), (4, 9, 1)]
    assert rows_of(read_parts(source, batch, ListenFilter(as_of=3, lower=6))) == [(4, 9, 1)]


@contextlib.contextmanager
def arrow_pool():
    """Counts what Arrow allocates within."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "each", "apart"), [(16, 120_000, False), (16, 120_000, True), (3, 500_000, False)])
def test_memory_is_bound_however_many_rows_there_are(source, runs, each, apart):
    memory_bytes = 16 << 20  # of some 45 MiB of rows
    batches = []
    for index in range(runs):
        ids = np.arange(each) + index * each if apart else np.arange(each) * runs + index
        table = pa.table(
            [
                pa.StructArray.from_arrays([pa.array(ids)], fields=list(SCHEMA.key_type)),
                empty_struct(each),
                pa.array(np.arange(each) % 7),
                pa.array(np.ones(each, dtype=np.int64)),
            ],
            schema=SCHEMA.updates_schema,
        )
        data = encode_part(table, desc=desc(0, 10), schema=SCHEMA)
        batches.append(batch_of(desc(0, 10), set_part(source, data, each)))
    del table
    with arrow_pool() as pool:
        tables = read_consolidated(source, runs_of(batches), KEEP, memory_bytes=memory_bytes)
        assert sum(table.num_rows for table in tables) == runs * each
    assert pool.max_memory() < memory_bytes


def test_a_part_whose_rows_go_back_over_a_run_is_refused(source):
    from persist_engine.base.errors import InvariantViolated

    low, high = (stored(source, [(key, 1, 1)], desc(0, 10)) for key in (1, 2))
    other = stored(source, [(7, 1, 1)], desc(10, 20))
    batches = [batch_of(desc(0, 10), high, low), batch_of(desc(10, 20), other)]
    with pytest.raises(InvariantViolated, match="out of order"):
        rows_of(read_consolidated(source, runs_of(batches), KEEP, memory_bytes=1 << 20))


def test_runs_that_lie_elsewhere_than_statistics_say_are_refused(source):
    """They were read one behind the other, without a merge: that they do not lie so is found all the same."""
    from persist_engine.base.errors import InvariantViolated
    from persist_engine.model.batch import ColumnStats, PartStats

    batches = []
    for index, key in enumerate((2, 1)):
        stats = PartStats(columns=(("key.id", ColumnStats(0, str(index), str(index))),))
        part = dataclasses.replace(stored(source, [(key, 1, 1)], desc(0, 10)), stats=stats)
        batches.append(batch_of(desc(0, 10), part))
    with pytest.raises(InvariantViolated, match="out of order"):
        rows_of(read_consolidated(source, runs_of(batches), KEEP, memory_bytes=1 << 20))


@pytest.mark.parametrize(
    "row_filter",
    [
        KEEP,
        CompactionFilter(Antichain.of(5)),
        CompactionFilter(Antichain.empty()),
        SnapshotFilter(5),
        SnapshotFilter(2**63),
    ]
    + [ListenFilter(4, 5), ChangesFilter(2, 5), Matching(SnapshotFilter(5), Filter(Compare("id", "<", 2), SCHEMA))],
    ids=repr,
)
@pytest.mark.parametrize("time", [0, 4, 5, 6, 2**63 - 1])
def test_rows_of_one_time_pass_as_well_when_they_come_at_the_time_they_are_seen(row_filter, time):
    def passed(at):
        rows = pa.array([{"id": each} for each in range(3)], SCHEMA.key_type)
        columns = [rows, empty_struct(3), pa.array([at] * 3, pa.int64()), pa.array([1, 2, 3], pa.int64())]
        return row_filter.apply(pa.table(columns, schema=SCHEMA.updates_schema)).to_pylist()

    assert passed(row_filter.seen(time)) == passed(time)
