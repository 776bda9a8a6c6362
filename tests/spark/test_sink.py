"""Whole sinks on a local session: what the shard holds afterwards equals the input, whatever fails in between."""

import io
import json
import sys
import threading

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Location, PersistClient, Schema, Settings, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, Unavailable
from persist_engine.work.audit.verify import verify_shard
from persist_spark import landing, partitions, sink
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError, Envelope, EnvelopeType, Input, SinkSpec, Write
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
KEY, VALUE = "id BIGINT", "name STRING, score DOUBLE"
MIRROR, APPEND = Envelope(type=EnvelopeType.MIRROR), Envelope(type=EnvelopeType.APPEND)
TIMED = Envelope(type=EnvelopeType.APPEND, timestamp_column="t")


@pytest.fixture
def spark(local_spark) -> SparkSession:
    return local_spark


class Shard:
    """One shard on files, written by sinks over a table of the session."""

    def __init__(self, folder, spark):
        self.location = Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/consensus.db")
        self.folder, self.spark = folder, spark
        self.id = ShardId.new()
        self.schema = Schema.from_ddl(KEY, VALUE)
        self.client = PersistClient.open(self.location, settings=Settings(retain_ms=None))
        self.client.initialise(self.id, self.schema)
        self.files = 0
        self.lines = io.StringIO()

    def spec(self, query: str, envelope: Envelope, run: str, **more) -> SinkSpec:
        """A sink whose input is what `query` gives now."""
        self.files += 1
        path = f"{self.folder}/input-{self.files}"
        self.spark.sql(query).write.parquet(path)
        source = Input(format="parquet", options={"path": path}, **more.pop("input", {}))
        changes = {"sink_id": "ns/s", "write": Write(parallelism=3), **more}
        return SinkSpec(
            run_id=run,
            shard_id=self.id,
            key_ddl=KEY,
            value_ddl=VALUE,
            blob=self.location.blob,
            consensus=self.location.consensus,
            input=source,
            envelope=envelope,
            **changes,
        )

    def run(self, query: str, envelope: Envelope, run: str, **more):
        self.lines = io.StringIO()
        spec = self.spec(query, envelope, run, **more)
        return sink.run_sink(self.spark, spec, log=Log(self.lines, SystemEnv()))

    def events(self) -> list[dict]:
        """What the last run told."""
        return [json.loads(line) for line in self.lines.getvalue().splitlines()]

    def told(self) -> list[str]:
        """What the last run told from the staging on."""
        names = [each["event"] for each in self.events()]
        return names[names.index("staged") :]

    def rows(self, as_of: int | None = None) -> list:
        """(id, name, score, diff), sorted as text: the collection at its latest time."""
        upper = self.client.recent_upper(self.id).time
        assert upper is not None
        with self.client.open_leased_reader(self.id, purpose="test") as reader:
            table = reader.snapshot(Antichain.of(upper - 1 if as_of is None else as_of)).to_table()
        return sorted(
            ((row["key"]["id"], row["val"]["name"], row["val"]["score"], row["diff"]) for row in table.to_pylist()),
            key=repr,
        )

    def blobs(self) -> int:
        return sum(1 for path in (self.folder / "blobs").rglob("*") if path.is_file())

    def edit(self, rows, *, ahead_ms: int | None = None) -> None:
        """Somebody else writes (id, name, score, diff): where the shard ends, or so far ahead of the clock."""
        with self.client.open_writer(self.id, self.schema, purpose="vandal") as writer:
            upper = writer.fetch_recent_upper()
            time = upper.time if ahead_ms is None else max(upper.time, SystemEnv().now_ms() + ahead_ms)
            updates = [(((id_,), (name, score)), time, diff) for id_, name, score, diff in rows]
            answer = writer.compare_and_append(updates, expected_upper=upper, new_upper=Antichain.of(time + 1))
            assert isinstance(answer, Appended)

    def part_keys(self) -> list[set[str]]:
        """Of the batches in state, oldest first, the keys of their blobs."""
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            return [set(batch.blob_keys()) for batch in writer.machine.refresh().trace.batches()]

    def check_sound(self) -> None:
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            assert verify_shard(writer.machine).findings == []


