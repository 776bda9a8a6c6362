"""A reader of shards on `file://` and `sqlite://`, written from docs/spec.md, section 29, alone.

Imports nothing of the engine: messages come from `proto/`, versions from the table of rule 29.2. It is no product: it holds
whole shards in memory and looks at every row by itself. Its errors say which rule the bytes break.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
import struct
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]

Row = tuple[Any, Any]


class Unreadable(Exception):
    """Bytes that break a rule of the specification."""


def need(condition: object, rule: str, text: str) -> None:
    if not condition:
        raise Unreadable(f"spec {rule}: {text}")


# -- the document and its messages -------------------------------------------------------------------------------------


def versions() -> dict[str, int]:
    """Kind to newest version, as the table of 29.2 has them."""
    text = (ROOT / "docs" / "spec.md").read_text()
    table = text.split("**29.2**")[1].split("**29.3**")[0]
    return {
        kind: int(version) for kind, version in re.findall(r"^\| .+ \| `?(\w+)`? \| (\d+) \|$", table, re.MULTILINE)
    }


def messages() -> dict[str, Any]:
    """Every message of `proto/`, by name."""
    folder = ROOT / "proto"
    sources = sorted((folder / "persist_engine" / "pb").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "all.bin"
        well_known = resources.files("grpc_tools") / "_proto"
        arguments = [f"-I{folder}", f"-I{well_known}", f"--descriptor_set_out={out}", "--include_imports"]
        assert protoc.main(["protoc", *arguments, *map(str, sources)]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for each in files.file:
        pool.Add(each)
    classes = message_factory.GetMessageClassesForFiles([each.name for each in files.file], pool)
    return {name.rpartition(".")[2]: kind for name, kind in classes.items()}


VERSIONS, MESSAGES = versions(), messages()


def opened(kind: str, name: str, data: bytes) -> Any:
    """The message in an envelope (29.1)."""
    need(len(data) >= 10 and data[:3] == b"PST", "29.1", "no envelope")
    version, crc = struct.unpack_from("<HI", data, 4)
    need(zlib.crc32(data[10:], zlib.crc32(data[:6])) == crc, "29.1", "the checksum does not match")
    need(data[3:4].decode() == kind, "29.1", f"kind {data[3:4]!r} where {kind} belongs")
    need(version <= VERSIONS[kind], "29.2", f"version {version} of {kind}")
    return MESSAGES[name].FromString(data[10:])


def time_of(message: Any, *, rule: str = "29.4") -> float:
    """A frontier's time; infinity for the empty one."""
    need(len(message.elements) <= 1, rule, "a frontier of several times")
    return message.elements[0] if message.elements else math.inf


