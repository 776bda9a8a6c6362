"""Parts: Parquet that any reader opens, and no damage that goes unnoticed."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, InvariantViolated, SchemaMismatch
from persist_engine.codec import part as part_codec
from persist_engine.codec import row_groups
from persist_engine.codec.part import checksum, decode_part, encode_part, open_part, verify_part
from persist_engine.model.frontier import Antichain, Description
from persist_engine.rows.schema import Schema
from persist_engine.rows.updates import consolidate, normalise
from persist_kit.strategies import updates_table

SCHEMA = Schema.from_ddl("id BIGINT NOT NULL, s STRING", "v STRUCT<a: INT, b: DOUBLE>, w BINARY")
DESC = Description(Antichain(3), Antichain(None), Antichain(1))
ROWS = [
    ({"id": 1, "s": ""}, {"v": None, "w": b""}, 3, 1),
    ({"id": 1, "s": None}, {"v": {"a": None, "b": -0.0}, "w": None}, 4, -2),
    ({"id": 2, "s": "é"}, {"v": {"a": 5, "b": float("inf")}, "w": b"\x00"}, 2**63 - 1, 7),
]
TABLE = updates_table(SCHEMA, ROWS)
DATA = encode_part(TABLE, desc=DESC, schema=SCHEMA)


def test_metadata_says_what_a_part_is() -> None:
    metadata = pq.read_schema(io.BytesIO(DATA)).metadata
    assert metadata[b"persist.format"] == b"1"
    assert json.loads(metadata[b"persist.desc"]) == {"lower": 3, "upper": None, "since": 1}
    assert json.loads(metadata[b"persist.codecs"]) == ["struct", "struct", "u64", "i64"]
    assert (metadata[b"persist.rows"], metadata[b"persist.diffs_sum"]) == (b"3", b"6")


def test_a_value_without_fields_has_no_column_in_the_file_and_comes_back() -> None:
    schema = Schema.from_ddl("id BIGINT")
    table = updates_table(schema, [({"id": 1}, {}, 0, 1), ({"id": 2}, {}, 0, 1)])
    data = encode_part(table, desc=DESC, schema=schema)
    assert pq.read_schema(io.BytesIO(data)).names == ["key", "time", "diff"]
    assert decode_part(data, key="k", schema=schema).table.equals(table)
    only_val = decode_part(data, key="k", schema=schema, columns=["val"]).table
    assert only_val.to_pylist() == [{"val": {}}, {"val": {}}]


def test_no_rows_are_a_part_too() -> None:
    data = encode_part(TABLE.slice(0, 0), desc=DESC, schema=SCHEMA)
    decoded = decode_part(data, key="k", schema=SCHEMA)
    assert decoded.table.num_rows == 0
    assert decoded.table.schema == SCHEMA.updates_schema


def test_columns_are_picked_in_the_schema_s_order() -> None:
    picked = decode_part(DATA, key="k", schema=SCHEMA, columns=["diff", "val.w", "key.id"]).table
    assert picked.schema == pa.schema(
        [
            ("key", pa.struct([pa.field("id", pa.int64(), nullable=False)])),
            ("val", pa.struct([("w", pa.binary())])),
            ("diff", pa.int64()),
        ]
    )
    assert picked.to_pylist()[2] == {"key": {"id": 2}, "val": {"w": b"\x00"}, "diff": 7}
    with pytest.raises(InvalidUsage, match=r"no column key.x"):
        decode_part(DATA, key="k", schema=SCHEMA, columns=["key.x"])


def test_every_single_flipped_byte_is_noticed() -> None:
    for at in range(len(DATA)):
        damaged = DATA[:at] + bytes([DATA[at] ^ 0x10]) + DATA[at + 1 :]
        with pytest.raises(CorruptData, match="part the-key"):
            verify_part(damaged, key="the-key")


@pytest.mark.parametrize("data", [b"", b"PAR1", DATA[:-1], DATA[1:], DATA + b"\x00", b"PAR1" + bytes(40) + b"PAR1"])
def test_other_bytes_are_no_part(data: bytes) -> None:
    with pytest.raises(CorruptData, match="the-key"):
        decode_part(data, key="the-key", schema=SCHEMA)


def test_a_foreign_parquet_file_is_no_part() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), sink)
    with pytest.raises(CorruptData, match="no part"):
        decode_part(sink.getvalue(), key="the-key", schema=SCHEMA)


def test_the_descriptor_s_checksum_is_believed_over_the_file_s_own() -> None:
    other = encode_part(TABLE.slice(1), desc=DESC, schema=SCHEMA)
    assert decode_part(DATA, key="k", schema=SCHEMA, expected_checksum=checksum(DATA)).table.equals(TABLE)
    with pytest.raises(CorruptData, match="the descriptor says"):
        decode_part(other, key="k", schema=SCHEMA, expected_checksum=checksum(DATA))


def test_a_checksum_of_an_unknown_kind_is_incompatible() -> None:
    with pytest.raises(Incompatible, match="cannot verify the checksum 'blake3:00'"):
        decode_part(DATA, key="k", schema=SCHEMA, expected_checksum="blake3:00")


def rewritten(metadata: dict[str, str]) -> bytes:
    """The part, written anew by another writer of Parquet with these entries changed."""
    stored = pq.read_table(io.BytesIO(DATA))
    sink = io.BytesIO()
    changed = {name.encode(): text.encode() for name, text in metadata.items()}
    pq.write_table(stored.replace_schema_metadata({**stored.schema.metadata, **changed}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    "metadata",
    [
        {"persist.desc": '{"lower": null, "upper": 3, "since": 0}'},
        {"persist.desc": '{"lower": "x", "upper": 3, "since": 0}'},
        {"persist.desc": "nonsense"},
        {"persist.rows": "4"},
        {"persist.format": "x"},
    ],
)
def test_a_sound_file_with_metadata_that_no_code_writes_is_corrupt(metadata: dict[str, str]) -> None:
    data = rewritten(metadata)
    with pytest.raises(CorruptData, match="part the-key"):
        decode_part(data, key="the-key", schema=SCHEMA, expected_checksum=checksum(data))


def test_user_data_that_looks_like_the_check_does_not_mislead_it() -> None:
    schema = Schema.from_ddl("`persist-part-crc32=00000000` STRING")
    table = updates_table(schema, [({"persist-part-crc32=00000000": "persist-part-crc32=11111111"}, {}, 0, 1)])
    data = encode_part(table, desc=DESC, schema=schema)
    assert decode_part(data, key="k", schema=schema).table.equals(table)


@pytest.mark.parametrize("version", [0, 3])
def test_another_format_is_incompatible(version: int) -> None:
    other = rewritten({"persist.format": str(version)})
    with pytest.raises(Incompatible, match=f"part the-key has format {version}, this code reads formats 1 and 2"):
        decode_part(other, key="the-key", schema=SCHEMA, expected_checksum=checksum(other))


def test_a_descriptor_that_names_another_format_is_incompatible() -> None:
    with pytest.raises(
        Incompatible, match="part the-key has format 'parquet/3', this code reads 'parquet/1', 'parquet/2'"
    ):
        open_part(DATA, key="the-key", schema=SCHEMA, format_name="parquet/3", expected_checksum="sha9:00")


def test_a_part_of_another_schema_is_refused_by_column() -> None:
    with pytest.raises(SchemaMismatch, match=r"part the-key .* key.id is BIGINT, the shard's is INT"):
        decode_part(DATA, key="the-key", schema=Schema.from_ddl("id INT NOT NULL, s STRING", SCHEMA.val_ddl))
    with pytest.raises(SchemaMismatch, match="updates schema"):
        encode_part(TABLE, desc=DESC, schema=Schema.from_ddl("id INT"))


def test_nulls_where_updates_have_none_are_refused() -> None:
    holes = TABLE.set_column(2, "time", pa.array([1, None, 2]))
    with pytest.raises(InvariantViolated, match="column time of a part holds nulls"):
        encode_part(holes, desc=DESC, schema=SCHEMA)


NESTED = Schema.from_ddl(
    "id BIGINT",
    "v STRUCT<x: INT NOT NULL, y: STRING NOT NULL, z: STRUCT<w: DECIMAL(5,2) NOT NULL, b: BOOLEAN> NOT NULL>",
)


def test_null_structs_hide_the_nulls_of_their_fields_that_are_not_null() -> None:
    """Python rows, and what Arrow makes of nothing, have nulls below: inline they were taken, and no compaction could ever
    write them.
    """
    full = ((1,), ((5, "a", (1, None)),))
    tables = list(normalise([(((0,), (None,)), 1, 1), (full, 1, 1), (((2,), (None,)), 1, 1)], NESTED))
    val = pa.StructArray.from_arrays([pa.nulls(3, NESTED.val.field("v").type)], fields=list(NESTED.val))
    tables.append(tables[0].set_column(1, tables[0].schema.field(1), pa.chunked_array([val])).slice(1))
    for table in tables:
        assert table.column("val").combine_chunks().field(0).field(0).null_count
        decoded = decode_part(encode_part(table, desc=DESC, schema=NESTED), key="k", schema=NESTED).table
        assert decoded.to_pylist() == table.to_pylist()
        assert encode_part(decoded, desc=DESC, schema=NESTED) == encode_part(table, desc=DESC, schema=NESTED)


@pytest.mark.parametrize(
    ("hole", "name"), [((None, "a", (1, True)), "x"), ((5, "a", None), "z"), ((5, "a", (None,) * 2), "w")]
)
def test_a_null_that_shows_in_a_field_that_is_not_null_is_refused(hole: tuple[Any, ...], name: str) -> None:
    x, y, z = hole
    inner = None if z is None else dict(zip("wb", z, strict=True))
    val = pa.array([{"v": {"x": x, "y": y, "z": inner}}], NESTED.val_type)
    table = updates_table(NESTED, [({"id": 1}, {"v": None}, 1, 1)])
    table = table.set_column(1, table.schema.field(1), pa.chunked_array([val]))
    with pytest.raises(InvariantViolated, match=f"NOT NULL field {name} holds nulls"):
        encode_part(table, desc=DESC, schema=NESTED)


def test_numbers_that_do_not_compress_are_stored_as_they_are() -> None:
    schema = Schema.from_ddl("id BIGINT", "x DOUBLE, price DOUBLE, s STRING")
    x, ids = np.random.default_rng(1).random(3000), np.arange(3000)
    columns = {"x": pa.array(x), "price": pa.array(np.round(x * 1000, 2)), "s": pa.array(ids.astype(str))}
    val = pa.StructArray.from_arrays(list(columns.values()), fields=list(schema.val_type))
    key = pa.StructArray.from_arrays([pa.array(ids)], fields=list(schema.key_type))
    ones = pa.array(np.ones(3000, dtype=np.int64))
    for rows, codec in ((3000, "UNCOMPRESSED"), (500, "ZSTD")):
        table = pa.table([key, val, ones, ones], schema=schema.updates_schema).slice(0, rows)
        data = encode_part(table, desc=DESC, schema=schema)
        group = pq.read_metadata(io.BytesIO(data)).row_group(0)
        codecs = {group.column(each).path_in_schema: group.column(each).compression for each in range(6)}
        assert codecs == dict.fromkeys(codecs, "ZSTD") | {"val.x": codec}
        assert decode_part(data, key="k", schema=schema).table.equals(table)


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (0, 1),
        (1, 1),
        (2048, 1),
        (2049, 2),
        (8192, 4),
        (10_000, 4),
        (32_768, 4),
        (32_769, 5),
        (262_144, 32),
        (600_000, 37),
    ],
)
def test_a_part_of_some_thousand_rows_has_four_row_groups(rows: int, groups: int) -> None:
    table = pa.table({"key": pa.array(range(rows), pa.int64())})
    assert -(-max(1, rows) // row_groups.group_rows(table)) == groups


def test_many_rows_lie_in_row_groups_and_come_back_in_order() -> None:
    schema = Schema.from_ddl("id BIGINT")
    rows = row_groups.DECODED_ROWS + 10
    key = pa.StructArray.from_arrays([pa.array(np.arange(rows))], ["id"])
    ones = pa.array(np.ones(rows, dtype=np.int64))
    table = pa.table([key, part_codec.empty_struct(rows), ones, ones], schema=schema.updates_schema)
    data = encode_part(table, desc=DESC, schema=schema)
    assert pq.ParquetFile(io.BytesIO(data)).num_row_groups == 32
    assert open_part(data, key="k", schema=schema).spans == (tuple(range(31)), (31,))
    decoded = decode_part(data, key="k", schema=schema).table
    assert decoded.equals(table)
    assert consolidate(decoded) is decoded


def test_wide_rows_that_are_short_in_the_file_are_not_all_decoded_at_once() -> None:
    """Rows with few different texts take a few bytes each in the file, which says nothing of their size in memory."""
    schema, rows = Schema.from_ddl("id BIGINT", "text STRING"), 60_000
    texts = pa.array([str(number % 10) * 1000 for number in range(rows)])
    sides = [
        pa.StructArray.from_arrays([array], [name]) for array, name in ((pa.array(range(rows)), "id"), (texts, "text"))
    ]
    ones = pa.array(np.ones(rows, dtype=np.int64))
    table = pa.table([*sides, ones, ones], schema=schema.updates_schema)
    data = encode_part(table, desc=DESC, schema=schema)
    assert len(data) < row_groups.ROW_GROUP_BYTES
    opened = open_part(data, key="k", schema=schema)
    groups = [opened.read_group(group) for group in range(opened.groups)]
    assert pa.concat_tables(groups).equals(table)
    assert max(group.nbytes for group in groups) < 1.5 * row_groups.DECODED_BYTES < table.nbytes


@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "decoded"])
def test_no_thread_of_arrow_holds_the_bytes_when_the_rows_are_there(
    monkeypatch: pytest.MonkeyPatch, is_opened: bool
) -> None:
    """One that lets go of them later needs the interpreter, and aborts a process that ends meanwhile."""
    monkeypatch.setattr(part_codec, "_THREADED_BYTES_MIN", 1)
    schema = Schema.from_ddl("id BIGINT", "name STRING")
    table = updates_table(schema, [({"id": key}, {"name": f"n{key}"}, 3, 1) for key in range(200)])
    view = memoryview(encode_part(table, desc=DESC, schema=schema))
    late, held = 0, sys.getrefcount(view)
    for _ in range(100):
        if is_opened:
            rows = open_part(view, key="k", schema=schema).read_group(0, use_threads=True)
        else:
            rows = decode_part(view, key="k", schema=schema).table
        late += sys.getrefcount(view) > held
        assert rows.num_rows == 200
    assert late == 0
