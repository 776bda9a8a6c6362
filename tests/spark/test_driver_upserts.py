"""Small batches of an Upsert that the driver decides: the same updates as on executors, and back to these where it must not decide."""

import io
import json
import math
import os
import random
import threading
from dataclasses import replace

import envelope_run
import pyarrow as pa
import pytest
from persist_engine import Antichain, PersistClient, Settings, SourceProgress
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import RetrySettings
from persist_engine.storage.open import open_blob, open_consensus
from persist_engine.testing.faults import Faults, FaultyConsensus
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, Stream
from persist_spark.streaming import batches, driver_upserts, stream
from persist_spark.streaming.driver_upserts import DriverUpserts
from persist_spark.streaming.stream import run_stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
KEY, VALUE = "id BIGINT, part STRING", "at BIGINT, x DOUBLE, more STRUCT<a: INT, b: STRING>"
KEYS, VALUES = ("id", "part"), ("at", "x", "more")
COLUMNS = f"{KEY}, {VALUE}, seq BIGINT, gone BOOLEAN"


class Acts(Log):
    """A log in memory that calls `act` at the first event of a name."""

    def __init__(self, event=None, act=None):
        super().__init__(io.StringIO(), SystemEnv())
        self.at, self.act = event, act

    def event(self, event, **fields):
        super().event(event, **fields)
        if event == self.at and self.act is not None:
            act, self.act = self.act, None
            act()

    def of(self, name):
        lines = (json.loads(line) for line in self._stream.getvalue().splitlines())
        return [line for line in lines if line["event"] == name]


class Files:
    """A folder of JSON files, of which a batch reads one, and the shards of the sinks that follow it."""

    def __init__(self, spark, folder):
        self.spark, self.folder, self.count = spark, folder, 0
        folder.mkdir()

    def add(self, *rows):
        path = self.folder / f"{self.count:03}.json"
        path.write_text("".join(json.dumps(row, allow_nan=True) + "\n" for row in rows))
        os.utime(path, (1_700_000_000 + self.count,) * 2)  # Spark takes the oldest first
        self.count += 1

    def run(self, target, envelope, log=None, stop=None, *, sql=None, **changes):
        """A driver that reads what is new and ends, or runs until `stop`."""
        options = {"path": str(self.folder), "maxFilesPerTrigger": "1"}
        input_ = Input(format="json", schema=COLUMNS, options=options, sql=sql or _SQL)
        changes = {"stream": Stream(is_bounded=True), **changes}
        spec = replace(target.spec([], COLUMNS, envelope), input=input_, **changes)
        log = log or Acts()
        run_stream(self.spark, spec, stop=stop or threading.Event(), env=SystemEnv(), log=log)
        return log


#: A column that an envelope does not name must be a field of the shard.
_SQL = f"select {', '.join((*KEYS, *VALUES))}, seq, gone from input"
_ENVELOPES = {
    "field": Envelope(type=EnvelopeType.UPSERT, order_column="at"),
    "column": Envelope(type=EnvelopeType.UPSERT, order_column="seq", delete_column="gone"),
}


@pytest.fixture
def files(local_spark, tmp_path):
    return Files(local_spark, tmp_path / "in")


def _row(dice, seq):
    more = dice.choice([None, {"a": None, "b": "x"}, {"a": 1, "b": None}])
    return {
        "id": dice.choice([None, 1, 2, 3]),
        "part": dice.choice([None, "", "p"]),
        "at": dice.choice([None, *range(5)]),
        "x": dice.choice([None, math.nan, 0.0, -0.0, 1.5]),
        "more": more,
        "seq": seq,
        "gone": dice.random() < 0.3,
    }


