"""What docs/spec.md says of durable bytes is enough to read a shard: a reader that knows nothing else (`shard_reader.py`) reads
what the engine wrote, and gets the same rows.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
import redis
from persist_engine import Appended, Location, PersistClient, Schema, ShardId
from persist_engine.base.settings import BatchSettings, CompactionSettings, MaintenanceSettings, Settings
from persist_engine.client.read.handle import ReadHandle
from persist_engine.client.read.snapshot import Snapshot
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.servers import redis_server

READER = Path(__file__).with_name("shard_reader.py")
OLD = Schema.from_ddl(
    "id BIGINT NOT NULL, `a key` STRING", "n INT, x DOUBLE, place STRUCT<city: STRING, at: DECIMAL(9,2)>"
)
NEW = Schema.from_ddl(
    "id BIGINT NOT NULL, `a key` STRING",
    "n BIGINT, x DOUBLE, place STRUCT<city: STRING, at: DECIMAL(9,2)>, tags ARRAY<DOUBLE>, by MAP<STRING, ARRAY<INT>>",
)


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shard_reader", READER)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["shard_reader"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = loaded()


def settings(**batch: Any) -> Settings:
    return Settings(
        batch=BatchSettings(**batch),
        compaction=CompactionSettings(claim_ms=0),  # what an append claims is free again
        maintenance=MaintenanceSettings(rollup_threshold=1000),
    )


def rows(first: int, count: int, time: int, diff: int = 1) -> list[Any]:
    return [
        (((number, f"key {number % 7}"), (number % 5, value_of(number), place_of(number))), time, diff)
        for number in range(first, first + count)
    ]


def value_of(number: int) -> float | None:
    return (None, -0.0, 0.5, math.nan, float(number))[number % 5]


def place_of(number: int) -> tuple[str, None] | None:
    return None if number % 3 else (f"city {number}", None)


class Shard:
    """A shard on files, and both ways to read it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.blobs, self.log = folder / "blobs", folder / "log.db"
        location = Location(blob=f"file://{self.blobs}", consensus=f"sqlite://{self.log}")
        self.client = PersistClient.open(location, settings=settings)
        self.id = ShardId.new()

    def append(self, updates: Any, *, upto: int, schema: Schema = OLD) -> None:
        with self.client.open_writer(self.id, schema, purpose="test") as writer:
            lower = writer.fetch_recent_upper()
            outcome = writer.compare_and_append(updates, expected_upper=lower, new_upper=upto)
            assert isinstance(outcome, Appended)

    def check(self) -> set[str]:
        """At every time that may be read: the reader's rows are the engine's. What the reader met."""
        contents = reader.open_shard(self.blobs, self.log, self.id)
        seen = set(contents.seen)
        if contents.thin:
            seen.add("zero width")
        with self.client.open_leased_reader(self.id, purpose="test") as handle:
            machine = self.client.machine(self.id)
            assert contents.since == machine.state.trace.since.time
            assert contents.upper == machine.state.trace.upper.time
            for as_of in range(int(contents.since), int(contents.upper)):
                read = reader.Rows(self.blobs, self.id, contents, as_of)
                assert read.counts == engine_rows(handle, as_of)
                seen |= read.seen
        return seen


def engine_rows(handle: ReadHandle, as_of: int) -> Counter[Any]:
    snapshot = handle.snapshot(as_of)
    assert isinstance(snapshot, Snapshot)
    table = snapshot.to_table()
    key, val = (table.schema.field(name).type for name in ("key", "val"))
    out: Counter[Any] = Counter()
    for row in table.to_pylist():
        assert row["time"] == as_of
        out[reader.canonical(row["key"], key), reader.canonical(row["val"], val)] += row["diff"]
    return out


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    return Shard(tmp_path, settings(inline_part_bytes_max=6 << 10, run_parts_max=2, target_part_bytes=2048))


def test_the_reader_knows_nothing_of_the_engine() -> None:
    tree = ast.parse(READER.read_text())
    roots = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    roots |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in roots if name not in sys.stdlib_module_names} == {"pyarrow", "google", "grpc_tools"}


