"""Whole sinks on a local session: afterwards the shard equals the input, whatever fails in between.

Bad input is in test_bad_input.py, and lost appends are in test_landing.py and test_landing_mirrors.py, without Spark.
"""

import io
import json
import sys
import threading
from dataclasses import replace

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, ShardNotFound
from persist_spark import frames, sink, staging
from persist_spark.envelopes import corrected
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Write
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession
from query_shard import KEY, VALUE, Shard

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MIRROR, APPEND = Envelope(type=EnvelopeType.MIRROR), Envelope(type=EnvelopeType.APPEND)
TIMED = Envelope(type=EnvelopeType.APPEND, timestamp_column="t")


@pytest.fixture
def spark(local_spark) -> SparkSession:
    return local_spark


@pytest.fixture
def shard(tmp_path, spark) -> Shard:
    made = Shard(tmp_path, spark)
    yield made
    made.client.close()


ROWS = "select id, concat('n', id) as name, id / 2d as score from range({})"
#: Rows large enough for parts in blobs.
LARGE = "select id, repeat(sha2(cast(id as string), 256), 4) as name, 0d as score from range({})"


def expected(count: int) -> list:
    return sorted(((i, f"n{i}", i / 2, 1) for i in range(count)), key=repr)


def test_an_append_writes_every_row_once_for_each_run_id(shard):
    first = shard.run(ROWS.format(1000), APPEND, "r1")
    assert (first.rows_read, first.updates_written, first.already_done) == (1000, 1000, False)
    assert shard.rows() == expected(1000)
    again = shard.run(ROWS.format(1000), APPEND, "r1")
    assert again.already_done
    assert again.upper == first.upper
    assert shard.rows() == expected(1000)
    shard.run(ROWS.format(1000), APPEND, "r2")
    assert {row[3] for row in shard.rows()} == {2}


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=lambda each: each.type.value)
def test_runs_into_a_table_that_counts_take_one_number_each(shard, envelope):
    shard.id = ShardId.new()
    shard.client.initialise(shard.id, shard.schema, clock="counter")
    for number, query in enumerate((ROWS.format(2), ROWS.format(3)), 1):
        shard.run(query, envelope, f"u-{number}")
        assert shard.client.recent_upper(shard.id).time == number + 1
    assert len(shard.rows(as_of=1)) == 2
    shard.check_sound()


def test_tasks_of_a_small_append_may_hold_the_same_keys(shard, monkeypatch):
    """Nothing brings equal rows into one task. Each task's batch is a run of its own, and readers add up the diffs."""
    monkeypatch.setattr(frames, "SMALL_TASK_BYTES", 1)
    twice = "select id % 1500 as id, repeat('x', 64) as name, 0d as score from range(3000)"
    report = shard.run(twice, APPEND, "r1", write=Write())
    assert (report.rows_read, len(shard.parts())) == (3000, 2)
    assert shard.rows() == sorted(((i, "x" * 64, 0.0, 2) for i in range(1500)), key=repr)
    shard.check_sound()


def test_an_append_with_a_timestamp_column_writes_rows_at_their_own_times(shard):
    query = "select id, 'x' as name, 0d as score, timestamp_millis(1000 + id) as t from range(10)"
    report = shard.run(query, TIMED, "r1")
    assert (report.lower, report.upper, report.rows_read) == (0, 1010, 10)
    assert [row[0] for row in shard.rows(1003)] == [0, 1, 2, 3]
    assert len(shard.rows()) == 10


def test_a_mirror_makes_the_shard_equal_to_its_input(shard):
    odd = (
        "select * from values (1L, 'a', double('NaN')), (2L, null, 0d), (3L, 'c', -0d), (4L, null, null), (5L, 'e', 1d)"
        " as v(id, name, score)"
    )
    shard.run(odd, MIRROR, "r1")
    once = shard.rows()
    assert [row[0] for row in once] == [1, 2, 3, 4, 5]
    unchanged = shard.run(odd, MIRROR, "r2")
    assert (unchanged.rows_read, unchanged.updates_written) == (5, 0)
    # A rival deletes a row, doubles one, adds one, and deletes one that does not exist.
    shard.edit([(5, "e", 1.0, -1), (4, None, None, 1), (9, "x", 0.0, 1), (8, "y", 0.0, -1)])
    assert repr(shard.rows()) != repr(once)
    corrected = shard.run(odd, MIRROR, "r3")
    assert corrected.updates_written == 4
    assert repr(shard.rows()) == repr(once)


