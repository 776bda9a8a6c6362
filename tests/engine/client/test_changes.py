"""Changes between two times, compared with the list of all appended updates; and parts leased to other processes."""

import collections
import pickle
import random

import numpy as np
import pyarrow as pa
import pytest
from persist_engine.base.errors import CorruptData, Incompatible, InvalidBounds, InvalidUsage, MissingBlob, Unavailable
from persist_engine.base.settings import BatchSettings, CompactionSettings, RetrySettings, Settings
from persist_engine.client.read.leased import LeasedPart
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.model.frontier import Antichain
from persist_engine.rows import updates as laws
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import Compare
from persist_engine.rows.row_changes import changes_of, changes_schema
from persist_engine.rows.schema import Schema
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.rollup import write_rollup
from persist_kit.strategies import updates_table
from persist_kit.world import AheadEnv, StillEnv, World

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
at = Antichain.of
SETTINGS = Settings(
    batch=BatchSettings(target_part_bytes=1024, inline_part_bytes_max=0),
    compaction=CompactionSettings(claim_ms=0),
    retry=RetrySettings(give_up_ms=50),
)


def fill(world, *, appends=8, rows=40, seed=0):
    """A shard with batches [10i, 10i+10), and its updates."""
    rng = random.Random(seed)
    client, shard_id, history = world.process(), world.shard_id(), []
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for i in range(appends):
            updates = [
                (((rng.randrange(30),), (rng.choice("abc"),)), 10 * i + rng.randrange(10), rng.choice([1, 1, 1, -1, 2]))
                for _ in range(rows)
            ]
            history += updates
            writer.compare_and_append(updates, expected_upper=at(10 * i), new_upper=at(10 * i + 10))
    return shard_id, history


def compact(world, shard_id, since):
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="since") as reader:
        reader.downgrade_since(at(since))
    for _ in range(4):
        client.machine(shard_id).spine_exert(10**6)
    while any(outcome.applied for outcome in compact_due(client.machine(shard_id))):
        pass
    return client


def expected(history, after, upto):
    sums = collections.Counter()
    for ((key,), (name,)), time, diff in history:
        if after < time <= upto:
            sums[key, name, time] += diff
    return {row: diff for row, diff in sums.items() if diff}


def rows_of(table):
    return {(r["key"]["id"], r["val"]["name"], r["time"]): r["diff"] for r in table.to_pylist()}


@pytest.fixture(scope="module")
def filled():
    world = World(settings=SETTINGS, env=AheadEnv())
    shard_id, history = fill(world)
    compacted, compacted_history = fill(world, seed=1)
    compact(world, compacted, 25)
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="hold"), client.open_leased_reader(compacted, purpose="hold"):
        yield world, {"plain": (shard_id, history, 0), "compacted": (compacted, compacted_history, 25)}


@pytest.mark.slow
@pytest.mark.parametrize("which", ["plain", "compacted"])
@pytest.mark.parametrize(("after", "upto"), [(25, 79), (30, 31), (39, 39), (25, 25), (44, 67), (29, 40), (78, 79)])
def test_changes_are_the_updates_between_two_times_consolidated(filled, which, after, upto):
    """Spec 15.11."""
    world, shards = filled
    shard_id, history, _ = shards[which]
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        with reader.changes(at(after), at(upto)) as changes:
            table = changes.to_table()
            assert table.schema == changes.updates_schema == SCHEMA.updates_schema
            assert laws.is_consolidated(table)
            assert rows_of(table) == expected(history, after, upto)
            assert pa.Table.from_batches(changes.to_batches(memory_bytes=0), schema=table.schema) == table
        before, later = reader.snapshot(after).to_table(), reader.snapshot(upto).to_table()
        moved = laws.consolidate(laws.advance_times(pa.concat_tables([before, table]), at(upto)))
        assert moved.to_pylist() == later.to_pylist()


def test_changes_from_the_beginning_are_the_whole_history(filled):
    world, shards = filled
    shard_id, history, _ = shards["plain"]
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        assert rows_of(reader.changes(None, 79).to_table()) == expected(history, -1, 79)
        assert rows_of(reader.changes(0, 79).to_table()) == expected(history, 0, 79)


