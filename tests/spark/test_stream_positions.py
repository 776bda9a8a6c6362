"""The position of a stream: what is written is read again, and any other bytes are refused. And the checkpoint that is made of it."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from persist_engine import Antichain, SourceProgress
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.base.errors import CorruptData, Determinate, Incompatible, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.retry import Retry
from persist_engine.base.settings import RetrySettings
from persist_engine.flow.mint_run import RunToken
from persist_spark.report import Log, SinkReport
from persist_spark.spec import ConfigurationError, Input
from persist_spark.streaming import checkpoint as checkpoints
from persist_spark.streaming.batches import Batches
from persist_spark.streaming.checkpoint import Checkpoint, temporary_checkpoint
from persist_spark.streaming.each_batch import EachBatch, NotDone
from persist_spark.streaming.file_log import file_age_ms
from persist_spark.streaming.position import (
    NO_BATCH,
    TOKEN_BYTES_MAX,
    Position,
    committer,
    decode_position,
    encode_position,
)
from persist_spark.streaming.sources import name_of

TEXTS = st.text(min_size=1, max_size=12)
PLACES = st.one_of(st.tuples(st.just(NO_BATCH), st.none()), st.tuples(st.integers(min_value=0, max_value=2**62), TEXTS))
POSITIONS = st.builds(
    lambda place, **rest: Position(batch=place[0], offsets=place[1], **rest),
    place=PLACES,
    source=TEXTS,
    query=TEXTS,
    run=TEXTS,
    driver=TEXTS,
    logs=st.dictionaries(TEXTS, st.text(max_size=12), max_size=3),
    has_rows=st.booleans(),
)
POSITION = Position(
    source="rate", query="q", batch=3, run="uid-3", driver="ab", offsets='v1\n{"batchTimestampMs":17}\n30', logs={"0/0": "v1\n5"}
)  # fmt: skip


@given(POSITIONS)
def test_what_is_encoded_is_decoded(position):
    assert decode_position(encode_position(position), sink_id="s") == position


@given(st.binary(max_size=64))
def test_other_bytes_are_the_token_of_a_run_over_a_batch_source(token):
    with pytest.raises((ConfigurationError, Incompatible, CorruptData)):
        decode_position(token, sink_id="s")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": 1}, Incompatible, "has format 1, and this release reads format 2"),
        ({"batch": -2}, CorruptData, "position.batch must be a number from -1"),
        ({"batch": None}, CorruptData, "position.batch must be a number"),
        ({"offsets": None}, CorruptData, "offsets must be set exactly when there is a batch"),
        ({"more": 1}, CorruptData, "unknown field: position.more"),
        ({"logs": {"0/0": 3}}, CorruptData, "position.logs.0/0 must be text"),
    ],
)
def test_a_position_that_this_release_did_not_write_is_refused(changes, error, message):
    document = {**json.loads(encode_position(POSITION)), **changes}
    with pytest.raises(error, match=message):
        decode_position(json.dumps(document).encode(), sink_id="s")


def test_the_committer_is_named():
    progress = SourceProgress(token=encode_position(POSITION), upper=Antichain.of(4))
    assert committer(progress) == "driver ab of run uid-3 (its batch 3)"
    assert committer(replace(progress, token=b"uid-9")) == "run uid-9"
    assert committer(replace(progress, token=RunToken(b"uid-9", b"a" * 32).encode())) == "run uid-9"
    assert committer(None) == "another run"


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (replace(POSITION, batch=NO_BATCH, offsets=None), {"metadata", "sources/0/0"}),
        (replace(POSITION, batch=0), {"metadata", "sources/0/0", "offsets/0", "commits/0"}),
        (POSITION, {"metadata", "sources/0/0", "offsets/2", "offsets/3", "commits/3"}),
    ],
)
def test_the_checkpoint_holds_what_the_next_batch_needs(tmp_path, position, expected):
    made = Checkpoint(tmp_path)
    made.write(position)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == expected
    assert made.logs(position.offsets) == {"0/0": "v1\n5"}
    if position.offsets is not None:
        planned = made.planned(position.batch)
        assert (planned.batch, planned.offsets, planned.at_ms) == (position.batch, position.offsets, 17)


def entry(number, *, batch, age_ms=0):
    return json.dumps({"path": f"file:///f/{number}", "timestamp": 1_000_000 - age_ms, "batchId": batch})


def test_the_list_of_files_is_made_of_those_that_the_batch_ends_with_and_that_spark_does_not_ignore(tmp_path):
    made = Checkpoint(tmp_path, file_age_ms=50)
    folder = tmp_path / "sources" / "0"
    folder.mkdir(parents=True)
    (folder / "9.compact").write_text("\n".join(["v1", entry(1, batch=0, age_ms=51), entry(2, batch=9, age_ms=50)]))
    (folder / "10").write_text("\n".join(["v1", entry(3, batch=10)]))
    (folder / "11").write_text("\n".join(["v1", entry(4, batch=11)]))
    (folder / ".10.crc").write_text("crc")
    logs = made.logs('v1\n{}\n{"logOffset":10}')
    assert list(logs) == ["0/10.compact", "0/.forgotten"]
    head, *lines = logs["0/10.compact"].splitlines()
    assert (head, [json.loads(line)["path"][-1] for line in lines]) == ("v1", ["2", "3"])
    assert logs["0/.forgotten"] == str(1_000_000 - 51)
    assert made.logs(None) == {}


def test_a_long_list_is_compressed_and_one_that_is_too_long_is_refused():
    lines = [entry(number, batch=0) for number in range(5000)]
    long = replace(POSITION, logs={"0/9.compact": "\n".join(lines)})
    token = encode_position(long)
    assert len(token) < TOKEN_BYTES_MAX < len(long.logs["0/9.compact"])
    assert decode_position(token, sink_id="s") == long
    assert committer(SourceProgress(token=token, upper=Antichain.of(4))) == "driver ab of run uid-3 (its batch 3)"
    with pytest.raises(CorruptData, match="position.packed"):
        decode_position(token.replace(b'"packed":"', b'"packed":"AAAA'), sink_id="s")
    random_names = random.Random(1).randbytes(300_000).hex()
    with pytest.raises(ConfigurationError, match="lower the option maxFileAge"):
        encode_position(replace(POSITION, logs={"0/9.compact": random_names}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 7 * 86_400_000),
        ({"MAXFILEAGE": "2h", "latestFirst": "false"}, 7_200_000),
        ({"maxFileAge": "soon"}, "'soon' is not a length of time"),
        ({"maxFileAge": "none"}, "'none' is not a length of time"),
        ({"latestFirst": "true"}, "latestFirst: the sink would have to remember every file"),
    ],
)
def test_the_age_after_which_a_file_is_forgotten(options, expected):
    source = Input(format="json", options=options)
    if isinstance(expected, int):
        assert file_age_ms(source) == expected
    else:
        with pytest.raises(ConfigurationError, match=expected):
            file_age_ms(source)


@pytest.mark.parametrize("memory", [Path("/no/such/folder"), Path("/dev/shm")])
def test_the_folder_of_a_driver_ends_with_it(monkeypatch, memory):
    monkeypatch.setattr(checkpoints, "_SHARED_MEMORY", memory)
    with temporary_checkpoint() as made:
        made.write(POSITION)
        assert made.folder.is_dir()
    assert not made.folder.exists()


def test_a_shard_as_a_source_is_named_with_the_source():
    for source, name in (
        (Input(format="persist", options={"Shard": "s1", "rows": "updates"}), "persist s1"),
        (Input(format="kafka", options={"subscribe": "t"}), "kafka"),
    ):
        assert name_of(source, [source]) == name


def test_after_a_batch_that_failed_nothing_is_done_any_more(tmp_path):
    """Its append may have happened. A commit of an older position would find it, and report the driver as fenced by itself."""
    done = []

    class Work:
        def do(self, rows, planned):
            done.append("batch")
            raise Unavailable("the answer is lost")

        def idle(self):
            done.append("idle")

        def finish(self, timeout_s):
            done.append("finish")

    with temporary_checkpoint() as checkpoint:
        checkpoint.write(POSITION)
        env = SystemEnv()
        log, report = Log(io.StringIO(), env), SinkReport(run_id="r")
        each = EachBatch(work=Work(), checkpoint=checkpoint, report=report, env=env, log=log, on_failure=lambda: None)
        each.idle()
        with pytest.raises(NotDone):
            each(None, POSITION.batch)
        each.idle()
        assert each.end(0)
    assert isinstance(each.failure, Unavailable)
    assert done == ["idle", "batch"]


def test_what_is_left_at_the_end_waits_for_a_store_no_longer_than_the_pod_is_there(monkeypatch):
    """The end has so much time in all: for the batch in flight, and then for the position of batches without rows."""
    env, given_s = SeededEnv(), []
    retry = Retry(env, RetrySettings(give_up_ms=120_000), NoMetrics())

    def fails():
        raise Determinate("redis does not answer")

    left = SimpleNamespace(
        client=SimpleNamespace(versions=SimpleNamespace(retry=retry)),
        _pending=POSITION,
        _commit_position=lambda position: retry.external("commit", fails),
    )

    class Work:
        def finish(self, timeout_s):
            given_s.append(timeout_s)
            Batches.finish(left, timeout_s)

    each = EachBatch(work=Work(), checkpoint=None, report=None, env=env, log=None, on_failure=lambda: None)
    monkeypatch.setattr(each, "_lock", SlowLock(env, seconds=20))
    began_s = env.monotonic_s()
    with pytest.raises(Unavailable):
        each.end(45)
    assert given_s == [25]
    assert 45 <= env.monotonic_s() - began_s < 46


class SlowLock:
    """A lock that another thread holds for so long."""

    def __init__(self, env, seconds):
        self._env, self._seconds = env, seconds

    def acquire(self, *, timeout):
        self._env.sleep(self._seconds)
        return True

    def release(self):
        pass