@pytest.fixture
def shard(tmp_path, spark) -> Shard:
    made = Shard(tmp_path, spark)
    yield made
    made.client.close()


ROWS = "select id, concat('n', id) as name, id / 2d as score from range({})"


def expected(count: int) -> list:
    return sorted(((i, f"n{i}", i / 2, 1) for i in range(count)), key=repr)


def test_append_writes_every_row_once_per_run(shard):
    first = shard.run(ROWS.format(1000), APPEND, "r1")
    assert (first.rows_read, first.updates_written, first.already_done) == (1000, 1000, False)
    assert shard.rows() == expected(1000)
    again = shard.run(ROWS.format(1000), APPEND, "r1")
    assert again.already_done
    assert again.upper == first.upper
    assert shard.rows() == expected(1000)
    shard.run(ROWS.format(1000), APPEND, "r2")
    assert {row[3] for row in shard.rows()} == {2}


def test_append_puts_rows_at_their_own_times(shard):
    query = "select id, 'x' as name, 0d as score, timestamp_millis(1000 + id) as t from range(10)"
    report = shard.run(query, TIMED, "r1")
    assert (report.lower, report.upper, report.rows_read) == (0, 1010, 10)
    assert [row[0] for row in shard.rows(1003)] == [0, 1, 2, 3]
    assert len(shard.rows()) == 10


def test_late_rows_and_rows_without_a_time_are_refused_before_anything_is_staged(shard):
    timed = "select id, 'x' as name, 0d as score, {} as t from range(5)"
    shard.run(timed.format("1000 + id"), TIMED, "r1")
    before = shard.blobs()
    with pytest.raises(ConfigurationError, match="2 rows have a time before the shard's upper 1005, the first at 1003"):
        shard.run(timed.format("1003 + id"), TIMED, "r2")
    with pytest.raises(ConfigurationError, match="t is null in 1 of 5 rows"):
        shard.run(timed.format("if(id = 3, null, 2000 + id)"), TIMED, "r2")
    assert shard.client.recent_upper(shard.id) == Antichain.of(1005)
    assert shard.blobs() <= before + 1  # a rollup may have come, no part has


@pytest.mark.parametrize("envelope", [APPEND, TIMED, MIRROR], ids=["append", "timed", "mirror"])
def test_an_empty_input_is_an_error_unless_allowed(shard, envelope):
    query = "select id, 'x' as name, 0d as score{} from range(0)"
    query = query.format(", id as t" if envelope is TIMED else "")
    with pytest.raises(ConfigurationError, match="input is empty"):
        shard.run(query, envelope, "r1")
    report = shard.run(query, envelope, "r2", input={"allow_empty": True})
    assert (report.rows_read, report.updates_written) == (0, 0)
    # Without rows a timed append has no time to move to.
    assert (shard.client.recent_upper(shard.id).time == 0) == (envelope is TIMED)


def test_a_mirror_makes_the_shard_equal_to_its_input_whatever_stood_there(shard):
    odd = (
        "select * from values (1L, 'a', double('NaN')), (2L, null, 0d), (3L, 'c', -0d), (4L, null, null), (5L, 'e', 1d)"
        " as v(id, name, score)"
    )
    shard.run(odd, MIRROR, "r1")
    once = shard.rows()
    assert [row[0] for row in once] == [1, 2, 3, 4, 5]
    unchanged = shard.run(odd, MIRROR, "r2")
    assert (unchanged.rows_read, unchanged.updates_written) == (5, 0)
    # Somebody removes a row, doubles one, adds one, and takes away what is not there.
    shard.edit([(5, "e", 1.0, -1), (4, None, None, 1), (9, "x", 0.0, 1), (8, "y", 0.0, -1)])
    assert repr(shard.rows()) != repr(once)
    corrected = shard.run(odd, MIRROR, "r3")
    assert corrected.updates_written == 4
    assert repr(shard.rows()) == repr(once)


