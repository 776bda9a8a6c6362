"""The targets of fuzzing (`make fuzz`), one per decoder. Each takes bytes or text and must raise an error of the engine or return a valid
value.

The rule of each target: the decoder raises one of its declared errors, or returns a value that encodes, and decodes to an equal value
again. Anything else (another exception, a crash, a hang, a changed value) is a finding. A checksum in the input is corrected first, because
damage that the checksum detects never reaches the decoder behind it.
"""

from __future__ import annotations

import contextlib
import random
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

import pyarrow as pa
from persist_engine.base.errors import (
    CorruptData,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    SchemaMismatch,
)
from persist_engine.base.version import parse_version
from persist_engine.base.versioned import SeqNo
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.codec import part as part_codec
from persist_engine.codec.batch import (
    decode_batch,
    decode_run_listing,
    decode_transmittable,
    encode_batch,
    encode_run_listing,
    encode_transmittable,
)
from persist_engine.codec.envelope import FORMAT_VERSION, Kind
from persist_engine.codec.inline_part import decode_inline, encode_inline, inline_format_name_of
from persist_engine.codec.keys import blob_key, parse_blob_key
from persist_engine.codec.registry import (
    decode_identity,
    decode_name,
    decode_shard_owner,
    encode_identity,
    encode_name,
    encode_shard_owner,
)
from persist_engine.codec.staging_note import decode_staging_note, encode_staging_note
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model import ids
from persist_engine.model.diff.state_diff import apply
from persist_engine.model.state import SchemaPair, ShardState
from persist_engine.rows.ddl import parse_ddl, print_ddl
from persist_engine.rows.part_stats import bound
from persist_engine.rows.schema import Schema
from persist_engine.rows.words import RowCodec
from persist_engine.storage.urls import parse_url

from persist_kit.fuzz import wire as fuzz_wire
from persist_kit.states import SHARD
from persist_kit.world import SCHEMA as NARROW

V = TypeVar("V")
Mutator = Callable[[bytes, random.Random, Callable[[bytes], bytes]], bytes]

#: Every type that a shard may hold.
WIDE = Schema.from_ddl(
    "id BIGINT NOT NULL, place STRUCT<name: STRING, at: DOUBLE>",
    "b BOOLEAN, i TINYINT, f FLOAT, m DECIMAL(9,2), s STRING, r BINARY, d DATE, t TIMESTAMP, w TIMESTAMP_NTZ",
)
_INLINE_FRONT_BYTES = 10
_OWNED = ids.ShardId.from_bytes(b"\x01" * 16)
_NAME = "name/persist-operator%2Fmain/analytics/flights"
_DURABLE = (CorruptData, Incompatible)
_URLS = {
    "s3": frozenset({"endpoint", "region"}),
    "redis": frozenset({"ack"}),
    "file": frozenset[str](),
    "mem": frozenset[str](),
}
_ID_KINDS = (
    ids.ShardId,
    ids.StoreId,
    ids.WriterId,
    ids.LeasedReaderId,
    ids.CriticalReaderId,
    ids.PartId,
    ids.RollupId,
    ids.RunId,
    ids.IdempotencyToken,
)


_ROW_CODECS = [RowCodec(kind) for kind in (NARROW.key_type, NARROW.val_type, WIDE.key_type, WIDE.val_type)]


class Finding(AssertionError):
    """A decoder broke its rule."""


@dataclass(frozen=True)
class Target:
    """One decoder. `check` raises Finding, or returns whether the decoder accepted the input."""

    name: str
    check: Callable[[bytes], bool]
    mutate: Mutator | None = None
    """Changes an input but keeps its structure valid. None: atheris changes plain bytes."""


def need(condition: bool, text: str) -> None:  # noqa: FBT001 - reads as the assertion it is
    """Raises Finding unless `condition`."""
    if not condition:
        raise Finding(text)