@pytest.mark.slow
def test_a_reader_written_from_the_document_reads_what_the_engine_reads(shard: Shard) -> None:
    """Spec 29.1 to 29.12, 29.15, 29.16, 21.5: every kind of part, through appends, compaction, a rollup, collection and a
    schema that grows.
    """
    seen: set[str] = set()
    shard.append(rows(0, 5, 0), upto=2)
    shard.append([], upto=3)
    seen |= shard.check()
    for start in range(3, 8):
        shard.append(rows(start, 40, start) + rows(start, 2, start, diff=-1), upto=start + 1)
    seen |= shard.check()
    with shard.client.open_writer(shard.id, OLD, purpose="test") as writer:
        cut = writer.batch(rows(500, 9, 8) + rows(500, 9, 9), lower=8, upper=20)
        writer.compare_and_append_batch([cut], expected_upper=8, new_upper=9)
        moved = writer.batch(rows(700, 3, 0), lower=0, upper=1)
        moved.rewrite_times(9, 10)
        writer.compare_and_append_batch([moved], expected_upper=9, new_upper=10)
    seen |= shard.check()
    machine = shard.client.machine(shard.id)
    write_rollup(machine)
    seen |= shard.check()
    compact_due(machine)
    seen |= shard.check()
    assert not isinstance(shard.client.evolve_schema(shard.id, NEW), str)
    lists = ([-0.0, None, 2.5], {"b": [1, None], "a": None})
    grown = [((key, (*val, *lists)), time, diff) for (key, val), time, diff in rows(2**20, 40, 10)]
    shard.append(grown, upto=11, schema=NEW)
    for _ in range(3):
        machine.spine_exert(1 << 20)
    seen |= shard.check()
    compact_due(machine)
    write_rollup(machine)
    gc_and_truncate(machine)
    seen |= shard.check()
    assert seen >= {
        "diffs in a rollup",
        "inline part",
        "listing",
        "narrower bounds",
        "older schema",
        "packed batches",
        "part in blob",
        "rewritten times",
        "zero width",
    }


KEYS = Schema.from_ddl(
    "ok BOOLEAN, f FLOAT, t TIMESTAMP, n TIMESTAMP_NTZ, b BINARY, s SMALLINT, y TINYINT, d DECIMAL(9,2), day DATE, "
    "at STRUCT<x: INT, y: STRING>",
    "",
)
WHEN = datetime(1999, 12, 31, 23, 59, 59, 5)
ROWS: list[tuple[Any, ...]] = [
    (True, 0.5, WHEN.replace(tzinfo=UTC), WHEN, b"\x00", 3, -1, Decimal("-1.25"), date(1960, 2, 3), (1, "a")),
    (False, -0.0, None, None, b"", -300, 5, Decimal("1234567.89"), date(2020, 2, 3), (-7, None)),
    (None, math.nan, None, WHEN, b"\x00\xff\x00", None, None, None, None, None),
    (False, -math.inf, None, None, b"zz", 0, 0, Decimal(0), None, (None, "b\x00")),
]


@pytest.mark.parametrize("inline_bytes_max", [0, 4096])
def test_keys_of_every_type_and_a_value_without_fields(tmp_path: Path, inline_bytes_max: int) -> None:
    """Spec 29.10 to 29.14: no column `val` in a file, a column without fields in an inline part; ordered key bytes."""
    shard = Shard(tmp_path, settings(inline_part_bytes_max=inline_bytes_max))
    for time, key in enumerate(ROWS):
        shard.append([((key, ()), time, 1)], upto=time + 1, schema=KEYS)
    shard.append([((key, ()), len(ROWS), 2) for key in ROWS], upto=len(ROWS) + 1, schema=KEYS)
    assert shard.check() == {"inline part" if inline_bytes_max else "part in blob"}


@pytest.mark.parametrize("place", ["rollup", "part", "entry"])
def test_a_reader_written_from_the_document_refuses_damage(tmp_path: Path, place: str) -> None:
    """Spec 29.1, 29.12: each checksum covers every byte."""
    shard = Shard(tmp_path, settings(inline_part_bytes_max=0))
    shard.append(rows(0, 5, 0), upto=1)
    shard.append(rows(9, 5, 1), upto=2)
    if place == "entry":
        data = reader.entries(shard.log, shard.id)[-1][1]
        with pytest.raises(reader.Unreadable):
            reader.opened("D", "StateDiff", data[:-1] + bytes([data[-1] ^ 1]))
        return
    pattern = "v*/r*" if place == "rollup" else "n*/p*"
    (path, *_) = sorted((shard.blobs / shard.id).glob(pattern))
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    with pytest.raises(reader.Unreadable):
        reader.Rows(shard.blobs, shard.id, reader.open_shard(shard.blobs, shard.log, shard.id), 1)