@pytest.mark.parametrize("kind", _ENVELOPES)
def test_driver_and_executors_write_the_same(files, make_target, monkeypatch, kind):
    envelope, dice = _ENVELOPES[kind], random.Random(kind)
    if kind == "field":
        monkeypatch.setattr(f"{__name__}._SQL", _SQL.replace(", seq, gone", ""))
    batches = [[_row(dice, number * 50 + seq) for seq in range(12)] for number in range(5)]
    if kind == "field":  # the oracle wants one last row of each key
        batches = [list({(r["id"], r["part"], r["at"]): r for r in rows}.values()) for rows in batches]
    for rows in batches:
        files.add(*rows)
    here, reading, there = (make_target(KEY, VALUE) for _ in range(3))
    log = files.run(here, envelope)
    assert len(log.of("decided")) == len(batches)
    assert not log.of("staged")
    with monkeypatch.context() as patch:
        patch.setattr(driver_upserts, "STATE_UPDATES_MAX", -1)
        log = files.run(reading, envelope)
    assert (len(log.of("upserts_read_keys")), len(log.of("decided"))) == (1, len(batches))
    assert not log.of("staged")
    monkeypatch.setattr(driver_upserts, "COMMANDS_BYTES_MAX", 0)
    log = files.run(there, envelope)
    assert len(log.of("staged")) == len(batches)
    assert not log.of("decided")
    state = {}
    for rows in batches:
        state = envelope_run.upserted(state, rows, key=KEYS, value=VALUES, envelope=envelope)
    expected = {key: envelope_run.key_of(value) for key, value in state.items()}
    for target in (here, reading, there):
        assert {key: envelope_run.key_of(value) for key, value in target.state().items()} == expected


PLAIN = Envelope(type=EnvelopeType.UPSERT, order_column="seq", delete_column="gone")


def _one(number, x=1.0, seq=0, *, gone=False):
    return {"id": number, "part": "p", "at": None, "x": x, "more": None, "seq": seq, "gone": gone}


def _held(number, x):
    return (number, "p"), (None, x, None)


def test_a_key_without_a_last_row_is_refused_by_name_and_nothing_is_written(files, make_target):
    target = make_target(KEY, VALUE)
    files.add(_one(1))
    files.add(_one(2, x=1.0), _one(2, x=2.0), _one(3))
    log = Acts()
    with pytest.raises(ConfigurationError, match="several different rows for key .*2.*none of them is the last"):
        files.run(target, PLAIN, log)
    assert [line["batch"] for line in log.of("batch")] == [0]
    assert target.state() == dict([_held(1, 1.0)])


def test_a_shard_with_several_values_of_a_key_goes_on_without_the_key(files, make_target):
    """A handle that knows all keys cannot be had then. The driver, and executors, look at the keys of the batch alone."""
    target = make_target(KEY, VALUE)
    target.write({_held(1, 1.0): 1, _held(1, 2.0): 1, _held(2, 1.0): 1})
    files.add(_one(2, x=5.0))
    files.add(_one(1, x=5.0))
    log = Acts()
    with pytest.raises(Exception, match="the shard holds 2 values of key"):
        files.run(target, PLAIN, log)
    assert len(log.of("upserts_read_keys")) == 1
    assert [line["batch"] for line in log.of("batch")] == [0]
    assert len(log.of("appended")) == 1
    assert not log.of("staged")
    target.write({_held(1, 1.0): -1})
    assert target.state() == dict([_held(1, 2.0), _held(2, 5.0)])


@pytest.mark.parametrize(("limit", "value"), [("STATE_UPDATES_MAX", 1), ("STATE_BYTES_MAX", 0)])
def test_of_a_shard_with_too_many_keys_the_driver_reads_those_of_each_batch(
    files, make_target, monkeypatch, limit, value
):
    monkeypatch.setattr(driver_upserts, limit, value)
    target = make_target(KEY, VALUE)
    target.write({_held(1, 1.0): 1, _held(2, 1.0): 1})
    files.add(_one(1, x=5.0))
    files.add(_one(2, x=5.0))
    log = files.run(target, PLAIN)
    assert len(log.of("upserts_read_keys")) == 1
    assert not log.of("staged")
    assert target.state() == dict([_held(1, 5.0), _held(2, 5.0)])
    found = target.client.inspect(target.id)
    assert (len(found.readers), len(found.writers)) == (0, 0)


