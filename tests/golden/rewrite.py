"""Durable bytes as examples: what they are made of, and (with --rewrite) the files themselves.

The files are rewritten only when a format changes. After the first release the files of older formats stay beside the new
ones.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.batch import encode_run_listing, encode_transmittable
from persist_engine.codec.deletions import Cause, Deletions, encode_deletions
from persist_engine.codec.inline_part import encode_inline
from persist_engine.codec.part import checksum, encode_part, key_lower, part_stats
from persist_engine.codec.registry import Identity, encode_identity, encode_name, encode_shard_owner
from persist_engine.codec.staging_note import JOB_BYTES, StagingNote, encode_staging_note
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.model.batch import (
    Footing,
    HollowBatch,
    HollowPart,
    HollowRollup,
    HollowRun,
    InlinePart,
    RunKind,
    RunMeta,
    RunOrder,
)
from persist_engine.model.diff.state_diff import Delete, Insert, StateDiff, Update
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import (
    CriticalReaderId,
    IdempotencyToken,
    LeasedReaderId,
    RunId,
    ShardId,
    StoreId,
    WriterId,
)
from persist_engine.model.ownership import Owner
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.flat import SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.spine.trace import Trace
from persist_engine.model.state import (
    Claim,
    CriticalReader,
    DebugInfo,
    LeasedReader,
    ShardState,
    SourceProgress,
    Writer,
)
from persist_engine.model.step import initial_state
from persist_engine.rows.schema import CODECS, Schema
from persist_spark.streaming.position import Position, encode_position

FOLDER = Path(__file__).resolve().parent
VERSION = "0.1.0"
SHARD = ShardId.from_bytes(b"\x01" * 16)
SCHEMA = Schema.from_ddl(
    "id BIGINT NOT NULL, place STRUCT<name: STRING, at: DOUBLE>",
    "b BOOLEAN, i TINYINT, f FLOAT, m DECIMAL(9,2), s STRING, r BINARY, d DATE, t TIMESTAMP, w TIMESTAMP_NTZ",
)
LISTS = Schema.from_ddl(
    "id BIGINT NOT NULL",
    "l ARRAY<STRING>, m MAP<STRING, DOUBLE>, s STRUCT<x: ARRAY<STRUCT<y: INT, z: ARRAY<DATE>>>>, n MAP<INT, ARRAY<DECIMAL(9,2)>>",
)
DENSE = Schema.from_ddl("id BIGINT NOT NULL", "x DOUBLE, s STRING")
FILTERED = ("key.id", "val.i", "val.f", "val.m", "val.s", "val.r", "val.d", "val.t", "val.w")
BIRTH = b"\x0b" * 16
STORE = Identity(StoreId.from_bytes(b"\x0c" * 16))
DELETIONS = Deletions(
    shard_id=SHARD,
    cause=Cause.COLLECTION,
    seqno=SeqNo(42),
    hostname="flights-gc-42",
    begun_ms=1_700_000_000_000,
    gone_ms=1_700_000_000_250,
    keys=("n0000100/p01010101-0101-0101-0101-010101010101", "v40/r02020202-0202-0202-0202-020202020202"),
)
INTENTION = replace(DELETIONS, cause=Cause.ORPHAN_SCAN, gone_ms=None)
NOTE = StagingNote(
    shard_id=SHARD,
    sink_id="analytics/flights",
    run=b"uid-3",
    job=b"\x0e" * JOB_BYTES,
    batch=b"a transmittable batch",
    rows=3,
    errors=1,
    least_time=1_700_000_000_000,
    low=(1 << 63) - 1,
    high=5,
    least=("1", "a"),
    greatest=("2", ""),
    version="0.1.0",
)
OWNER = Owner("persist-operator/main", "analytics", "flights")
POSITION = Position(
    source="rate",
    query="0c0c0c0c-0c0c-4c0c-8c0c-0c0c0c0c0c0c",
    batch=7,
    run="uid-3",
    driver="0d0d0d0d0d0d0d0d",
    offsets='v1\n{"batchWatermarkMs":0,"batchTimestampMs":1795444713444,"conf":{}}\n70',
    logs={"0/0": "v1\n1795444713000"},
)
DESC = Description(Antichain(0), Antichain(10), Antichain(0))
_AT = datetime(2013, 1, 1, 5, 17, tzinfo=UTC)
_FULL = (True, -1, 0.5, Decimal("12.34"), "é", b"\x00\xff", date(2013, 1, 1), _AT, _AT.replace(tzinfo=None))
ROWS = [
    ((1, {"name": "", "at": -0.0}), _FULL, 3, 1),
    ((1, {"name": None, "at": float("nan")}), (None,) * 9, 4, -1),
    ((2, None), _FULL, 9, 2),
]


def table() -> pa.Table:
    """Three updates with every type, nulls, NaN and -0.0."""
    columns = [
        pa.array([dict(zip(fields.names, row[at], strict=True)) for row in ROWS], kind)
        for at, fields, kind in ((0, SCHEMA.key, SCHEMA.key_type), (1, SCHEMA.val, SCHEMA.val_type))
    ]
    times, diffs = (pa.array([row[at] for row in ROWS], pa.int64()) for at in (2, 3))
    return pa.table([*columns, times, diffs], schema=SCHEMA.updates_schema)


def lists_table() -> pa.Table:
    """Three updates with lists and maps in each other, with nulls, and with none."""
    full = {
        "l": ["", None, "é"],
        "m": [("a", float("nan")), ("b", None), ("c", -0.0)],
        "s": {"x": [{"y": 1, "z": [date(2013, 1, 1), None]}, None, {"y": None, "z": []}]},
        "n": [(-1, None), (2, [Decimal("12.34")])],
    }
    vals = [full, {"l": [], "m": [], "s": {"x": None}, "n": []}, dict.fromkeys(full)]
    key = pa.array([{"id": each} for each in (1, 1, 2)], LISTS.key_type)
    times, diffs = (pa.array(numbers, pa.int64()) for numbers in ([3, 4, 9], [1, -1, 2]))
    return pa.table([key, pa.array(vals, LISTS.val_type), times, diffs], schema=LISTS.updates_schema)


def dense_table() -> pa.Table:
    """As many updates as a sample has rows, with numbers that do not compress."""
    numbers = [int.from_bytes(sha256(b"%d" % each).digest()[:8], "big") / 2**64 for each in range(1024)]
    val = pa.array([{"x": each, "s": "same"} for each in numbers], DENSE.val_type)
    key = pa.array([{"id": each} for each in range(1024)], DENSE.key_type)
    ones = pa.array([1] * 1024, pa.int64())
    return pa.table([key, val, ones, ones], schema=DENSE.updates_schema)


def batch() -> HollowBatch:
    """Two runs: a part in blob with statistics, also of fields within structs, and one inline."""
    hollow = HollowPart(
        key="n0000100/p02020202-0202-0202-0202-020202020202",
        size_bytes=1234,
        rows=3,
        diffs_sum=2,
        checksum=checksum(b"golden"),
        key_lower=key_lower(table()),
        stats=part_stats(table(), SCHEMA, 10_000),
        schema_id=0,
        footer=Footing(200, checksum(b"footer"), 96, ("key.id", "val.s")),
    )
    inline = InlinePart(b"inline", 1, -1, ts_rewrite=Antichain(5), schema_id=0)
    run = RunMeta(RunOrder.STRUCTURED, RunId.from_bytes(b"\x03" * 16), 0, 3, waits_from_ms=1_700_000_000_000)
    return HollowBatch(
        DESC, 4, (hollow, inline), (1,), (run, RunMeta(RunOrder.UNORDERED, truncated=True, kind=RunKind.DISTINCT))
    )


def hollow_run() -> HollowRun:
    """A pointer to the listing of the batch's parts."""
    return HollowRun(
        key="n0000100/p09090909-0909-0909-0909-090909090909",
        size_bytes=400,
        checksum=checksum(b"listing"),
        rows=4,
        diffs_sum=1,
        parts_bytes=1234,
        part_bytes_max=1234,
        part_count=2,
        blob_count=2,
        oldest_key="n0000100/p02020202-0202-0202-0202-020202020202",
        schema_id=0,
        key_lower=b"",
        ts_rewrite=Antichain(7),
    )