def test_the_log_of_a_pair_says_what_the_document_says(tmp_path: Path) -> None:
    """Spec 29.15, 29.18: identity, mark, owner and name, where and as they are described."""
    from persist_engine.model.ownership import Owner

    shard = Shard(tmp_path, settings())
    shard.append([], upto=1)
    owner = Owner("op/1", "name space", "n~1")
    shard.client.adopt(owner, shard.id, shard.id, take_over=True)
    in_blob = reader.opened("I", "StoreIdentity", (shard.blobs / "store-identity").read_bytes())
    [(_, head)] = reader.entries(shard.log, "store-identity")[-1:]
    known = reader.opened("I", "StoreIdentity", head)
    assert known.bound
    assert known.store_id == in_blob.store_id
    assert len(known.store_id) == 16
    assert (shard.blobs / shard.id / "created").read_bytes() == b""
    [(first, entry)] = reader.entries(shard.log, f"owner/{shard.id}")
    assert first == 1
    found = reader.opened("O", "ShardOwner", entry)
    assert (found.owner.operator_id, found.owner.namespace, found.owner.name) == ("op/1", "name space", "n~1")
    [(_, entry)] = reader.entries(shard.log, "name/op%2F1/name%20space/n~1")
    assert reader.opened("N", "RegisteredName", entry).shard_id == found.shard_id


def test_a_sent_batch_is_as_the_document_says(tmp_path: Path) -> None:
    """Spec 29.4, 29.10, 6.1: an envelope, the shard, and a hollow batch whose parts lie under their keys."""
    shard = Shard(tmp_path, settings(inline_part_bytes_max=0))
    with shard.client.open_writer(shard.id, OLD, purpose="test") as writer:
        batch = writer.batch(rows(0, 4, 3), lower=2, upper=9)
        message = reader.opened("T", "TransmittableBatch", batch.to_transmittable())
    assert message.shard_id == shard.id.to_bytes()
    assert (reader.time_of(message.batch.desc.lower), reader.time_of(message.batch.desc.upper)) == (2, 9)
    (part,) = message.batch.parts
    table, written = reader.parquet_part((shard.blobs / shard.id / part.hollow.key).read_bytes())
    assert table.num_rows == part.hollow.rows == 4
    assert written == (2, 9, 0)
    assert table.schema.field("key").type == pa.struct(list(OLD.key))


@pytest.mark.redis
def test_a_log_in_redis_is_as_the_document_says(tmp_path: Path) -> None:
    """Spec 29.17, 24.1: the list, the hash, and news of a commit."""
    with redis_server() as server:
        location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"{server.url}?prefix=mine:")
        client, shard = PersistClient.open(location), ShardId.new()
        with client.open_writer(shard, OLD, purpose="test") as writer:
            raw = redis.Redis.from_url(server.url)
            with raw.pubsub() as news:
                news.subscribe(f"mine:{{{shard}}}:n")
                while news.get_message(timeout=10)["type"] != "subscribe":
                    pass
                writer.compare_and_append(rows(0, 3, 0), expected_upper=0, new_upper=1)
                message = news.get_message(timeout=10)
            log, meta = raw.lrange(f"mine:{{{shard}}}:l", 0, -1), raw.hgetall(f"mine:{{{shard}}}:m")
            raw.close()
        client.close()
    diffs = [reader.opened("D", "StateDiff", entry) for entry in log]
    assert [diff.seqno_to for diff in diffs] == [1, 2]
    assert [diff.predecessor for diff in diffs] == [b"", reader.tag_of(log[0])]
    assert set(meta) == {b"e", b"run", b"h", b"l", b"t"}
    assert (meta[b"e"], meta[b"l"], meta[b"h"]) == (b"0", b"1", b"2")
    assert meta[b"t"] == b"2:" + reader.tag_of(log[1]).hex().encode()
    assert message["data"] == b"2 " + log[1]