def test_a_mirror_keeps_the_number_of_copies_of_a_row(shard):
    twice = "select id % 3 as id, 'x' as name, 0d as score from range(6)"
    shard.run(twice, MIRROR, "r1")
    assert shard.rows() == [(0, "x", 0.0, 2), (1, "x", 0.0, 2), (2, "x", 0.0, 2)]
    shard.run("select id, 'x' as name, 0d as score from range(2)", MIRROR, "r2")
    assert shard.rows() == [(0, "x", 0.0, 1), (1, "x", 0.0, 1)]


def test_a_mirror_of_the_same_rows_reads_nothing_of_the_shard(shard, tmp_path):
    """Not even when the rows come in another order and in other partitions."""
    shard.run(LARGE.format(3000), MIRROR, "r-1")
    away = {tmp_path / str(n): path for n, path in enumerate((tmp_path / "blobs" / shard.id).glob("n*/*"))}
    for hidden, path in away.items():
        path.rename(hidden)
    for run, query in (("r-2", LARGE.format(3000)), ("r-3", LARGE.format(3000) + " order by name desc")):
        report = shard.run(query, MIRROR, run)
        assert (report.rows_read, report.updates_written, "unchanged" in shard.all_events()) == (3000, 0, True)
        assert shard.run(query, MIRROR, run).already_done
    with pytest.raises(Fenced, match="a newer run"):
        shard.run(LARGE.format(3000), MIRROR, "r-2")
    assert len(away) == 3
    for hidden, path in away.items():
        hidden.rename(path)
    assert shard.run(LARGE.format(2999), MIRROR, "r-4").updates_written == 1
    assert "unchanged" not in shard.all_events()
    assert shard.run(LARGE.format(2999), MIRROR, "r-5").updates_written == 0
    assert "unchanged" in shard.all_events(), "corrections leave the digest of their rows too"
    assert len(shard.rows()) == 2999


def test_a_mirror_of_the_same_rows_corrects_what_others_write_meanwhile(shard):
    shard.run(ROWS.format(5), MIRROR, "r1")
    report = shard.run(
        ROWS.format(5), MIRROR, "r2", acts=[lambda: shard.edit([(9, "rival", 0.0, 1), (0, "n0", 0.0, -1)])]
    )
    assert "unchanged" in shard.all_events()
    assert report.updates_written == 2
    assert shard.rows() == expected(5)
    shard.edit([(9, "rival", 0.0, 1)])
    assert shard.run(ROWS.format(5), MIRROR, "r3").updates_written == 1
    with shard.client.open_writer(shard.id, shard.schema, purpose="rival") as writer:
        upper = writer.fetch_recent_upper()
        writer.compare_and_append_batch([], expected_upper=upper, new_upper=Antichain.of(upper.time + 5))
    assert shard.run(ROWS.format(5), MIRROR, "r4").updates_written == 0
    assert "unchanged" in shard.all_events(), "an upper that moved brought no rows"
    assert shard.rows() == expected(5)


def test_an_unchanged_empty_mirror_still_needs_allow_empty(shard):
    nothing = ROWS.format(0)
    shard.run(nothing, MIRROR, "r1", input={"allow_empty": True})
    with pytest.raises(ConfigurationError, match="allowEmpty"):
        shard.run(nothing, MIRROR, "r2")
    assert shard.run(nothing, MIRROR, "r3", input={"allow_empty": True}).rows_read == 0


def test_a_mirror_runs_once_for_each_run_id(shard):
    shard.run(ROWS.format(3), MIRROR, "r1")
    assert shard.run(ROWS.format(5), MIRROR, "r1").already_done
    assert shard.rows() == expected(3)


def test_a_mirror_reads_a_shard_whose_since_is_ahead_of_its_upper(shard):
    shard.run(ROWS.format(3), MIRROR, "r1")
    upper = shard.client.recent_upper(shard.id).time
    since = upper + 1_000_000
    with shard.client.open_leased_reader(shard.id, purpose="test") as reader:
        reader.downgrade_since(Antichain.of(since))
    report = shard.run(ROWS.format(4), MIRROR, "r2")
    assert report.lower == since + 1
    assert shard.rows() == expected(4)


