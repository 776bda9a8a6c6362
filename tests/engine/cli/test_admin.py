"""`persist admin`: a dry run changes nothing and reports what would change, `--commit` does just that, `--json` reports as JSON."""

import hashlib
import json
import shutil
import sys

import pyarrow.parquet as pq
import pytest
from persist_engine.base.wording import counted, sized
from persist_engine.cli import main as cli
from persist_engine.cli.admin.orphans import seconds_of
from persist_engine.cli.options import complete_shard
from persist_engine.cli.output import ago
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, PartId, ShardId
from persist_kit.disk import SETTINGS, Disk, write
from persist_kit.world import SCHEMA, contents

at = Antichain.of


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a location with one shard of 20 appends, and its id: each test works on a copy."""
    folder, shard_id = tmp_path_factory.mktemp("disk"), ShardId.new()
    with Disk(folder).client() as client:
        write(client, shard_id, range(20))
    return folder, shard_id


@pytest.fixture
def disk(written, tmp_path):
    folder, shard_id = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    made = Disk(tmp_path)
    made.shard_id = shard_id
    return made


@pytest.fixture
def admin(monkeypatch, capfd, disk):
    """Runs `persist admin ARGS` in this process; (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["persist", "admin", *map(str, args), *disk.args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run


def ok(result):
    code, out, err = result
    assert code == 0, (out, err)
    return json.loads(out)


@pytest.mark.slow
def test_deletions_are_shown_by_record_and_by_blob(admin, disk):
    assert ok(admin("deletions", disk.shard_id, "--json")) == []
    ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))
    (_, done) = ok(admin("force-gc", disk.shard_id, "--commit", "--json"))["done"]
    (record,) = ok(admin("deletions", disk.shard_id, "--json"))
    assert (record["record"], record["cause"], record["outcome"]) == (done["deletion_record"], "Collection", "Deleted")
    assert len(record["blobs"]) == done["blobs_deleted"]
    assert record["begun_ms"] <= record["gone_ms"]
    code, out, err = admin("deletions", disk.shard_id, "--blobs")
    assert (code, err) == (0, f"1 record of {counted(len(record['blobs']), 'deleted blob')}\n")
    assert all(key in out for key in record["blobs"])
    assert done["deletion_record"] in admin("deletions", disk.shard_id)[1]
    assert ok(admin("deletions", disk.shard_id, "--since", str(record["gone_ms"] + 60_000), "--json")) == []
    assert admin("deletions", disk.shard_id, "--since", "latest")[0] == 64


@pytest.mark.slow
@pytest.mark.parametrize("command", ["force-compaction", "force-gc", "restore"])
def test_a_dry_run_changes_nothing_and_reports_what_would_change(admin, disk, command):
    """Spec B.8."""
    before = disk.everything(disk.shard_id)
    code, out, err = admin(command, disk.shard_id)
    assert (code, disk.everything(disk.shard_id)) == (0, before)
    assert out.strip()
    assert command == "restore" or "--commit" in err
    report = ok(admin(command, disk.shard_id, "--json"))
    assert report["committed"] is False
    assert disk.everything(disk.shard_id) == before


@pytest.mark.slow
def test_force_compaction_does_the_merges_of_its_dry_run(admin, disk):
    plan = ok(admin("force-compaction", disk.shard_id, "--json"))["plan"]
    assert plan
    done = ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))["done"]
    assert len(done) == len(plan)
    assert all(each["outcome"] == "Succeeded" for each in done)
    assert [each["what"].split()[0] for each in plan] == [each["message"].split()[0] for each in done]
    assert ok(admin("force-compaction", disk.shard_id, "--json"))["plan"] == []


@pytest.mark.slow
def test_the_environment_disables_compaction_for_the_process(admin, disk, monkeypatch):
    monkeypatch.setenv("PERSIST_COMPACTION_DISABLED", "1")
    assert ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))["done"] == []
    monkeypatch.setenv("PERSIST_COMPACTION_DISABLED", "0")
    assert ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))["done"]
    with disk.client() as client:
        assert len(contents(client, disk.shard_id, 19)) == 20


@pytest.mark.slow
def test_full_compaction_leaves_one_batch_with_rows(admin, disk):
    (planned,) = ok(admin("force-compaction", disk.shard_id, "--full", "--json"))["plan"]
    assert "20 rows" in planned["what"]
    ok(admin("force-compaction", disk.shard_id, "--full", "--commit", "--json"))
    with disk.client() as client:
        batches = [b for b in client.machine(disk.shard_id).refresh().trace.spine_batches() if b.sizes.rows]
        assert [batch.sizes.runs for batch in batches] == [1]
        assert len(contents(client, disk.shard_id, 19)) == 20