def run_batch() -> HollowBatch:
    """One run: a hollow run, and a part after it."""
    return HollowBatch(DESC, 7, (hollow_run(), batch().parts[0]), (), (batch().run_metas[0],))


def state_diff() -> StateDiff:
    """Every field and every type of change."""
    debug, spine_id = DebugInfo("host", "golden"), SpineId(0, 1)
    writer = Writer(7, 8, debug, IdempotencyToken.from_bytes(b"\x04" * 16), Antichain(10))
    leased = LeasedReader(SeqNo(1), Antichain(3), 7, 900_000, debug)
    rollup = HollowRollup("v1/r05050505-0505-0505-0505-050505050505", None)
    return StateDiff(
        VERSION,
        SHARD,
        BIRTH,
        SeqNo(1),
        SeqNo(2),
        1_700_000_000_000,
        rollup.key,
        hostname=(Update(None, "old", "new"),),
        last_gc_req=(Update(None, SeqNo(0), SeqNo(1)),),
        active_rollup=(Insert(None, Claim(SeqNo(2), 9)),),
        active_gc=(Delete(None, Claim(SeqNo(1), 9)),),
        rollups=(Insert(SeqNo(1), rollup), Delete(SeqNo(0), HollowRollup(rollup.key, 55))),
        leased_readers=(Insert(LeasedReaderId.from_bytes(b"\x06" * 16), leased),),
        critical_readers=(
            Insert(CriticalReaderId.from_bytes(b"\x07" * 16), CriticalReader(Antichain(None), b"8 octets", debug)),
        ),
        writers=(Update(WriterId.from_bytes(b"\x08" * 16), Writer(1, 2, debug), writer),),
        schemas=(Insert(0, SCHEMA.to_pair()),),
        progress=(Insert("ns/flights", SourceProgress(b"run-1", Antichain(10))),),
        since=(Update(None, Antichain(0), Antichain(3)),),
        legacy_batches=(Insert(HollowBatch.empty(DESC), None),),
        hollow_batches=(Insert(spine_id, batch()),),
        spine_batches=(Insert(spine_id, ThinSpineBatch(2, DESC, (spine_id,), (DESC,))),),
        merges=(Insert(spine_id, ThinMerge(Antichain(3), 4, 5)),),
        staging_floor_ms=(Insert(None, 1_700_000_000_000),),
        retain_ms=(Update(None, 86_400_000, 604_800_000),),
        predecessor=b"\x0c" * 16,
    )