def test_a_mirror_keeps_how_often_a_row_is_there(shard):
    twice = "select id % 3 as id, 'x' as name, 0d as score from range(6)"
    shard.run(twice, MIRROR, "r1")
    assert shard.rows() == [(0, "x", 0.0, 2), (1, "x", 0.0, 2), (2, "x", 0.0, 2)]
    shard.run("select id, 'x' as name, 0d as score from range(2)", MIRROR, "r2")
    assert shard.rows() == [(0, "x", 0.0, 1), (1, "x", 0.0, 1)]


def test_a_mirror_runs_once_per_run_id(shard):
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
    """Lets the task stage everything and then fail, in its first attempt."""

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, batches):
        staged = list(self.stage(batches))
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("this attempt is lost after it staged")
        yield from staged


@pytest.fixture
def failing_tasks(monkeypatch):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    for name in ("StageRows", "StageCorrections"):
        original = getattr(partitions, name)
        monkeypatch.setattr(sink, name, lambda task, original=original: FailsFirst(original(task)))
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=["append", "mirror"])
def test_a_task_that_fails_after_staging_writes_nothing_twice(shard, failing_tasks, envelope):
    """Rows large enough for blobs, so that the lost attempts leave parts behind."""
    shard.edit([(0, "x", 0.0, 1)])  # so that the mirror has something to correct
    blobs, parts = shard.blobs(), shard.client.inspect(shard.id).parts
    query = "select id, repeat(sha2(cast(id as string), 256), 4) as name, 0d as score from range(3000)"
    report = shard.run(query, envelope, "r1")
    assert (report.rows_read, report.updates_written) == (3000, 3001 if envelope is MIRROR else 3000)
    rows = shard.rows()
    assert len(rows) == (3000 if envelope is MIRROR else 3001)
    assert {row[3] for row in rows} == {1}
    assert shard.client.inspect(shard.id).parts - parts == 3
    assert shard.blobs() - blobs >= 6  # the orphans of the first attempts among them, for the orphan scan


class Racing:
    """Somebody else appends before each of the first `times` appends of a run."""

    def __init__(self, monkeypatch, times, act):
        original = landing.Landing._try
        self.times = 0
        self.staged: list[set[str]] = []

        def tries(run):
            self.staged.append({key for batch in run.batches for key in batch.hollow.blob_keys()})
            if self.times < times:
                self.times += 1
                act()
            return original(run)

        monkeypatch.setattr(landing.Landing, "_try", tries)


class Busy:
    """A writer that commits a row five times a second, at the wall clock, for as long as the `with` block takes."""

    def __init__(self, shard, monkeypatch):
        self.shard, self.commits = shard, 0
        self._stopped, self._committed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run)
        original = landing.Landing.land

        def land(run):
            # So that the first append is lost, however quick the staging was.
            seen = self.commits
            with self._committed:
                assert self._committed.wait_for(lambda: self.commits > seen, 60)
            return original(run)

        monkeypatch.setattr(landing.Landing, "land", land)

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


LARGE = "select id, repeat(sha2(cast(id as string), 256), 4) as name, 0d as score from range({})"


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=["append", "mirror"])
def test_a_run_stages_once_and_lands_beside_a_writer_that_never_rests(shard, monkeypatch, envelope):
    """It staged everything sixteen times, lost as many appends, and gave up."""
    shard.edit([(-2, "before", 0.0, 1)])
    with Busy(shard, monkeypatch) as busy:
        report = shard.run(LARGE.format(3000), envelope, "r1")
    told = shard.told()
    assert (told.count("staged"), told[-1]) == (1, "appended")
    assert told.count("lost_append") == told.count("moved" if envelope is APPEND else "corrected") >= 1
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


