"""A driver that is killed while its run stages, and the next one of the run: it stages only what the first one did not (spec 10.12).

The first driver ends where it would append, and the notes of some of its tasks are taken away, as if these tasks had still been under way.
"""

import datetime as dt
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from persist_engine import Antichain, Schema, ShardId, StagingNote
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import Fenced, Unavailable
from persist_engine.work.audit.orphans import scan_orphans
from persist_spark import frames, sink, staging
from persist_spark.report import Log
from persist_spark.resume.earlier import Earlier, kept_of
from persist_spark.resume.key_ranges import KeyRange, has_ranges, range_number
from persist_spark.resume.noting import JOB_BYTES
from persist_spark.spec import Envelope, EnvelopeType
from query_shard import Shard

pytestmark = [pytest.mark.spark, pytest.mark.slow]
MIRROR, APPEND = Envelope(type=EnvelopeType.MIRROR), Envelope(type=EnvelopeType.APPEND)
TIMED = Envelope(type=EnvelopeType.APPEND, timestamp_column="t")
DIFF = Envelope(type=EnvelopeType.DIFF, diff_column="d")
ROWS = "select id, sha2(cast(id as string), 256) as name, id / 2d as score from range({})"
#: Times far ahead of the clock of the test.
LATE_MS = 4_000_000_000_000


class Killed(BaseException):
    """The end of a driver."""


class Site(Shard):
    """A shard whose sinks note what they stage, however little it is. Three tasks stage a run."""

    NOTE = StagingNote(
        shard_id=ShardId.new(),
        sink_id="ns/s",
        run=b"r1",
        job=b"a" * JOB_BYTES,
        batch=b"",
        rows=1,
        errors=0,
        least_time=None,
        low=0,
        high=0,
        least=("1",),
        greatest=("1",),
    )

    def kill(self, query: str, envelope: Envelope, *, at: str = "land", **more: Any) -> list[Path]:
        """A driver of run r1 that ends before its append. Returns the notes that it leaves."""

        def killed(_landing: object) -> None:
            raise Killed

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sink.Landing, at, killed)
            with pytest.raises(Killed):
                self.run(query, envelope, "r1", **more)
        return self.notes()

    def notes(self) -> list[Path]:
        return sorted((self.folder / "blobs" / self.id).glob("n0000000/*"))

    def logged(self, event: str) -> dict[str, Any] | None:
        events = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return next((each for each in events if each["event"] == event), None)

    def kept(self) -> int:
        """How many batches of earlier drivers the last run kept."""
        resumed = self.logged("resumed")
        return 0 if resumed is None else resumed["batches"]

    def ids(self) -> Counter[int]:
        """The ids of the rows, each as often as it is there."""
        return Counter({row[0]: row[3] for row in self.rows()})

    def unnamed(self) -> int:
        """The parts that no version names."""
        with self.client.open_writer(self.id, self.schema, purpose="test") as writer:
            return scan_orphans(writer.machine, older_than_ms=0, commit=False).young


@pytest.fixture
def shard(tmp_path, local_spark, monkeypatch) -> Site:
    monkeypatch.setattr(staging, "NOTED_BYTES", 0)
    made = Site(tmp_path, local_spark)
    yield made
    made.client.close()


@pytest.mark.parametrize("envelope", [APPEND, MIRROR], ids=lambda each: each.type.value)
def test_the_next_driver_of_a_run_stages_only_what_the_killed_one_did_not(shard, envelope):
    first, *others = shard.kill(ROWS.format(4000), envelope)
    assert len(others) == 2
    first.unlink()
    before = shard.parts()
    report = shard.run(ROWS.format(4000), envelope, "r1")
    assert shard.ids() == Counter(range(4000))
    assert (report.rows_read, report.updates_written, report.already_done) == (4000, 4000, False)
    assert shard.kept() == 2
    assert shard.logged("staged")["batches"] > 2
    assert len(shard.parts() - before) < len(before)
    assert shard.notes() == []
    shard.check_sound()


def test_a_driver_that_was_killed_at_its_append_leaves_nothing_to_stage(shard):
    notes = {note.name for note in shard.kill(ROWS.format(3000), APPEND)}
    before = shard.parts()
    report = shard.run(ROWS.format(3000), APPEND, "r1")
    assert (shard.kept(), report.updates_written) == (3, 3000)
    assert shard.parts() == before - notes
    assert shard.ids() == Counter(range(3000))


def test_a_run_resumes_as_often_as_its_drivers_are_killed(shard):
    query = ROWS.format(4000)
    notes = shard.kill(query, APPEND)
    notes[1].unlink()
    notes[2].unlink()
    shard.kill(query, APPEND)
    assert shard.kept() == 1
    newest = shard.notes()[-1]
    newest.unlink()
    shard.run(query, APPEND, "r1")
    assert shard.kept() == 3
    assert shard.ids() == Counter(range(4000))
    shard.check_sound()


