"""A value that was retracted is gone from every object, entry of the log and rollup by the deadline, on idle and on busy shards."""

import contextlib
import random

import pytest
import redis as driver
from deadline_house import HOUR_MS, MINUTE_MS, Kept
from persist_kit.servers import redis_server, s3_server

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


def forget(kept):
    """Write the mark, retract it, and let the deadline come: it is there until then, and gone at the deadline."""
    kept.write(*OTHERS, (99, MARK, 1))
    kept.pass_ms(HOUR_MS)
    kept.write((99, MARK, -1))
    kept.pass_ms(HOUR_MS)
    assert kept.holding(MARK), "it is there: the test would see it"
    assert "deadlineTime" in kept.status.get("debt", {}), kept.status["conditions"]
    kept.pass_ms(5 * HOUR_MS - 10 * MINUTE_MS)
    assert kept.holding(MARK) == []
    assert kept.holding("kept-7"), "only what was retracted is gone"
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
    kept.pass_ms(HOUR_MS)
    assert kept.holding(MARK) == []


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
