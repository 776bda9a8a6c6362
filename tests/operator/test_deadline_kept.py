"""A value that was retracted is gone from every object, entry of the log and rollup by the deadline, on idle and on busy shards."""

import contextlib
import json
import random

import boto3
import pytest
import redis as driver
from deadline_house import HOUR_MS, MINUTE_MS, SCHEMA, Kept
from persist_engine.cli.main import application
from persist_engine.codec.keys import blob_key
from persist_engine.parts.listings import new_part_key
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.repair.force import force_compaction
from persist_kit.servers import redis_server, s3_server
from persist_operator.api import names
from persist_operator.api.shard import Window
from persist_operator.plan.waiting import windows
from typer.testing import CliRunner

SPEC = {"retention": {"sinceLagSeconds": 3600}, "compaction": {"deadlineSeconds": 6 * 3600}}
DEADLINE_S = 5 * 3600
MARK = "b8f1c02e-forget-me"
OTHERS = [(key, f"kept-{key}", 1) for key in range(20)]


@pytest.fixture
def keep(make_shard, settings):
    """Makes Kept shards, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(blob, consensus, *, inline_bytes=0, spec=SPEC):
            kept = Kept(make_shard, settings, blob=blob, consensus=consensus, inline_bytes=inline_bytes, spec=spec)
            stack.callback(kept.close)
            return kept

        yield make


@pytest.fixture
def on_files(keep, tmp_path):
    return lambda **options: keep(f"file://{tmp_path}/blobs", f"sqlite:///{tmp_path}/log.db", **options)


def test_a_compaction_on_request_removes_what_a_hold_kept_in_the_only_run(on_files):
    """While the reader held since, a compaction merged all into one run, the mark with it. Nothing waits to be merged after that."""
    request = f"{names.REQUEST_PREFIX}compact"
    kept = on_files(spec={"retention": {"sinceLagSeconds": 0}, "compaction": {"deadlineSeconds": 30 * 24 * 3600}})
    kept.write(*OTHERS, (99, MARK, 1))
    with kept.client.open_leased_reader(kept.shard_id, SCHEMA, purpose="report"):
        kept.pass_ms(MINUTE_MS, step_ms=MINUTE_MS)
        kept.write((99, MARK, -1))
        force_compaction(kept.client.machine(kept.shard_id), full=True)
        kept.annotations[request] = "held"
        kept.look()
        assert kept.client.inspect(kept.shard_id).runs == 1
        assert kept.full == [], "it would remove nothing"
        kept.pass_ms(MINUTE_MS, step_ms=MINUTE_MS)
    kept.pass_ms(5 * MINUTE_MS, step_ms=MINUTE_MS)
    assert kept.client.inspect(kept.shard_id).updates == len(OTHERS) + 2
    kept.annotations[request] = "free"
    kept.look()
    assert kept.full == ["compaction"]
    assert kept.client.inspect(kept.shard_id).updates == len(OTHERS)
    kept.pass_ms(MINUTE_MS, step_ms=MINUTE_MS)
    kept.annotations[request] = "again"
    kept.look()
    assert kept.full == ["compaction"], "there is nothing left to remove"


def forget(kept):
    """Write the mark, retract it, and let the deadline come: it is there until then, and gone at the deadline."""
    kept.write(*OTHERS, (99, MARK, 1))
    kept.pass_ms(HOUR_MS)
    kept.write((99, MARK, -1))
    kept.pass_ms(HOUR_MS)
    retracted_ms = kept.env.now_ms() - HOUR_MS + MINUTE_MS
    places = kept.holding(MARK)
    assert places, "it is there: the test would see it"
    before = kept.proof(retracted_ms)
    assert not before.proven
    named = " ".join(one.where for one in before.remains)
    assert [place for place in places if "/n0" in place and place not in named] == [], (
        "the proof names each part that holds it"
    )
    assert "deadlineTime" in kept.status.get("debt", {}), kept.status["conditions"]
    kept.pass_ms(5 * HOUR_MS - 10 * MINUTE_MS)
    assert kept.holding(MARK) == []
    assert kept.holding("kept-7"), "only what was retracted is gone"
    after = kept.proof(retracted_ms)
    assert (after.proven, after.remains) == (True, ())
    assert after.blobs >= 2
    kept.look()
    assert "deadlineTime" not in kept.status["debt"]
    assert kept.condition("CompactionCurrent")[:2] == ("True", "Current")
    assert kept.condition("GarbageCollected")[:2] == ("True", "Current")


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_nothing_is_left_on_an_idle_shard_over_files(on_files, inline_bytes):
    kept = on_files(inline_bytes=inline_bytes)
    forget(kept)
    before = len(kept.full)
    kept.pass_ms(24 * HOUR_MS, step_ms=HOUR_MS)
    assert len(kept.full) == before, "a shard that owes nothing is left alone"


def test_windows_are_kept_while_the_deadline_is(on_files):
    """The merge is due outside the windows. It takes place in the one before, also on an idle shard, whose since would not have moved."""
    schedule = {"schedule": "0 */3 * * *", "durationSeconds": 3600, "timeZone": "Etc/UTC"}
    kept = on_files(spec={**SPEC, "maintenance": {"windows": [schedule]}})
    window, merged = [Window.of(schedule)], []

    def note(action):
        if action.kind == "compaction":
            merged.append(kept.env.now_ms())
        return False

    kept.fails = note
    forget(kept)
    assert len(merged) == 1
    assert windows.is_open(window, merged[0])


@pytest.mark.redis
@pytest.mark.s3
def test_nothing_is_left_in_redis_and_s3(keep, monkeypatch):
    with redis_server() as redis, s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        kept = keep(s3.location("data"), redis.url, inline_bytes=200)
        forget(kept)
        assert MARK.encode() not in b"".join(_values_of(redis))
        kept.close()


def _values_of(redis):
    with driver.Redis.from_url(redis.url) as client:
        for key in client.scan_iter():
            yield client.dump(key)


def test_a_reader_that_holds_since_is_named_and_the_deadline_holds_after_it(on_files):
    kept = on_files()
    kept.write(*OTHERS, (99, MARK, 1))
    kept.pass_ms(HOUR_MS)
    with kept.client.open_leased_reader(kept.shard_id, purpose="a slow report", lease_ms=1000 * HOUR_MS):
        kept.write((99, MARK, -1))
        kept.pass_ms(7 * HOUR_MS)
        assert kept.holding(MARK)
        status, reason, message = kept.condition("CompactionCurrent")
        assert (status, reason) == ("False", "DeadlineMissed")
        assert "a slow report" in message
        assert "updates retracted since 20" in message
        assert {"a slow report"} == {
            one.held_by.split("(")[1].split(",")[0] for one in kept.proof(kept.env.now_ms()).remains
        }
    kept.pass_ms(HOUR_MS)
    assert kept.holding(MARK) == []


def test_the_deadline_holds_when_processes_are_killed_in_between(on_files):
    """The collection dies for hours after the compaction. A compaction dies before it, and leaves a part that only a listing finds."""
    kept = on_files()
    kept.write(*OTHERS, (99, MARK, 1))
    kept.write((99, MARK, -1))
    retracted_ms = kept.env.now_ms()
    machine = kept.client.machine(kept.shard_id)
    held = next(place for place in kept.holding(MARK) if "/n0" in place)
    left_behind = blob_key(kept.shard_id, new_part_key(machine))
    machine.blob.set(left_behind, machine.blob.get(held))
    kept.fails = lambda action: action.kind == "gc" and kept.env.now_ms() < retracted_ms + 5 * HOUR_MS
    kept.pass_ms(6 * HOUR_MS)
    assert set(kept.full) == {"compaction", "gc"}
    assert set(kept.holding(MARK)) == {left_behind}
    (left,) = kept.proof(retracted_ms).remains
    assert (left.where, left.kind) == (left_behind, "orphan")
    assert "persist admin orphans" in left.remedy
    scan_orphans(machine, older_than_ms=HOUR_MS, commit=True)
    assert kept.holding(MARK) == []
    assert kept.proof(retracted_ms).proven


def test_a_reader_of_an_old_version_is_named_by_the_condition_and_by_the_proof(on_files):
    kept = on_files()
    kept.write(*OTHERS, (99, MARK, 1))
    with kept.client.open_leased_reader(kept.shard_id, purpose="a forgotten export", lease_ms=1000 * HOUR_MS) as reader:
        open_snapshot = reader.snapshot(kept.newest())
        kept.write((99, MARK, -1))
        reader.downgrade_since(kept.newest())
        kept.pass_ms(5 * HOUR_MS)
        assert kept.condition("GarbageCollected")[:2] == ("False", "BlockedByReader")
        assert "a forgotten export" in kept.condition("GarbageCollected")[2]
        left = kept.proof(kept.env.now_ms()).remains
        assert {one.kind for one in left} >= {"part", "log"}
        assert all("a forgotten export" in one.held_by for one in left)
        del open_snapshot
    kept.pass_ms(HOUR_MS)
    assert kept.holding(MARK) == []
    assert kept.proof(kept.env.now_ms()).proven


@pytest.mark.s3
def test_a_bucket_that_keeps_old_versions_proves_nothing_until_they_are_gone(keep, monkeypatch, tmp_path):
    with s3_server(versioned=True) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        # A session of its own: the default one keeps the credentials of an earlier test's server.
        store = boto3.session.Session().client("s3", endpoint_url=f"http://{s3.address}", region_name=s3.region)
        store.put_bucket_versioning(Bucket=s3.bucket, VersioningConfiguration={"Status": "Enabled"})
        kept = keep(s3.location("data"), f"sqlite:///{tmp_path}/log.db")
        kept.write(*OTHERS, (99, MARK, 1))
        kept.write((99, MARK, -1))
        retracted_ms = kept.env.now_ms()
        kept.pass_ms(6 * HOUR_MS)
        left = kept.proof(retracted_ms)
        assert left.kept == left.remains_count > 0
        assert {one.kind for one in left.remains} == {"old version"}
        for one in left.remains:
            key, _, version = one.where.partition(" version ")
            store.delete_object(Bucket=s3.bucket, Key=f"data/{key}", VersionId=version)
        assert kept.proof(retracted_ms).proven


def test_the_command_ends_with_zero_when_proven_and_with_three_when_not(on_files, tmp_path):
    kept = on_files()
    kept.write(*OTHERS, (99, MARK, 1))
    kept.write((99, MARK, -1))
    command = [
        "admin",
        "proof",
        str(kept.shard_id),
        "--blob",
        f"file://{tmp_path}/blobs",
        "--consensus",
        f"sqlite:///{tmp_path}/log.db",
    ]
    shown = CliRunner().invoke(application(), [*command, "--before", str(kept.env.now_ms()), "--json"])
    assert shown.exit_code == 3
    report = json.loads(shown.stdout)
    assert (report["proven"], report["remains_count"]) == (False, len(report["remains"]))
    text = CliRunner().invoke(application(), [*command, "--before", str(kept.env.now_ms())])
    assert text.exit_code == 3
    assert str(kept.shard_id) in text.stdout
    assert CliRunner().invoke(application(), [*command, "--before", "-1h"]).exit_code == 0
    assert CliRunner().invoke(application(), [*command, "--before", "latest"]).exit_code != 0


def test_an_append_only_shard_owes_nothing_and_is_never_merged_for_it(on_files):
    kept = on_files()
    for hour in range(30):
        kept.write((hour, f"row-{hour}", 1))
        kept.pass_ms(HOUR_MS, step_ms=HOUR_MS)
    assert kept.full == []
    assert "deadlineTime" not in kept.status["debt"]


@pytest.mark.parametrize("seed", range(2))
def test_the_deadline_holds_on_shards_that_are_busy_and_idle_by_turns_whatever_runs_fail(keep, seed):
    """Weeks of writes, pauses and failing runs. Each value has a name of its own, so that it can be looked for in all bytes."""
    draw = random.Random(seed)  # noqa: S311 - a test that repeats
    spec = {
        "retention": {"sinceLagSeconds": draw.choice([0, 1800, 3600])},
        "compaction": {"deadlineSeconds": DEADLINE_S, "maxUncompactedBatches": draw.choice([2, 8, 64])},
        "rollup": {"everySeqnos": draw.choice([4, 32, 128])},
    }
    name = f"mem:deadline-{seed}-{draw.random()}"
    kept = keep(name, name, inline_bytes=draw.choice([0, 300, 1 << 20]), spec=spec)
    broken: dict[str, int] = {}

    def fails(action):
        left = broken.get(action.kind, 0)
        if left == 0 and draw.random() < 0.1:
            left = draw.randint(1, 3)  # so many in a row
            broken[action.kind] = left + 1
        broken[action.kind] = max(0, broken.get(action.kind, 0) - 1)
        return left > 0

    kept.fails = fails
    live: dict[int, str] = {}
    gone: dict[str, int] = {}
    busy, number = True, 0
    for _ in range(draw.randint(100, 130)):
        if draw.random() < 0.06:
            busy = not busy
        if busy:
            rows, retracted = [], []
            for key in draw.sample(range(8), draw.randint(1, 3)):
                if key in live:
                    old = live.pop(key)
                    rows.append((key, old, -1))
                    retracted.append(old)
                if draw.random() < 0.7:
                    number += 1
                    live[key] = f"value-{seed}-{number}-"
                    rows.append((key, live[key], 1))
            if rows:
                kept.write(*rows)
            gone |= dict.fromkeys(retracted, kept.env.now_ms())
        kept.pass_ms(20 * MINUTE_MS, step_ms=5 * MINUTE_MS)
        if draw.random() < 0.1:
            gone = kept.still_there(gone)
            now_ms, owed_ms = kept.env.now_ms(), kept.client.inspect(kept.shard_id).owed_from_ms
            younger = {name: (at, owed_ms) for name, at in gone.items() if owed_ms is None or owed_ms > at}
            assert younger == {}, "the age is never younger than the truth"
            assert [name for name, at in gone.items() if now_ms - at > 1000 * DEADLINE_S] == []
    assert number > 20
    assert {"compaction", "gc"} <= set(kept.full)
