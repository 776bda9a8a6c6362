"""Landing the rows of an Append beside writers that commit first, and the end of a run that cannot land."""

from __future__ import annotations

from dataclasses import replace

import pytest
from landing_run import RUN, SINK, A, Rows, Run, many
from persist_engine import Antichain, Appended
from persist_engine.base.errors import Unavailable
from persist_engine.flow.append_run import Late
from persist_engine.flow.mint_run import AlreadyDone, Superseded
from persist_engine.work.audit.verify import verify_shard
from persist_kit.staged import named_keys
from persist_kit.world import row
from persist_spark.landing import Landed
from persist_spark.spec import ConfigurationError

#: Far ahead of the clock, so that a write at such a time determines the times of everything after it.
FAR_MS = 1_000_000


@pytest.mark.parametrize("races", [1, 7])
def test_an_append_that_loses_moves_to_a_later_time_without_a_new_upload(run: Run, races: int):
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


def test_an_append_moves_to_now_when_the_upper_is_in_the_past(run: Run):
    land = run.append(many(10))

    def act() -> None:
        run.write({(1, "rival"): 1}, at=run.minted.time + 5)
        run.env.advance_ms(FAR_MS)

    outcome = run.race(land, [act])
    assert outcome.lower == A(run.minted.time + 6)
    assert outcome.upper.time > run.minted.time + FAR_MS


def test_an_append_keeps_its_time_while_it_fits(run: Run):
    """The rival writes at the first times of the shard. The batches are appended as they were staged."""
    outcome = run.race(run.append(many(100)), [lambda: run.write({(1, "rival"): 1})] * 3)
    assert outcome == Landed(A(3), run.minted.upper, 100)
    assert [each["event"] for each in run.events()] == ["lost_append", "append_again"] * 3
    newest = list(run.writer.machine.state.trace.batches())[-1]
    assert {part.ts_rewrite for part in newest.parts} == {None}


def test_small_parts_are_joined_once_for_all_appends():
    run = Run(inline_part_bytes_max=4096, target_part_bytes=1 << 20)
    rows = Rows({(key, f"{key:x<1500}"): 1 for key in range(16)})
    land = run.append(rows, tasks=8)
    assert not run.staged_keys
    end = run.minted.time
    acts = [lambda turn=turn: run.write({(-1, "rival"): 1}, at=end + turn) for turn in range(1, 5)]
    assert isinstance(run.race(land, acts), Landed)
    parts = [key for key in run.blob.written if "/n" in key]
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


def test_an_append_that_never_wins_ends_and_leaves_nothing(run: Run):
    land = replace(run.append(many(300)), tries_max=3)
    end = run.minted.time
    acts = [lambda turn=turn: run.write({(-1, "rival"): 1}, at=end + turn) for turn in range(1, 4)]
    with pytest.raises(Unavailable, match="were faster 3 times in a row; nothing was appended"):
        run.race(land, acts)
    assert run.contents() == Rows({(-1, "rival"): 3})
    run.check_sound()


def test_a_closed_shard_is_a_configuration_error_and_the_staged_parts_are_deleted(run: Run):
    land = run.append(many(300))

    def close() -> None:
        run.rival.compare_and_append([], expected_upper=A(0), new_upper=Antichain.empty())

    with pytest.raises(ConfigurationError, match="closed while the sink was writing"):
        run.race(land, [close])
    assert run.blobs() == set()


@pytest.mark.parametrize(("token", "outcome"), [(RUN, AlreadyDone), (b"uid-8", Superseded)])
def test_a_run_that_another_driver_overtook_deletes_only_its_own_parts(run: Run, token: bytes, outcome: type):
    """The other driver has the same run or a newer one. Its appended parts stay."""
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
def test_an_append_with_an_unknown_outcome_leaves_every_blob(run: Run, envelope: str, happened: bool):
    """The append may have happened. A deleted blob could then be acknowledged data."""
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
