"""What earlier releases wrote decodes to what they meant, and this code still writes the same."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from persist_engine.codec.batch import decode_run_listing, decode_transmittable
from persist_engine.codec.inline_part import decode_inline
from persist_engine.codec.part import decode_part
from persist_engine.codec.registry import decode_identity, decode_name, decode_shard_owner
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff

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
    assert decode_transmittable(stored("batch-0.1.0.bin")) == (golden.SHARD, "0.1.0", golden.batch())
    assert decode_transmittable(stored("batch-of-runs-0.1.0.bin")) == (golden.SHARD, "0.1.0", golden.run_batch())
    assert decode_transmittable(stored("batch-nested.bin")) == (golden.SHARD, "0.1.0", golden.nested_batch())
    listing = decode_run_listing(stored("run-0.1.0.bin"), key="golden", shard_id=golden.SHARD)
    assert listing == golden.run_batch().parts
    assert decode_state_diff(stored("diff-0.1.0.bin"), key="golden") == golden.state_diff()
    assert decode_state_diff(stored("diff-of-a-shard.bin"), key="golden") == golden.state_diff_of_a_shard()
    assert decode_rollup(stored("rollup-2.bin"), key="golden") == golden.rollup()
    assert decode_rollup(stored("rollup-2.bin"), key="golden", lazily=True) == golden.rollup()
    assert decode_state_diff(stored("diff-born.bin"), key="golden") == golden.born_diff()
    assert decode_rollup(stored("rollup-born.bin"), key="golden") == golden.born_rollup()
    assert decode_state_diff(stored("diff-fenced.bin"), key="golden") == golden.fenced_diff()
    assert decode_rollup(stored("rollup-fenced.bin"), key="golden") == golden.fenced_rollup()
    assert decode_state_diff(stored("diff-chained.bin"), key="golden") == golden.chained_diff()
    assert decode_rollup(stored("rollup-chained.bin"), key="golden") == golden.chained_rollup()
    assert decode_state_diff(stored("diff-retained.bin"), key="golden") == golden.retained_diff()
    assert decode_rollup(stored("rollup-retained.bin"), key="golden") == golden.retained_rollup()


def test_the_stored_identity_and_registry_decode_to_the_values_they_were_made_of(golden: ModuleType) -> None:
    key = "name/persist-operator%2Fmain/analytics/flights"
    assert decode_identity(stored("identity.bin"), key="golden") == golden.STORE
    assert decode_shard_owner(stored("owner.bin"), key="golden", shard_id=golden.SHARD) == golden.OWNER
    assert decode_name(stored("name.bin"), key=key) == (golden.OWNER, golden.SHARD)


def test_the_stored_rollup_of_many_batches_decodes_to_its_state(golden: ModuleType) -> None:
    """Not byte for byte: how bytes are compressed is the library's to choose."""
    data = stored("rollup-3.bin")
    assert data[4:6] == b"\3\0"
    for lazily in (False, True):
        assert decode_rollup(data, key="golden", lazily=lazily) == golden.packed_rollup()


@pytest.mark.parametrize(
    "name",
    [
        "batch-0.1.0.bin",
        "batch-of-runs-0.1.0.bin",
        "batch-nested.bin",
        "run-0.1.0.bin",
        "diff-0.1.0.bin",
        "diff-of-a-shard.bin",
        "rollup-2.bin",
        "diff-born.bin",
        "rollup-born.bin",
        "diff-fenced.bin",
        "rollup-fenced.bin",
        "diff-chained.bin",
        "rollup-chained.bin",
        "diff-retained.bin",
        "rollup-retained.bin",
        "identity.bin",
        "owner.bin",
        "name.bin",
    ],
)
def test_messages_are_still_written_byte_for_byte(golden: ModuleType, name: str) -> None:
    assert golden.files()[name] == stored(name)


def test_the_stored_part_decodes_to_its_rows(golden: ModuleType) -> None:
    """Not byte for byte: Parquet files name the Arrow release that wrote them."""
    part = decode_part(stored("part-0.1.0.parquet"), key="golden", schema=golden.SCHEMA)
    assert repr(part.table.to_pylist()) == repr(golden.table().to_pylist())
    assert part.table.schema == golden.table().schema
    assert part.desc == golden.DESC


def test_the_stored_inline_part_decodes_to_its_rows(golden: ModuleType) -> None:
    """Not byte for byte either: how a record batch is laid out is Arrow's to choose."""
    part = decode_inline(stored("inline-1.bin"), format_name="arrow/1", key="golden", schema=golden.SCHEMA)
    assert repr(part.table.to_pylist()) == repr(golden.table().to_pylist())
    assert part.table.schema == golden.table().schema
    assert part.desc == golden.DESC


def test_any_parquet_reader_reads_the_stored_part(golden: ModuleType) -> None:
    plain = pq.read_table(io.BytesIO(stored("part-0.1.0.parquet")))
    assert plain.column_names == ["key", "val", "time", "diff"]
    assert plain.column("time").to_pylist() == [3, 4, 9]