def test_batches_whose_keys_lie_among_too_many_rows_are_upserted_by_executors(files, make_target, monkeypatch):
    """Two keys may lie among more rows too: a list of them finds their rows alone."""
    monkeypatch.setattr(driver_upserts, "STATE_UPDATES_MAX", 1)
    monkeypatch.setattr(driver_upserts, "READ_ROWS_MAX", 2)
    target = make_target(KEY, VALUE)
    target.write({_held(number, 1.0): 1 for number in range(1, 9)})
    files.add(*(_one(number, x=5.0) for number in (1, 8)))
    files.add(_one(2, x=5.0))
    files.add(*(_one(number, x=6.0) for number in range(3, 9)))
    files.add(_one(3, x=7.0))
    log = files.run(target, PLAIN)
    assert [line["commands"] for line in log.of("upserts_on_executors")] == [6]
    assert [line["rows"] for line in log.of("staged")] == [6]
    assert [line["rows"] for line in log.of("decided")] == [2, 1, 6, 1], "the third one in vain"
    expected = {1: 5.0, 2: 5.0, 3: 7.0, **dict.fromkeys(range(4, 9), 6.0)}
    assert target.state() == dict(_held(number, x) for number, x in expected.items())


def test_a_driver_that_read_too_much_takes_smaller_batches_and_then_none(files, make_target, monkeypatch):
    monkeypatch.setattr(driver_upserts, "STATE_UPDATES_MAX", 1)
    monkeypatch.setattr(driver_upserts, "READ_BYTES_MAX", -1)
    target = make_target(KEY, VALUE)
    target.write({_held(number, 1.0): 1 for number in range(1, 9)})
    files.add(*(_one(number, x=5.0) for number in (1, 8)))
    files.add(_one(2, x=5.0))
    files.add(_one(2, x=6.0))
    log = files.run(target, PLAIN)
    assert [line["commands"] for line in log.of("upserts_on_executors")] == [2, 1]
    assert [line["rows"] for line in log.of("decided")] == [2, 1]
    assert [line["rows"] for line in log.of("staged")] == [2, 1, 1]
    expected = {**dict.fromkeys(range(3, 8), 1.0), 1: 5.0, 8: 5.0, 2: 6.0}
    assert target.state() == dict(_held(number, x) for number, x in expected.items())


def test_other_writers_between_two_batches_and_within_one(files, make_target):
    """The driver decides anew against what they wrote."""
    target = make_target(KEY, VALUE)
    files.add(_one(1), _one(2), _one(3))
    files.add(_one(1, x=2.0), _one(2, gone=True), _one(4))

    def rival():
        target.write({_held(1, 1.0): -1, _held(1, 7.0): 1, _held(2, 1.0): -1, _held(4, 9.0): 1})

    second = Acts("batch", lambda: setattr(second, "at", "decided") or setattr(second, "act", rival))
    log = files.run(target, PLAIN, second)
    assert len(log.of("appended")) == 2
    assert target.state() == dict([_held(1, 2.0), _held(3, 1.0), _held(4, 1.0)])


def test_a_driver_is_fenced_by_another_and_the_other_goes_on(files, make_target):
    target = make_target(KEY, VALUE)
    files.add(_one(1))
    files.add(_one(2))
    other = Acts()
    log = Acts("decided", lambda: files.run(target, PLAIN, other, run_id="r-2"))
    with pytest.raises(Fenced, match="ns/s"):
        files.run(target, PLAIN, log, run_id="r-1")
    assert not log.of("appended")
    assert len(other.of("appended")) == 2
    assert target.state() == dict([_held(1, 1.0), _held(2, 1.0)])


def test_an_idle_driver_holds_nothing_back(files, make_target, monkeypatch):
    """Others write while the source has nothing new: the driver's own reader follows them, and lets since advance from time to time."""
    monkeypatch.setattr(batches, "KEEP_UP_S", 0.0)
    target, stop, uppers = make_target(KEY, VALUE), threading.Event(), []
    files.add(_one(1))

    class Idle(DriverUpserts):
        def keep_up(self):
            super().keep_up()
            if self._handle is not None:
                if not uppers:
                    target.write({_held(5, 1.0): 1})
                uppers.append(self._handle.upper)
                if uppers[-1] == target.client.recent_upper(target.id):
                    stop.set()

    monkeypatch.setattr(stream, "DriverUpserts", Idle)
    files.run(target, PLAIN, stop=stop, stream=Stream(commit_interval_s=1))
    assert uppers[0] < uppers[-1]
    assert target.state() == dict([_held(1, 1.0), _held(5, 1.0)])