def rollup() -> Rollup:
    """A state with one of everything, the diff that led to it, and the tag of the entry before."""
    diff = state_diff()
    entry = VersionedData(SeqNo(2), encode_state_diff(diff))
    state = ShardState(
        VERSION,
        SHARD,
        BIRTH,
        CODECS,
        SeqNo(2),
        diff.walltime_ms,
        "new",
        SeqNo(1),
        Claim(SeqNo(2), 9),
        None,
        *(
            SharedMap([(change.key, change.to) for change in changes if not isinstance(change, Delete)])
            for changes in (
                diff.rollups,
                diff.leased_readers,
                diff.critical_readers,
                diff.writers,
                diff.schemas,
                diff.progress,
            )
        ),
        trace=Trace().push_without_requests(batch()),
        staging_floor_ms=1_700_000_000_000,
        tag=entry.tip.tag,
        retain_ms=604_800_000,
    )
    return Rollup(state, (entry,), b"\x0c" * 8)


def packed_rollup() -> Rollup:
    """So many live batches that the rollup holds some of them compressed."""
    state = rollup().state
    trace = state.trace
    for index in range(1, 40):
        desc = Description(Antichain(10 * index), Antichain(10 * index + 10), Antichain(0))
        trace = trace.push_without_requests(replace(batch(), desc=desc))
    return Rollup(replace(state, trace=trace))


def flat_rollup() -> Rollup:
    """A trace without structure."""
    state = rollup().state
    return Rollup(replace(state, trace=replace(state.trace, structured=False)))


def counting_diff() -> StateDiff:
    """The first version of a shard whose table counts its writes."""
    _, diff = initial_state(
        shard_id=SHARD,
        codecs=CODECS,
        schema=SCHEMA.to_pair(),
        now_ms=1_700_000_000_000,
        hostname="host",
        applier_version=VERSION,
        rollup=HollowRollup("v1/first", None),
        birth=b"\x0b" * 16,
        clock="counter",
    )
    return diff


def files() -> dict[str, bytes]:
    """Name of each golden file and what this code would write there."""
    return {
        "part.parquet": encode_part(table(), desc=DESC, schema=SCHEMA),
        "part-filtered.parquet": encode_part(table(), desc=DESC, schema=SCHEMA, filtered=FILTERED),
        "inline.bin": encode_inline(table(), desc=DESC, schema=SCHEMA, bytes_max=1 << 20) or b"",
        "part-dense.parquet": encode_part(dense_table(), desc=DESC, schema=DENSE),
        "part-lists.parquet": encode_part(lists_table(), desc=DESC, schema=LISTS),
        "inline-lists.bin": encode_inline(lists_table(), desc=DESC, schema=LISTS, bytes_max=1 << 20) or b"",
        "batch.bin": encode_transmittable(SHARD, VERSION, batch()),
        "batch-of-runs.bin": encode_transmittable(SHARD, VERSION, run_batch()),
        "run-listing.bin": encode_run_listing(SHARD, run_batch().parts, version=VERSION),
        "diff.bin": encode_state_diff(state_diff()),
        "diff-counter.bin": encode_state_diff(counting_diff()),
        "rollup.bin": encode_rollup(rollup()),
        "rollup-packed.bin": encode_rollup(packed_rollup()),
        "rollup-flat.bin": encode_rollup(flat_rollup()),
        "identity.bin": encode_identity(STORE),
        "owner.bin": encode_shard_owner(SHARD, OWNER),
        "name.bin": encode_name(OWNER, SHARD),
        "deletions.bin": encode_deletions(DELETIONS),
        "deletions-intended.bin": encode_deletions(INTENTION),
        "staging-note.bin": encode_staging_note(NOTE),
        "position.json": encode_position(POSITION),
    }


def main() -> int:
    """List what differs; with --rewrite, write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rewrite", action="store_true", help="write the files")
    rewrite = parser.parse_args().rewrite
    for name, data in files().items():
        path = FOLDER / name
        if not path.exists() or path.read_bytes() != data:
            sys.stdout.write(f"{name} {'rewritten' if rewrite else 'differs'}\n")
            if rewrite:
                path.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
