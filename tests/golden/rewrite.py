"""Durable bytes of version 0.1.0, as examples: what they are made of, and (with --rewrite) the files themselves.

The files are what stores out there hold. They are rewritten only when a format version is raised, and then the old ones
stay under another name.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec.batch import encode_run_listing, encode_transmittable
from persist_engine.codec.inline_part import encode_inline
from persist_engine.codec.part import checksum, encode_part, key_lower, part_stats
from persist_engine.codec.registry import Identity, encode_identity, encode_name, encode_shard_owner
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import encode_state_diff
from persist_engine.model.batch import HollowBatch, HollowPart, HollowRollup, HollowRun, InlinePart, RunMeta, RunOrder
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
from persist_engine.rows.schema import CODECS, Schema

FOLDER = Path(__file__).resolve().parent
VERSION = "0.1.0"
SHARD = ShardId.from_bytes(b"\x01" * 16)
SCHEMA = Schema.from_ddl(
    "id BIGINT NOT NULL, place STRUCT<name: STRING, at: DOUBLE>",
    "b BOOLEAN, i TINYINT, f FLOAT, m DECIMAL(9,2), s STRING, r BINARY, d DATE, t TIMESTAMP, w TIMESTAMP_NTZ",
)
BIRTH = b"\x0b" * 16
STORE = Identity(StoreId.from_bytes(b"\x0c" * 16))
OWNER = Owner("persist-operator/main", "analytics", "flights")
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
    rows, stats = table(), part_stats(table(), SCHEMA, 10_000)
    # 0.1.0 knew nothing of what lies within structs.
    tops = tuple(column for column in stats.columns if not column[0].startswith("["))
    hollow = HollowPart(
        key="n0000100/p02020202-0202-0202-0202-020202020202",
        size_bytes=1234,
        rows=3,
        diffs_sum=2,
        checksum=checksum(b"golden"),
        key_lower=key_lower(rows),
        stats=replace(stats, columns=tops),
        schema_id=0,
    )
    inline = InlinePart(b"inline", 1, -1, ts_rewrite=Antichain(5), schema_id=0)
    run = RunMeta(RunOrder.STRUCTURED, RunId.from_bytes(b"\x03" * 16), 0, 3)
    return HollowBatch(DESC, 4, (hollow, inline), (1,), (run, RunMeta(RunOrder.UNORDERED, truncated=True)))


def nested_batch() -> HollowBatch:
    """What came after 0.1.0: statistics of fields within structs."""
    (part, _), (run, _) = batch().parts, batch().run_metas
    assert isinstance(part, HollowPart)
    return HollowBatch(DESC, 3, (replace(part, stats=part_stats(table(), SCHEMA, 10_000)),), (), (run,))


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


def born_diff() -> StateDiff:
    """As `state_diff`, of a log that knows its birth: a field added after 0.1.0."""
    return replace(state_diff(), birth=BIRTH)


def born_rollup() -> Rollup:
    """As `rollup`, of a log that knows its birth."""
    return Rollup(replace(rollup().state, birth=BIRTH), (VersionedData(SeqNo(2), encode_state_diff(born_diff())),))


def fenced_diff() -> StateDiff:
    """What came after: a staging floor."""
    return replace(born_diff(), staging_floor_ms=(Insert(None, 1_700_000_000_000),))


def fenced_rollup() -> Rollup:
    """As above."""
    state = replace(born_rollup().state, staging_floor_ms=1_700_000_000_000)
    return Rollup(state, (VersionedData(SeqNo(2), encode_state_diff(fenced_diff())),))


def chained_diff() -> StateDiff:
    """What came after, in format 2: the entry it follows."""
    return replace(fenced_diff(), predecessor=b"\x0c" * 16)


def chained_rollup() -> Rollup:
    """As above: the tag of the state's entry, and those of entries before the diffs'."""
    entry = VersionedData(SeqNo(2), encode_state_diff(chained_diff()))
    return Rollup(replace(fenced_rollup().state, tag=entry.tip.tag), (entry,), b"\x0c" * 8)


def retained_diff() -> StateDiff:
    """What came after, in format 3: the retention."""
    return replace(chained_diff(), retain_ms=(Update(None, 86_400_000, 604_800_000),))


def retained_rollup() -> Rollup:
    """As above, in format 4."""
    entry = VersionedData(SeqNo(2), encode_state_diff(retained_diff()))
    return Rollup(replace(chained_rollup().state, tag=entry.tip.tag, retain_ms=604_800_000), (entry,), b"\x0c" * 8)


def packed_rollup() -> Rollup:
    """In format 3: so many live batches that some are compressed."""
    state = fenced_rollup().state
    trace = state.trace
    for index in range(1, 40):
        desc = Description(Antichain(10 * index), Antichain(10 * index + 10), Antichain(0))
        trace = trace.push_without_requests(replace(batch(), desc=desc))
    return Rollup(replace(state, trace=trace))


def files() -> dict[str, bytes]:
    """Name of each golden file and what this code would write there."""
    return {
        "part-0.1.0.parquet": encode_part(table(), desc=DESC, schema=SCHEMA),
        "inline-1.bin": encode_inline(table(), desc=DESC, schema=SCHEMA, bytes_max=1 << 20) or b"",
        "batch-0.1.0.bin": encode_transmittable(SHARD, VERSION, batch()),
        "run-0.1.0.bin": encode_run_listing(SHARD, run_batch().parts, version=VERSION),
        "batch-of-runs-0.1.0.bin": encode_transmittable(SHARD, VERSION, run_batch()),
        "batch-nested.bin": encode_transmittable(SHARD, VERSION, nested_batch()),
        "diff-0.1.0.bin": encode_state_diff(state_diff()),
        "diff-of-a-shard.bin": encode_state_diff(state_diff_of_a_shard()),
        "rollup-2.bin": encode_rollup(rollup()),
        "diff-born.bin": encode_state_diff(born_diff()),
        "rollup-born.bin": encode_rollup(born_rollup()),
        "diff-fenced.bin": encode_state_diff(fenced_diff()),
        "rollup-fenced.bin": encode_rollup(fenced_rollup()),
        "diff-chained.bin": encode_state_diff(chained_diff()),
        "rollup-chained.bin": encode_rollup(chained_rollup()),
        "diff-retained.bin": encode_state_diff(retained_diff()),
        "rollup-retained.bin": encode_rollup(retained_rollup()),
        "rollup-3.bin": encode_rollup(packed_rollup()),
        "identity.bin": encode_identity(STORE),
        "owner.bin": encode_shard_owner(SHARD, OWNER),
        "name.bin": encode_name(OWNER, SHARD),
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