# -- the log -----------------------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """What a reader needs of a state: hollow batches by their bytes, those of zero width by spine id."""

    seqno: int = 0
    tag: bytes = b""
    since: float = 0
    schemas: dict[int, Any] = field(default_factory=dict)
    batches: dict[bytes, Any] = field(default_factory=dict)
    thin: dict[tuple[int, int], Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def add(self, batch: Any, spine_id: tuple[int, int] | None) -> None:
        if time_of(batch.desc.lower) == time_of(batch.desc.upper):
            need(spine_id is not None and spine_id not in self.thin, "29.8", "a batch of zero width without an id")
            self.thin[spine_id] = batch
            return
        key = batch.SerializeToString(deterministic=True)
        need(key not in self.batches, "29.8", "an insert over an existing batch")
        self.batches[key] = batch

    @property
    def upper(self) -> float:
        return max((time_of(batch.desc.upper) for batch in self.batches.values()), default=0)


def tag_of(entry: bytes) -> bytes:
    return hashlib.blake2b(entry, digest_size=16).digest()


def entries(log_file: Path, key: str) -> list[tuple[int, bytes]]:
    """The log of a consensus key (29.16)."""
    connection = sqlite3.connect(f"file:{log_file}?mode=ro", uri=True)
    query = "SELECT sequence_number, data FROM consensus WHERE shard = ? ORDER BY sequence_number"
    found = connection.execute(query, (key,)).fetchall()
    connection.close()
    return found


def changes(diff: Any) -> list[tuple[int, bytes, bytes | None, bytes | None]]:
    """(field, key, from, to) of every change (29.5); None for a side that is not there."""
    columns = diff.field_diffs
    need(len(columns.fields) == len(columns.types), "29.5", "fields and types differ in number")
    need(sum(columns.lens) == len(columns.data), "29.5", "the lengths do not add up")
    slices, at = [], 0
    for size in columns.lens:
        slices.append(columns.data[at : at + size])
        at += size
    out, rest = [], iter(slices)
    for number, kind in zip(columns.fields, columns.types, strict=True):
        need(1 <= number <= 17, "29.5", f"field {number}")
        key = next(rest)
        match kind:
            case 0:
                out.append((number, key, None, next(rest)))
            case 1:
                out.append((number, key, next(rest), next(rest)))
            case _:
                out.append((number, key, next(rest), None))
    need(next(rest, None) is None, "29.5", "more slices than changes need")
    return out


def spine_id(message: Any) -> tuple[int, int]:
    return message.lo, message.hi


def apply(contents: Contents, entry: bytes, shard: bytes) -> None:
    """The fields that contents depend on (29.8)."""
    diff = opened("D", "StateDiff", entry)
    need(diff.seqno_from == contents.seqno and diff.seqno_to == contents.seqno + 1, "29.5", "a gap in the log")
    need(diff.predecessor == contents.tag, "29.8", "the entry follows another one")
    need(diff.shard_id == shard, "29.5", "the entry of another shard")
    for number, key, old, new in sorted(changes(diff), key=lambda change: change[3] is not None):
        match number:
            case 11:
                need(old is not None and new is not None, "8.2", "since is only updated")
                need(time_of(MESSAGES["Antichain"].FromString(old)) == contents.since, "8.4", "another old since")
                contents.since = time_of(MESSAGES["Antichain"].FromString(new))
            case 9:
                assert new is not None
                contents.schemas[MESSAGES["U64"].FromString(key).value] = MESSAGES["SchemaPair"].FromString(new)
            case 12 | 13:
                batch = MESSAGES["HollowBatch"]
                if number == 12:
                    before, after = (key if old is not None else None), (key if new is not None else None)
                    found_id = None
                else:
                    before, after = old, new
                    found_id = spine_id(MESSAGES["SpineId"].FromString(key))
                if before is not None:
                    gone = batch.FromString(before).SerializeToString(deterministic=True)
                    there = contents.batches.pop(gone, None) if number == 12 else contents.thin.pop(found_id, None)
                    need(there is not None, "8.4", "what is deleted is not there")
                if after is not None:
                    contents.add(batch.FromString(after), found_id)
    contents.seqno, contents.tag = diff.seqno_to, tag_of(entry)


def open_shard(blobs: Path, log_file: Path, shard: str) -> Contents:
    """Rule 29.8, steps 1 to 4."""
    log = entries(log_file, shard)
    need(log, "29.8", f"no shard {shard}")
    own = bytes.fromhex(shard[1:].replace("-", ""))
    key = opened("D", "StateDiff", log[-1][1]).latest_rollup_key
    rollup = opened("R", "Rollup", (blobs / shard / key).read_bytes())
    state = rollup.state
    need(f"v{state.seqno}" == key.split("/")[0] and state.shard_id == own, "29.6", "another rollup")
    contents = Contents(state.seqno, state.tag, time_of(state.trace.since))
    contents.schemas = {each.id: each.schema for each in state.schemas}
    for diff in rollup.diffs[-1:]:
        need(diff.seqno == state.seqno and tag_of(diff.data) == state.tag, "29.6", "the last diff is another entry")
        contents.seen.add("diffs in a rollup")
    for stored in state.trace.stored:
        data = stored.batches
        if stored.unpacked_bytes:
            data = pa.decompress(data, decompressed_size=stored.unpacked_bytes, codec="zstd", asbytes=True)
            contents.seen.add("packed batches")
        held = MESSAGES["StoredBatches"].FromString(data)
        need(len(held.ids) == len(held.batches) == stored.count, "29.7", "another number of batches")
        need(sum(batch.rows for batch in held.batches) == stored.rows, "29.7", "another number of rows")
        for each_id, batch in zip(held.ids, held.batches, strict=True):
            contents.add(batch, spine_id(each_id))
    for batch in state.trace.legacy_batches:
        contents.add(batch, None)
    for seqno, entry in log:
        if seqno == state.seqno:
            need(tag_of(entry) == state.tag, "29.8", "the entry of the rollup is another one")
        elif seqno == contents.seqno + 1:
            apply(contents, entry, own)
    need(contents.seqno == log[-1][0], "29.8", "the log does not lead to its end")
    return contents


# -- parts -------------------------------------------------------------------------------------------------------------

TYPES = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}