class FailsFirst:
    """A task whose first attempt fails after it has staged everything."""

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, batches):
        staged = list(self.stage(batches))
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("this attempt fails after it staged")
        yield from staged


@pytest.fixture
def failing_tasks(monkeypatch):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    for module, name in ((staging, "StageRows"), (corrected, "StageRows"), (corrected, "MakeCorrections")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda task, original=original, **more: FailsFirst(original(task, **more)))
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=["append", "mirror"])
def test_a_task_that_fails_after_staging_writes_nothing_twice(shard, failing_tasks, envelope):
    """The rows are large enough for blobs, so that the failed attempts leave parts behind."""
    shard.edit([(0, "x", 0.0, 1)])  # so that the mirror has something to correct
    before, parts = shard.parts(), shard.client.inspect(shard.id).parts
    report = shard.run(LARGE.format(3000), envelope, "r1")
    assert (report.rows_read, report.updates_written) == (3000, 3001 if envelope is MIRROR else 3000)
    rows = shard.rows()
    assert len(rows) == (3000 if envelope is MIRROR else 3001)
    assert {row[3] for row in rows} == {1}
    assert shard.client.inspect(shard.id).parts - parts == 3
    assert len(shard.parts() - before) >= 6, "the orphans of the first attempts stay for the orphan scan"


class Busy:
    """A writer that commits a row five times a second, at the wall clock, for as long as the `with` block takes."""

    def __init__(self, shard):
        self.shard, self.commits = shard, 0
        self._stopped, self._committed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def next_commit(self):
        """Waits for a commit, so that an append at an older upper is lost."""
        with self._committed:
            before = self.commits
            assert self._committed.wait_for(lambda: self.commits > before, 60)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()

    def _run(self):
        with self.shard.client.open_writer(self.shard.id, self.shard.schema, purpose="busy") as writer:
            upper = writer.fetch_recent_upper()
            while not self._stopped.wait(0.2):
                time = max(upper.time, SystemEnv().now_ms())
                update = (((-1,), ("busy", 0.0)), time, 1)
                answer = writer.compare_and_append([update], expected_upper=upper, new_upper=Antichain.of(time + 1))
                upper = answer.upper if isinstance(answer, Appended) else answer.current
                with self._committed:
                    self.commits += isinstance(answer, Appended)
                    self._committed.notify_all()


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=["append", "mirror"])
def test_a_run_stages_once_and_lands_beside_a_writer_that_never_pauses(shard, envelope):
    """Such a run staged everything sixteen times, lost as many appends, and gave up."""
    shard.edit([(-2, "before", 0.0, 1)])
    with Busy(shard) as busy:
        report = shard.run(LARGE.format(3000), envelope, "r1", acts=[busy.next_commit])
    events = shard.events()
    assert (events.count("staged"), events[-1]) == (1, "appended")
    assert events.count("lost_append") == events.count("moved" if envelope is APPEND else "corrected") >= 1
    there = {row[0]: row[3] for row in shard.rows(report.upper - 1)}
    assert [there.pop(key) for key in range(3000)] == [1] * 3000
    if envelope is MIRROR:
        assert there == {}
    else:
        assert there.pop(-2) == 1
        assert 1 <= there.pop(-1) <= busy.commits
        assert there == {}
    assert {row[0]: row[3] for row in shard.rows()}.get(-1, 0) <= busy.commits
    assert shard.run(LARGE.format(3000), envelope, "r1").already_done
    shard.check_sound()


def test_an_append_that_loses_appends_to_other_writers_appends_what_it_staged_first(shard):
    staged: list[set[str]] = []

    def act():
        staged.append(shard.parts())
        shard.edit([(77, "x", 0.0, 1)], ahead_ms=100_000)

    report = shard.run(LARGE.format(3000), APPEND, "r1", acts=[act, act])
    assert shard.events() == ["staged", *["lost_append", "moved"] * 2, "appended"]
    assert (report.rows_read, report.updates_written) == (3000, 3000)
    assert len(staged[0]) == 3
    assert shard.parts() == staged[0]
    rows = shard.rows()
    assert len(rows) == 3001
    assert {row[3] for row in rows} == {1, 2}
    assert len(shard.rows(report.upper - 2)) == 1
    shard.check_sound()
    # Tasks read the moved parts like any others: the corrections against them are right.
    changed = shard.run(LARGE.format(3000), MIRROR, "r2")
    assert changed.updates_written == 1


