"""Durable bytes of version 0.1.0, as examples: what they are made of, and (with --rewrite) the files themselves.

The files are what stores out there hold. They are rewritten only when a format version is raised, and then the old ones
stay under another name.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.batch import encode_transmittable
from persist_engine.codec.inline_part import encode_inline
from persist_engine.codec.part import checksum, encode_part, key_lower, part_stats
from persist_engine.codec.schema import CODECS, Schema
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.model.batch import HollowBatch, HollowPart, HollowRollup, InlinePart, RunMeta, RunOrder
from persist_engine.model.flat_trace import SpineId, ThinMerge, ThinSpineBatch
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import CriticalReaderId, IdempotencyToken, LeasedReaderId, RunId, ShardId, WriterId
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.state import (
    Claim,
    CriticalReader,
    DebugInfo,
    LeasedReader,
    ShardState,
    SourceProgress,
    Writer,
)
from persist_engine.model.state_diff import Delete, Insert, StateDiff, Update
from persist_engine.model.trace import Trace

FOLDER = Path(__file__).resolve().parent
VERSION = "0.1.0"
SHARD = ShardId.from_bytes(b"\x01" * 16)
SCHEMA = Schema.from_ddl(
    "id BIGINT NOT NULL, place STRUCT<name: STRING, at: DOUBLE>",
    "b BOOLEAN, i TINYINT, f FLOAT, m DECIMAL(9,2), s STRING, r BINARY, d DATE, t TIMESTAMP, w TIMESTAMP_NTZ",
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


def batch() -> HollowBatch:
    """Two runs: a part in blob with statistics, and one inline."""
    rows = table()
    hollow = HollowPart(
        key="n0000100/p02020202-0202-0202-0202-020202020202",
        size_bytes=1234,
        rows=3,
        diffs_sum=2,
        checksum=checksum(b"golden"),
        key_lower=key_lower(rows),
        stats=part_stats(rows, SCHEMA, 10_000),
        schema_id=0,
    )
    inline = InlinePart(b"inline", 1, -1, ts_rewrite=Antichain(5), schema_id=0)
    run = RunMeta(RunOrder.STRUCTURED, RunId.from_bytes(b"\x03" * 16), 0, 3)
    return HollowBatch(DESC, 4, (hollow, inline), (1,), (run, RunMeta(RunOrder.UNORDERED, truncated=True)))


def state_diff() -> StateDiff:
    """Every field, every type of change."""
    debug, spine_id = DebugInfo("host", "golden"), SpineId(0, 1)
    writer = Writer(7, 8, debug, IdempotencyToken.from_bytes(b"\x04" * 16), Antichain(10))
    leased = LeasedReader(SeqNo(1), Antichain(3), 7, 900_000, debug)
    rollup = HollowRollup("v1/r05050505-0505-0505-0505-050505050505", None)
    return StateDiff(
        VERSION,
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
    )


def state_diff_of_a_shard() -> StateDiff:
    """What came after 0.1.0: whose diff it is, and inline parts that are no Parquet."""
    parts = (InlinePart(b"inline", 1, -1, schema_id=0, format="arrow/1"),)
    held = HollowBatch(DESC, 1, parts, (), (RunMeta(),))
    return StateDiff(VERSION, SeqNo(1), SeqNo(2), 1, "v1/x", legacy_batches=(Insert(held, None),), shard_id=SHARD)


def rollup() -> Rollup:
    """A state with one of everything and the diff that led to it."""
    diff = state_diff()
    state = ShardState(
        VERSION,
        SHARD,
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
    )
    return Rollup(state, (VersionedData(SeqNo(2), encode_state_diff(diff)),))


def files() -> dict[str, bytes]:
    """Name of each golden file and what this code would write there."""
    return {
        "part-0.1.0.parquet": encode_part(table(), desc=DESC, schema=SCHEMA),
        "inline-1.bin": encode_inline(table(), desc=DESC, schema=SCHEMA, bytes_max=1 << 20) or b"",
        "batch-0.1.0.bin": encode_transmittable(SHARD, VERSION, batch()),
        "diff-0.1.0.bin": encode_state_diff(state_diff()),
        "diff-of-a-shard.bin": encode_state_diff(state_diff_of_a_shard()),
        "rollup-0.1.0.bin": encode_rollup(rollup()),
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