def test_changes_before_since_are_answered_by_a_value(filled):
    world, shards = filled
    shard_id, _, since = shards["compacted"]
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        for after in (0, since - 1):
            answer = reader.changes(after, 79)
            assert answer == SinceAhead(since=at(since), as_of=after)
            with pytest.raises(InvalidUsage, match="since"):
                answer.to_table()
        assert not isinstance(reader.changes(since, 79), SinceAhead)
        reader.downgrade_since(at(50))
        assert reader.changes(49, 79) == SinceAhead(since=at(50), as_of=49)


def test_changes_from_the_beginning_start_at_since_after_since_has_moved(filled):
    """The contents at since and the changes after it add up to the contents at the end."""
    world, shards = filled
    shard_id, history, since = shards["compacted"]
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        for floor in (since, 50):
            reader.downgrade_since(at(floor))
            advanced = [(row, max(time, floor), diff) for row, time, diff in history]
            assert rows_of(reader.changes(None, 79).to_table()) == expected(advanced, -1, 79)
            assert rows_of(reader.changes(None, floor).to_table()) == expected(advanced, -1, floor)
            changes = reader.changes(None, 79, shape="rows").to_table()
            assert min(changes["time"].to_pylist()) == floor
            assert reader.changes(None, floor - 1) == SinceAhead(since=at(floor), as_of=floor - 1)
        filtered = reader.changes(None, 79, where="id < 10").to_table()
        assert rows_of(filtered) == {row: diff for row, diff in expected(advanced, -1, 79).items() if row[0] < 10}


def test_changes_up_to_the_future_wait_or_give_up(filled):
    world, shards = filled
    with world.process().open_leased_reader(shards["plain"][0], purpose="test") as reader:
        with pytest.raises(Unavailable, match="upper is still"):
            reader.changes(70, 80, timeout_s=0)
        with pytest.raises(InvalidBounds, match="after 9"):
            reader.changes(9, 8)
        for bad in (Antichain.empty(), -1, 2**63):
            with pytest.raises(InvalidUsage, match="upto"):
                reader.changes(0, bad)
        with pytest.raises(InvalidUsage, match="since"):
            reader.changes(Antichain.empty(), 79)
        with pytest.raises(InvalidUsage, match="updates or rows"):
            reader.changes(0, 79, shape="both")
        changes = reader.changes(0, 79)
        changes.close()
        with pytest.raises(InvalidUsage, match="closed"):
            changes.to_table()


@pytest.mark.slow
def test_filtered_changes_equal_the_filtered_full_changes(filled):
    world, shards = filled
    for shard_id, _, _ in shards.values():
        with world.process().open_leased_reader(shard_id, purpose="test") as reader:
            whole = reader.changes(25, 70).to_table()
            got = reader.changes(25, 70, where="id < 10 AND name <> 'a'").to_table()
            only = Filter(Compare("id", "<", 10), SCHEMA).apply(whole)
            assert got.to_pylist() == Filter(Compare("name", "!=", "a"), SCHEMA).apply(only).to_pylist()
            cut = reader.changes(25, 70, columns=["name"])
            assert cut.to_table().schema == cut.updates_schema
            assert cut.to_table().column("val") == whole.column("val")
            changes = reader.changes(25, 70, shape="rows", columns=["id"])
            assert changes.to_table().schema == changes.updates_schema
            assert changes.to_table().column("key").type == pa.struct([pa.field("id", pa.int64())])


# -- row by row ---------------------------------------------------------------------------------------------------------


def row_changes_by_definition(history, after, upto):
    """The changes of each (key, time) by definition, deletions first."""
    groups = collections.defaultdict(list)
    for (key, name, time), diff in expected(history, after, upto).items():
        groups[key, time].append((name, diff))
    out = []
    for (key, time), some in sorted(groups.items()):
        both = any(diff < 0 for _, diff in some) and any(diff > 0 for _, diff in some)
        for added in (False, True):
            word = ("update_after" if added else "update_before") if both else ("insert" if added else "delete")
            for name, diff in sorted(some):
                if (diff > 0) == added:
                    out += [(key, name, time, word)] * abs(diff)
    return out


def words_of(table):
    return [(r["key"]["id"], r["val"]["name"], r["time"], r["change"]) for r in table.to_pylist()]