@pytest.mark.parametrize("races", [1, 5])
def test_an_append_that_lost_races_is_what_was_staged_first(shard, monkeypatch, races):
    racing = Racing(monkeypatch, races, lambda: shard.edit([(77, "x", 0.0, 1)], ahead_ms=100_000))
    report = shard.run(LARGE.format(3000), APPEND, "r1")
    assert shard.told() == ["staged", *["lost_append", "moved"] * races, "appended"]
    assert (report.rows_read, report.updates_written) == (3000, 3000)
    first, *others = racing.staged
    assert first
    assert all(keys == first for keys in others)
    assert shard.part_keys()[-1] == first
    rows = shard.rows()
    assert len(rows) == 3001
    assert {row[3] for row in rows} == {1, races}
    assert len(shard.rows(report.upper - 2)) == 1
    shard.check_sound()
    # What was moved is read by others like anything else: their splits, and the corrections made of them.
    changed = shard.run(LARGE.format(3000), MIRROR, "r2")
    assert changed.updates_written == 1


WON = {
    "another row": lambda shard: shard.edit([(77, "x", 0.0, 1)]),
    "a row taken away": lambda shard: shard.edit([(1, "n1", 0.5, -1)]),
    "a wanted row once more": lambda shard: shard.edit([(3, "n3", 1.5, 1)]),
    "the very same corrections": lambda shard: shard.edit([(3, "n3", 1.5, 1), (9, "old", 0.0, -1)]),
}


@pytest.mark.parametrize("won", WON)
def test_a_mirror_that_lost_races_corrects_what_won(shard, monkeypatch, won):
    """Staged once; whatever others wrote before each of three appends is gone afterwards."""
    shard.run(ROWS.format(3), MIRROR, "r1")
    shard.edit([(9, "old", 0.0, 1)])
    racing = Racing(monkeypatch, 3, lambda: WON[won](shard))
    shard.run(ROWS.format(4), MIRROR, "r2")
    assert racing.times == 3
    assert shard.told() == ["staged", *["lost_append", "corrected"] * 3, "appended"]
    assert shard.rows() == expected(4)
    shard.check_sound()


def test_a_mirror_that_lost_the_race_counts_all_that_it_appended(shard, monkeypatch):
    shard.run(ROWS.format(3), MIRROR, "r1")
    Racing(monkeypatch, 2, lambda: shard.edit([(77, "x", 0.0, 1)]))
    report = shard.run(ROWS.format(4), MIRROR, "r2")
    assert shard.rows() == expected(4)
    assert report.updates_written == 3  # one row added, and each of the other's copies taken back


def test_a_mirror_takes_back_changes_of_several_parts(shard, monkeypatch):
    large = [(key, f"{key:x>2000}", 0.0, 1) for key in range(1000, 4000)]
    monkeypatch.setattr(landing, "DRIVER_PART_BYTES_MAX", 1 << 20)
    shard.run(ROWS.format(3), MIRROR, "r1")
    racing = Racing(monkeypatch, 1, lambda: shard.edit(large))
    report = shard.run(ROWS.format(4), MIRROR, "r2")
    assert len(racing.staged[1] - racing.staged[0]) > 3
    assert report.updates_written == 3001
    assert shard.rows() == expected(4)
    shard.check_sound()


def test_the_first_run_of_a_mirror_that_lost_the_race_corrects_what_came_before_it(shard, monkeypatch):
    Racing(monkeypatch, 2, lambda: shard.edit([(77, "x", 0.0, 1), (1, "n1", 0.5, 1)]))
    shard.run(ROWS.format(4), MIRROR, "r1")
    assert shard.told() == ["staged", *["lost_append", "corrected"] * 2, "appended"]
    assert shard.rows() == expected(4)


def test_a_mirror_whose_lease_ran_out_stages_anew(shard, monkeypatch):
    """What came meanwhile cannot be told for sure any more."""
    shard.run(ROWS.format(3), MIRROR, "r1")

    def lapse():
        shard.edit([(77, "x", 0.0, 1)])
        monkeypatch.setattr(landing.Landing, "_decide", recompute)

    original = landing.Landing._decide

    def recompute(run, current):
        run.reader._heartbeat._lost.set()
        monkeypatch.setattr(landing.Landing, "_decide", original)
        return original(run, current)

    Racing(monkeypatch, 1, lapse)
    shard.run(ROWS.format(4), MIRROR, "r2")
    assert shard.told() == ["staged", "lost_append", "recompute", "minted", "staged", "appended"]
    assert shard.rows() == expected(4)


