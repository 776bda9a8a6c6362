"""The upsert machine: what commands come to, given what was persisted. Driven event by event, and against a dict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_engine.base.errors import InvariantViolated
from persist_engine.flow.upsert import Emission, UpsertMachine
from persist_engine.flow.upsert_memory import MemoryStore
from persist_engine.flow.upsert_state import MergeStats, UpsertState
from persist_engine.flow.word_rows import Words, hash_rows
from persist_engine.model.frontier import EMPTY, Antichain
from persist_kit.depth import draws

A = Antichain.of
SEED = np.array([5, 6, 7, 8], np.uint64)
#: (key, value or None to delete, time, order)
Command = tuple[int, str | None, int, int | None]
#: (key, value, time, diff)
Update = tuple[int, str, int, int]


def hashed(numbers: list[int]) -> pa.Array:
    words = Words(np.arange(len(numbers) + 1), np.array(numbers, np.uint64))
    buffers = [None, pa.py_buffer(np.ascontiguousarray(hash_rows(words, SEED)))]
    return pa.Array.from_buffers(pa.binary(32), len(numbers), buffers)


def encoded(values: list[str | None]) -> pa.Array:
    padded = [None if v is None else v.encode() + b"\0" * (-len(v) % 8) for v in values]
    return pa.array(padded, pa.large_binary())


def commands(*rows: Command) -> pa.Table:
    ks, vs, ts, orders = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return pa.table(
        {"hash": hashed(ks), "key": pa.array(ks, pa.int64()), "value": encoded(vs), "time": pa.array(ts, pa.int64()), "order": pa.array(orders, pa.int64())}
    )  # fmt: skip


def updates(*rows: Update) -> pa.Table:
    ks, vs, ts, ds = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return pa.table(
        {"hash": hashed(ks), "key": pa.array(ks, pa.int64()), "value": encoded(vs), "time": pa.array(ts, pa.int64()), "diff": pa.array(ds, pa.int64())}
    )  # fmt: skip


def plain(table: pa.Table | None) -> list[Update]:
    assert table is not None
    rows = ((r["key"], r["value"].rstrip(b"\0").decode(), r["time"], r["diff"]) for r in table.to_pylist())
    return sorted(rows, key=lambda row: (row[0], row[2], row[3], row[1]))


def machine(*persisted: Update, frontier: int = 0) -> UpsertMachine:
    made = UpsertMachine(
        UpsertState(MemoryStore(), seed=SEED),
        frontier=A(0),
        provisional=lambda: UpsertState(MemoryStore(), seed=SEED),
    )
    if persisted:
        made.on_snapshot(updates(*persisted), completed=True)
    made.on_persisted_frontier(A(frontier))
    return made


def feed(made: UpsertMachine, emission: Emission) -> None:
    """What was emitted was appended."""
    if emission.updates.num_rows:
        made.on_persisted(emission.updates)
    made.on_persisted_frontier(emission.upper)


def test_the_greatest_order_of_a_key_and_time_replaces_what_was_persisted() -> None:
    made = machine((1, "old", 3, 1), (2, "gone", 3, 1), frontier=5)
    made.on_commands(commands((1, "b", 5, 2), (1, "a", 5, 1), (2, None, 5, 1), (3, "new", 5, 1), (4, None, 5, 9)))
    made.on_input_frontier(A(6))
    emission = made.drain()
    assert emission is not None
    assert (emission.lower, emission.upper) == (A(5), A(6))
    assert plain(emission.updates) == [(1, "old", 5, -1), (1, "b", 5, 1), (2, "gone", 5, -1), (3, "new", 5, 1)]


def test_a_value_that_is_there_already_emits_nothing() -> None:
    made = machine((1, "same", 0, 1), frontier=1)
    made.on_commands(commands((1, "same", 1, 0)))
    made.on_input_frontier(A(2))
    assert plain(made.drain().updates) == []


def test_times_of_one_key_follow_each_other_in_one_emission() -> None:
    made = machine((1, "x", 0, 1), frontier=1)
    made.on_commands(commands((1, "c", 9, 0), (1, "a", 1, 7), (1, None, 4, 0), (1, "b", 2, -3), (1, "lost", 2, -4)))
    made.on_input_frontier(A(10))
    assert plain(made.drain().updates) == [
        (1, "x", 1, -1),
        (1, "a", 1, 1),
        (1, "a", 2, -1),
        (1, "b", 2, 1),
        (1, "b", 4, -1),
        (1, "c", 9, 1),
    ]


def test_nothing_is_emitted_of_a_time_that_is_open() -> None:
    made = machine()
    made.on_commands(commands((1, "a", 3, 0), (1, "b", 7, 0)))
    assert made.drain() is None
    made.on_input_frontier(A(5))
    assert made.output_frontier == A(3)
    emission = made.drain()
    assert (emission.upper, plain(emission.updates)) == (A(5), [(1, "a", 3, 1)])
    feed(made, emission)
    assert made.drain() is None
    assert made.stashed == 1
    assert made.output_frontier == A(5)
    made.on_input_frontier(EMPTY)
    assert made.output_frontier == A(7)
    emission = made.drain()
    assert (emission.lower, emission.upper) == (A(5), EMPTY)
    assert plain(emission.updates) == [(1, "a", 7, -1), (1, "b", 7, 1)]
    feed(made, emission)
    assert made.stashed == 0
    assert made.output_frontier == EMPTY


def test_draining_changes_nothing_until_it_comes_back() -> None:
    """Spec 16.11."""
    made = machine((1, "x", 0, 1), frontier=1)
    made.on_commands(commands((1, "y", 1, 0)))
    made.on_input_frontier(A(2))
    assert plain(made.drain().updates) == plain(made.drain().updates)
    feed(made, made.drain())
    assert made.drain() is None


def test_a_time_that_another_writer_took_is_dropped_and_the_rest_decided_anew() -> None:
    """Spec 16.9."""
    made = machine((1, "x", 0, 1), frontier=1)
    made.on_commands(commands((1, "mine", 1, 0), (1, "later", 5, 0)))
    made.on_input_frontier(A(6))
    assert len(plain(made.drain().updates)) == 4
    made.on_persisted(updates((1, "x", 2, -1), (1, "theirs", 2, 1)))
    assert made.drain() is None, "half of what was persisted is no ground for a decision"
    assert made.on_persisted_frontier(A(3)) == 1
    emission = made.drain()
    assert (emission.lower, plain(emission.updates)) == (A(3), [(1, "theirs", 5, -1), (1, "later", 5, 1)])
    assert made.on_commands(commands((1, "late", 2, 0), (2, "fine", 4, 0))) == 1


def test_forgetting_commands_leaves_only_what_was_persisted() -> None:
    made = machine((1, "x", 0, 1), frontier=1)
    made.on_commands(commands((1, "y", 1, 0)))
    made.drain_partially()
    made.on_commands(commands((1, "z", 1, 1)))
    made.on_input_frontier(A(2))
    made.forget_commands()
    assert made.drain() is None
    made.on_commands(commands((1, "w", 1, 0)))
    made.on_input_frontier(A(2))
    assert plain(made.drain().updates) == [(1, "x", 1, -1), (1, "w", 1, 1)]


def test_bug_31_a_shard_with_duplicates_fails_loudly_with_the_number_of_bad_keys_and_their_sums() -> None:
    """Upstream wrote a key twice: diff_sum 2 after hydration. The process must not go on, nor die without a name."""
    made = machine()
    made.on_persisted(updates((1, "a", 0, 1), (2, "b", 0, 1), (3, "c", 0, 1)))
    made.on_persisted(updates((2, "b", 1, 1), (3, "d", 1, 1), (4, "x", 1, -1)))
    expected = r"^3 keys .* not written by upserts only.*diff_sum 2, len_sum 16, checksum_sum -?\d+, .*diff_sum -1"
    with pytest.raises(InvariantViolated, match=expected) as caught:
        made.on_persisted_frontier(A(2))
    assert caught.value.detail["bad_keys"] == 3
    assert made.drain() is None


def test_bug_31_state_is_not_read_while_a_persisted_time_is_half_handed_in() -> None:
    """Between a retraction and its insertion a key has no value, or two: deciding then would write a wrong retraction."""
    made = machine((1, "a", 0, 1), frontier=1)
    made.on_commands(commands((1, "z", 3, 0)))
    made.on_input_frontier(A(4))
    made.on_persisted(updates((1, "b", 1, 1)))
    assert made.drain() is None
    assert made.drain_partially() is None
    made.on_persisted(updates((1, "a", 1, -1)))
    made.on_persisted_frontier(A(2))
    assert plain(made.drain().updates) == [(1, "b", 3, -1), (1, "z", 3, 1)]


def test_bytes_that_do_not_add_up_are_found_when_the_key_is_read_and_the_key_is_named() -> None:
    """The sums are those of one value, but what was retracted was never there: found by checksum and xor, not guessed."""
    made = machine((41, "aaaaaaaa", 0, 1), (41, "bbbbbbbb", 0, -1), (41, "cccccccc", 0, 1), frontier=1)
    made.on_commands(commands((41, "z", 1, 0)))
    made.on_input_frontier(A(2))
    with pytest.raises(InvariantViolated, match=r"1 keys hold neither one value nor none.*diff_sum 1.*\(keys 41\)"):
        made.drain()


def test_a_snapshot_is_completed_once() -> None:
    """Spec 16.5."""
    state = UpsertState(MemoryStore(), seed=SEED)
    made = UpsertMachine(state, frontier=A(0))
    stats = made.on_snapshot(updates((1, "a", 0, 1), (2, "b", 0, 1), (1, "a", 0, -1)), completed=False)
    assert (stats.updates, stats.inserts, stats.deletes, stats.values_diff) == (3, 2, 1, 1)
    assert stats.size_diff == state.store.size_bytes == state.totals.size_bytes
    made.on_snapshot(updates(), completed=True)
    assert (state.totals.updates, state.totals.values, state.totals.clamped) == (3, 1, False)
    with pytest.raises(InvariantViolated, match="completed twice"):
        made.on_snapshot(updates(), completed=True)


def test_totals_below_nothing_show_as_nothing() -> None:
    """Chunks that only take away: gauges are clamped, and say so."""
    state = UpsertState(MemoryStore(), seed=SEED)
    made = UpsertMachine(state, frontier=A(0))
    made.on_persisted(updates((1, "a", 0, 1), (2, "b", 0, 1)))
    made.on_snapshot(updates((1, "a", 0, -1), (2, "b", 0, -1)), completed=True)
    assert (state.totals.values, state.totals.size_bytes, state.totals.clamped) == (0, 0, True)


# -- partial mode ----------------------------------------------------------------------------------------------------


def test_commands_of_an_open_time_are_decided_bit_by_bit() -> None:
    """Spec 16.8."""
    made = machine((1, "x", 0, 1), frontier=5)
    made.on_commands(commands((1, "a", 5, 1), (2, "b", 5, 1)))
    first = made.drain_partially()
    assert plain(first) == [(1, "x", 5, -1), (1, "a", 5, 1), (2, "b", 5, 1)]
    assert made.stashed == 0
    assert made.drain_partially() is None
    made.on_commands(commands((1, "c", 5, 2), (2, None, 5, 3), (3, None, 5, 0)))
    second = made.drain_partially()
    assert plain(second) == [(1, "a", 5, -1), (1, "c", 5, 1), (2, "b", 5, -1)]
    made.on_commands(commands((3, "d", 5, 1), (1, "e", 6, 0)))
    made.on_input_frontier(A(7))
    last = made.drain()
    assert plain(last.updates) == [(1, "c", 6, -1), (1, "e", 6, 1), (3, "d", 5, 1)]
    for table in (first, second, last.updates):
        made.on_persisted(table)
    made.on_persisted_frontier(A(7))
    made.on_commands(commands((1, "f", 7, -9), (2, "f", 7, -9), (3, None, 7, -9)))
    made.on_input_frontier(A(8))
    assert plain(made.drain().updates) == [(1, "e", 7, -1), (1, "f", 7, 1), (2, "f", 7, 1), (3, "d", 7, -1)]


def test_bug_32_a_replay_with_an_equal_order_key_flips_nothing() -> None:
    """Equal order keys are skipped (>=): what came first stands, whether in one drain, over partial drains, or as a
    tombstone.
    """
    made = machine()
    made.on_commands(commands((1, "first", 0, 5), (1, "again", 0, 5), (2, None, 0, 5), (3, "n", 0, None)))
    assert plain(made.drain_partially()) == [(1, "first", 0, 1), (3, "n", 0, 1)]
    made.on_commands(commands((1, "replay", 0, 5), (2, "replay", 0, 5), (3, "m", 0, None)))
    assert plain(made.drain_partially()) == []
    made.on_commands(commands((1, "replay", 0, 5), (2, "replay", 0, 4), (3, "m", 0, None), (2, "later", 1, 0)))
    made.on_input_frontier(A(2))
    assert plain(made.drain().updates) == [(2, "later", 1, 1)]


def test_bug_32_a_tombstone_keeps_its_order_key() -> None:
    """An older insertion that comes after a newer deletion of the same time must not bring the key back."""
    made = machine((1, "x", 0, 1), frontier=1)
    made.on_commands(commands((1, None, 1, 10)))
    assert plain(made.drain_partially()) == [(1, "x", 1, -1)]
    made.on_commands(commands((1, "older", 1, 9)))
    assert plain(made.drain_partially()) == []
    made.on_commands(commands((1, "newer", 1, 11)))
    assert plain(made.drain_partially()) == [(1, "newer", 1, 1)]


def test_any_order_key_beats_a_persisted_value() -> None:
    made = machine((1, "x", 0, 1), frontier=1)
    made.on_commands(commands((1, "y", 1, None)))
    assert plain(made.drain_partially()) == [(1, "x", 1, -1), (1, "y", 1, 1)]


# -- against a dict --------------------------------------------------------------------------------------------------

some_commands = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.none() | st.sampled_from(["a", "b", "long enough for two words"]),
        st.integers(0, 5),
        st.none() | st.integers(-2, 2),
    ),
    max_size=14,
)


def contents(log: list[Update], time: int) -> dict[int, str]:
    """The shard at `time`; fails unless every key has one value or none."""
    sums: dict[tuple[int, str], int] = {}
    for key, value, at, diff in log:
        if at <= time:
            sums[key, value] = sums.get((key, value), 0) + diff
    left = {pair: diff for pair, diff in sums.items() if diff}
    assert set(left.values()) <= {1}
    assert len({key for key, _ in left}) == len(left)
    return dict(left)  # type: ignore[arg-type]


def expected(rows: list[Command], time: int) -> dict[int, str]:
    """Commands applied by hand: by time, of each (key, time) the greatest order, of equal ones the first."""
    best: dict[tuple[int, int], tuple[Any, int]] = {}
    for number, (key, _, at, order) in enumerate(rows):
        rank = (order is not None, order or 0, -number)
        if at <= time and (at, key) not in best or at <= time and best[at, key][0] < rank:
            best[at, key] = (rank, number)
    out: dict[int, str] = {}
    for (_, key), (_, number) in sorted(best.items()):
        value = rows[number][1]
        if value is None:
            out.pop(key, None)
        else:
            out[key] = value
    return out


@pytest.mark.slow
@settings(max_examples=draws(70), deadline=None)
@given(rows=some_commands, steps=st.lists(st.sampled_from(["partial", "drain", "commands", "restart"]), max_size=14))
def test_any_way_of_draining_comes_to_the_same_contents(rows: list[Command], steps: list[str]) -> None:
    """Commands come one by one, in any order within the open times; drains, partial drains and restarts in between."""
    rows = sorted(rows, key=lambda row: row[2])
    log: list[Update] = []
    staged: list[pa.Table] = []
    made = machine()

    def append(emission: Emission | None) -> None:
        if emission is None:
            return
        tables = [*staged, emission.updates.select(["hash", "key", "value", "time", "diff"])]
        staged.clear()
        for table in tables:
            if table.num_rows:
                log.extend(plain(table))
                made.on_persisted(table)
        made.on_persisted_frontier(emission.upper)

    handed: list[Command] = []
    for number, row in enumerate(rows):
        made.on_input_frontier(A(row[2]))
        append(made.drain())
        made.on_commands(commands(row))
        handed.append(row)
        step = steps[number % len(steps)] if steps else "commands"
        if step == "partial":
            table = made.drain_partially()
            staged += [] if table is None else [table]
        elif step == "drain":
            append(made.drain())
        elif step == "restart":
            staged.clear()
            frontier = made.persisted_frontier
            made = machine()
            if log:
                made.on_snapshot(updates(*log), completed=True)
            made.on_persisted_frontier(frontier)
            made.on_commands(commands(*handed))  # the input is replayed from its beginning
            made.on_input_frontier(A(row[2]))
    made.on_input_frontier(A(9))
    append(made.drain())
    for time in range(7):
        assert dict(contents(log, time)) == dict.fromkeys(expected(rows, time).items(), 1)


def held(state: UpsertState) -> dict[bytes, bytes]:
    """Every key's value. Its record may be longer: what is added up is never cut."""
    store = state.store
    assert isinstance(store, MemoryStore)
    return {
        key.tobytes(): value
        for keys, _ in store.items()
        for key, value in zip(keys, state.read(keys).to_pylist(), strict=True)
    }