def _commands(*numbers):
    """Commands of a shard of (id BIGINT, n BIGINT), as a small batch brings them."""
    rows = len(numbers)
    return pa.table(
        {
            "k0": pa.array(numbers, pa.int64()),
            "v0": pa.array(numbers, pa.int64()),
            "o": pa.nulls(rows, pa.int64()),
            "deleted": [False] * rows,
            "weight": pa.array([1] * rows, pa.int64()),
            "fault": pa.nulls(rows, pa.string()),
        }
    )


def test_what_others_write_while_the_source_is_idle_is_kept_within_the_limit_too(make_target, monkeypatch):
    target, log = make_target("id BIGINT", "n BIGINT"), Acts()
    spec = target.spec([], "id BIGINT, n BIGINT", Envelope(type=EnvelopeType.UPSERT))
    with DriverUpserts(spec=spec, client=target.client, log=log) as upserts:
        done = upserts.commit(_commands(1, 2), b"first", expected=None)
        monkeypatch.setattr(driver_upserts, "STATE_BYTES_MAX", 1 << 14)
        upserts.keep_up()
        assert not log.of("upserts_read_keys")
        target.write({((number,), (number,)): 1 for number in range(10, 2000)})
        upserts.keep_up()
        assert len(log.of("upserts_read_keys")) == 1
        assert len(target.client.inspect(target.id).readers) == 0
        first = SourceProgress(token=b"first", upper=Antichain.of(done.upper))
        assert upserts.commit(_commands(2, 3), b"second", expected=first).updates_written == 1


def test_a_driver_whose_stores_fail_while_it_is_idle_reads_the_shard_anew(make_target):
    """Then it cannot release its leases either. They lapse, and the driver goes on."""
    target, log, faults = make_target("id BIGINT", "n BIGINT"), Acts(), Faults()
    env, metrics = SystemEnv(), NoMetrics()
    consensus = FaultyConsensus(open_consensus(target.location.consensus, env=env, metrics=metrics), faults)
    blob = open_blob(target.location.blob, env=env, metrics=metrics)
    settings = Settings(retry=RetrySettings(give_up_ms=100.0))
    spec = target.spec([], "id BIGINT, n BIGINT", Envelope(type=EnvelopeType.UPSERT))
    with (
        PersistClient(blob, consensus, settings=settings, env=env, metrics=metrics) as client,
        DriverUpserts(spec=spec, client=client, log=log) as upserts,
    ):
        done = upserts.commit(_commands(1, 2), b"first", expected=None)
        faults.break_down()
        upserts.keep_up()
        faults.heal()
        assert len(log.of("upserts_let_go")) == 1
        target.write({((3,), (3,)): 1})
        first = SourceProgress(token=b"first", upper=Antichain.of(done.upper))
        assert upserts.commit(_commands(2, 3, 4), b"second", expected=first).updates_written == 1


def test_the_handle_goes_with_the_driver(files, make_target):
    target = make_target(KEY, VALUE)
    files.add(_one(1))
    files.run(target, PLAIN)
    found = target.client.inspect(target.id)
    assert (len(found.readers), len(found.writers)) == (0, 0)


def test_maps_are_refused_before_the_first_batch_whatever_its_size(files, make_target):
    """Executors cannot compare maps, so the driver does not either."""
    target = make_target("id BIGINT", "at MAP<STRING, INT>")
    files.add(_one(1))
    with pytest.raises(
        ConfigurationError, match="Spark cannot compare the values of at, which are MAPs: use Mirror or Append"
    ):
        files.run(target, Envelope(type=EnvelopeType.UPSERT), sql="select id, map('a', 1) as at from input")
    assert target.state() == {}