def _comes_back(
    raw: bytes, decode: Callable[[bytes], V], encode: Callable[[V], bytes], refusals: tuple[type[PersistError], ...]
) -> V | None:
    """The value of `raw`, after a check that it encodes and decodes to itself. None when the decoder refuses `raw`."""
    try:
        value = decode(raw)
    except refusals:
        return None
    again = encode(value)
    if again != raw:  # otherwise it encodes to the same bytes
        back = decode(again)
        if back != value:
            raise Finding(f"{value!r} came back as {back!r}")
        if encode(back) != again:
            raise Finding(f"{value!r} is written in two ways")
    return value


# -- messages ---------------------------------------------------------------------------------------------------------


def enveloped(kind: Kind, payload: bytes) -> bytes:
    """`payload` with a valid envelope."""
    front = struct.pack("<4sH", b"PST" + kind.value, FORMAT_VERSION)
    return front + struct.pack("<I", zlib.crc32(payload, zlib.crc32(front))) + payload


def _envelope(data: bytes) -> bool:
    found = [
        _comes_back(data, partial(decode_state_diff, key="fuzz"), encode_state_diff, _DURABLE),
        _comes_back(data, partial(decode_rollup, key="fuzz"), encode_rollup, _DURABLE),
        _comes_back(data, decode_batch, encode_batch, _DURABLE),
        _comes_back(data, decode_transmittable, lambda value: encode_transmittable(*value), _DURABLE),
    ]
    accepted = sum(value is not None for value in found)
    need(accepted <= 1, "one message was taken for two kinds")
    return accepted == 1


def _state_diff(payload: bytes) -> bool:
    decode = partial(decode_state_diff, key="fuzz")
    return _comes_back(enveloped(Kind.STATE_DIFF, payload), decode, encode_state_diff, _DURABLE) is not None


def _rollup(payload: bytes) -> bool:
    decode = partial(decode_rollup, key="fuzz")
    return _comes_back(enveloped(Kind.ROLLUP, payload), decode, encode_rollup, _DURABLE) is not None


def _batch(payload: bytes) -> bool:
    return _comes_back(enveloped(Kind.BATCH, payload), decode_batch, encode_batch, _DURABLE) is not None


def _transmittable(payload: bytes) -> bool:
    data = enveloped(Kind.TRANSMITTABLE_BATCH, payload)
    return _comes_back(data, decode_transmittable, lambda value: encode_transmittable(*value), _DURABLE) is not None


def _listing(payload: bytes) -> bool:
    decode = partial(decode_run_listing, key="fuzz", shard_id=SHARD)
    data = enveloped(Kind.RUN_LISTING, payload)
    return _comes_back(data, decode, partial(encode_run_listing, SHARD), _DURABLE) is not None


def _registry(payload: bytes) -> bool:
    found = [
        _comes_back(
            enveloped(Kind.STORE_IDENTITY, payload), partial(decode_identity, key="fuzz"), encode_identity, _DURABLE
        ),
        _comes_back(
            enveloped(Kind.SHARD_OWNER, payload),
            lambda data: (decode_shard_owner(data, key="fuzz", shard_id=_OWNED),),
            lambda owner: encode_shard_owner(_OWNED, *owner),
            _DURABLE,
        ),
        _comes_back(
            enveloped(Kind.REGISTERED_NAME, payload),
            partial(decode_name, key=_NAME),
            lambda name: encode_name(*name),
            _DURABLE,
        ),
    ]
    return any(value is not None for value in found)


def _staging_note(payload: bytes) -> bool:
    decode = partial(decode_staging_note, key="fuzz", shard_id=SHARD)
    return _comes_back(enveloped(Kind.STAGING_NOTE, payload), decode, encode_staging_note, _DURABLE) is not None


def _applied(payload: bytes) -> bool:
    """The payload of a rollup, followed by that of a diff. The diff applies to the state, or is refused; the resulting state must be
    encodable.
    """
    size = int.from_bytes(payload[:4], "little")
    try:
        before = _state_of(payload[4 : 4 + size])
        diff = decode_state_diff(enveloped(Kind.STATE_DIFF, payload[4 + size :]), key="fuzz")
        diff = replace(diff, seqno_from=before.seqno, seqno_to=before.seqno.next())
        after = apply(before, diff)
    except (*_DURABLE, InvariantViolated, InvalidUsage):
        return False
    data = encode_rollup(Rollup(after))
    need(decode_rollup(data, key="fuzz").state == after, "the state after a diff is not what its rollup says")
    return True


