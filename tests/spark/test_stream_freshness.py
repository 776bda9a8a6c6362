"""A stream reports since when it has everything of its source."""

import io
import json
import threading

import pytest
from persist_engine import Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_spark.report import Log
from persist_spark.spec import Envelope, EnvelopeType, Input, SinkSpec, Stream, Write
from persist_spark.streaming import freshness
from persist_spark.streaming.freshness import Freshness, is_waiting
from persist_spark.streaming.stream import run_stream

IDLE = {"isTriggerActive": False, "isDataAvailable": False, "message": "Waiting for data to arrive"}
NOW_MS = 1_790_000_000_000


class Query:
    status = IDLE


class Env(SystemEnv):
    """A clock that a test sets. The wall clock is ahead of it by `ahead`."""

    def __init__(self):
        self.now, self.ahead = NOW_MS, 0

    def now_ms(self):
        return self.now + self.ahead

    def monotonic_s(self):
        return self.now / 1000


@pytest.fixture
def reporting():
    """A Freshness for these options, its clock, and the times that it has reported."""

    def make(target_s, **options):
        env, out = Env(), io.StringIO()
        stream = Stream(commit_interval_s=10, fresh_s=target_s)
        source = Input(format="json", options=options)
        found = Freshness.of(stream, [source], env=env, log=Log(out, env))
        return found, env, lambda: [json.loads(line)["fresh_ms"] for line in out.getvalue().splitlines()]

    return make


def test_two_waits_an_interval_apart_show_that_nothing_was_new_at_the_first(reporting):
    fresh, env, reported = reporting(60)
    for _ in range(11):
        fresh.look(Query, None)
        env.now += 1_000
    assert reported() == [], "Spark may not have looked in between"
    for _ in range(10):
        fresh.look(Query, None)
        env.now += 1_000
    # Looks at 0, 5, 10, 15, 20 s: at 15 s the first is more than an interval past, at 20 s the second.
    assert reported() == [NOW_MS, NOW_MS + 5_000]


def test_reports_go_on_after_a_clock_that_was_ahead_was_set_back(reporting):
    """Regression: nothing was reported until that time came, an hour later, and the time that stood meanwhile was one of the future."""
    fresh, env, reported = reporting(60)
    env.ahead = 3_600_000
    ahead = env.now_ms()
    fresh.look(Query, ahead)
    env.ahead = 0
    for _ in range(20):
        env.now += 1_000
        fresh.look(Query, ahead)
    assert reported() == [ahead, NOW_MS + 5_000]
    fresh.look(Query, env.now - 3)
    assert reported()[2:] == [env.now - 3]


@pytest.mark.parametrize("kind", ["a batch", "a look of Spark under way"])
def test_a_wait_does_not_count_across(reporting, kind):
    fresh, env, reported = reporting(60, maxFilesPerTrigger="1")
    busy = type("Busy", (), {"status": {**IDLE, "isTriggerActive": True}})
    fresh.look(Query, 1)
    env.now += 9_000
    fresh.look(*((Query, 2) if kind == "a batch" else (busy, 1)))
    env.now += 9_000
    fresh.look(Query, 2 if kind == "a batch" else 1)
    assert reported() == []
    env.now += 11_000
    fresh.look(Query, 2 if kind == "a batch" else 1)
    assert reported() == [NOW_MS + 18_000]


@pytest.mark.parametrize(
    "changes", [{"isTriggerActive": True}, {"isDataAvailable": True}, {"message": "Initializing sources"}]
)
def test_a_query_that_works_or_starts_does_not_wait(changes):
    assert is_waiting(IDLE)
    assert is_waiting({**IDLE, "message": "Waiting for next trigger"})
    assert not is_waiting({**IDLE, **changes})


@pytest.mark.parametrize(("option", "reports"), [({}, True), ({"maxFilesPerTrigger": "1"}, False)])
def test_a_batch_has_everything_unless_batches_are_limited(reporting, option, reports):
    fresh, _, reported = reporting(60, **option)
    busy = type("Busy", (), {"status": {**IDLE, "isTriggerActive": True}})
    fresh.look(busy, NOW_MS - 3)
    assert reported() == ([NOW_MS - 3] if reports else [])


@pytest.mark.parametrize("name", ["refreshEvery", "refreshevery"])
def test_what_waits_for_the_next_refresh_is_not_there(reporting, name):
    fresh, _, reported = reporting(60, **{name: "20s"})
    fresh.look(Query, NOW_MS)
    assert reported() == [NOW_MS - 20_000]


def test_refreshes_at_single_times_promise_no_freshness(reporting):
    """What came after one of them may wait for ever."""
    fresh, _, _ = reporting(60, refreshAt="2026-07-01T00:00:00Z")
    assert fresh is None
    assert reporting(60, refreshAt="2026-07-01T00:00:00Z", refreshEvery="1m")[0].behind_ms == 60_000


def test_a_long_target_is_reported_in_few_steps(reporting):
    fresh, env, reported = reporting(400)
    for _ in range(100):
        fresh.look(Query, None)
        env.now += 6_000
    assert len(reported()) == 600 // 100
    assert all(later - earlier >= 97_500 for earlier, later in zip(reported(), reported()[1:], strict=False))


def test_a_stream_without_a_target_reports_nothing():
    assert Freshness.of(Stream(), [Input(format="json")], env=SystemEnv(), log=Log(io.StringIO(), SystemEnv())) is None


@pytest.mark.spark
@pytest.mark.slow
def test_a_real_stream_is_fresh_after_its_batch_and_again_while_its_source_is_idle(local_spark, tmp_path, monkeypatch):
    monkeypatch.setattr(freshness, "LOOK_S", 0.0)
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    shard, stop, out = ShardId.new(), threading.Event(), io.StringIO()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"id": 1, "n": 2}')
    fresh = []

    def listen(event, fields):
        if event == "batch":
            fresh.append("batch")
        if event == "fresh":
            fresh.append(fields["fresh_ms"])
        if len(fresh) >= 4 or event == "not_committed":
            stop.set()

    log = Log(out, SystemEnv())
    log.listener = listen
    spec = SinkSpec(
        sink_id="ns/s", run_id="r-1", shard_id=shard, key_ddl="id BIGINT", value_ddl="n BIGINT", blob=location.blob,
        consensus=location.consensus, envelope=Envelope(type=EnvelopeType.APPEND), write=Write(parallelism=1),
        input=Input(format="json", schema="id BIGINT, n BIGINT", options={"path": f"{tmp_path}/in"}),
        stream=Stream(commit_interval_s=1, fresh_s=60),
    )  # fmt: skip
    began_ms = SystemEnv().now_ms()
    with PersistClient.open(location, settings=Settings(retain_ms=None)) as client:
        client.initialise(shard, Schema.from_ddl("id BIGINT", "n BIGINT"))
        timer = threading.Timer(120, stop.set)
        timer.start()
        try:
            run_stream(local_spark, spec, stop=stop, env=SystemEnv(), log=log)
        finally:
            timer.cancel()
    assert fresh[0] == "batch"
    assert began_ms <= fresh[1] <= fresh[2] <= fresh[3] <= SystemEnv().now_ms() - 1000
