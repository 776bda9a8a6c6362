"""A shard whose compactions sift out what cancelled reads as one whose compactions do not: at every time, in every form."""

import dataclasses
import functools
import random

import pyarrow as pa
import pytest
from persist_engine.base.settings import BatchSettings, CompactionSettings, RetrySettings, Settings
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.client.write.outcomes import Appended
from persist_engine.model.batch import RunKind
from persist_engine.model.frontier import Antichain
from persist_engine.parts import selection
from persist_engine.parts.contents import Contents
from persist_engine.parts.fetch import PartSource
from persist_engine.parts.read_ahead import Shape
from persist_engine.rows.predicate_text import parse_predicate
from persist_engine.rows.schema import Schema
from persist_engine.work.audit.verify_parts import RunToCheck, check_run
from persist_engine.work.compact import compact_due
from persist_kit.world import World

SCHEMA = Schema.from_ddl("id BIGINT, tag STRING", "x DOUBLE, place STRUCT<a: INT>")
at = Antichain.of
WIDTH, APPENDS = 3, 6
LAST = WIDTH * APPENDS - 1


def settings(sift_bytes_min):
    return Settings(
        batch=BatchSettings(target_part_bytes=2048, inline_part_bytes_max=0),
        compaction=CompactionSettings(
            sift_bytes_min=sift_bytes_min, claim_ms=0, inputs_min=2, parts_min=2, updates_min=1
        ),
        retry=RetrySettings(give_up_ms=100),
        retain_ms=None,
    )


def updates_of(seed):
    """Appends of random updates. Most retract what is there and insert another value, as an upsert does; some just count."""
    rng, there = random.Random(seed), {}
    values = [None, 0.5, -0.0, 0.0, float("nan"), 2.0]
    for append in range(APPENDS):
        rows = []
        for _ in range(30):
            key = (rng.choice([None, *range(20)]), rng.choice([None, "", "é"]))
            time = append * WIDTH + rng.randrange(WIDTH)
            if rng.random() < 0.15:
                rows.append(((key, (rng.choice(values), None)), time, rng.choice([-2, -1, 1, 2, 3])))
                continue
            before, after = there.get(key), (rng.choice(values), rng.choice([None, {"a": rng.choice([None, append])}]))
            time = append * WIDTH + WIDTH - 1 if before is None else max(time, before[1])
            if before is not None:
                rows.append(((key, before[0]), time, -1))
            there[key] = (after, time)
            rows.append(((key, after), time, 1))
        yield rows


def filled(seed, *, sift_bytes_min, since, compacted):
    """A world and its shard; `compacted` appends are merged, and later ones are not."""
    world = World(settings=settings(sift_bytes_min))
    client, shard_id = world.process(), world.shard_id()
    with (
        client.open_writer(shard_id, SCHEMA, purpose="test") as writer,
        client.open_leased_reader(shard_id, SCHEMA, purpose="since") as reader,
    ):
        for append, rows in enumerate(updates_of(seed)):
            lower, upper = at(append * WIDTH), at(append * WIDTH + WIDTH)
            answer = writer.append_batch(writer.batch(rows, lower=lower, upper=upper), lower, upper)
            assert isinstance(answer, Appended)
            if append + 1 == compacted:
                reader.downgrade_since(at(since))
                compact(client.machine(shard_id))
    return world, shard_id


def compact(machine):
    for _ in range(4):
        machine.spine_exert(10**6)
    while any(outcome.applied for outcome in compact_due(machine)):
        pass


def kinds_of(world, shard_id):
    trace = world.process().machine(shard_id).refresh().trace
    return [meta.kind for batch in trace.batches() for meta in batch.run_metas]


FORMS = [
    {},
    {"columns": ["id", "x"]},
    {"columns": ["x"]},
    {"where": parse_predicate("id < 12")},
    {"where": parse_predicate("x > 0.0 or id is null"), "columns": ["tag"]},
]


def reads_of(world, shard_id):
    """Everything that readers see, by time and form."""
    found = {}
    with world.process().open_leased_reader(shard_id, SCHEMA, purpose="read") as reader:
        since = reader.since.time
        for as_of in range(since, LAST + 1):
            for number, form in enumerate(FORMS):
                if number and (number + as_of) % len(FORMS):  # all rows at every time, the other forms in turn
                    continue
                with reader.snapshot(as_of, **form) as snapshot:
                    assert not isinstance(snapshot, SinceAhead)
                    table = snapshot.to_table()
                    found[as_of, number, "rows"] = repr(table.to_pylist())
                    pieces = [batch for split in snapshot.splits(3) for batch in split.to_batches(reader.blob)]
                    found[as_of, number, "splits"] = repr([row for batch in pieces for row in batch.to_pylist()])
                    found[as_of, number, "count"] = snapshot.count() - sum(table.column("diff").to_pylist())
        with reader.changes(at(since), at(LAST)) as changes:
            found[LAST, 0, "changes"] = repr(changes.to_table().to_pylist())
    return found


@functools.cache
def plain_and_its_reads(seed, since, compacted):
    """A shard whose compactions sift nothing out, and what its readers see."""
    plain = filled(seed, sift_bytes_min=1 << 30, since=since, compacted=compacted)
    return plain, reads_of(*plain)


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    plain_and_its_reads.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("since", "compacted"), [(0, APPENDS), (4, APPENDS - 2), (LAST, APPENDS)])
def test_a_sifted_shard_reads_as_a_plain_one(seed, since, compacted):
    plain, seen = plain_and_its_reads(seed, since, compacted)
    sifted = filled(seed, sift_bytes_min=0, since=since, compacted=compacted)
    assert set(kinds_of(*plain)) == {RunKind.ANY}
    if since < LAST:
        assert RunKind.BALANCED in kinds_of(*sifted)
    found = reads_of(*sifted)
    assert found == seen
    assert not any(left for (*_, what), left in found.items() if what == "count")


