"""Landing the corrections of an Upsert beside writers that commit first: it retracts what they wrote to the run's keys, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from landing_run import RUN, SINK, A, Rows, Run, many
from persist_engine.flow.append_run import Recompute
from persist_engine.model.state import SourceProgress
from persist_engine.work.audit.verify import verify_shard
from persist_kit.depth import draws
from persist_spark.envelopes import run_keys
from persist_spark.envelopes.run_keys import RunKeys
from persist_spark.landing import Landed

WANTED = {1: "new", 2: None, 6: "six"}


def test_an_upsert_retracts_what_others_wrote_to_its_keys_and_keeps_the_rest(run: Run):
    run.write({(1, "old"): 1, (2, "old"): 1, (9, "kept"): 1})
    land = run.upsert(WANTED)
    first = {(1, "old"): -1, (1, "theirs"): 1, (4, "beyond"): 1}
    second = {(2, "again"): 1, (2, "old"): -1, (0, "before"): 1, (9, "kept"): -1}
    outcome = run.race(land, [lambda: run.write(first), lambda: run.write(second), lambda: run.write({(5, "x"): 1})])
    assert isinstance(outcome, Landed)
    assert [each["event"] for each in run.events()] == ["lost_append", "corrected"] * 3
    assert [each["updates"] for each in run.events("corrected")] == [2, 2, 0]
    assert run.contents() == Rows({(1, "new"): 1, (6, "six"): 1, (4, "beyond"): 1, (0, "before"): 1, (5, "x"): 1})
    run.check_sound()


def test_a_key_that_the_run_leaves_unchanged_keeps_the_value_of_the_run(run: Run):
    """Nothing was staged for it, because the shard held that value. Another writer replaced it before the append."""
    run.write({(1, "new"): 1, (6, "six"): 1})
    land = run.upsert(WANTED)
    assert not run.corrections
    assert isinstance(run.race(land, [lambda: run.write({(1, "new"): -1, (1, "theirs"): 1})]), Landed)
    assert run.contents() == Rows({(1, "new"): 1, (6, "six"): 1})


@pytest.mark.parametrize("is_touched", [True, False])
def test_a_run_whose_order_is_that_of_the_shard_compares_anew_what_others_changed(run: Run, is_touched: bool):
    run.write({(1, "old"): 1})
    land = run.upsert(WANTED, is_contestable=True)
    outcome = run.race(land, [lambda: run.write({(6 if is_touched else 4, "theirs"): 1})])
    if is_touched:
        assert outcome == Recompute()
        assert run.contents() == Rows({(1, "old"): 1, (6, "theirs"): 1})
    else:
        assert run.contents() == Rows({(1, "new"): 1, (6, "six"): 1, (4, "theirs"): 1})
    run.check_sound()


@pytest.mark.parametrize("id_", [2, 3, 4])
def test_with_too_many_keys_a_change_within_their_range_counts(run: Run, monkeypatch: Any, id_: int):
    monkeypatch.setattr(run_keys, "KEYS_MAX", 1)
    run.write({(0, "old"): 1})
    land = run.upsert({1: "new", 3: "three"})
    outcome = run.race(land, [lambda: run.write({(id_, "theirs"): 1})])
    assert isinstance(outcome, Landed) == (id_ == 4)
    run.check_sound()


NAMES = st.sampled_from("abc")
CHANGES = st.dictionaries(st.tuples(st.integers(0, 9), NAMES), st.sampled_from([-1, 1, 2]), max_size=6)


@given(data=st.data())
@drawn(max_examples=draws(20), deadline=None)
def test_the_runs_keys_are_right_and_all_others_are_as_others_wrote_them(data: st.DataObject):
    run = Run(inline_part_bytes_max=data.draw(st.sampled_from([0, 4096])))
    for rows in data.draw(st.lists(CHANGES, max_size=2)):
        run.write(rows)
    wanted = data.draw(st.dictionaries(st.integers(0, 9), st.none() | NAMES, min_size=1, max_size=6))
    land = run.upsert(wanted, tasks=data.draw(st.integers(1, 2)))
    acts = data.draw(st.lists(st.one_of(CHANGES, st.sampled_from(["compact", "large"])), max_size=4))
    theirs = run.contents()

    def act(what: Any) -> None:
        if what == "compact":
            run.compacts()
            return
        rows = dict(many(300, first=100)) if what == "large" else what
        run.write(rows)
        theirs.update(rows)  # adds

    outcome = run.race(land, [lambda what=what: act(what) for what in acts])
    assert isinstance(outcome, Landed)
    mine = {(id_, name): 1 for id_, name in wanted.items() if name is not None}
    others = {each: diff for each, diff in theirs.items() if each[0] not in wanted and diff}
    assert run.contents() == Rows(mine | others)
    assert run.client.progress(run.id, SINK) == SourceProgress(RUN, outcome.upper)
    assert verify_shard(run.writer.machine).findings == []
    run.close()


KEY_TYPE = pa.struct([("x", pa.float64()), ("s", pa.struct([("t", pa.string())]))])
KEYS = st.builds(
    lambda x, s: {"x": x, "s": s},
    st.sampled_from([None, 0.0, -0.0, 1.5, math.nan]),
    st.none() | st.builds(lambda t: {"t": t}, st.none() | st.sampled_from("ab")),
)


def same(key: dict[str, Any]) -> str:
    x = key["x"]
    return repr(
        {**key, "x": "NaN" if x is not None and math.isnan(x) else x and x + 0.0} | ({"x": 0.0} if x == 0 else {})
    )


@given(st.lists(KEYS, unique_by=same, max_size=8), st.lists(KEYS, max_size=70))
@drawn(max_examples=draws(60), deadline=None)
def test_rows_of_a_runs_keys_are_found_as_the_engine_compares_keys(mine: list[Any], rows: list[Any]):
    keys = RunKeys(count=len(mine), fetch=lambda: pa.array(mine, KEY_TYPE), where=None, is_contestable=False)
    batch = pa.record_batch({"key": pa.array(rows, KEY_TYPE), "n": pa.array(range(len(rows)), pa.int64())})
    wanted = {same(key) for key in mine}
    assert keys.among(batch).column("n").to_pylist() == [n for n, key in enumerate(rows) if same(key) in wanted]


def test_the_first_run_on_a_shard_that_others_began_meanwhile(run: Run):
    land = run.upsert(WANTED)
    assert run.minted.as_of is None
    run.race(land, [lambda: run.write({(1, "theirs"): 1, (2, "theirs"): 1, (7, "kept"): 1})])
    assert run.contents() == Rows({(1, "new"): 1, (6, "six"): 1, (7, "kept"): 1})
    assert run.writer.fetch_recent_upper() > A(0)