@pytest.mark.parametrize("which", ["plain", "compacted"])
@pytest.mark.parametrize(("after", "upto"), [(25, 79), (30, 31), (39, 39), (44, 67)])
def test_row_changes_are_deletions_and_insertions_of_whole_rows(filled, which, after, upto):
    world, shards = filled
    shard_id, history, _ = shards[which]
    with world.process().open_leased_reader(shard_id, purpose="test") as reader:
        changes = reader.changes(after, upto, shape="rows")
        table = pa.Table.from_batches(changes.to_batches(memory_bytes=0), schema=changes.updates_schema)
    assert words_of(table) == row_changes_by_definition(history, after, upto)


@pytest.mark.parametrize("seed", range(30))
def test_row_changes_do_not_depend_on_how_the_stream_is_cut(seed):
    rng = random.Random(seed)
    history = [
        (((rng.randrange(3),), (rng.choice("ab"),)), rng.randrange(3), rng.choice([-2, -1, 1, 1])) for _ in range(25)
    ]
    rows = sorted(expected(history, -1, 9).items())
    table = updates_table(SCHEMA, [({"id": k}, {"name": n}, t, d) for (k, n, t), d in rows])
    cuts = sorted(rng.sample(range(1, len(rows)), rng.randrange(len(rows) - 1))) if len(rows) > 1 else []
    pieces = [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    changes = list(changes_of(pieces))
    assert all(each.schema == changes_schema(SCHEMA) and each.num_rows for each in changes)
    assert [row for each in changes for row in words_of(each)] == row_changes_by_definition(history, -1, 9)
    assert list(changes_of([])) == []


def test_a_diff_too_large_for_row_changes_is_refused_with_a_hint_at_updates():
    table = updates_table(SCHEMA, [({"id": 1}, {"name": "a"}, 0, 2**62), ({"id": 2}, {"name": "a"}, 0, -(2**63))])
    assert np.iinfo(np.int64).min == -(2**63)
    with pytest.raises(InvalidUsage, match="read them as updates"):
        list(changes_of([table.slice(1)]))
    with pytest.raises(InvalidUsage, match="read them as updates"):
        list(changes_of([table]))


# -- leased parts ------------------------------------------------------------------------------------------------------


def summed(tables):
    sums = collections.Counter()
    for table in tables:
        for r in table.to_pylist():
            sums[r["key"]["id"], r["val"]["name"], r["time"]] += r["diff"]
    return {row: diff for row, diff in sums.items() if diff}


def collect(client, shard_id):
    """Writes rollups and collects everything that no reader holds."""
    for _ in range(2):
        write_rollup(client.machine(shard_id))
        gc_and_truncate(client.machine(shard_id))


@pytest.mark.slow
def test_leased_parts_outlive_their_snapshot_and_are_collected_after_their_return():
    world = World(settings=SETTINGS, env=AheadEnv())
    shard_id, history = fill(world)
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="issuer") as reader:
        with reader.snapshot(79, where="id < 20") as snapshot:
            parts = snapshot.lease_parts()
            whole = snapshot.to_table()
        assert reader.leased_parts == len(parts) > 4
        for part in parts:
            again = LeasedPart.from_bytes(pickle.loads(pickle.dumps(part.to_bytes())))
            assert again == part
        # The snapshot is closed. The shard is compacted and collected. Only the leases keep the blobs.
        other = compact(world, shard_id, 79)
        reader.downgrade_since(at(79))
        collect(other, shard_id)
        got = summed(table for part in parts for table in part.fetch(world.blob))
        assert got == rows_of(whole)
        assert got == {row: d for row, d in _as_of(history, 79).items() if row[0] < 20}
        for part in parts[1:]:
            assert reader.return_part(part)
            assert not reader.return_part(part)
        reader.downgrade_since(at(79))
        collect(other, shard_id)
        assert reader.fetch(parts[0]).num_rows  # still leased, so its version keeps all that it names
        assert reader.return_part(parts[0])
        assert reader.leased_parts == 0
        reader.downgrade_since(at(79))
        for _ in range(2):
            collect(other, shard_id)
        with pytest.raises(MissingBlob, match=parts[0].part.key):
            reader.fetch(parts[0])


def _as_of(history, as_of):
    sums = collections.Counter()
    for ((key,), (name,)), time, diff in history:
        if time <= as_of:
            sums[key, name, as_of] += diff
    return {row: diff for row, diff in sums.items() if diff}