def fields_of(ddl: str) -> list[pa.Field]:
    """The fields that DDL in its printed form declares (29.13, 26.1)."""
    tokens = re.findall(r"`(?:[^`]|``)*`|\w+|[<>(),:]", ddl)
    at = 0

    def take(*expected: str) -> str:
        nonlocal at
        token = tokens[at] if at < len(tokens) else ""
        need(not expected or token in expected, "26.1", f"{token!r} in {ddl!r}")
        at += 1
        return token

    def peek() -> str:
        return tokens[at] if at < len(tokens) else ""

    def data_type() -> pa.DataType:
        name = take()
        if name == "DECIMAL":
            take("(")
            precision = int(take())
            take(",")
            scale = int(take())
            take(")")
            return pa.decimal128(precision, scale)
        if name == "STRUCT":
            take("<")
            inner = declared(":")
            take(">")
            return pa.struct(inner)
        if name in ("ARRAY", "MAP"):
            take("<")
            key = data_type() if name == "MAP" else None
            if key is not None:
                take(",")
            value = data_type()
            take(">")
            return pa.list_(pa.field("element", value)) if key is None else pa.map_(key, value)
        return TYPES[name]

    def declared(mark: str) -> list[pa.Field]:
        out = []
        while peek() not in ("", ">"):
            name = take()
            name = name[1:-1].replace("``", "`") if name.startswith("`") else name
            if mark:
                take(mark)
            kind, nullable = data_type(), True
            if peek() == "NOT":
                take("NOT")
                take("NULL")
                nullable = False
            out.append(pa.field(name, kind, nullable=nullable))
            if peek() == ",":
                take(",")
        return out

    return declared("")


def inline_part(data: bytes) -> tuple[pa.Table, tuple[float, float, float]]:
    """Rows and description of an inline part (29.13)."""
    need(data[:4] == b"PSTI", "29.13", "no inline part")
    version, crc = struct.unpack_from("<HI", data, 4)
    need(zlib.crc32(data[10:], zlib.crc32(data[:6])) == crc, "29.13", "the checksum does not match")
    need(version <= VERSIONS["PSTI"], "29.2", f"version {version} of inline parts")
    closed, *bounds, key_bytes, val_bytes = struct.unpack_from("<BQQQHH", data, 10)
    at = 39
    key_ddl, val_ddl = data[at : at + key_bytes].decode(), data[at + key_bytes : at + key_bytes + val_bytes].decode()
    schema = pa.schema(
        [
            ("key", pa.struct(fields_of(key_ddl))),
            ("val", pa.struct(fields_of(val_ddl))),
            ("time", pa.int64()),
            ("diff", pa.int64()),
        ]
    )
    message = pa.py_buffer(data[at + key_bytes + val_bytes :])
    table = pa.Table.from_batches([pa.ipc.read_record_batch(message, schema)])
    lower, upper, since = (math.inf if closed >> bit & 1 else time for bit, time in enumerate(bounds))
    return table, (lower, upper, since)


def parquet_part(data: bytes) -> tuple[pa.Table, tuple[float, float, float]]:
    """Rows and description of a part in blob (29.12)."""
    file = pq.ParquetFile(pa.BufferReader(data))
    metadata = {name.decode(): value.decode() for name, value in file.schema_arrow.metadata.items() if name[:1] == b"p"}
    need(int(metadata["persist.format"]) <= VERSIONS["Parquet"], "29.2", "a newer part")
    need(json.loads(metadata["persist.codecs"]) == ["struct", "struct", "u64", "i64"], "1.4", "other codecs")
    mark = b"persist-part-crc32="
    at = data.rindex(mark) + len(mark)
    zeroed = data[:at] + b"00000000" + data[at + 8 :]
    need(data[at : at + 8] == b"%08x" % zlib.crc32(zeroed), "29.12", "the check in the file does not match")
    table = file.read()
    need(table.num_rows == int(metadata["persist.rows"]), "29.12", "another number of rows")
    total = (sum(table.column("diff").to_pylist()) + 2**63) % 2**64 - 2**63
    need(total == int(metadata["persist.diffs_sum"]), "29.12", "another sum of diffs")
    desc = json.loads(metadata["persist.desc"])
    lower, upper, since = (math.inf if desc[name] is None else desc[name] for name in ("lower", "upper", "since"))
    return table, (lower, upper, since)


