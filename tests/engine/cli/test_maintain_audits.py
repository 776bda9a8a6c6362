"""`persist maintain verify|orphans`: what the report of a run says, and that a finding is no failure of the run."""

import json

import pytest
from persist_engine.model.ids import PartId, ShardId
from persist_kit.disk import Disk, write

BASE = {"outcome": "Succeeded", "diffs_truncated": 0}


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    made.shard_id = ShardId.new()
    with made.client() as client:
        write(client, made.shard_id, range(3))
    return made


@pytest.fixture
def maintain(persist, disk, tmp_path):
    def run(*args):
        file = tmp_path / "report.json"
        code, _, err = persist("maintain", *args, disk.shard_id, "--report", file, "--json", *disk.args)
        return code, json.loads(file.read_text()) if file.exists() else err

    return run


def stray(disk, index, *, staged_ms=1_700_000_000_000):
    path = disk.blobs / disk.shard_id / "n0000100" / PartId.staged_at(staged_ms + index, bytes(10))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"stray")
    return path


def parts(disk):
    return sorted(path for path in (disk.blobs / disk.shard_id).glob("n*/p*") if path.is_file())


def rollups(disk):
    return sorted(path for path in (disk.blobs / disk.shard_id).glob("v*/*") if path.is_file())


@pytest.mark.parametrize("mode", ["Metadata", "Full"])
def test_a_whole_shard_is_verified(maintain, mode):
    code, report = maintain("verify", "--mode", mode)
    assert (code, report["verdict"], report["missing_blobs"], report["errors"]) == (0, "Verified", 0, 0)
    assert report.items() >= {**BASE, "type": "Verify", "mode": mode}.items()
    assert (report["bytes_read"] > 0, "nothing is missing" in report["message"]) == (True, True)


@pytest.mark.parametrize("mode", ["Metadata", "Full"])
def test_a_missing_part_is_the_verdict_and_comes_back(maintain, disk, mode):
    path = parts(disk)[0]
    kept = path.read_bytes()
    path.unlink()
    code, report = maintain("verify", "--mode", mode)
    assert (code, report["outcome"], report["verdict"], report["missing_blobs"]) == (0, "Succeeded", "MissingBlobs", 1)
    assert path.name in report["message"]
    path.write_bytes(kept)
    assert maintain("verify", "--mode", mode)[1]["verdict"] == "Verified"


def test_damage_within_a_part_is_found_by_a_full_verification_only(maintain, disk):
    path = parts(disk)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    assert maintain("verify", "--mode", "Metadata")[1]["verdict"] == "Verified"
    report = maintain("verify", "--mode", "Full")[1]
    assert (report["verdict"], report["missing_blobs"], report["errors"] > 0) == ("Corrupt", 0, True)


def test_a_missing_rollup_is_missing_although_the_state_cannot_be_read(maintain, disk):
    for path in rollups(disk):
        path.unlink()
    code, report = maintain("verify")
    assert (code, report["verdict"], report["missing_blobs"]) == (0, "MissingBlobs", 1)


def test_many_findings_fit_the_report_of_a_pod(maintain, disk):
    with disk.client() as client:
        write(client, disk.shard_id, range(3, 40))
    for path in parts(disk):
        path.unlink()
    report = maintain("verify")[1]
    assert report["missing_blobs"] > 10
    assert "more" in report["message"]
    assert len(json.dumps(report)) < 4096


def test_orphans_are_counted_and_deleted_only_on_request_in_bounded_runs(maintain, disk):
    strays = [stray(disk, index) for index in range(5)]
    code, report = maintain("orphans")
    assert (code, report["orphan_blobs"], report["orphan_bytes"], report["blobs_deleted"]) == (0, 5, 25, 0)
    assert all(path.exists() for path in strays)
    first = maintain("orphans", "--max-deletes", "3")[1]
    assert (first["blobs_deleted"], first["orphan_blobs"], first["complete"]) == (3, 2, False)
    assert sum(path.exists() for path in strays) == 2
    second = maintain("orphans", "--max-deletes", "3")[1]
    assert (second["blobs_deleted"], second["orphan_blobs"], second["complete"]) == (2, 0, True)
    assert maintain("verify")[1]["verdict"] == "Verified", "no named blob was deleted"


def test_an_age_that_slow_writers_need_is_refused(maintain):
    code, err = maintain("orphans", "--older-than-seconds", "3599")
    assert code == 64
    assert "at least 3600" in err
