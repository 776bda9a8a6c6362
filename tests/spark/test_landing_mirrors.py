"""Landing the corrections of a Mirror beside writers that commit first: the landing retracts what they wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from landing_run import RUN, SINK, A, Rows, Run, many
from persist_engine import Appended, Schema
from persist_engine.base.errors import Unavailable
from persist_engine.flow.append_run import Recompute
from persist_engine.model.batch import HollowPart
from persist_engine.model.state import SourceProgress
from persist_engine.work.audit.verify import verify_shard
from persist_kit.depth import draws
from persist_kit.staged import named_keys
from persist_spark import landing
from persist_spark.landing import Landed
from persist_spark.spec import ConfigurationError

#: Far ahead of the clock, so that a write at such a time determines the times of everything after it.
FAR_MS = 1_000_000


def test_a_mirror_retracts_only_what_was_written_since_its_last_correction(run: Run):
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
    assert before <= named_keys(run.writer), "the first corrections are appended as they were staged"
    assert run.contents() == many(300)
    run.check_sound()


def test_small_corrections_are_joined_before_they_exceed_their_maximum():
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


class CountingWriter:
    """A writer that records the number of rows of each table added to a builder."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.tables = writer, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    @contextmanager
    def builder(self, lower: Any) -> Iterator[Any]:
        with self.writer.builder(lower) as builder:

            def add(table: Any) -> None:
                self.tables.append(table.num_rows)
                builder.add(table)

            yield SimpleNamespace(add=add, finish=builder.finish)


def test_a_mirror_retracts_changes_of_many_parts_part_by_part(run: Run):
    run.write(many(5, name="before"))
    counting = CountingWriter(run.writer)
    land = replace(run.mirror(many(50)), writer=counting)
    large = many(4000, first=1000)
    run.race(land, [lambda: run.write(dict(large), at=run.minted.time + 10)])
    assert sum(counting.tables) == 4000
    assert max(counting.tables) < 4000
    assert len(land.batches[-1].hollow.parts) > 10
    assert all(isinstance(part, HollowPart) for part in land.batches[-1].hollow.parts)
    assert run.contents() == many(50)
    run.check_sound()


def test_the_first_run_of_a_mirror_retracts_what_a_rival_wrote_first(run: Run):
    land = run.mirror(many(300))
    assert run.minted.as_of is None
    end = run.minted.time + FAR_MS
    acts = [lambda: run.write({(1, "x"): 1, (2, "x"): 5}), lambda: run.write({(1, "x"): 1}, at=end)]
    assert run.race(land, acts).upper == A(end + 2)
    assert [each["updates"] for each in run.events("corrected")] == [2, 1]
    assert run.contents() == many(300)
    run.check_sound()


@pytest.mark.parametrize("is_readable", [True, False])
def test_the_first_run_of_a_mirror_continues_once_the_upper_is_past_since(run: Run, is_readable: bool):
    """The first changes are no longer readable. The contents are, once the upper is past since."""
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
    """Its corrections were staged at several lowers. The second of two that keep the time was refused."""
    run.write(many(3, name="before"))
    land = run.mirror(many(300), lease_ms=10 * FAR_MS)  # the reader outlives the clock's jump
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


class LapsingReader:
    """A reader whose lease expires when its changes are read."""

    def __init__(self, reader: Any, lapse: Callable[[], None]) -> None:
        self.reader, self.lapse = reader, lapse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def changes(self, *args: Any, **named: Any) -> Any:
        self.lapse()
        return self.reader.changes(*args, **named)


@pytest.mark.parametrize("moment", ["before the read", "during the read"])
def test_a_mirror_whose_lease_expired_is_computed_again(run: Run, moment: str):
    run.write({(1, "before"): 1})
    land = run.mirror(many(300), lease_ms=100)  # so that the next heartbeat, which notices, is soon

    def lapse() -> None:
        run.rival.machine.expire_leased_reader(run.reader.reader_id)
        while not run.reader.since.is_empty():
            run.env.sleep(0.01)

    def act() -> None:
        run.write({(-1, "rival"): 1}, at=run.minted.time + 5)
        if moment == "before the read":
            lapse()

    if moment == "during the read":
        land = replace(land, reader=LapsingReader(run.reader, lapse))
    assert run.race(land, [act]) == Recompute()
    assert run.contents() == Rows({(1, "before"): 1, (-1, "rival"): 1})
    run.check_sound()


def test_a_mirror_stops_at_rows_of_a_newer_schema(run: Run):
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


def test_a_mirror_that_never_wins_ends_and_leaves_nothing(run: Run):
    run.write({(1, "before"): 1})
    land = replace(run.mirror(many(300)), tries_max=3)
    acts = [lambda: run.write(dict(many(200, name="rival")))] * 3
    with pytest.raises(Unavailable, match="were faster 3 times"):
        run.race(land, acts)
    run.check_sound()


def test_a_failed_read_leaves_the_staged_parts_to_the_orphan_scan(run: Run):
    """The store is down, so the landing does not try to delete them. Nothing was appended."""
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
@drawn(max_examples=draws(20), deadline=None)
def test_a_shard_equals_its_mirror_after_any_writes_of_a_rival(data: st.DataObject):
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