SHAPE_OF = Shape.of


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (selection, "_ends_by", lambda last, desc, parts: True),  # a read of the past without the history
        (Contents, "_is_distinct", lambda self, desc, meta, parts: True),  # runs that are not distinct, handed through
        (
            Shape,
            "of",
            lambda self, member: SHAPE_OF(self, member._replace(is_balanced=True)),
        ),  # rows of every run left out
    ],
)
def test_a_shortcut_taken_too_often_is_found(monkeypatch, module, name, broken):
    plain, right = plain_and_its_reads(0, 0, APPENDS)
    sifted = filled(0, sift_bytes_min=0, since=0, compacted=APPENDS)
    monkeypatch.setattr(module, name, broken)
    assert reads_of(*sifted) != right or reads_of(*plain) != right


def distinct_shard():
    """A shard of rows with one value each, rewritten once: the sifted run is distinct."""
    world = World(settings=settings(0))
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for append in range(2):
            rows = [(((number, "a"), (float(append), None)), append, 1) for number in range(500)]
            if append:
                rows += [(((number, "a"), (0.0, None)), append, -1) for number in range(500)]
            answer = writer.compare_and_append(rows, expected_upper=at(append), new_upper=at(append + 1))
            assert isinstance(answer, Appended)
    compact(client.machine(shard_id))
    return world, shard_id


def test_the_newest_contents_of_a_sifted_shard_are_read_without_its_history():
    world, shard_id = distinct_shard()
    trace = world.process().machine(shard_id).refresh().trace
    (batch,) = [each for each in trace.batches() if each.parts]
    (left, left_parts), (history, history_parts) = batch.part_runs()
    assert (left.kind, history.kind) == (RunKind.DISTINCT, RunKind.BALANCED)
    assert sum(part.rows for part in left_parts) == 500
    assert all(each.is_compact for each in trace.spine_batches())
    with world.process().open_leased_reader(shard_id, SCHEMA, purpose="read") as reader:
        fetched = []
        with reader.snapshot(1) as snapshot:
            rows = pa.Table.from_batches(snapshot.to_batches(on_fetched=fetched.append))
            assert snapshot.plain_blobs() is not None
        assert rows.num_rows == 500
        assert sum(fetched) == sum(part.size_bytes for part in left_parts)
        with reader.snapshot(0) as snapshot:
            assert {row["val"]["x"] for row in snapshot.to_table().to_pylist()} == {0.0}


def test_a_read_of_the_near_past_leaves_out_older_history():
    """A few keys rewritten after many: the rows that cancelled first are a run of their own."""
    world = World(settings=settings(0))
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for append, keys in enumerate((500, 500, 10, 10)):
            rows = [(((number, "a"), (float(append), None)), append, 1) for number in range(keys)]
            if append:
                before = 1.0 if append == 2 else float(append - 1)
                rows += [(((number, "a"), (before, None)), append, -1) for number in range(keys)]
            answer = writer.compare_and_append(rows, expected_upper=at(append), new_upper=at(append + 1))
            assert isinstance(answer, Appended)
    compact(client.machine(shard_id))
    (batch,) = [each for each in client.machine(shard_id).refresh().trace.batches() if each.parts]
    (left, _), (older, old_parts), (newer, new_parts) = batch.part_runs()
    assert (left.kind, older.kind, newer.kind) == (RunKind.DISTINCT, RunKind.BALANCED, RunKind.BALANCED)
    assert [sum(part.rows for part in parts) for parts in (old_parts, new_parts)] == [1000, 40]
    with world.process().open_leased_reader(shard_id, SCHEMA, purpose="read") as reader:
        for as_of, needs_old, needs_new in ((0, True, False), (1, False, True), (2, False, True), (3, False, False)):
            fetched = []
            with reader.snapshot(as_of) as snapshot:
                rows = pa.Table.from_batches(snapshot.to_batches(on_fetched=fetched.append)).to_pylist()
            assert {part.size_bytes for part in old_parts}.issubset(fetched) == needs_old
            assert {part.size_bytes for part in new_parts}.issubset(fetched) == needs_new
            changed = {float(as_of)} if as_of != 1 else {1.0}
            assert {row["val"]["x"] for row in rows if row["key"]["id"] < 10} == changed
            assert {row["val"]["x"] for row in rows if row["key"]["id"] >= 10} == {min(1.0, float(as_of))}


def test_a_truncated_run_is_not_taken_for_balanced():
    world, shard_id = distinct_shard()
    (batch,) = [each for each in world.process().machine(shard_id).refresh().trace.batches() if each.parts]
    metas = [dataclasses.replace(meta, truncated=True) for meta in batch.run_metas]
    assert [meta.is_balanced for meta in batch.run_metas] == [False, True]
    assert [meta.is_balanced for meta in metas] == [False, False]


@pytest.mark.parametrize("kind", [RunKind.DISTINCT, RunKind.BALANCED])
def test_verification_finds_a_run_of_the_wrong_kind(kind):
    world, shard_id = distinct_shard()
    machine = world.process().machine(shard_id)
    (batch,) = [each for each in machine.refresh().trace.batches() if each.parts]
    source = PartSource(shard_id, machine.blob, SCHEMA, machine.retry, machine.metrics)
    for meta, parts in batch.part_runs():
        run = RunToCheck(batch.desc, parts, is_sorted=True, kind=kind, is_alone=len(parts) == 1)
        found = check_run(source, run, {})
        assert bool(found.findings) == (meta.kind is not kind)
