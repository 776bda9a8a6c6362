"""`persist maintain verify|orphans`: what the report of a run says, and that a finding is no failure of the run."""

import json
import subprocess
import sys

import pytest
from persist_engine import Location, PersistClient
from persist_engine.model.ids import PartId, ShardId
from persist_kit.disk import SETTINGS, Disk, write
from persist_kit.servers import redis_server

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


#: As on a full disk: the operating system refuses what this process writes past so many bytes of a file.
ON_A_FULL_DISK = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)); "
    "from persist_engine.cli.main import main; sys.exit(main())"
)


def scanned_on_a_full_disk(disk, stores, report):
    """The exit code and the report, which is small enough to be written."""
    words = ["maintain", "orphans", disk.shard_id, "--max-deletes", "1000", "--report", str(report), "--json", *stores]
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, *words], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, json.loads(report.read_text()), done.stderr


def test_a_scan_on_a_full_disk_deletes_nothing_and_says_why(disk, tmp_path):
    """It cannot even commit since when batches are refused."""
    strays = [stray(disk, index) for index in range(100)]
    code, report, err = scanned_on_a_full_disk(disk, disk.args, tmp_path / "report.json")
    assert (code, report["outcome"]) == (70, "Failed")
    assert disk.location.consensus in report["message"]
    assert report["message"].removeprefix("Unavailable: ") in err
    assert all(path.exists() for path in strays)


@pytest.mark.redis
def test_a_scan_that_cannot_record_its_intention_deletes_nothing_and_says_why(tmp_path, persist):
    """Spec 14.15. Its log has room, the blob store has none. Once there is room, the next scan deletes and records."""
    with redis_server() as server:
        disk = Disk(tmp_path / "paired")
        stores = ["--blob", disk.location.blob, "--consensus", server.url, "--give-up", "0.3"]
        with PersistClient.open(Location(blob=disk.location.blob, consensus=server.url), settings=SETTINGS) as client:
            disk.shard_id = ShardId.new()
            write(client, disk.shard_id, range(3))
        strays = [stray(disk, index) for index in range(100)]
        code, report, _ = scanned_on_a_full_disk(disk, stores, tmp_path / "report.json")
        assert (code, report["outcome"], report["blobs_deleted"]) == (70, "Failed", 0)
        for text in ("set record", disk.location.blob, "File too large"):
            assert text in report["message"]
        assert all(path.exists() for path in strays)
        code, out, _ = persist("maintain", "orphans", disk.shard_id, "--max-deletes", "1000", "--json", *stores)
        assert (code, json.loads(out)["blobs_deleted"]) == (0, 100)
        assert not any(path.exists() for path in strays)


@pytest.mark.redis
def test_a_scan_on_a_full_redis_deletes_nothing_and_says_why(tmp_path, persist):
    """The floor, before which batches are refused, is a commit."""
    with redis_server() as server:
        disk = Disk(tmp_path / "paired")
        stores = ["--blob", disk.location.blob, "--consensus", server.url, "--give-up", "0.3"]
        with PersistClient.open(Location(blob=disk.location.blob, consensus=server.url), settings=SETTINGS) as client:
            disk.shard_id = ShardId.new()
            write(client, disk.shard_id, range(3))
        strays = [stray(disk, index) for index in range(5)]
        server.command("CONFIG", "SET", "maxmemory", "1")
        words = ("maintain", "orphans", disk.shard_id, "--max-deletes", "1000", "--report", tmp_path / "report.json")
        code, _, err = persist(*words, *stores)
        report = json.loads((tmp_path / "report.json").read_text())
        assert (code, report["outcome"]) == (70, "Failed")
        assert "redis is full" in report["message"]
        assert "redis is full" in err
        assert all(path.exists() for path in strays)


def test_an_age_that_slow_writers_need_is_refused(maintain):
    code, err = maintain("orphans", "--older-than-seconds", "3599")
    assert code == 64
    assert "at least 3600" in err