@lru_cache(maxsize=256)
def _state_of(payload: bytes) -> ShardState:
    """The decoded state, cached: most mutations do not change it, and decoding it takes most of an execution."""
    return decode_rollup(enveloped(Kind.ROLLUP, payload), key="fuzz").state


def _mutated_pair(data: bytes, rng: random.Random, scramble: Callable[[bytes], bytes]) -> bytes:
    size = int.from_bytes(data[:4], "little")
    state, diff = data[4 : 4 + size], data[4 + size :]
    if rng.random() < 0.2:
        state = fuzz_wire.mutated(state, rng, scramble)
    else:
        diff = fuzz_wire.mutated_slices(diff, rng, scramble)
    return len(state).to_bytes(4, "little") + state + diff


# -- parts ------------------------------------------------------------------------------------------------------------


def _part(data: bytes) -> bool:
    """Both ways of reading must agree, and their result must survive a write and a read."""
    data = _with_check(data)
    accepted = False
    for schema in (NARROW, WIDE):
        try:
            decoded = part_codec.decode_part(data, key="fuzz", schema=schema)
        except (*_DURABLE, SchemaMismatch):
            continue
        accepted = True
        try:
            written = part_codec.encode_part(decoded.table, desc=decoded.desc, schema=schema)
        except InvariantViolated:  # a sum of diffs beyond int64: refused at a write, and harmless at a read
            continue
        again = part_codec.decode_part(written, key="fuzz", schema=schema)
        need(again.desc == decoded.desc, "the description changed")
        need(part_codec.encode_part(again.table, desc=again.desc, schema=schema) == written, "the rows changed")
    return accepted


def _inline(data: bytes) -> bool:
    """Like `_part`, for inline parts."""
    if len(data) >= _INLINE_FRONT_BYTES:
        data = data[:6] + struct.pack("<I", zlib.crc32(data[_INLINE_FRONT_BYTES:], zlib.crc32(data[:6]))) + data[10:]
    accepted = False
    for schema in (NARROW, WIDE):
        try:
            decoded = decode_inline(data, format_name=inline_format_name_of(schema), key="fuzz", schema=schema)
        except (*_DURABLE, SchemaMismatch):
            continue
        accepted = True
        if not decoded.table.num_rows:
            continue
        written = encode_inline(decoded.table, desc=decoded.desc, schema=schema, bytes_max=1 << 24)
        if written is None:
            raise Finding("what was read cannot be written")
        again = decode_inline(written, format_name=inline_format_name_of(schema), key="fuzz", schema=schema)
        need(again.desc == decoded.desc, "the description changed")
        back = encode_inline(again.table, desc=again.desc, schema=schema, bytes_max=1 << 24)
        need(back == written, "the rows changed")
    return accepted


def _rows(data: bytes) -> bool:
    """One byte that selects the key or the value of a schema, and the bytes of one such row."""
    codec = _ROW_CODECS[data[0] % len(_ROW_CODECS) if data else 0]
    raw = pa.array([data[1:]], pa.large_binary())
    try:
        rows = codec.decode(raw)
    except CorruptData:
        return False
    written = codec.encode(rows)
    if not written.equals(raw) and not codec.encode(codec.decode(written)).equals(written):
        raise Finding(f"{data!r} is written in two ways")
    return True


def _with_check(data: bytes) -> bytes:
    """The file with a correct checksum, if it has a place for one."""
    mark = b"persist-part-crc32="
    at = data.rfind(mark)
    if at < 0:
        return data
    at += len(mark)
    zeros = b"0" * 8
    crc = zlib.crc32(data[at + 8 :], zlib.crc32(zeros, zlib.crc32(data[:at])))
    return data[:at] + b"%08x" % crc + data[at + 8 :]


