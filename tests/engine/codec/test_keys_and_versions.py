"""Keys are made and parsed in one place; versions decide what may be read."""

from __future__ import annotations

import pytest
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage
from persist_engine.base.version import APPLIER_VERSION, check_readable, parse_version
from persist_engine.base.versioned import SeqNo
from persist_engine.codec import keys
from persist_engine.model.ids import PartId, RollupId, ShardId

SHARD, PART, ROLLUP = ShardId.from_bytes(b"s" * 16), PartId.from_bytes(b"p" * 16), RollupId.from_bytes(b"r" * 16)


def test_part_keys_parse_to_what_made_them() -> None:
    partial = keys.part_key("1.22.3", PART)
    assert partial == f"n0102203/{PART}"
    assert keys.parse_blob_key(keys.blob_key(SHARD, partial)) == keys.PartKey(SHARD, (1, 22, 3), PART, partial)
    assert keys.blob_key(SHARD, partial).startswith(keys.parts_prefix(SHARD))


def test_rollup_keys_parse_to_what_made_them() -> None:
    """Spec 6.2."""
    partial = keys.rollup_key(SeqNo(7), ROLLUP)
    assert partial == f"v7/{ROLLUP}"
    assert keys.parse_blob_key(keys.blob_key(SHARD, partial)) == keys.RollupKey(SHARD, SeqNo(7), ROLLUP, partial)
    assert keys.blob_key(SHARD, partial).startswith(keys.rollups_prefix(SHARD))
    assert keys.blob_key(SHARD, partial).startswith(keys.shard_prefix(SHARD))


def test_keys_sort_by_the_version_that_wrote_them() -> None:
    versions = ["0.2.0", "0.10.0", "1.0.0", "10.0.0"]
    assert sorted(keys.part_key(version, PART) for version in versions) == [keys.part_key(v, PART) for v in versions]


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        f"{SHARD}",
        f"{SHARD}/v1",
        f"{SHARD}/v01/{ROLLUP}",
        f"{SHARD}/v/{ROLLUP}",
        f"{SHARD}/v1/{PART}",
        f"{SHARD}/n0102203/{ROLLUP}",
        f"{SHARD}/n010220/{PART}",
        f"{SHARD}/x1/{PART}",
        f"{SHARD}/w{SHARD[1:]}/{PART}",
        f"{SHARD}/n0102203/{PART}/more",
        f"w{SHARD[1:]}/n0102203/{PART}",
        f"{SHARD}/v{2**63}/{ROLLUP}",
    ],
)
def test_other_keys_are_refused_by_name(bad: str) -> None:
    """Spec 6.3."""
    with pytest.raises(InvalidUsage, match="not a blob key"):
        keys.parse_blob_key(bad)


def test_code_reads_older_bytes_and_one_minor_ahead() -> None:
    major, minor, patch = parse_version(APPLIER_VERSION)
    for readable in (f"{major}.{minor}.{patch + 9}", f"{major}.{minor + 1}.9", "0.0.1"):
        check_readable(readable, "the-key")
    for newer in (f"{major}.{minor + 2}.0", f"{major + 1}.0.0"):
        with pytest.raises(Incompatible, match="the-key: written by version"):
            check_readable(newer, "the-key")


@pytest.mark.parametrize("bad", ["", "1", "1.2", "1.2.3.4", "01.2.3", "1.2.x", "1.1000.0", "-1.0.0", "１.0.0"])
def test_what_is_no_version_is_refused(bad: str) -> None:
    with pytest.raises(InvalidUsage):
        parse_version(bad)
    with pytest.raises(CorruptData, match="the-key"):
        check_readable(bad, "the-key")