def test_rows_that_changed_since_are_staged_again_and_no_others(shard):
    shard.kill(ROWS.format(3000), APPEND)
    # One row has another value, one is gone, and one is new, all in the range of one task.
    changed = (
        "select id, sha2(cast(if(id = 2990, -1, id) as string), 256) as name, id / 2d as score "
        "from range(3005) where id <> 2995"
    )
    report = shard.run(changed, APPEND, "r1")
    assert shard.kept() == 2
    assert report.updates_written == 3004
    assert shard.ids() == Counter(set(range(3005)) - {2995})
    names = {row[0]: row[1] for row in shard.rows()}
    assert names[2990] == shard.spark.sql("select sha2('-1', 256) as n").first().n
    shard.check_sound()


def test_copies_of_rows_count(shard):
    """A row that is there twice is another input than the row once, whatever hashes cancel."""
    shard.kill("select id div 2 as id, 'a' as name, 0d as score from range(2000)", APPEND)
    shard.run("select id div 3 as id, 'a' as name, 0d as score from range(3000)", APPEND, "r1")
    assert shard.kept() == 0
    assert shard.ids() == Counter(i // 3 for i in range(3000))


def test_an_input_that_changes_while_it_is_compared_is_staged_whole(shard, monkeypatch):
    """As if the rows that were compared had been others than those that the tasks then staged."""
    first, *_ = shard.kill(ROWS.format(3000), APPEND)
    first.unlink()
    compare = staging.kept_of

    def compared_with_others(*given: Any) -> Any:
        kept = compare(*given)
        rows, low, high = kept.rest_sums
        return replace(kept, rest_sums=(rows, low - 1, high))

    monkeypatch.setattr(staging, "kept_of", compared_with_others)
    report = shard.run(ROWS.format(3000), APPEND, "r1")
    assert shard.logged("changed_input") is not None
    assert report.updates_written == 3000
    assert shard.ids() == Counter(range(3000))
    assert shard.notes() == []
    shard.check_sound()


@pytest.mark.parametrize("ahead_ms", [None, 3_600_000], ids=["behind", "past the time of the run"])
def test_rows_of_another_writer_between_two_drivers_stay(shard, ahead_ms):
    shard.kill(ROWS.format(3000), APPEND)
    shard.edit([(-1, "theirs", 0.0, 1)], ahead_ms=ahead_ms)
    shard.run(ROWS.format(3000), APPEND, "r1")
    assert shard.kept() == 3
    assert shard.ids() == Counter([-1, *range(3000)])
    shard.check_sound()


def test_a_mirror_of_a_shard_that_another_writer_began_meanwhile_is_compared_with_it(shard):
    shard.kill(ROWS.format(3000), MIRROR)
    shard.edit([(-1, "theirs", 0.0, 1), (5, "theirs", 0.0, 1)])
    shard.run(ROWS.format(3000), MIRROR, "r1")
    assert shard.kept() == 0
    assert shard.ids() == Counter(range(3000))
    assert all(row[1] != "theirs" for row in shard.rows())


def test_times_of_the_rows_themselves_are_compared_too(shard):
    query = "select id, 'n' as name, 0d as score, {} + id % 3 as t from range(3000)"
    shard.kill(query.format(LATE_MS), TIMED)
    later = shard.run(query.format(f"{LATE_MS} + if(id = 3, 3, 0)"), TIMED, "r1")
    assert later.updates_written == 3000
    assert shard.kept() == 0  # the last time is another one, and so are the bounds of all batches
    assert shard.ids() == Counter(range(3000))
    assert 3 not in {row[0] for row in shard.rows(as_of=LATE_MS + 2)}


def test_batches_with_times_of_their_own_are_kept(shard):
    query = f"select id, 'n' as name, 0d as score, {LATE_MS} + id % 3 as t from range(3000)"
    first, *_ = shard.kill(query, TIMED)
    first.unlink()
    shard.edit([(-1, "theirs", 0.0, 1)])
    shard.run(query, TIMED, "r1")
    assert shard.kept() == 2
    assert shard.ids() == Counter([-1, *range(3000)])
    assert len(shard.rows(as_of=LATE_MS)) == 1001


def test_diffs_are_compared_too(shard):
    query = "select id, 'n' as name, 0d as score, {} as d from range(3000)"
    shard.kill(query.format("1L"), DIFF)
    shard.run(query.format("if(id = 7, 2L, 1L)"), DIFF, "r1")
    assert shard.kept() == 2
    assert shard.ids() == Counter([7, *range(3000)])


def test_a_batch_that_the_orphan_scan_may_have_deleted_is_staged_again(shard):
    shard.kill(ROWS.format(3000), APPEND)
    for note in shard.notes():
        note.rename(note.with_suffix(".kept"))
    with shard.client.open_writer(shard.id, shard.schema, purpose="test") as writer:
        shard.edit([(-1, "theirs", 0.0, 1)], ahead_ms=1)
        assert scan_orphans(writer.machine, older_than_ms=0, commit=True).deleted == 3
    for note in (shard.folder / "blobs" / shard.id).glob("n0000000/*.kept"):
        note.rename(note.with_suffix(""))
    shard.run(ROWS.format(3000), APPEND, "r1")
    assert shard.kept() == 0
    assert shard.ids() == Counter([-1, *range(3000)])
    shard.check_sound()


def test_two_drivers_of_one_run_append_it_once_and_the_later_one_deletes_nothing_of_it(shard, monkeypatch):
    """The first driver was only slow. The second one has appended the first one's batches when the first one goes on."""
    land, query = sink.Landing.land, ROWS.format(3000)
    second = {}

    def slow(landing):
        if not second:
            second["notes"] = [note.unlink() for note in shard.notes()[:1]]
            second["report"] = shard.run(query, APPEND, "r1")
            second["kept"] = shard.kept()
        return land(landing)

    monkeypatch.setattr(sink.Landing, "land", slow)
    first = shard.run(query, APPEND, "r1")
    assert (second["report"].already_done, second["kept"], first.already_done) == (False, 2, True)
    assert first.upper == second["report"].upper
    assert shard.ids() == Counter(range(3000))
    shard.check_sound()
    assert shard.unnamed() == 0  # what the first driver alone had staged is deleted
    assert shard.notes() == []


def test_a_driver_that_cannot_append_leaves_its_batches_to_the_next_one(shard):
    land = sink.Landing.land

    def unlucky(landing):
        landing.tries_max = 0
        return land(landing)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sink.Landing, "land", unlucky)
        with pytest.raises(Unavailable, match="other writers of shard .* were faster 0 times in a row"):
            shard.run(ROWS.format(3000), APPEND, "r1")
    assert len(shard.notes()) == 3
    shard.run(ROWS.format(3000), APPEND, "r1")
    assert shard.kept() == 3
    assert shard.ids() == Counter(range(3000))