# -- texts ------------------------------------------------------------------------------------------------------------


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _ddl(data: bytes) -> bool:
    try:
        schema = parse_ddl(_text(data))
    except InvalidUsage:
        return False
    need(parse_ddl(print_ddl(schema)) == schema, f"{print_ddl(schema)!r} declares another schema")
    return True


def _schema(data: bytes) -> bool:
    """Two texts, or two serialized Arrow schemas."""
    accepted = False
    key, _, val = data.partition(b"\xff")
    try:
        schema = Schema.from_ddl(_text(key), _text(val))
    except InvalidUsage:
        pass
    else:
        accepted = True
        need(Schema.from_pair(schema.to_pair()) == schema, "a registered schema came back as another")
    size = int.from_bytes(data[:2], "little")
    try:
        schema = Schema.from_pair(SchemaPair(data[2 : 2 + size], data[2 + size :]))
    except CorruptData:
        return accepted
    need(Schema.from_ddl(schema.key_ddl, schema.val_ddl) == schema, "the DDL of a schema declares another")
    need(Schema.from_pair(schema.to_pair()) == schema, "a registered schema came back as another")
    return True


def _names(data: bytes) -> bool:
    """Blob keys, ids, seqnos and versions: parsers must accept only the exact text that the engine writes."""
    text = _text(data)
    accepted = False
    try:
        key = parse_blob_key(text)
    except InvalidUsage:
        pass
    else:
        accepted = True
        need(blob_key(key.shard_id, key.partial) == text, f"{text!r} is taken for {key}")
    for kind in _ID_KINDS:
        try:
            accepted |= kind.from_bytes(kind(text).to_bytes()) == text
        except InvalidUsage:
            continue
        need(accepted, f"{text!r} is taken for another {kind.what} id")
    with contextlib.suppress(InvalidUsage):
        need(str(SeqNo.parse(text)) == text, f"{text!r} is taken for a seqno")
    try:
        need(".".join(map(str, parse_version(text))) == text, f"{text!r} is taken for a version")
    except InvalidUsage:
        return accepted
    return True


def _url(data: bytes) -> bool:
    try:
        url = parse_url(_text(data), allowed=_URLS)
    except InvalidUsage as error:
        need("hunter2" not in str(error) or b":hunter2@" not in data, f"a message shows the password: {error}")
        return False
    secret = url.password or ""
    # The omitted part of a path is shown as "...", which may resemble a password.
    elsewhere = (url.host + url.path + url.scheme, f"{url.host}...{url.path}")
    is_shown = len(secret) > 6 and secret in url.shown and not any(secret in text for text in elsewhere)
    need(not is_shown, f"shows the password: {url.shown}")
    return True


def _statistics(data: bytes) -> bool:
    """A bound of each type."""
    accepted = False
    for schema in (WIDE.key, WIDE.val):
        for field in schema:
            try:
                value = bound(_text(data), field.type)
            except CorruptData:
                continue
            need(value.type == field.type, f"a bound of {field.type} is {value.type}")
            accepted = True
    return accepted


def _split(data: bytes) -> bool:
    return (
        _comes_back(data, SnapshotSplit.from_bytes, lambda split: split.to_bytes(), (*_DURABLE, InvalidUsage))
        is not None
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("envelope", _envelope),
        Target("state_diff", _state_diff, fuzz_wire.mutated_slices),
        Target("rollup", _rollup, fuzz_wire.mutated),
        Target("apply", _applied, _mutated_pair),
        Target("batch", _batch, fuzz_wire.mutated),
        Target("transmittable", _transmittable, fuzz_wire.mutated),
        Target("listing", _listing, fuzz_wire.mutated),
        Target("registry", _registry, fuzz_wire.mutated),
        Target("staging_note", _staging_note, fuzz_wire.mutated),
        Target("part", _part),
        Target("inline", _inline),
        Target("rows", _rows),
        Target("ddl", _ddl),
        Target("schema", _schema),
        Target("names", _names),
        Target("url", _url),
        Target("statistics", _statistics),
        Target("split", _split),
    )
}

if __name__ == "__main__":
    sys.stdout.write("\n".join(TARGETS) + "\n")