def check_row_groups(data: bytes, footing: Any) -> None:
    """The footer that state describes, and the row groups that the footer describes (29.12)."""
    footer = data[-footing.size_bytes :]
    need(crc_text(footer) == footing.checksum, "29.12", "another footer")
    metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
    groups = json.loads(metadata.metadata[b"persist.groups"])["groups"]
    checks = metadata.metadata[b"persist.group_checks"].removeprefix(b"persist-group-crc32s=")
    need(len(groups) * 8 == len(checks) and len(groups) == metadata.num_row_groups, "29.12", "another number of groups")
    for index in range(metadata.num_row_groups):
        columns = [metadata.row_group(index).column(at) for at in range(metadata.row_group(index).num_columns)]
        starts = [each.dictionary_page_offset or each.data_page_offset for each in columns]
        end = max(start + each.total_compressed_size for start, each in zip(starts, columns, strict=True))
        found = b"%08x" % zlib.crc32(data[min(starts) : end])
        need(found == checks[8 * index : 8 * index + 8], "29.12", "a row group does not match its check")


def crc_text(data: bytes) -> str:
    return f"crc32:{zlib.crc32(data):08x}"


def key_bytes(value: Any, kind: pa.DataType) -> bytes:
    """A field of a key as ordered bytes (29.14)."""
    if pa.types.is_struct(kind):
        inner = b"".join(key_bytes(None if value is None else value[each.name], each.type) for each in kind)
        return key_bytes(value is None, pa.bool_()) + inner
    if value is None:
        return b"\x02"
    if pa.types.is_boolean(kind):
        return b"\x01" + bytes([value])
    if pa.types.is_floating(kind):
        if math.isnan(value):
            return b"\x01" + b"\xff" * 8
        (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))
        return b"\x01" + (bits ^ (2**64 - 1 if bits >> 63 else 1 << 63)).to_bytes(8, "big")
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        raw = value.encode() if isinstance(value, str) else value
        return b"\x01" + raw.replace(b"\x00", b"\x00\xff") + b"\x00\x00"
    if pa.types.is_decimal(kind):
        number, width = int(value.scaleb(kind.scale)), 16
    else:
        width = kind.bit_width // 8
        number = pa.scalar(value, kind).cast(pa.int32() if width == 4 else pa.int64()).as_py()
    return b"\x01" + (number + (1 << (8 * width - 1))).to_bytes(width, "big")


def check_descriptor(part: Any, table: pa.Table) -> None:
    """What state says of a part's rows: the least key (29.14), bounds and null counts (29.10)."""
    key = table.column("key").type
    least = min(
        b"".join(key_bytes(row[each.name], each.type) for each in key) for row in table.column("key").to_pylist()
    )
    need(part.key_lower == least[:100], "29.14", "another least key")
    times = table.column("time").to_pylist()
    need((part.stats.time_min, part.stats.time_max) == (min(times), max(times)), "29.10", "other bounds of time")
    need(part.stats.diff_min == min(table.column("diff").to_pylist()), "29.10", "another least diff")
    for each in part.stats.columns:
        path = json.loads(each.column) if each.column.startswith("[") else each.column.split(".", 1)
        column = [row[path[0]] for row in table.select([path[0]]).to_pylist()]
        for name in path[1:]:
            column = [None if value is None else value[name] for value in column]
        need(each.null_count == sum(value is None for value in column), "29.10", f"nulls of {path}")
        present = [value for value in column if isinstance(value, int | str)]
        if each.HasField("lower") and present:
            need(json.loads(each.lower) <= min(present) and max(present) <= json.loads(each.upper), "29.10", f"{path}")