@pytest.mark.slow
def test_force_gc_deletes_exactly_the_blobs_of_its_dry_run(admin, disk):
    ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))
    before = set(disk.files())
    plan = ok(admin("force-gc", disk.shard_id, "--json"))["plan"]
    report = {each["what"] for each in plan if each["do"].startswith("delete")}
    assert report
    assert all(each["size_bytes"] > 0 for each in plan if each["do"].startswith("delete"))
    assert plan[0]["do"] == "write rollup"
    done = ok(admin("force-gc", disk.shard_id, "--commit", "--json"))["done"]
    assert [each["type"] for each in done] == ["Rollup", "GC"]
    assert before - set(disk.files()) == report
    assert done[1]["diffs_truncated"] == sum(int(e["what"].split()[0]) for e in plan if e["do"] == "truncate")


@pytest.mark.slow
def test_force_gc_stops_where_a_reader_holds_and_holds_names_it(admin, disk):
    with disk.client() as client, client.open_leased_reader(disk.shard_id, SCHEMA, purpose="nightly report"):
        write(client, disk.shard_id, range(20, 24))
        ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))
        assert [each for each in ok(admin("force-gc", disk.shard_id, "--json"))["plan"] if "delete" in each["do"]] == []
        seen = ok(admin("holds", disk.shard_id, "--json"))
        (reader,) = [hold for hold in seen["holds"] if hold["kind"] == "leased"]
        assert reader["purpose"] == "nightly report"
        assert (reader["blocks_since"], reader["blocks_collection"]) == (True, True)
        assert reader["seqno"] == seen["seqno_since"] < seen["seqno"]
        _, out, _ = admin("holds", disk.shard_id)
        assert "nightly report" in out
        assert "since gc" in out


def test_holds_are_listed_oldest_first_and_say_since_when(admin, disk):
    with disk.client() as client:
        critical = CriticalReaderId.new()
        client.open_critical_since(disk.shard_id, critical, opaque=b"1", purpose="archive")
        with client.open_leased_reader(disk.shard_id, SCHEMA, purpose="late") as reader:
            reader.downgrade_since(at(5))
            seen = ok(admin("holds", disk.shard_id, "--json"))
    assert [hold["purpose"] for hold in seen["holds"]] == ["archive", "late"], "the writer has expired"
    archive, late = seen["holds"]
    assert (archive["blocks_since"], late["blocks_since"]) == (True, False)
    assert archive["held_from_ms"] <= late["held_from_ms"] <= seen["now_ms"]
    assert (archive["lease_ends_ms"], archive["has_lapsed"]) == (None, False)
    assert late["lease_ends_ms"] > seen["now_ms"]


def test_finalize_refuses_with_what_is_in_the_way(admin, disk):
    before = disk.everything(disk.shard_id)
    for flags in ([], ["--commit"]):
        code, out, _ = admin("finalize", disk.shard_id, "--json", *flags)
        assert code == 64
        assert json.loads(out)["kind"] == "FinalizationError"
        assert "upper is {20}" in out
        assert "since is {0} although no reader holds it" in out
    assert disk.everything(disk.shard_id) == before


@pytest.mark.slow
def test_finalize_closes_only_a_shard_without_holds(admin, disk):
    """Spec B.4."""
    critical = CriticalReaderId.new()
    with disk.client() as client:
        client.open_critical_since(disk.shard_id, critical, opaque=b"1", purpose="archive")
    code, out, _ = admin("finalize", disk.shard_id, "--close", "--commit", "--json")
    assert code == 64
    assert critical in out
    assert "archive" in out
    with disk.client() as client, client.open_leased_reader(disk.shard_id, SCHEMA, purpose="report"):
        code, out, _ = admin("finalize", disk.shard_id, "--close", "--release", critical, "--commit", "--json")
        assert (code, "report" in out) == (64, True)
        assert client.recent_upper(disk.shard_id) == at(20), "refused before anything was closed"


@pytest.mark.slow
def test_finalize_leaves_no_data_and_two_versions(admin, disk, tmp_path):
    """Spec 14.9."""
    critical = CriticalReaderId.new()
    with disk.client() as client:
        client.open_critical_since(disk.shard_id, critical, opaque=b"1", purpose="archive")
    ok(admin("force-compaction", disk.shard_id, "--commit", "--json"))
    args = ("finalize", disk.shard_id, "--close", "--release", critical, "--json")
    before = disk.everything(disk.shard_id)
    plan = ok(admin(*args))["plan"]
    assert [each["do"] for each in plan] == ["close", "release", "delete", "make a tombstone of"]
    assert disk.everything(disk.shard_id) == before
    ok(admin(*args, "--commit"))
    with disk.client() as client:
        assert client.is_finalized(disk.shard_id)
    assert disk.paths(disk.shard_id, kind="part") == []
    assert len(disk.diffs(disk.shard_id)) <= 2
    rollups = [path.parent.name for path in disk.paths(disk.shard_id, kind="rollup")]
    assert len(rollups) == 2
    assert "v1" not in rollups, "none of before the tombstone, with what was inline"
    again = ok(admin("finalize", disk.shard_id, "--commit", "--json"))
    code, _, said = admin("export", disk.shard_id, "--to", tmp_path / "gone")
    assert (code, said.endswith(": the shard is closed, and no time of it can be read any more\n")) == (64, True)
    assert [each for each in again["done"] if each["outcome"] == "Succeeded"] == []


