"""The stored bytes decode to the values they were made of, and this code still writes the same."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from persist_engine.base.errors import CorruptData
from persist_engine.codec.batch import decode_run_listing, decode_transmittable
from persist_engine.codec.bloom import PartFilters, wrong_filters
from persist_engine.codec.deletions import decode_deletions
from persist_engine.codec.inline_part import decode_inline
from persist_engine.codec.part import decode_part
from persist_engine.codec.registry import decode_identity, decode_name, decode_shard_owner
from persist_engine.codec.row_groups import footing_of
from persist_engine.codec.staging_note import decode_staging_note
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.frontier import Antichain
from persist_engine.model.state import SourceProgress
from persist_engine.pb import state_pb2
from persist_spark.streaming.position import decode_position

FOLDER = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_rewrite", FOLDER / "rewrite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def test_the_stored_messages_decode_to_the_values_they_were_made_of(golden: ModuleType) -> None:
    assert decode_transmittable(stored("batch.bin")) == (golden.SHARD, golden.VERSION, golden.batch())
    assert decode_transmittable(stored("batch-of-runs.bin")) == (golden.SHARD, golden.VERSION, golden.run_batch())
    listing = decode_run_listing(stored("run-listing.bin"), key="golden", shard_id=golden.SHARD)
    assert listing == golden.run_batch().parts
    assert decode_state_diff(stored("diff.bin"), key="golden") == golden.state_diff()


def test_the_stored_clock_of_a_counter(golden: ModuleType) -> None:
    diff = decode_state_diff(stored("diff-counter.bin"), key="golden")
    assert diff == golden.counting_diff()
    assert [(each.key, each.to) for each in diff.progress] == [
        ("persist:clock", SourceProgress(b"counter", Antichain(0)))
    ]


def test_the_stored_diff_has_a_change_in_every_collection(golden: ModuleType) -> None:
    diff = golden.state_diff()
    assert not [each.name for each in fields(diff) if each.name != "tag" and not getattr(diff, each.name)]


@pytest.mark.parametrize("lazily", [False, True])
def test_the_stored_rollups_decode_to_their_states(golden: ModuleType, lazily: bool) -> None:  # noqa: FBT001
    """The packed one not byte for byte: how bytes are compressed is the library's to choose."""
    packed = stored("rollup-packed.bin")
    assert decode_rollup(stored("rollup.bin"), key="golden", lazily=lazily) == golden.rollup()
    assert decode_rollup(packed, key="golden", lazily=lazily) == golden.packed_rollup()
    assert any(each.unpacked_bytes for each in state_pb2.Rollup.FromString(packed[10:]).state.trace.stored)
    flat = decode_rollup(stored("rollup-flat.bin"), key="golden", lazily=lazily)
    assert flat == golden.flat_rollup()
    assert not flat.state.trace.structured


@pytest.mark.parametrize(
    "name",
    [
        "batch.bin",
        "run-listing.bin",
        "diff.bin",
        "rollup.bin",
        "identity.bin",
        "owner.bin",
        "name.bin",
        "deletions.bin",
        "staging-note.bin",
    ],
)
def test_every_stored_message_is_of_the_one_format(name: str) -> None:
    assert stored(name)[4:6] == b"\1\0"


def test_the_stored_identity_and_registry_decode_to_the_values_they_were_made_of(golden: ModuleType) -> None:
    key = "name/persist-operator%2Fmain/analytics/flights"
    assert decode_identity(stored("identity.bin"), key="golden") == golden.STORE
    assert decode_shard_owner(stored("owner.bin"), key="golden", shard_id=golden.SHARD) == golden.OWNER
    assert decode_name(stored("name.bin"), key=key) == (golden.OWNER, golden.SHARD)


@pytest.mark.parametrize(
    "name",
    [
        "batch.bin",
        "batch-of-runs.bin",
        "run-listing.bin",
        "diff.bin",
        "diff-counter.bin",
        "rollup.bin",
        "rollup-flat.bin",
        "identity.bin",
        "owner.bin",
        "name.bin",
        "deletions.bin",
        "deletions-intended.bin",
        "staging-note.bin",
        "position.json",
    ],
)
def test_messages_are_still_written_byte_for_byte(golden: ModuleType, name: str) -> None:
    assert golden.files()[name] == stored(name)


@pytest.mark.parametrize(("name", "value"), [("deletions.bin", "DELETIONS"), ("deletions-intended.bin", "INTENTION")])
def test_the_stored_records_of_deletions_decode_to_the_values_they_were_made_of(
    golden: ModuleType, name: str, value: str
) -> None:
    """Spec 29.19."""
    assert decode_deletions(stored(name), key="golden", shard_id=golden.SHARD) == getattr(golden, value)