@pytest.mark.parametrize("moment", ["before it reads back", "while it stages"])
def test_a_mirror_stops_when_the_schema_outgrows_it(shard, monkeypatch, moment):
    """Rows with a field that it does not see: taken back without it they would stay, and others go missing."""
    shard.run(ROWS.format(3), MIRROR, "r1")
    wider = Schema.from_ddl(KEY, VALUE + ", note STRING")

    def outgrow():
        shard.client.evolve_schema(shard.id, wider)
        with shard.client.open_writer(shard.id, wider, purpose="newer") as writer:
            upper = writer.fetch_recent_upper()
            update = (((77,), ("x", 0.0, "noted")), upper.time, 1)
            writer.compare_and_append([update], expected_upper=upper, new_upper=Antichain.of(upper.time + 1))

    if moment == "while it stages":
        Racing(monkeypatch, 1, outgrow)
    else:
        original = sink._Run.until_done
        monkeypatch.setattr(sink._Run, "until_done", lambda run: (outgrow(), original(run))[1])
    with pytest.raises(ConfigurationError, match="schema: shard .* has evolved to schema 1, this handle has 0"):
        shard.run(ROWS.format(4), MIRROR, "r2")
    with shard.client.open_leased_reader(shard.id, wider, purpose="test") as reader:
        upper = shard.client.recent_upper(shard.id).time
        rows = {
            (row["key"]["id"], row["val"]["note"], row["diff"])
            for row in reader.snapshot(upper - 1).to_table().to_pylist()
        }
    assert rows == {(77, "noted", 1), *((id_, None, 1) for id_, *_ in expected(3))}


def test_an_append_that_lost_the_race_is_appended_once(shard, monkeypatch):
    Racing(monkeypatch, 1, lambda: shard.edit([(77, "x", 0.0, 1)]))
    shard.run(ROWS.format(3), APPEND, "r1")
    assert shard.rows() == sorted([*expected(3), (77, "x", 0.0, 1)], key=repr)


def test_timed_rows_overtaken_while_staging_are_refused_and_deleted(shard, monkeypatch):
    def overtake():
        with shard.client.open_writer(shard.id, shard.schema, purpose="other") as writer:
            writer.compare_and_append([], expected_upper=Antichain.of(0), new_upper=Antichain.of(1003))

    Racing(monkeypatch, 1, overtake)
    query = "select id, repeat('x', 9000) || id as name, 0d as score, 1000 + id as t from range(5)"
    before = shard.blobs()
    with pytest.raises(
        ConfigurationError, match="some rows have a time before the shard's upper 1003, the first at 1000"
    ):
        shard.run(query, TIMED, "r1")
    assert shard.rows() == []
    assert shard.blobs() <= before + 1


def test_an_older_run_that_comes_back_after_a_newer_one_appends_nothing(shard):
    """A driver that slept, or was started twice: its own run is not on the shard any more, a newer one is."""
    shard.run(ROWS.format(10), APPEND, "uid-10")
    with pytest.raises(Fenced, match="newer run of sink ns/s than uid-9"):
        shard.run(ROWS.format(10), APPEND, "uid-9")
    assert shard.rows() == expected(10)


def test_a_run_that_was_overtaken_by_another_run_of_its_sink_is_fenced(shard, monkeypatch):
    other = shard.spec(ROWS.format(2), APPEND, "r2")
    spec = shard.spec(ROWS.format(3), APPEND, "r1")
    Racing(monkeypatch, 1, lambda: sink.run_sink(shard.spark, other))
    with pytest.raises(Fenced, match="another run of sink ns/s"):
        sink.run_sink(shard.spark, spec)
    assert shard.rows() == expected(2)