@pytest.mark.slow
def test_usage_of_one_and_of_all_shards(admin, disk):
    stray = f"{disk.shard_id}/n0000100/p00000000-0000-0000-0000-000000000000"
    (disk.blobs / stray).write_bytes(b"stray")
    everything = ok(admin("usage", "--json"))
    (only,) = everything["shards"]
    assert only["bytes"]["not_leaked_not_referenced"] == 5
    assert everything["total_bytes"] == sum(len(data) for key, data in disk.files().items() if key != "store-identity")
    assert ok(admin("usage", disk.shard_id, "--json"))["shards"] == [only]
    (billed,) = ok(admin("usage", "--referenced", "--json"))
    assert billed["parts_bytes"] == only["bytes"]["current"]
    code, out, _ = admin("usage")
    assert (code, disk.shard_id in out) == (0, True)


@pytest.mark.slow
def test_verify_ends_with_74_and_the_key_of_what_is_broken(admin, disk):
    sound = ok(admin("verify", disk.shard_id, "--json"))
    assert (sound["corrupt"], sound["parts_read"], sound["rows"]) == (False, 20, 20)
    assert len(ok(admin("verify", "--json"))) == 1
    part = disk.paths(disk.shard_id, kind="part")[3]
    part.write_bytes(part.read_bytes()[:-1])
    code, out, _ = admin("verify", disk.shard_id, "--json")
    assert code == 74
    assert {finding["key"] for finding in json.loads(out)["findings"]} == {disk.key(part)}
    code, out, _ = admin("verify")
    assert (code, disk.key(part) in out) == (74, True)
    (rollup,) = disk.paths(disk.shard_id, kind="rollup")
    rollup.unlink()
    code, out, _ = admin("verify", disk.shard_id, "--json")
    assert code == 74
    assert disk.key(rollup) in out


@pytest.mark.slow
def test_restore_reports_what_the_store_did_not_keep(admin, disk):
    assert ok(admin("restore", disk.shard_id, "--commit", "--json"))["missing"] == []
    part = disk.paths(disk.shard_id, kind="part")[3]
    part.unlink()
    for flags in ([], ["--commit"]):
        code, out, _ = admin("restore", disk.shard_id, "--json", *flags)
        report = json.loads(out)
        assert (code, report["missing"]) == (74, [disk.key(part)])
        assert [each["key"] for each in report["lost"]] == ([disk.key(part)] if flags else [])
    code, out, _ = admin("restore", ShardId.new(), "--json")
    assert (code, json.loads(out)["kind"]) == (64, "ShardNotFound")


@pytest.mark.parametrize(("flags", "times"), [([], {19}), (["--as-of", "4"], {4}), (["--history"], set(range(20)))])
def test_export_writes_files_that_the_manifest_proves(admin, disk, tmp_path, flags, times):
    """Spec 28.3."""
    to = tmp_path / "out"
    report = ok(admin("export", disk.shard_id, "--to", to, "--json", *flags))
    manifest = json.loads((to / "_manifest.json").read_text())
    assert manifest == report
    assert {path.name for path in to.iterdir()} == {"_manifest.json", *(file["name"] for file in manifest["files"])}
    table = pq.read_table(to, columns=["key", "val", "time", "diff"])
    assert table.num_rows == manifest["rows"] == (5 if "4" in flags else 20)
    assert set(table["time"].to_pylist()) == times
    for file in manifest["files"]:
        data = (to / file["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size_bytes"], file["sha256"])
    code, out, _ = admin("export", disk.shard_id, "--to", to, "--json")
    assert (code, "not an empty directory" in out) == (64, True)


def test_an_export_of_an_unreadable_time_leaves_no_directory(admin, disk, tmp_path):
    for time in ("100", "yesterday"):
        code, _, _ = admin("export", disk.shard_id, "--to", tmp_path / "out", "--as-of", time, "--json")
        assert code in (64, 70)
    assert {path.name for path in tmp_path.iterdir()} == {"blobs", "consensus.db"} | {
        path.name for path in tmp_path.glob("consensus.db*")
    }


