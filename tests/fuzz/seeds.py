"""Where fuzzing begins: one valid input or more per target, made of the golden values and of a small real shard.

`python tests/fuzz/seeds.py` writes them into corpus/; inputs that once were findings lie beside them under other names.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pyarrow as pa
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import SCAN_ALL, SeqNo
from persist_engine.codec.batch import encode_batch, encode_run_listing
from persist_engine.codec.inline_part import encode_inline
from persist_engine.codec.part import encode_part
from persist_engine.codec.state import Rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.frontier import Antichain
from persist_engine.model.state import ShardState
from persist_engine.rows.words import RowCodec
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.states import SHARD
from persist_kit.world import SCHEMA, World, row

FOLDER = Path(__file__).resolve().parent / "corpus"
HEAD_BYTES = 10


def golden() -> ModuleType:
    """tests/golden/rewrite.py."""
    path = Path(__file__).resolve().parent.parent / "golden" / "rewrite.py"
    spec = importlib.util.spec_from_file_location("golden_rewrite", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lived() -> list[tuple[ShardState, bytes]]:
    """Every version of a small shard that was written, read, compacted, rolled up and collected, with the diff to the
    next.
    """
    settings = Settings(
        batch=BatchSettings(inline_part_bytes_max=0),
        maintenance=MaintenanceSettings(rollup_threshold=4, gc_versions_min=1000),
        compaction=CompactionSettings(inputs_min=2, parts_min=2, updates_min=1),
    )
    world = World(7, settings=settings)
    client, shard_id = world.process(), world.shard_id()
    writer = client.open_writer(shard_id, SCHEMA, purpose="seed")
    states = []
    with client.open_leased_reader(shard_id, SCHEMA, purpose="seed") as reader:
        critical = client.open_critical_since(shard_id, golden().CriticalReaderId.from_bytes(b"c" * 16), opaque=b"one")
        first = client.machine(shard_id).state
        for time in range(7):
            writer.append([row(time, "x", time)], lower=Antichain(time), upper=Antichain(time + 1))
        compact_due(client.machine(shard_id))
        reader.downgrade_since(Antichain(3))
        critical.compare_and_downgrade_since(b"one", (b"two", Antichain(4)))
        write_rollup(client.machine(shard_id))
    writer.expire()
    state = first
    for entry in world.consensus.scan(str(shard_id), SeqNo(0), SCAN_ALL):
        if entry.seqno > state.seqno:
            states.append((state, entry.data))
            state = apply(state, decode_state_diff(entry.data, key="seed"))
    gc_and_truncate(client.machine(shard_id))
    return states


def seeds() -> dict[str, list[bytes]]:
    """Target -> inputs."""
    made = golden()
    files = {path.name: path.read_bytes() for path in made.FOLDER.iterdir() if path.suffix == ".bin"}
    history = lived()
    tables = made.table().slice(0, 1)
    narrow = encode_part(SCHEMA.updates_schema.empty_table(), desc=made.DESC, schema=SCHEMA)
    short = pa.table(
        [pa.array([{"id": 7}]), pa.array([{"name": "x"}]), pa.array([3]), pa.array([1])], schema=SCHEMA.updates_schema
    )
    split = make_split()
    schema = made.SCHEMA.to_pair()
    return {
        "envelope": [files["diff.bin"], files["batch.bin"], encode_batch(made.batch())],
        "state_diff": [files["diff.bin"][HEAD_BYTES:], *(diff[HEAD_BYTES:] for _, diff in history[::4])],
        "rollup": [
            *(files[name][HEAD_BYTES:] for name in ("rollup.bin", "rollup-packed.bin", "rollup-flat.bin")),
            *(encode_rollup(Rollup(state))[HEAD_BYTES:] for state, _ in (history[0], history[-1])),
        ],
        "apply": [_pair(encode_rollup(Rollup(state))[HEAD_BYTES:], diff[HEAD_BYTES:]) for state, diff in history[::2]],
        "batch": [encode_batch(made.batch())[HEAD_BYTES:]],
        "transmittable": [files["batch.bin"][HEAD_BYTES:]],
        "registry": [files[name][HEAD_BYTES:] for name in ("identity.bin", "owner.bin", "name.bin")],
        "staging_note": [files["staging-note.bin"][HEAD_BYTES:]],
        "listing": [encode_run_listing(SHARD, made.batch().parts)[HEAD_BYTES:]],
        "part": [narrow, encode_part(tables, desc=made.DESC, schema=made.SCHEMA)],
        "inline": [
            encode_inline(tables, desc=made.DESC, schema=made.SCHEMA, bytes_max=1 << 20) or b"",
            encode_inline(short, desc=made.DESC, schema=SCHEMA, bytes_max=1 << 20) or b"",
        ],
        "rows": [
            bytes((number + index,)) + row.as_py()
            for number, table, schema in ((2, tables, made.SCHEMA), (0, short, SCHEMA))
            for index, (side, kind) in enumerate((("key", schema.key_type), ("val", schema.val_type)))
            for row in RowCodec(kind).encode(table.column(side))
        ],
        "ddl": [
            made.SCHEMA.key_ddl.encode(),
            made.SCHEMA.val_ddl.encode(),
            b"`a ``b` struct<x int not null, y: dec(38, 2)> NOT NULL, c TIMESTAMP_LTZ",
        ],
        "schema": [
            made.SCHEMA.key_ddl.encode() + b"\xff" + made.SCHEMA.val_ddl.encode(),
            len(schema.key).to_bytes(2, "little") + schema.key + schema.val,
        ],
        "names": [
            f"{made.SHARD}/v12/r05050505-0505-0505-0505-050505050505".encode(),
            f"{made.SHARD}/n0000100/p05050505-0505-0505-0505-050505050505".encode(),
            b"v7",
            b"0.1.0",
            b"ri05050505-0505-0505-0505-050505050505",
        ],
        "url": [
            b"s3://bucket/prefix?region=eu&endpoint=http%3A%2F%2F127.0.0.1%3A9000",
            b"redis://user:hunter2@host:6379/0?ack=redis",
            b"file:///a%20b/c",
            b"redis://[::1]:6379/0",
            b"mem:name",
        ],
        "statistics": [b"1", b'"12.34"', b'"00ff"', b"true", b"1e300", b'"nan"', b'"\\ud7ff"', b"null", b"[]"],
        "split": [split],
    }


def make_split() -> bytes:
    """Half of a small snapshot."""
    world = World(8, settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
    client, shard_id = world.process(), world.shard_id()
    writer = client.open_writer(shard_id, SCHEMA, purpose="seed")
    writer.append([row(key, "x", 0) for key in range(9)], lower=Antichain(0), upper=Antichain(1))
    with client.open_leased_reader(shard_id, SCHEMA, purpose="seed") as reader:
        snapshot = reader.snapshot(0)
        with snapshot:  # type: ignore[union-attr]  # since has not moved
            return snapshot.splits(2)[0].to_bytes()  # type: ignore[union-attr]


def _pair(state: bytes, diff: bytes) -> bytes:
    return len(state).to_bytes(4, "little") + state + diff


def main() -> None:
    """Write them."""
    for target, inputs in seeds().items():
        folder = FOLDER / target
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / f"seed-{number:02}").write_bytes(data)


if __name__ == "__main__":
    main()