def test_a_mirror_that_loses_appends_retracts_what_the_winners_wrote(shard):
    """Before each of two appends a rival writes the very same corrections, and a row of its own."""
    shard.run(ROWS.format(3), MIRROR, "r1")
    shard.edit([(9, "old", 0.0, 1)])
    rival = [(3, "n3", 1.5, 1), (9, "old", 0.0, -1), (77, "x", 0.0, 1)]
    report = shard.run(ROWS.format(4), MIRROR, "r2", acts=[lambda: shard.edit(rival)] * 2)
    assert shard.events() == ["staged", *["lost_append", "corrected"] * 2, "appended"]
    assert report.updates_written == 2 + 3 + 3
    assert shard.rows() == expected(4)
    shard.check_sound()


def test_a_mirror_whose_corrections_cannot_be_read_stages_again(shard):
    """The rival's rows lie before since, which is ahead of the upper. So the run starts over, at a time past since."""
    since = SystemEnv().now_ms() + 1_000_000
    with shard.client.open_leased_reader(shard.id, purpose="test") as reader:
        reader.downgrade_since(Antichain.of(since))

    def act():
        with shard.client.open_writer(shard.id, shard.schema, purpose="rival") as writer:
            rows = [(((77,), ("x", 0.0)), since - 1, 1)]
            writer.compare_and_append(rows, expected_upper=Antichain.of(0), new_upper=Antichain.of(since))

    shard.run(ROWS.format(4), MIRROR, "r1", acts=[act])
    assert shard.events() == ["staged", "lost_append", "recompute", "minted", "staged", "appended"]
    assert shard.rows() == expected(4)


def test_a_mirror_stops_when_the_schema_evolved_before_it_read_the_shard(shard, spark):
    """It does not see the new field. Corrections without that field would leave rows behind and remove others."""
    shard.run(ROWS.format(3), MIRROR, "r1")
    wider = Schema.from_ddl(KEY, VALUE + ", note STRING")

    class Outgrowing(Log):
        """Evolves the schema after the run has opened its writer, when it logs that its pods have little memory."""

        def event(self, event, **fields):
            super().event(event, **fields)
            if event == "smaller_parts":
                shard.client.evolve_schema(shard.id, wider)
                with shard.client.open_writer(shard.id, wider, purpose="newer") as writer:
                    upper = writer.fetch_recent_upper()
                    row = (((77,), ("x", 0.0, "noted")), upper.time, 1)
                    writer.compare_and_append([row], expected_upper=upper, new_upper=Antichain.of(upper.time + 1))

    conf = spark.sparkContext._conf
    pod = {"spark.executor.memory": "1g", "spark.executor.memoryOverhead": "512m", "spark.executor.cores": "1"}
    for name, value in pod.items():
        conf.set(name, value)
    lines = io.StringIO()
    try:
        with pytest.raises(ConfigurationError, match="schema: shard .* has evolved to schema 1, this handle has 0"):
            sink.run_sink(spark, shard.spec(ROWS.format(4), MIRROR, "r2"), log=Outgrowing(lines, SystemEnv()))
    finally:
        for name in pod:
            conf._jconf.remove(name)
    assert [json.loads(line)["event"] for line in lines.getvalue().splitlines()] == ["smaller_parts"]
    with shard.client.open_leased_reader(shard.id, wider, purpose="test") as reader:
        upper = shard.client.recent_upper(shard.id).time
        rows = {
            (row["key"]["id"], row["val"]["note"], row["diff"])
            for row in reader.snapshot(upper - 1).to_table().to_pylist()
        }
    assert rows == {(77, "noted", 1), *((id_, None, 1) for id_, *_ in expected(3))}