def test_the_stored_position_of_a_stream_decodes_to_the_value_it_was_made_of(golden: ModuleType) -> None:
    assert decode_position(stored("position.json"), sink_id="ns/s") == golden.POSITION


def test_the_stored_part_decodes_to_its_rows(golden: ModuleType) -> None:
    """Not byte for byte: Parquet files name the Arrow release that wrote them."""
    part = decode_part(stored("part.parquet"), key="golden", schema=golden.SCHEMA)
    assert repr(part.table.to_pylist()) == repr(golden.table().to_pylist())
    assert part.table.schema == golden.table().schema
    assert part.desc == golden.DESC


def test_the_stored_part_with_a_column_as_it_is_decodes_to_its_rows(golden: ModuleType) -> None:
    data = stored("part-dense.parquet")
    group = pq.read_metadata(io.BytesIO(data)).row_group(0)
    assert [group.column(each).compression for each in range(5)] == ["ZSTD", "UNCOMPRESSED", *["ZSTD"] * 3]
    assert decode_part(data, key="golden", schema=golden.DENSE).table == golden.dense_table()


def test_the_filters_of_the_stored_part_hold_its_values(golden: ModuleType) -> None:
    data = stored("part-filtered.parquet")
    footing = footing_of(data, golden.FILTERED)
    assert footing.filters_bytes == 978
    assert list(wrong_filters(data, footing, key="golden")) == []
    rows = decode_part(data, key="golden", schema=golden.SCHEMA).table.to_pylist()
    assert repr(rows) == repr(golden.table().to_pylist())
    start = len(data) - footing.size_bytes - footing.filters_bytes
    metadata = pq.read_metadata(io.BytesIO(data))
    filters = PartFilters.read(data[start : len(data) - footing.size_bytes], start=start, metadata=metadata)
    assert filters is not None
    texts = {row["val"]["s"] for row in rows} - {None}
    assert not any(filters.lacks(0, ("val", "s"), text) for text in texts)
    assert all(filters.lacks(0, ("val", "s"), f"{text} and more") for text in texts)


def test_the_stored_inline_part_decodes_to_its_rows(golden: ModuleType) -> None:
    """Not byte for byte either: how a record batch is laid out is Arrow's to choose."""
    part = decode_inline(stored("inline.bin"), format_name="arrow/1", key="golden", schema=golden.SCHEMA)
    assert repr(part.table.to_pylist()) == repr(golden.table().to_pylist())
    assert part.table.schema == golden.table().schema
    assert part.desc == golden.DESC


def test_the_stored_parts_with_lists_decode_to_their_rows(golden: ModuleType) -> None:
    part = decode_part(stored("part-lists.parquet"), key="golden", schema=golden.LISTS)
    inline = decode_inline(stored("inline-lists.bin"), format_name="arrow/2", key="golden", schema=golden.LISTS)
    for found in (part, inline):
        assert repr(found.table.to_pylist()) == repr(golden.lists_table().to_pylist())
        assert found.table.schema == golden.lists_table().schema
        assert found.desc == golden.DESC


def test_a_part_with_lists_has_a_format_of_its_own(golden: ModuleType) -> None:
    """Spec 29.2: code from before lists refuses it by the number of its format."""
    assert b"persist.format" in pq.read_metadata(io.BytesIO(stored("part-lists.parquet"))).metadata
    for name, version in (("part.parquet", b"1"), ("part-lists.parquet", b"2")):
        assert pq.read_schema(io.BytesIO(stored(name))).metadata[b"persist.format"] == version
    assert (stored("inline.bin")[4], stored("inline-lists.bin")[4]) == (1, 2)
    with pytest.raises(CorruptData, match="format"):
        decode_inline(stored("inline-lists.bin"), format_name="arrow/1", key="golden", schema=golden.LISTS)


def test_any_parquet_reader_reads_the_stored_part(golden: ModuleType) -> None:
    plain = pq.read_table(io.BytesIO(stored("part.parquet")))
    assert plain.column_names == ["key", "val", "time", "diff"]
    assert plain.column("time").to_pylist() == [3, 4, 9]


def test_the_stored_staging_note_decodes_to_the_value_it_was_made_of(golden: ModuleType) -> None:
    """Spec 29.20."""
    assert decode_staging_note(stored("staging-note.bin"), key="golden", shard_id=golden.SHARD) == golden.NOTE