def test_a_listener_hands_out_parts_and_moves_on(filled):
    world, shards = filled
    shard_id, history, _ = shards["plain"]
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        listen = reader.listen(25)
        tables = []
        while listen.frontier != at(80):
            batch = listen.next_parts(timeout_s=0)
            assert batch.frontier == listen.frontier
            for part in batch.parts:
                tables.append(reader.fetch(LeasedPart.from_bytes(part.to_bytes())))
                assert reader.return_part(part)
        assert listen.next_parts(timeout_s=0) is None
        assert reader.leased_parts == 0
    assert summed(tables) == expected(history, 25, 79)


def test_leased_parts_of_other_readers_and_garbled_parts_are_refused(filled):
    world, shards = filled
    client = world.process()
    with (
        client.open_leased_reader(shards["plain"][0], purpose="one") as one,
        client.open_leased_reader(shards["plain"][0], purpose="other") as other,
    ):
        part, *_ = one.snapshot(79).lease_parts()
        with pytest.raises(InvalidUsage, match="not by"):
            other.return_part(part)
        data = part.to_bytes()
        with pytest.raises(Incompatible, match="format 7"):
            LeasedPart.from_bytes(data.replace(b'"format": 3', b'"format": 7'))
        for damaged in (b"", b"{}", data[:-5], data.replace(b'"snapshot"', b'"snapshut"'), b"[]", b"null"):
            with pytest.raises(CorruptData, match="leased part"):
                LeasedPart.from_bytes(damaged)
        assert part.bytes_estimate > 0


def test_regression_a_dropped_listener_batch_releases_its_version(filled):
    """A batch that was requested and never consumed held its version, and with it all blobs, for ever (bug 9)."""
    world, shards = filled
    client = world.process()
    shard_id = shards["plain"][0]
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        listen = reader.listen(5)
        hold = lambda: client.machine(shard_id).refresh().leased_readers[reader.reader_id].seqno  # noqa: E731
        before = client.machine(shard_id).state.seqno
        events = listen.next_batch(timeout_s=0)
        reader.downgrade_since(at(5))
        reader.downgrade_since(at(5))
        assert hold() == before  # it can still be consumed
        del events
        reader.downgrade_since(at(5))
        assert hold() == client.machine(shard_id).state.seqno - 1


def test_regression_a_listener_does_not_repeat_what_compaction_merged_into_its_next_batch():
    """Rows that the listener had delivered came again with the batch that held them and the next ones (bug 19)."""
    world = World(settings=SETTINGS, env=AheadEnv())
    shard_id, history = fill(world, appends=4)
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        listen = reader.listen(3)
        tables = [event.table for event in listen.next_batch(timeout_s=0) if hasattr(event, "table")]
        assert listen.frontier == at(10)
        other = compact(world, shard_id, 3)
        client.machine(shard_id).refresh()
        assert [b.desc.lower for b in other.machine(shard_id).refresh().trace.batches() if b.rows] == [at(0)]
        tables += [event.table for event in listen.next_batch(timeout_s=0) if hasattr(event, "table")]
        assert listen.frontier == at(40)
    assert summed(tables) == expected(history, 3, 39)


def test_regression_a_listener_reports_progress_even_when_since_cannot_move():
    """The frontier had advanced when the downgrade of since failed. The rows that were delivered never got their progress and
    were never delivered again.
    """
    world = World(settings=SETTINGS, env=StillEnv())
    shard_id, history = fill(world, appends=3)
    client = world.process()
    with client.open_leased_reader(shard_id, purpose="test", lease_ms=4000) as reader:
        listen = reader.listen(0)
        sums, pending, progressed = collections.Counter(), [], 0
        for turn in range(50):
            if progressed == 30:
                break
            world.env.advance_ms(1100)  # a downgrade is due with every batch
            if turn % 2:
                world.faults.fail_next("compare_and_set", happened=False, times=60)
            try:
                event = next(listen)
            except Unavailable:
                pending = []  # the contract: rows after the last progress are dropped
                world.faults.heal()
                continue
            world.faults.heal()
            if hasattr(event, "table"):
                pending.append(event.table)
            else:
                progressed = event.frontier.time
                for row, diff in summed(pending).items():
                    sums[row] += diff
                pending = []
        assert {row: diff for row, diff in sums.items() if diff} == expected(history, 0, 29)