@pytest.mark.slow
@settings(max_examples=draws(70), deadline=None)
@given(rows=some_commands, closed=st.lists(st.integers(1, 9), max_size=6))
def test_what_was_appended_is_known_without_adding_it_up(rows: list[Command], closed: list[int]) -> None:
    states = [UpsertState(MemoryStore(), seed=SEED) for _ in range(2)]
    added, known = (UpsertMachine(state, frontier=A(0)) for state in states)
    for each in (added, known):
        each.on_commands(commands(*rows))
    for upper in sorted({*closed, 9}):
        for each in (added, known):
            each.on_input_frontier(A(upper))
        emission = added.drain()
        ours = known.drain()
        assert emission is not None
        assert ours is not None
        assert plain(ours.updates) == plain(emission.updates)
        stats = added.on_persisted(emission.updates) if emission.updates.num_rows else None
        added.on_persisted_frontier(emission.upper)
        taken_in = known.on_appended(ours)
        assert replace(stats or MergeStats(0, 0, 0, 0, 0), size_diff=taken_in.size_diff) == taken_in
        assert states[1].store.size_bytes <= states[0].store.size_bytes
        assert held(states[1]) == held(states[0])
        assert known.persisted_frontier == added.persisted_frontier


def test_an_emission_is_taken_in_only_where_it_was_drained() -> None:
    """Another writer's updates came in between: what its keys held before no longer holds."""
    made = machine((1, "a", 0, 1), frontier=1)
    made.on_commands(commands((1, "b", 1, 0)))
    made.on_input_frontier(A(2))
    emission = made.drain()
    assert emission is not None
    made.on_persisted(updates((1, "a", 1, -1), (1, "theirs", 1, 1)))
    with pytest.raises(InvariantViolated, match="appended where the state is at"):
        made.on_appended(emission)
    made.on_persisted_frontier(A(2))
    with pytest.raises(InvariantViolated, match="appended where the state is at"):
        made.on_appended(emission)
