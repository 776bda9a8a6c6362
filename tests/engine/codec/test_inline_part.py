"""Inline parts: bit for bit there and back, and every damage named."""

from __future__ import annotations

import struct
import zlib

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import CorruptData, Incompatible, InvariantViolated, SchemaMismatch
from persist_engine.codec.inline_part import decode_inline, encode_inline, inline_format_name_of
from persist_engine.codec.part import DecodedPart
from persist_engine.model.frontier import EMPTY, Antichain, Description
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import normalise
from persist_kit import strategies
from persist_kit.depth import draws

SCHEMA = Schema.from_ddl("id BIGINT NOT NULL, s STRING", "v STRUCT<x: DOUBLE, t: TIMESTAMP>")
ROWS = [
    (((1, "a"), ((float("nan"), None),)), 3, 1),
    (((2, None), (None,)), 4, -1),
    (((3, ""), ((-0.0, 5),)), 4, 2**62),
]
DESC = Description(Antichain(3), EMPTY, Antichain(0))
(TABLE,) = normalise(ROWS[:2], SCHEMA)
MUCH = 1 << 20


def encoded(table: pa.Table = TABLE, desc: Description = DESC, schema: Schema = SCHEMA) -> bytes:
    data = encode_inline(table, desc=desc, schema=schema, bytes_max=MUCH)
    assert data is not None
    return data


def sealed(raw: bytearray) -> bytes:
    """With the checksum that belongs to them."""
    raw[6:10] = struct.pack("<I", zlib.crc32(raw[10:], zlib.crc32(raw[:6])))
    return bytes(raw)


def decoded(data: bytes, schema: Schema = SCHEMA, format_name: str | None = None) -> DecodedPart:
    format_name = inline_format_name_of(schema) if format_name is None else format_name
    return decode_inline(data, format_name=format_name, key="the-key", schema=schema)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=draws(25), deadline=None)
def test_decode_gives_what_was_encoded(data: st.DataObject) -> None:
    schema = data.draw(strategies.schemas())
    table = data.draw(strategies.updates(schema))
    desc = data.draw(strategies.descriptions())
    if table.num_rows == 0:
        assert encode_inline(table, desc=desc, schema=schema, bytes_max=MUCH) is None
        return
    part = decoded(encoded(table, desc, schema), schema)
    assert part.desc == desc
    assert part.table.schema == table.schema
    assert repr(part.table.to_pylist()) == repr(table.to_pylist())
    assert encoded(part.table, desc, schema) == encoded(table, desc, schema)


def test_slices_and_chunks_are_encoded_as_what_they_show() -> None:
    rows = pa.concat_tables([TABLE, TABLE, TABLE])
    assert repr(decoded(encoded(rows.slice(1, 4))).table.to_pylist()) == repr(rows.slice(1, 4).to_pylist())
    assert encoded(rows.slice(2, 2)) == encoded()


def test_the_limit_is_exclusive_and_counts_every_byte() -> None:
    size = len(encoded())
    assert encode_inline(TABLE, desc=DESC, schema=SCHEMA, bytes_max=size) is None
    assert encode_inline(TABLE, desc=DESC, schema=SCHEMA, bytes_max=size + 1) == encoded()


@given(st.integers(0, len(encoded()) - 1), st.integers(1, 255))
@settings(max_examples=draws(200), deadline=None)
def test_any_changed_byte_is_found(at: int, change: int) -> None:
    data = bytearray(encoded())
    data[at] ^= change
    with pytest.raises(CorruptData, match="the-key"):
        decoded(bytes(data))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=draws(200), deadline=None)
def test_bytes_under_a_right_checksum_are_refused_or_are_sound_rows(data: st.DataObject) -> None:
    """Bytes with a forged checksum end in an error of ours or in a table that holds its rules."""
    raw = bytearray(encoded())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(10, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        part = decoded(sealed(raw))
    except (CorruptData, SchemaMismatch):
        return
    part.table.validate(full=True)
    assert all(column.null_count == 0 for column in part.table.columns)


@pytest.mark.parametrize("data", [b"", b"PSTI", encoded()[:-1], b"x" + encoded()[1:], encoded() + b"x"])
def test_what_is_no_inline_part_is_named(data: bytes) -> None:
    with pytest.raises(CorruptData, match="the-key"):
        decoded(data)


@pytest.mark.parametrize("version", [0, 3])
def test_other_formats_are_refused(version: int) -> None:
    data = bytearray(encoded())
    data[4:6] = struct.pack("<H", version)
    with pytest.raises(Incompatible, match=f"the-key has inline format {version}, this code reads formats 1 and 2"):
        decoded(sealed(data))


@pytest.mark.parametrize("name", ["", "arrow/0", "arrow/3", "parquet/1"])
def test_a_descriptor_that_names_another_format_is_refused(name: str) -> None:
    with pytest.raises(Incompatible, match=f"the-key.*'{name}'"):
        decoded(encoded(), format_name=name)


def test_another_schema_and_nulls_are_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"the-key.*key\.id is"):
        decoded(encoded(), Schema.from_ddl("id INT NOT NULL, s STRING", SCHEMA.val_ddl))
    with pytest.raises(SchemaMismatch, match="updates schema"):
        encoded(TABLE.drop_columns(["val"]))
    holes = TABLE.set_column(2, TABLE.schema.field(2), pa.array([None, 1], pa.int64()))
    with pytest.raises(InvariantViolated, match="nulls"):
        encoded(holes)