def test_a_driver_that_another_run_fenced_before_it_staged_leaves_its_batches_to_the_next_one(shard, monkeypatch):
    """The other run committed between the look of the driver at the progress and its look at the upper, so its commit ends where these
    batches begin. The next driver of the run expects that commit, and can append them.
    """
    until_done, others = sink.Run.until_done, ["r0"]

    def overtaken(run):
        if others:
            shard.run("select -1L as id, 'theirs' as name, 0d as score", APPEND, others.pop())
        return until_done(run)

    monkeypatch.setattr(sink.Run, "until_done", overtaken)
    with pytest.raises(Fenced, match="r0"):
        shard.run(ROWS.format(3000), APPEND, "r1")
    shard.run(ROWS.format(3000), APPEND, "r1")
    assert shard.kept() == 3
    assert shard.ids() == Counter([-1, *range(3000)])
    shard.check_sound()


def test_a_driver_is_fenced_by_a_run_that_stored_again_the_progress_that_it_expects(shard, monkeypatch):
    """Runs whose names have no numbers may follow each other in any order. Meanwhile another driver of the run has appended the batches."""
    other = ("select -1L as id, 'theirs' as name, 0d as score", APPEND, "zero")
    shard.run(*other)
    land, query = sink.Landing.land, ROWS.format(3000)
    shard.kill(query, APPEND)

    def slow(landing):
        monkeypatch.setattr(sink.Landing, "land", land)
        shard.run(query, APPEND, "r1")
        shard.run(*other)
        return land(landing)

    monkeypatch.setattr(sink.Landing, "land", slow)
    with pytest.raises(Fenced, match="zero"):
        shard.run(query, APPEND, "r1")
    assert shard.ids() == Counter([-1, -1, *range(3000)])
    shard.check_sound()


def test_small_runs_note_nothing(tmp_path, local_spark):
    shard = Site(tmp_path, local_spark)
    assert shard.kill("select id, 'a' as name, 0d as score from range(10)", APPEND) == []
    shard.client.close()


KEYS: dict[str, Callable[[random.Random], Any]] = {
    "BIGINT": lambda rng: rng.randint(-(2**63), 2**63 - 1),
    "TINYINT": lambda rng: rng.randint(-128, 127),
    "STRING": lambda rng: "".join(rng.choice("aB'\"\\ é\u0001\U0001f600%`") for _ in range(rng.randint(0, 4))),
    "DECIMAL(20,4)": lambda rng: Decimal(rng.randint(-(10**19), 10**19)).scaleb(-4),
    "DATE": lambda rng: dt.date(1970, 1, 1) + dt.timedelta(days=rng.randint(-30_000, 30_000)),
    "TIMESTAMP": lambda rng: dt.datetime.fromtimestamp(rng.randint(-(10**9), 10**9) / 1000 + 0.000_001, dt.UTC),
    "TIMESTAMP_NTZ": lambda rng: dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=rng.randint(-(10**15), 10**15)),
}