def test_an_export_is_cut_into_files_and_of_an_empty_shard_there_is_one(disk, tmp_path):
    from persist_engine.client import export

    empty = ShardId.new()
    with disk.client(SETTINGS) as client:
        manifest = export.export_shard(client, disk.shard_id, tmp_path / "cut", as_of=19, file_bytes_max=1)
        assert [file.rows for file in manifest.files] == [1] * 20
        assert pq.read_table(tmp_path / "cut")["key"].to_pylist() == [{"id": i} for i in range(20)]
        client.initialise(empty, SCHEMA)
        manifest = export.export_shard(client, empty, tmp_path / "none", as_of=None)
    assert (manifest.rows, len(manifest.files)) == (0, 1)
    assert pq.read_schema(tmp_path / "none" / "part-00000.parquet").names == ["key", "val", "time", "diff"]


def test_what_a_command_counted_is_written_for_prometheus(monkeypatch, capfd, disk, tmp_path):
    path = tmp_path / "persist.prom"
    args = ["persist", "--metrics", str(path), "maintain", "rollup", disk.shard_id, "--json", *disk.args]
    monkeypatch.setattr(sys, "argv", args)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    capfd.readouterr()
    assert ended.value.code == 0
    text = path.read_text()
    assert 'persist_command_total{name="AddRollup",outcome="committed"} 1.0' in text
    assert f'persist_state_upper{{shard="{disk.shard_id}"}} 20.0' in text
    assert 'persist_codec_seconds_count{op="encode",what="rollup"} 1.0' in text


@pytest.mark.parametrize(
    "command",
    [
        "force-compaction",
        "force-gc",
        "finalize",
        "restore",
        "export",
        "usage",
        "verify",
        "holds",
        "orphans",
        "owner",
        "names",
    ],
)
def test_help_shows_an_example(admin, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = admin(command, "--help")
    assert (code, f"persist admin {command}" in out) == (0, True)


@pytest.mark.slow
def test_orphans_of_all_shards_are_reported_then_deleted_in_resumable_steps(admin, disk):
    day_ms = 86_400_000
    other = ShardId.new()
    with disk.client() as client:
        write(client, other, range(2))
    strays = []
    for shard_id in sorted([disk.shard_id, other]):
        for index in range(3):
            part_id = PartId.staged_at(1_700_000_000_000 + index, bytes(10))
            path = disk.blobs / shard_id / "n0000100" / part_id
            path.write_bytes(b"stray")
            strays.append(disk.key(path))
    before = disk.files()
    report = ok(admin("orphans", "--json"))
    assert [orphan["key"] for shard in report["shards"] for orphan in shard["orphans"]] == strays
    assert disk.files() == before
    first = ok(admin("orphans", "--max-deletes", 3, "--commit", "--json"))
    assert [shard["deleted"] for shard in first["shards"]] == [3]
    assert (first["stopped"], first["resume_after"]) == (True, min(disk.shard_id, other))
    code, _, err = admin("orphans", "--max-deletes", 2, "--commit")
    assert code == 0
    assert f"--resume-after {min(disk.shard_id, other)}" in err
    rest = ok(admin("orphans", "--resume-after", min(disk.shard_id, other), "--commit", "--json"))
    assert [(shard["shard_id"], shard["deleted"]) for shard in rest["shards"]] == [(max(disk.shard_id, other), 1)]
    assert (rest["stopped"], rest["resume_after"]) == (False, None)
    assert set(before) - set(disk.files()) == set(strays)
    with disk.client() as client:
        assert len(contents(client, disk.shard_id, 19)) == 20
    for bad in ("59m", "7 days", "0", "-1d"):
        assert admin("orphans", f"--older-than={bad}", "--json")[0] == 64
    assert [seconds_of(text) * 1000 for text in ("1d", "24h", "1440m", "86400")] == [day_ms] * 4


def test_tab_completes_shards(disk):
    class Context:
        params = {"blob": disk.location.blob, "consensus": disk.location.consensus}  # noqa: RUF012

    assert complete_shard(Context, disk.shard_id[:3]) == [disk.shard_id]
    assert complete_shard(Context, "x") == []
    Context.params = {}
    assert complete_shard(Context, "s") == []


def test_counts_agree_with_their_nouns():
    assert [counted(n, "blob") for n in (0, 1, 2, 12_345)] == ["0 blobs", "1 blob", "2 blobs", "12,345 blobs"]
    assert [counted(2, noun) for noun in ("batch", "entry", "key")] == ["2 batches", "2 entries", "2 keys"]
    assert [sized(n) for n in (0, 999, 1_000, 1_500_000, 2 * 10**12)] == ["0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 TB"]
    assert [ago(ms) for ms in (0, 61_000, 90_061_000)] == ["0 s", "1 m 1 s", "1 d 1 h"]