class Rows:
    """The contents of one shard at one time (29.9)."""

    def __init__(self, blobs: Path, shard: str, contents: Contents, as_of: int) -> None:
        need(contents.since <= as_of < contents.upper, "29.9", f"{as_of} cannot be read")
        self._folder, self._own = blobs / shard, bytes.fromhex(shard[1:].replace("-", ""))
        self._as_of = as_of
        newest = contents.schemas[max(contents.schemas)]
        sides = (pa.ipc.read_schema(pa.py_buffer(raw)) for raw in (newest.key, newest.val))
        self._key, self._val = (pa.struct(list(side)) for side in sides)
        self.seen: set[str] = set()
        """What was met: for the test, which wants to have met everything."""
        self.counts: Counter[Row] = Counter()
        for batch in contents.batches.values():
            if time_of(batch.desc.lower) <= as_of:
                for part in batch.parts:
                    self._read(part, batch, rewrite=None)
        self.counts = Counter({row: count for row, count in self.counts.items() if count})

    def _read(self, part: Any, batch: Any, *, rewrite: float | None) -> None:
        kind = part.WhichOneof("part")
        part = getattr(part, kind)
        if rewrite is None and part.HasField("ts_rewrite"):
            rewrite = time_of(part.ts_rewrite)
        if kind == "run":
            self.seen.add("listing")
            data = (self._folder / part.key).read_bytes()
            need(crc_text(data) == part.checksum and len(data) == part.size_bytes, "29.11", "another listing")
            listing = opened("L", "RunListing", data)
            need(listing.shard_id == self._own and listing.parts, "29.11", "the listing of another shard")
            for below in listing.parts:
                self._read(below, batch, rewrite=rewrite)
            return
        if kind == "inline":
            self.seen.add("inline part")
            need(part.format in formats("arrow", "PSTI"), "29.13", f"format {part.format}")
            table, written = inline_part(part.data)
        else:
            self.seen.add("part in blob")
            need(part.format in formats("parquet", "Parquet"), "29.12", f"format {part.format}")
            data = (self._folder / part.key).read_bytes()
            need(crc_text(data) == part.checksum and len(data) == part.size_bytes, "29.12", "the checksum in state")
            table, written = parquet_part(data)
            check_descriptor(part, table)
            check_row_groups(data, part.footer)
        need(table.num_rows == part.rows, "2.4", "another number of rows")
        lower, upper, since = (time_of(getattr(batch.desc, name)) for name in ("lower", "upper", "since"))
        if (lower, upper) == written[:2]:
            need(since == written[2], "10.8", "another since")
        else:
            self.seen.add("narrower bounds" if rewrite is None else "rewritten times")
            fits = written[0] <= lower and (rewrite is not None or upper <= written[1]) and written[2] == 0
            need(fits, "10.8", "bounds that the part was not written under")
        self._count(table, lower, upper, rewrite)

    def _count(self, table: pa.Table, lower: float, upper: float, rewrite: float | None) -> None:
        keys = table.column("key").to_pylist()
        vals = table.column("val").to_pylist() if "val" in table.column_names else [{}] * len(keys)
        if table.column("key").type != self._key or (
            "val" in table.column_names and table.column("val").type != self._val
        ):
            self.seen.add("older schema")
        times, diffs = table.column("time").to_pylist(), table.column("diff").to_pylist()
        for key, val, time, diff in zip(keys, vals, times, diffs, strict=True):
            at = time if rewrite is None else max(time, rewrite)
            if lower <= at < upper and at <= self._as_of:
                self.counts[canonical(key, self._key), canonical(val, self._val)] += diff


def formats(name: str, kind: str) -> list[str]:
    """The formats of parts (29.2)."""
    return [f"{name}/{version}" for version in range(1, VERSIONS[kind] + 1)]


def canonical(value: Any, kind: pa.DataType) -> Any:
    """A hashable value, as the type `kind` shows it (26.2, 26.4)."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return tuple((each.name, canonical(value.get(each.name), each.type)) for each in kind)
    if pa.types.is_list(kind):
        return tuple(canonical(each, kind.value_type) for each in value)
    if pa.types.is_map(kind):
        return tuple((canonical(key, kind.key_type), canonical(each, kind.item_type)) for key, each in value)
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value