def test_timed_rows_that_are_late_when_staged_are_refused_and_deleted(shard):
    def overtake():
        with shard.client.open_writer(shard.id, shard.schema, purpose="other") as writer:
            writer.compare_and_append([], expected_upper=Antichain.of(0), new_upper=Antichain.of(1003))

    query = "select id, repeat('x', 9000) || id as name, 0d as score, 1000 + id as t from range(5)"
    with pytest.raises(
        ConfigurationError, match="some rows have a time before the shard's upper 1003, the first at 1000"
    ):
        shard.run(query, TIMED, "r1", acts=[overtake])
    assert shard.rows() == []
    assert shard.parts() == set()


def test_a_run_older_than_the_newest_run_of_its_sink_is_fenced(shard):
    """Its driver slept or was started twice. The shard has the progress of a newer run."""
    shard.run(ROWS.format(10), APPEND, "uid-10")
    with pytest.raises(Fenced, match="newer run of sink ns/s than uid-9"):
        shard.run(ROWS.format(10), APPEND, "uid-9")
    assert shard.rows() == expected(10)


def test_a_run_overtaken_by_another_run_of_its_sink_is_fenced(shard):
    other = shard.spec(ROWS.format(2), APPEND, "r2")
    spec = shard.spec(ROWS.format(3), APPEND, "r1")
    with pytest.raises(Fenced, match="run r2 of sink ns/s appended to"):
        shard.run_spec(spec, acts=[lambda: sink.run_sink(shard.spark, other)])
    assert shard.rows() == expected(2)


def test_a_second_driver_of_a_run_finds_the_run_done(shard):
    spec = shard.spec(ROWS.format(3), APPEND, "r1")
    assert shard.run_spec(spec, acts=[lambda: sink.run_sink(shard.spark, spec)]).already_done
    assert shard.rows() == expected(3)


def test_a_run_releases_its_handles_when_it_ends_and_when_it_fails(shard):
    shard.run(ROWS.format(3), MIRROR, "r1")
    with pytest.raises(ConfigurationError):
        shard.run("select id from range(3)", MIRROR, "r2")
    inspection = shard.client.inspect(shard.id)
    assert (inspection.readers, inspection.writers) == ((), ())


def test_a_sink_of_an_unknown_shard_is_refused_and_creates_nothing(shard):
    spec = replace(shard.spec(ROWS.format(1), APPEND, "r1"), shard_id=ShardId.new())
    with pytest.raises(ShardNotFound, match="does not exist"):
        sink.run_sink(shard.spark, spec)
    assert list(shard.client.shards()) == [shard.id]


def test_rows_of_every_type_are_written_and_read_back_unchanged(shard, spark):
    """The key has a column of every type, and the value has no fields. The second run reads them back and finds no difference."""
    ddl = (
        "b BOOLEAN, i8 TINYINT, i16 SMALLINT, i32 INT, i64 BIGINT, f FLOAT, d DOUBLE, dec DECIMAL(20,4), s STRING, "
        "bin BINARY, day DATE, at TIMESTAMP, wall TIMESTAMP_NTZ, nested STRUCT<x: INT, y: STRING>"
    )
    query = (
        "select true as b, 1Y as i8, 2S as i16, 3 as i32, 4L as i64, float(0.5) as f, 0.25d as d,"
        " cast(1.5 as decimal(20,4)) as dec, 'é' as s, X'00FF' as bin, date'2013-01-01' as day,"
        " timestamp'2013-01-01 05:00:00Z' as at, timestamp_ntz'2013-01-01 05:00:00' as wall,"
        " named_struct('x', 1, 'y', 'n') as nested"
    )
    typed = ShardId.new()
    schema = Schema.from_ddl(ddl)
    shard.client.initialise(typed, schema)
    spec = shard.spec(query, MIRROR, "r1")
    for run in ("r1", "r2"):
        report = sink.run_sink(spark, replace(spec, run_id=run, shard_id=typed, key_ddl=ddl, value_ddl=""))
    assert report.updates_written == 0
    with shard.client.open_leased_reader(typed, purpose="test") as reader:
        table = reader.snapshot(Antichain.of(report.upper - 1)).to_table()
    source = pa.Table.from_batches(spark.sql(query).toArrow().to_batches())
    assert table.column("key").to_pylist() == source.to_pylist()