@pytest.mark.parametrize(
    "ddl", [(kind,) for kind in KEYS] + [("STRING", "BIGINT"), ("DATE", "STRING", "DECIMAL(20,4)")]
)
def test_a_row_is_found_in_the_range_of_its_task(local_spark, ddl):
    """Spark finds by the texts of a range exactly the rows whose keys Arrow sees within it."""
    rng = random.Random(repr(ddl))
    schema = Schema.from_ddl(", ".join(f"f{at} {kind}" for at, kind in enumerate(ddl)), "v BIGINT")
    assert has_ranges(schema)
    keys = sorted({tuple(KEYS[kind](rng) for kind in ddl) for _ in range(120)}, key=_in_spark)
    cuts = [keys[:20], keys[30:31], keys[40:70], keys[75:]]
    names = [f"k{at}" for at in range(len(ddl))]
    ranges = {}
    for number, part in enumerate(cuts, 5):
        seen = KeyRange(schema)
        shuffled = rng.sample(part, len(part))
        for some in (shuffled[: len(part) // 2], shuffled[len(part) // 2 :]):
            columns = [pa.array([key[at] for key in some], field.type) for at, field in enumerate(schema.key)]
            seen.add(pa.RecordBatch.from_arrays(columns, names))
        ranges[number] = seen.texts()
    kinds = frames.flat_type(schema)
    rows = local_spark.createDataFrame([(*key, at) for at, key in enumerate(keys)], kinds)
    found = rows.select("v0", range_number(ranges, schema).alias("n")).collect()
    wanted = {keys.index(key): number for number, part in enumerate(cuts, 5) for key in part}
    assert {row.v0: row.n for row in found if row.n is not None} == wanted


def _in_spark(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(field.encode() if isinstance(field, str) else field for field in key)


@pytest.mark.parametrize("key", ["f DOUBLE", "f BINARY", "f BOOLEAN, g BIGINT", "f STRUCT<x: INT>"])
def test_keys_without_an_exact_text_have_no_ranges(key):
    assert not has_ranges(Schema.from_ddl(key, "v BIGINT"))


#: Keys that Spark and a shard can hold, but which have no text that is read again.
ODD = {
    "DATE": [pa.array([days], pa.int32()).cast(pa.date32()) for days in (-1_000_000, 5_000_000)],
    "TIMESTAMP": [pa.array([us], pa.int64()).cast(pa.timestamp("us", "UTC")) for us in (-(2**62), 2**62)],
    "TIMESTAMP_NTZ": [pa.array([us], pa.int64()).cast(pa.timestamp("us")) for us in (-(2**62), 2**62)],
    "STRING": [
        pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(bytes(4) + b"\1\0\0\0"), pa.py_buffer(b"\xff")])
    ],
}


@pytest.mark.parametrize("more", [(), ("BIGINT",)], ids=["alone", "with another field"])
@pytest.mark.parametrize(("kind", "odd"), [(kind, odd) for kind, every in ODD.items() for odd in every])
def test_a_key_without_a_text_has_no_range_and_harms_no_task(kind, odd, more):
    kinds = (kind, *more)
    seen = KeyRange(Schema.from_ddl(", ".join(f"f{at} {each}" for at, each in enumerate(kinds)), "v BIGINT"))
    seen.add(pa.RecordBatch.from_arrays([odd, *(pa.array([1]) for _ in more)], [f"k{at}" for at in range(len(kinds))]))
    assert seen.texts() is None


def test_a_noted_key_that_cannot_be_read_is_not_logged(shard):
    bounds = (("1",), ("secret",))
    note = replace(Site.NOTE, shard_id=shard.id, least=bounds[0], greatest=bounds[1])
    rows = frames.to_flat(shard.spark.sql(ROWS.format(1)), shard.schema)
    earlier = Earlier(Antichain.of(0), Antichain.of(1), (note,), (1,))
    assert kept_of(earlier, rows, shard.schema, Log(shard.lines, SystemEnv())) is None
    assert shard.logged("resume_failed") is not None
    assert "secret" not in shard.lines.getvalue()


def test_a_key_of_nulls_has_no_range():
    seen = KeyRange(Schema.from_ddl("f BIGINT", "v BIGINT"))
    seen.add(pa.RecordBatch.from_pydict({"k0": pa.array([None, None], pa.int64())}))
    assert seen.texts() is None
