"""Landing what was staged, beside others who commit first: without Spark, on stores in memory."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from persist_engine import Antichain, Appended, Schema
from persist_engine.base.errors import Unavailable
from persist_engine.base.settings import BatchSettings, CompactionSettings, RetrySettings, Settings
from persist_engine.client.batch import Batch
from persist_engine.flow.append_run import Late, Recompute, Staged
from persist_engine.flow.mint_run import AlreadyDone, Minted, ShardView, Superseded, mint
from persist_engine.model.batch import HollowPart
from persist_engine.model.state import SourceProgress
from persist_engine.testing.staged import named_keys
from persist_engine.testing.world import SCHEMA, AheadEnv, World, row
from persist_engine.work.compact import compact
from persist_engine.work.verify import verify_shard
from persist_spark import landing
from persist_spark.landing import Landed, Landing, driver_settings
from persist_spark.report import Log
from persist_spark.spec import ConfigurationError

A = Antichain.of
#: Ahead of any clock that goes on meanwhile: what is written then, and after, tells at which times the rest is.
FAR_MS = 1_000_000
Rows = Counter  # of (id, name)
SINK, RUN = "ns/s", b"uid-7"


class Run:
    """One run of a sink with its driver in one process and its tasks in another, and a rival in a third."""

    def __init__(self, **batch: Any) -> None:
        batch = {"inline_part_bytes_max": 0, "target_part_bytes": 4096, **batch}
        self.world = World(
            settings=Settings(
                batch=BatchSettings(**batch),
                retry=RetrySettings(give_up_ms=1),
                compaction=CompactionSettings(claim_ms=0),
            ),
            env=AheadEnv(),
        )
        self.env = self.world.env
        self.id = self.world.shard_id()
        self.client = self.world.process(settings=driver_settings(self.world.settings))
        self.writer = self.client.open_writer(self.id, SCHEMA, purpose="driver")
        self.tasks = self.world.process().open_writer(self.id, SCHEMA, purpose="tasks")
        self.rival = self.world.process().open_writer(self.id, SCHEMA, purpose="rival")
        self.reader: Any = None
        self.lines = io.StringIO()
        self.staged: list[Batch] = []
        self.staged_keys: set[str] = set()
        self.corrections = Rows()

    # -- the rival ---------------------------------------------------------------------------------------------------

    def write(self, rows: dict[tuple[int, str], int], *, at: int | None = None) -> int:
        """The rival writes `rows` at a time, its upper if none is said; the time."""
        upper = self.rival.fetch_recent_upper().time
        time = max(upper, upper if at is None else at)
        updates = [row(key, name, time, diff) for (key, name), diff in rows.items()]
        answer = self.rival.compare_and_append(updates, expected_upper=A(upper), new_upper=A(time + 1))
        assert isinstance(answer, Appended)
        return time

    def compacts(self) -> None:
        """The rival compacts all that there is."""
        while (answer := self.rival.machine.spine_exert(100_000)[0]).requests:
            for request in answer.requests:
                compact(self.rival.machine, request)

    # -- the run -----------------------------------------------------------------------------------------------------

    def append(self, rows: Rows, *, times: int | None = None, tasks: int = 3) -> Landing:
        """Staged as an Append stages it; `times`: rows carry their own, from there on."""
        return self._landing(rows, reads_back=False, times=times, tasks=tasks)

    def mirror(self, desired: Rows, *, tasks: int = 3) -> Landing:
        """Staged as a Mirror stages it."""
        self.reader = self.client.open_leased_reader(self.id, SCHEMA, purpose="driver")
        return self._landing(desired, reads_back=True, times=None, tasks=tasks)

    def _landing(self, rows: Rows, *, reads_back: bool, times: int | None, tasks: int) -> Landing:
        self.expected = self.client.progress(self.id, SINK)
        view = ShardView(
            since=A(0) if self.reader is None else self.reader.since,
            upper=self.writer.fetch_recent_upper(),
            progress=self.expected,
        )
        minted = mint(view, run=RUN, now_ms=self.env.now_ms(), reads_back=reads_back)
        assert isinstance(minted, Minted)
        self.minted = minted
        if minted.as_of is not None:
            persisted = self.contents(minted.as_of)
            rows = Rows({each: rows[each] - persisted[each] for each in {*rows, *persisted}})
        self.corrections = Rows({each: diff for each, diff in rows.items() if diff})
        updates = [
            row(key, name, minted.time if times is None else times + index, diff)
            for index, ((key, name), diff) in enumerate(sorted(self.corrections.items()))
        ]
        upper = minted.upper if times is None else A(times + len(updates))
        sent = [
            self.tasks.batch(updates[task::tasks], lower=minted.lower, upper=upper).to_transmittable()
            for task in range(tasks)
        ]
        self.staged = [self.writer.batch_from_transmittable(data, is_only_copy=True) for data in sent]
        self.staged_keys = {key for batch in self.staged for key in batch.hollow.blob_keys()}
        return Landing(
            writer=self.writer,
            reader=self.reader,
            staged=Staged(
                lower=minted.lower,
                upper=upper,
                time=minted.time if times is None else None,
                least_time=min((update[1] for update in updates), default=None),
                reads_back=reads_back,
                as_of=minted.as_of,
            ),
            batches=self.staged,
            sink_id=SINK,
            run_token=RUN,
            expected=self.expected,
            env=self.env,
            log=Log(self.lines, self.env),
        )

    def race(self, landing_: Landing, acts: list[Callable[[], Any]]) -> Any:
        """Land while others act before each of the first tries."""
        left, original = list(acts), landing_._try

        def tries() -> Any:
            if left:
                left.pop(0)()
            return original()

        landing_._try = tries  # type: ignore[method-assign]
        return landing_.land()

    # -- what came of it ---------------------------------------------------------------------------------------------

    def events(self, *names: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [each for each in found if not names or each["event"] in names]

    def contents(self, as_of: int | None = None) -> Rows:
        client = self.world.process()
        as_of = client.recent_upper(self.id).newest_complete if as_of is None else as_of
        with client.open_leased_reader(self.id, purpose="test") as reader:
            rows = reader.snapshot(as_of).to_table().to_pylist() if as_of >= 0 else []
        return Rows({(each["key"]["id"], each["val"]["name"]): each["diff"] for each in rows})

    def blobs(self) -> set[str]:
        return self.world.blob_keys(self.id, kind="part")

    def check_sound(self) -> None:
        """Nothing is damaged, and no blob lies about that the shard does not name."""
        assert verify_shard(self.writer.machine).findings == []
        assert self.blobs() == named_keys(self.writer)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.expire()
        self.client.close()


@pytest.fixture
def run() -> Any:
    made = Run()
    yield made
    made.close()


def many(count: int, *, first: int = 0, name: str = "x" * 40) -> Rows:
    return Rows({(key, name): 1 for key in range(first, first + count)})


# -- appends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("races", [1, 7])
def test_an_append_that_loses_moves_on_and_uploads_nothing_again(run: Run, races: int):
    land = run.append(many(500))
    before, end = run.blobs(), run.minted.time + FAR_MS
    acts = [lambda turn=turn: run.write({(-turn, "rival"): 1}, at=end + 1000 * turn) for turn in range(1, races + 1)]
    outcome = run.race(land, acts)
    last = end + 1000 * races
    assert outcome == Landed(A(last + 1), A(last + 2), 500)
    assert [each["event"] for each in run.events()] == ["lost_append", "moved"] * races
    assert run.events("moved")[-1]["time"] == last + 1
    newest = list(run.writer.machine.state.trace.batches())[-1]
    assert set(newest.blob_keys()) == run.staged_keys
    assert run.blobs() - before == named_keys(run.writer) - before
    assert run.contents(last) == Rows({(-turn, "rival"): 1 for turn in range(1, races + 1)})
    assert run.contents() == many(500) + run.contents(last)
    run.check_sound()


def test_an_append_moves_to_now_when_the_shard_ends_before(run: Run):
    land = run.append(many(10))

    def act() -> None:
        run.write({(1, "rival"): 1}, at=run.minted.time + 5)
        run.env.advance_ms(FAR_MS)

    outcome = run.race(land, [act])
    assert outcome.lower == A(run.minted.time + 6)
    assert outcome.upper.time > run.minted.time + FAR_MS


def test_a_time_that_still_fits_is_kept(run: Run):
    """The rival writes at the beginning of time: the batches are joined there, as they were staged."""
    outcome = run.race(run.append(many(100)), [lambda: run.write({(1, "rival"): 1})] * 3)
    assert outcome == Landed(A(3), run.minted.upper, 100)
    assert [each["event"] for each in run.events()] == ["lost_append", "append_again"] * 3
    newest = list(run.writer.machine.state.trace.batches())[-1]
    assert {part.ts_rewrite for part in newest.parts} == {None}


def test_small_parts_are_joined_once_for_all_tries():
    run = Run(inline_part_bytes_max=4096, target_part_bytes=1 << 20)
    sets: list[str] = []
    put = run.world.blob.set
    run.world.blob.set = lambda key, value: (sets.append(key), put(key, value))[1]  # type: ignore[method-assign]
    rows = Rows({(key, f"{key:x<1500}"): 1 for key in range(16)})
    land = run.append(rows, tasks=8)
    assert not run.staged_keys
    end = run.minted.time
    acts = [lambda turn=turn: run.write({(-1, "rival"): 1}, at=end + turn) for turn in range(1, 5)]
    assert isinstance(run.race(land, acts), Landed)
    parts = [key for key in sets if "/n" in key]
    assert len(parts) == 1
    assert run.contents() == rows + Rows({(-1, "rival"): 4})
    run.check_sound()
    run.close()


def test_timed_rows_are_appended_again_while_they_fit_and_late_after(run: Run):
    land = run.append(many(5), times=1000)
    outcome = run.race(land, [lambda: run.write({(-1, "rival"): 1}, at=999), lambda: run.write({(-1, "late"): 1})])
    assert outcome == Late(A(1001))
    assert [each["event"] for each in run.events()] == ["lost_append", "append_again", "lost_append"]
    assert run.contents() == Rows({(-1, "rival"): 1, (-1, "late"): 1})
    run.check_sound()


def test_an_append_that_never_wins_ends_and_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(landing, "TRIES_MAX", 3)
    land = run.append(many(300))
    end = run.minted.time
    acts = [lambda turn=turn: run.write({(-1, "rival"): 1}, at=end + turn) for turn in range(1, 9)]
    with pytest.raises(Unavailable, match="were faster 3 times in a row; nothing was appended"):
        run.race(land, acts)
    assert run.contents() == Rows({(-1, "rival"): 3})
    run.check_sound()


def test_a_closed_shard_is_told_and_what_was_staged_is_deleted(run: Run):
    land = run.append(many(300))

    def close() -> None:
        run.rival.compare_and_append([], expected_upper=A(0), new_upper=Antichain.empty())

    with pytest.raises(ConfigurationError, match="closed while the sink was writing"):
        run.race(land, [close])
    assert run.blobs() == set()


@pytest.mark.parametrize(("token", "outcome"), [(RUN, AlreadyDone), (b"uid-8", Superseded)])
def test_another_driver_that_came_first_keeps_what_it_appended(run: Run, token: bytes, outcome: type):
    """Of the same run or of a newer one: ours are deleted, theirs are not."""
    land = run.append(many(300))
    end = run.minted.time

    def lands() -> None:
        upper = run.rival.fetch_recent_upper()
        updates = [row(key, name, end + 9, 1) for key, name in many(300)]
        answer = run.rival.compare_and_append(
            updates, expected_upper=upper, new_upper=A(end + 10), progress=(SINK, token)
        )
        assert isinstance(answer, Appended)

    ended = run.race(land, [lambda: run.write({(-1, "rival"): 1}, at=end + 5), lands])
    assert isinstance(ended, outcome)
    assert run.contents() == many(300) + Rows({(-1, "rival"): 1})
    run.check_sound()


@pytest.mark.parametrize("happened", [True, False])
@pytest.mark.parametrize("envelope", ["append", "mirror"])
def test_an_unknown_end_after_lost_races_leaves_every_blob_where_it_is(run: Run, envelope: str, happened: bool):
    """The outcome of the append is unknown: to delete a blob would be to lose data that is acknowledged later."""
    run.write({(-1, "before"): 1})
    land = run.append(many(300)) if envelope == "append" else run.mirror(many(300))
    end = run.minted.time

    def breaks() -> None:
        run.world.faults.fail_next("compare_and_set", happened=happened)
        run.world.faults.fail_next("compare_and_set", happened=False, times=1000)

    acts = [lambda: run.write({(-2, "rival"): 1}, at=end + 5), lambda: run.write({(-3, "rival"): 1}), breaks]
    with pytest.raises(Unavailable):
        run.race(land, acts)
    run.world.faults.heal()
    keys = {f"{run.id}/{key}" for batch in land.batches for key in batch.hollow.blob_keys()}
    assert keys
    assert {f"{run.id}/{key}" for key in run.staged_keys} <= keys <= run.blobs()
    stored = run.client.progress(run.id, SINK)
    assert (stored is not None and stored.token == RUN) == happened
    rivals = Rows({(-1, "before"): 1, (-2, "rival"): 1, (-3, "rival"): 1})
    assert run.contents() == ((many(300) if envelope == "mirror" else many(300) + rivals) if happened else rivals)
    assert verify_shard(run.writer.machine).findings == []


# -- mirrors ---------------------------------------------------------------------------------------------------------------


def test_a_mirror_takes_back_only_what_came_since_it_looked_last(run: Run):
    run.write(many(200, name="before"))
    land = run.mirror(many(300))
    end = run.minted.time + FAR_MS
    before = {f"{run.id}/{key}" for key in run.staged_keys}
    acts = [
        lambda: run.write({(-1, "a"): 1}, at=end),
        lambda: run.write({(-2, "b"): 2, (-3, "c"): 1}),
        lambda: None,
    ]
    outcome = run.race(land, acts)
    assert outcome == Landed(A(end + 2), A(end + 3), 200 + 300 + 1 + 2)
    assert [each["event"] for each in run.events()] == ["lost_append", "corrected"] * 2
    assert [each["updates"] for each in run.events("corrected")] == [1, 2]
    assert [each["time"] for each in run.events("corrected")] == [end + 1, end + 2]
    assert before <= named_keys(run.writer), "the first corrections are linked as they lie"
    assert run.contents() == many(300)
    run.check_sound()


def test_small_corrections_are_joined_before_they_are_many():
    run = Run(inline_part_bytes_max=4096, target_part_bytes=1 << 20)
    run.write({(1, "before"): 1})
    land = run.mirror(many(4))
    acts = [lambda turn=turn: run.write({(-turn, "rival"): 1}) for turn in range(40)]
    run.race(land, acts)
    newest = list(run.writer.machine.state.trace.batches())[-1]
    assert newest.rows == 4 + 1 + 40
    assert 1 < len(newest.parts) <= landing.INLINE_PARTS_MAX
    assert run.contents() == many(4)
    run.check_sound()
    run.close()


def test_a_mirror_takes_back_changes_of_many_parts_as_they_stream_by(run: Run, monkeypatch: pytest.MonkeyPatch):
    tables: list[int] = []
    original = landing.negated

    def counted(rows: Any, *, time: int) -> Any:
        tables.append(rows.num_rows)
        return original(rows, time=time)

    monkeypatch.setattr(landing, "negated", counted)
    monkeypatch.setattr(landing, "CHANGES_MEMORY_BYTES", 1 << 16)
    run.write(many(5, name="before"))
    land = run.mirror(many(50))
    large = many(20_000, first=1000)
    run.race(land, [lambda: run.write(dict(large), at=run.minted.time + 10)])
    assert sum(tables) == 20_000
    assert max(tables) < 20_000
    assert len(land.batches[-1].hollow.parts) > 10
    assert all(isinstance(part, HollowPart) for part in land.batches[-1].hollow.parts)
    assert run.contents() == many(50)
    run.check_sound()


def test_the_first_run_of_a_mirror_takes_back_what_was_there_before_it(run: Run):
    land = run.mirror(many(300))
    assert run.minted.as_of is None
    end = run.minted.time + FAR_MS
    acts = [lambda: run.write({(1, "x"): 1, (2, "x"): 5}), lambda: run.write({(1, "x"): 1}, at=end)]
    assert run.race(land, acts).upper == A(end + 2)
    assert [each["updates"] for each in run.events("corrected")] == [2, 1]
    assert run.contents() == many(300)
    run.check_sound()


@pytest.mark.parametrize("is_readable", [True, False])
def test_the_first_run_of_a_mirror_goes_on_where_since_is_past_the_beginning(run: Run, is_readable: bool):
    """What led to the contents cannot be told any more, the contents can, once the upper is past since."""
    since = run.env.now_ms() + FAR_MS
    with run.client.open_leased_reader(run.id, purpose="test") as reader:
        reader.downgrade_since(A(since))
    land = run.mirror(many(300))
    assert run.minted.as_of is None
    outcome = run.race(land, [lambda: run.write({(1, "x"): 1, (2, "x"): 5}, at=since if is_readable else since - 1)])
    if is_readable:
        assert outcome == Landed(A(since + 1), A(since + 2), 302)
        assert run.contents() == many(300)
    else:
        assert outcome == Recompute()
    run.check_sound()


def test_a_mirror_whose_new_time_still_fits_is_corrected_at_that_time(run: Run):
    """Its corrections were staged at several lowers: the later of two that say no new time was refused."""
    run.write(many(3, name="before"))
    land = run.mirror(many(300))
    now = run.minted.time + FAR_MS

    def first() -> None:
        run.write({(-1, "a"): 1}, at=run.minted.time + 5)
        run.env.advance_ms(2 * FAR_MS)

    acts = [first, lambda: run.write({(-2, "b"): 1}, at=now), lambda: run.write({(-3, "c"): 1})]
    outcome = run.race(land, acts)
    times = {each["time"] for each in run.events("corrected")}
    assert len(times) == 1
    assert outcome == Landed(A(now + 2), A(max(times) + 1), 306)
    assert run.contents() == many(300)
    run.check_sound()


@pytest.mark.parametrize("moment", ["before it looks", "while it looks"])
def test_a_mirror_whose_lease_ran_out_is_computed_anew(run: Run, moment: str):
    run.write({(1, "before"): 1})
    land = run.mirror(many(300))
    changes = run.reader.changes

    def lapse() -> None:
        run.rival.machine.expire_leased_reader(run.reader.reader_id)
        run.reader._heartbeat._beat_once()

    def lost(*args: Any) -> Any:
        lapse()
        return changes(*args)

    def act() -> None:
        run.write({(-1, "rival"): 1}, at=run.minted.time + 5)
        if moment == "before it looks":
            lapse()
        else:
            run.reader.changes = lost

    assert run.race(land, [act]) == Recompute()
    assert run.contents() == Rows({(1, "before"): 1, (-1, "rival"): 1})
    run.check_sound()


def test_a_mirror_stops_at_rows_that_it_cannot_see(run: Run):
    run.write({(1, "before"): 1})
    land = run.mirror(many(300))
    wider = Schema.from_ddl("id BIGINT", "name STRING, note STRING")

    def outgrow() -> None:
        client = run.world.process()
        client.evolve_schema(run.id, wider)
        with client.open_writer(run.id, wider, purpose="newer") as writer:
            upper = writer.fetch_recent_upper()
            time = run.minted.time + 10
            update = (((1,), ("x", "noted")), time, 1)
            assert isinstance(
                writer.compare_and_append([update], expected_upper=upper, new_upper=A(time + 1)), Appended
            )

    with pytest.raises(ConfigurationError, match="schema: shard .* has evolved to schema 1, this handle has 0"):
        run.race(land, [lambda: run.write({(-1, "rival"): 1}), outgrow])
    assert not {f"{run.id}/{key}" for key in run.staged_keys} & run.blobs()


def test_a_mirror_that_never_wins_ends_and_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(landing, "TRIES_MAX", 3)
    run.write({(1, "before"): 1})
    land = run.mirror(many(300))
    acts = [lambda: run.write(dict(many(200, name="rival")))] * 9
    with pytest.raises(Unavailable, match="were faster 3 times"):
        run.race(land, acts)
    run.check_sound()


def test_a_look_that_fails_leaves_what_was_staged_to_the_orphan_scan(run: Run):
    """The store is down: to insist on deleting would only take longer. Nothing was appended."""
    run.write({(1, "before"): 1})
    land = run.mirror(many(300))

    def breaks() -> None:
        run.write(dict(many(200, name="rival")), at=run.minted.time + 5)
        run.world.faults.fail_next("get", happened=False, matching="/n", times=1000)

    with pytest.raises(Unavailable):
        run.race(land, [breaks])
    run.world.faults.heal()
    assert {f"{run.id}/{key}" for key in run.staged_keys} <= run.blobs()
    assert run.contents() == many(200, name="rival") + Rows({(1, "before"): 1})


CELLS = st.tuples(st.integers(0, 6), st.sampled_from("ab"))
COUNTS = st.dictionaries(CELLS, st.integers(-2, 3).filter(bool), max_size=6)
ACTS = st.one_of(
    st.tuples(st.just("write"), COUNTS, st.sampled_from([0, 1, 50])),
    st.tuples(st.sampled_from(["double", "clear", "the same", "large", "compact", "nothing"]), st.just({}), st.just(1)),
)


@given(data=st.data())
@drawn(max_examples=80, deadline=None)
def test_a_shard_equals_its_mirror_whatever_others_write_meanwhile(data: st.DataObject):
    run = Run(inline_part_bytes_max=data.draw(st.sampled_from([0, 1100, 4096])), target_part_bytes=2048)
    for rows in data.draw(st.lists(COUNTS, max_size=3)):
        run.write(rows)
    desired = Rows(data.draw(st.dictionaries(CELLS, st.integers(1, 3), max_size=8)))
    land = run.mirror(desired, tasks=data.draw(st.integers(1, 3)))
    end = run.minted.time

    def act(kind: str, rows: dict[tuple[int, str], int], ahead: int) -> None:
        run.env.advance_ms(data.draw(st.sampled_from([0, 40])))
        at = end + ahead if ahead else None
        match kind:
            case "write":
                run.write(rows, at=at)
            case "double":
                run.write(dict(desired), at=at)
            case "clear":
                run.write({each: -diff for each, diff in run.contents().items()}, at=at)
            case "the same":
                run.write(dict(run.corrections), at=at)
            case "large":
                run.write(dict(many(400, first=100)), at=at)
            case "compact":
                run.compacts()

    acts = data.draw(st.lists(ACTS, max_size=5))
    outcome = run.race(land, [lambda each=each: act(*each) for each in acts])
    assert isinstance(outcome, Landed)
    assert run.contents() == desired
    assert run.client.progress(run.id, SINK) == SourceProgress(RUN, outcome.upper)
    assert verify_shard(run.writer.machine).findings == []
    if "compact" not in [each[0] for each in acts]:
        run.check_sound()
    run.compacts()
    assert run.contents() == desired
    run.close()