def test_a_second_driver_of_the_same_run_finds_it_done(shard, monkeypatch):
    spec = shard.spec(ROWS.format(3), APPEND, "r1")
    Racing(monkeypatch, 1, lambda: sink.run_sink(shard.spark, spec))
    assert sink.run_sink(shard.spark, spec).already_done
    assert shard.rows() == expected(3)


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=["append", "mirror"])
def test_a_sink_that_never_wins_ends_and_leaves_nothing(shard, monkeypatch, envelope):
    shard.run(ROWS.format(1), MIRROR, "r1")
    before = shard.blobs()
    monkeypatch.setattr(landing, "TRIES_MAX", 3)
    Racing(monkeypatch, 9, lambda: shard.edit([(77, "x", 0.0, 1)]))
    with pytest.raises(Unavailable, match="3 times in a row; nothing was appended"):
        shard.run(LARGE.format(3000), envelope, "r2")
    assert shard.told().count("staged") == 1
    assert shard.rows() == sorted([*expected(1), (77, "x", 0.0, 3)], key=repr)
    assert shard.blobs() <= before + 1  # a rollup may have come, no part has
    inspection = shard.client.inspect(shard.id)
    assert (inspection.readers, inspection.writers) == ((), ())


def test_handles_are_given_back_when_a_run_ends_and_when_it_fails(shard):
    shard.run(ROWS.format(3), MIRROR, "r1")
    with pytest.raises(ConfigurationError):
        shard.run("select id from range(3)", MIRROR, "r2")
    inspection = shard.client.inspect(shard.id)
    assert (inspection.readers, inspection.writers) == ((), ())


def test_a_shard_of_another_schema_or_none_is_refused(shard):
    spec = shard.spec(ROWS.format(1), APPEND, "r1")
    with pytest.raises(ConfigurationError, match="val.score"):
        sink.run_sink(shard.spark, type(spec)(**{**fields(spec), "value_ddl": "name STRING, score INT"}))
    unknown = ShardId.from_bytes(SystemEnv().random_bytes(16))
    with pytest.raises(Exception, match="does not exist"):
        sink.run_sink(shard.spark, type(spec)(**{**fields(spec), "shard_id": unknown}))
    assert list(shard.client.shards()) == [shard.id]


def fields(spec: SinkSpec) -> dict:
    return {name: getattr(spec, name) for name in SinkSpec.__dataclass_fields__}


def test_a_null_where_the_schema_forbids_it_is_named(tmp_path, spark):
    shard = Shard(tmp_path, spark)
    strict = ShardId.new()
    shard.client.initialise(strict, Schema.from_ddl("id BIGINT NOT NULL", "name STRING"))
    query = "select nullif(id, 2) as id, 'x' as name from range(4)"
    spec = shard.spec(query, APPEND, "r1")
    changed = {"shard_id": strict, "key_ddl": "id BIGINT NOT NULL", "value_ddl": "name STRING"}
    with pytest.raises(Exception, match="id") as caught:
        sink.run_sink(spark, type(spec)(**{**fields(spec), **changed}))
    failure = sink_failure(caught.value)
    assert failure.exit_code == 72
    assert "id" in failure.message
    assert "Traceback" not in failure.message
    shard.client.close()


def sink_failure(error):
    from persist_spark.failures import classify

    return classify(error)


def test_types_travel_unchanged(tmp_path, spark):
    """Every type a shard may hold, and a value without fields, through a mirror and back."""
    shard = Shard(tmp_path, spark)
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
    changed = {"shard_id": typed, "key_ddl": ddl, "value_ddl": ""}
    for run in ("r1", "r2"):
        report = sink.run_sink(spark, type(spec)(**{**fields(spec), **changed, "run_id": run}))
    assert report.updates_written == 0
    with shard.client.open_leased_reader(typed, purpose="test") as reader:
        table = reader.snapshot(Antichain.of(report.upper - 1)).to_table()
    source = pa.Table.from_batches(spark.sql(query).toArrow().to_batches())
    assert table.column("key").to_pylist() == source.to_pylist()
    shard.client.close()
