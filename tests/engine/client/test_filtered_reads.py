"""Reads with filters and columns equal the same selection of a full read, and fetch less."""

import collections
import dataclasses
import pickle
import random
from datetime import date

import pyarrow as pa
import pytest
from persist_engine.base.errors import CorruptData, InvalidUsage, InvariantViolated
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, CompactionSettings, ReadSettings, RetrySettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.read.listen import Updates
from persist_engine.client.read.splits import SnapshotSplit
from persist_engine.client.write.outcomes import Appended
from persist_engine.codec.batch import decode_transmittable, encode_transmittable
from persist_engine.model.batch import ColumnStats, HollowBatch, HollowPart, PartStats
from persist_engine.model.frontier import Antichain
from persist_engine.parts.contents import Contents
from persist_engine.rows.errors_column import tag_errors, with_errors
from persist_engine.rows.filter import Filter
from persist_engine.rows.predicate import And, Compare, In, IsNull, Not, Or
from persist_engine.rows.predicate_text import parse_predicate
from persist_engine.rows.schema import Schema
from persist_engine.work.compact import compact_due
from persist_kit.world import AheadEnv, World

SCHEMA = Schema.from_ddl("id BIGINT, tag STRING", "x DOUBLE, d DATE, place STRUCT<a: INT>, `o.dd` INT")
at = Antichain.of


def settings(*, audit=0, **batch):
    given = {"target_part_bytes": 2048, "inline_part_bytes_max": 0, **batch}
    return Settings(
        batch=BatchSettings(**given),
        read=ReadSettings(stats_audit_percent=audit),
        compaction=CompactionSettings(claim_ms=0),
        retry=RetrySettings(give_up_ms=100),
        retain_ms=None,
    )


class Counted(NoMetrics):
    def __init__(self):
        self.counts = collections.Counter()

    def count(self, name, amount=1, /, **labels):
        self.counts[name] += amount


def client_of(world, *, audit=0):
    metrics = Counted()
    client = PersistClient(world.blob, world.consensus, settings=settings(audit=audit), env=world.env, metrics=metrics)
    return client, metrics.counts


def update(i, j, rng):
    key = (rng.choice([None, *range(100 * i, 100 * i + 50)]), rng.choice([None, "", "a", "é"]))
    day = rng.choice([None, date(2013, 1, 1 + i)])
    val = (rng.choice([None, 0.5, -0.0, float("nan"), 2.0]), day, rng.choice([None, {"a": None}, {"a": i}]), j % 3)
    return (key, val), 10 * i + rng.randrange(10), rng.choice([1, 1, 1, -1])


def fill(world, *, appends=8, rows=60, seed=0, mend=None):
    """A shard of random updates. With `mend`, the statistics of its parts are as `mend` returns them: a faulty writer's."""
    rng = random.Random(seed)
    client, shard_id = client_of(world)[0], world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for i in range(appends):
            batch = writer.batch([update(i, j, rng) for j in range(rows)], lower=at(10 * i), upper=at(10 * i + 10))
            if mend is not None:
                batch = mended(writer, batch, mend)
            assert isinstance(writer.append_batch(batch, at(10 * i), at(10 * i + 10)), Appended)
    return shard_id


def mended(writer, batch, mend):
    shard_id, version, hollow = decode_transmittable(batch.to_transmittable())
    runs = [
        (meta, [dataclasses.replace(part, stats=mend(part.stats)) for part in parts])
        for meta, parts in hollow.part_runs()
    ]
    changed = HollowBatch.of_runs(hollow.desc, hollow.rows, runs)
    return writer.batch_from_transmittable(encode_transmittable(shard_id, version, changed), is_only_copy=True)


def compact(world, shard_id):
    client, _ = client_of(world)
    for _ in range(4):
        client.machine(shard_id).spine_exert(10**6)
    while any(outcome.applied for outcome in compact_due(client.machine(shard_id))):
        pass


@pytest.fixture(scope="module")
def world():
    made = World(settings=settings(), env=AheadEnv())
    made.shard = fill(made)
    made.compacted = fill(made, seed=1)
    with client_of(made)[0].open_leased_reader(made.compacted, purpose="t") as reader:
        reader.downgrade_since(at(79))
    compact(made, made.compacted)
    made.whole = {name: whole_of(made, getattr(made, name)) for name in ("shard", "compacted")}
    return made


def whole_of(world, shard_id):
    with client_of(world)[0].open_leased_reader(shard_id, purpose="test") as reader, reader.snapshot(79) as snapshot:
        whole = snapshot.to_table()
        assert whole.num_rows
        assert snapshot.count() == sum(whole.column("diff").to_pylist())
        return whole


FILTERS = [
    "key.id < 120",
    "id >= 300 AND tag = 'a'",
    "val.x > 1 OR id IS NULL",
    "NOT (id BETWEEN 100 AND 500)",
    "d = DATE '2013-01-03'",
    "place.a = 2",
    "place IS NULL AND id > 10",
    "`o.dd` IN (1, 2) AND x <> 0",
    "x = 0",
    "id > 10000",
    [("key.tag", "in", ["é", ""]), ("id", "<=", 200)],
    [[("id", "=", 3)], [("id", ">", 650), ("tag", "!=", "a")]],
    Or((IsNull("tag"), In("id", (1, 2, 3, 401)))),
]


def test_reads_of_a_rewritten_batch_do_not_use_the_statistics_of_its_old_times():
    """Regression: the statistics of its parts say 0 to 1, its rows are read at 7. No read may skip, count or show rows by them."""
    world = World(settings=settings(), env=AheadEnv())
    client, shard_id = client_of(world, audit=100)[0], world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        rows = [((n, "a"), (0.5, None, None, n)) for n in (1, 2)]
        batch = writer.batch([(rows[0], 0, 1), (rows[1], 1, 2)], lower=at(0), upper=at(5))
        batch.rewrite_times(at(7), at(10))
        writer.compare_and_append_batch([batch], expected_upper=at(0), new_upper=at(10))
        assert [part.ts_rewrite for part in batch.hollow.parts] == [at(7)]
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        for as_of, seen in [(1, 0), (3, 0), (6, 0), (7, 2), (9, 2)]:
            for where in (None, "id >= 1"):
                with reader.snapshot(as_of, where=where) as snapshot:
                    assert snapshot.to_table().num_rows == seen, as_of
                    assert snapshot.count() == (3 if seen else 0), as_of
            with reader.snapshot(as_of, columns=["key.id"]) as snapshot:
                assert snapshot.to_table().num_rows == seen, as_of
        for since, upto, seen in [(None, 6, 0), (0, 1, 0), (5, 9, 2), (6, 7, 2), (7, 9, 0)]:
            with reader.changes(since, upto) as changes:
                assert changes.to_table().column("time").to_pylist() == [7] * seen, (since, upto)
        for as_of, seen in [(5, 2), (7, 0)]:
            with client.open_leased_reader(shard_id, purpose="follows") as follower:
                events = follower.listen(as_of).next_batch(timeout_s=10)
                times = [time for e in events if isinstance(e, Updates) for time in e.table.column("time").to_pylist()]
                assert times == [7] * seen, as_of


def errors_world():
    """A shard that may hold errors: rows 0 to 39 in four parts, and one more part with an error that is retracted at 50."""
    world = World(settings=settings(), env=AheadEnv())
    client, shard_id = client_of(world)[0], world.shard_id()
    tagged = with_errors(SCHEMA)
    with client.open_writer(shard_id, tagged, purpose="test") as writer:
        for n in range(4):
            rows = [((id_, "a", None), (0.5, None, None, n)) for id_ in range(10 * n, 10 * n + 10)]
            writer.append([(each, n, 1) for each in rows], lower=at(n), upper=at(n + 1))
        writer.append(tag_errors([("division by zero", 4, 1)], tagged), lower=at(4), upper=at(50))
        writer.append(tag_errors([("division by zero", 50, -1)], tagged), lower=at(50), upper=at(51))
    return world, shard_id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("id = 12", [12, None]),
        ("id > 1000", [None]),
        ("id IS NOT NULL AND id < 2", [0, 1, None]),
        ("val.x < 0", [None]),
    ],
)
def test_regression_a_filter_hides_no_error(where, ids):
    """A shard with an error was read as one without rows. Errors pass each filter, and no part that may hold one is skipped."""
    world, shard_id = errors_world()
    client, counts = client_of(world, audit=100)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        with reader.snapshot(49, where=where) as snapshot:
            table = snapshot.to_table()
            assert [key["id"] for key in table.column("key").to_pylist()] == ids
            assert [key["err"] for key in table.column("key").to_pylist()][-1] == "division by zero"
            assert snapshot.count() == len(ids)
            splits = [SnapshotSplit.from_bytes(split.to_bytes()) for split in snapshot.splits(3)]
            assert sum(b.num_rows for split in splits for b in split.to_batches(reader.blob)) == len(ids)
            leased = snapshot.lease_parts()
            assert sum(reader.fetch(part).num_rows for part in leased) == len(ids)
        assert counts["stats_skipped_parts"] >= 3, "parts without errors are skipped as ever"
        with reader.changes(3, 50, where=where, shape="updates") as changes:
            assert changes.to_table().column("diff").to_pylist() == [1, -1]
        with reader.snapshot(50, where=where) as snapshot:
            assert [key["id"] for key in snapshot.to_table().column("key").to_pylist()] == ids[:-1]
        seen = 0
        for event in reader.listen(3, where=where):
            if isinstance(event, Updates):
                seen += event.table.num_rows
            elif event.frontier == at(50):
                break
        assert seen == 1


def test_a_filter_on_the_error_column_selects_errors():
    world, shard_id = errors_world()
    client, _ = client_of(world)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        for where, seen in [("err IS NULL AND id = 12", [12]), ("key.err IS NOT NULL", [None]), ("err = 'other'", [])]:
            with reader.snapshot(49, where=where) as snapshot:
                assert [key["id"] for key in snapshot.to_table().column("key").to_pylist()] == seen


def test_a_part_is_skipped_only_if_its_statistics_exclude_errors():
    tagged = with_errors(SCHEMA)
    where = Filter(parse_predicate("id = 12"), tagged)
    stats = (("key.id", ColumnStats(0, "50", "60")), ("key.err", ColumnStats(3, None, None)))
    part = HollowPart("p", 1, rows=3, diffs_sum=3, checksum="", stats=PartStats(stats, 0, 1))
    assert not where.may_pass(part)
    for left in [stats[:1], ()]:
        assert where.may_pass(dataclasses.replace(part, stats=PartStats(left, 0, 1)))
    assert where.may_pass(dataclasses.replace(part, stats=None))
    plain = Schema.from_ddl("id BIGINT NOT NULL, err STRING", "")
    assert not Filter(parse_predicate("id = 12"), plain).may_pass(
        dataclasses.replace(part, stats=PartStats(stats[:1], 0, 1))
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", FILTERS, ids=str)
@pytest.mark.parametrize("shard", ["shard", "compacted"])
def test_a_filtered_read_equals_the_filtered_full_read(world, where, shard):
    client, _ = client_of(world, audit=50)
    shard_id = getattr(world, shard)
    with client.open_leased_reader(shard_id, purpose="test") as reader, reader.snapshot(79, where=where) as snapshot:
        got = snapshot.to_table()
        expected = Filter(_predicate(where), SCHEMA).apply(world.whole[shard])
        assert repr(got.to_pylist()) == repr(expected.to_pylist())
        assert snapshot.count() == sum(got.column("diff").to_pylist())
        pieces = [
            b
            for split in snapshot.splits(3)
            for b in SnapshotSplit.from_bytes(split.to_bytes()).to_batches(reader.blob)
        ]
        together = pa.Table.from_batches(pieces, schema=got.schema)
        assert repr(together.to_pylist()) == repr(got.to_pylist())
        parts = snapshot.lease_parts()
        fetched = pa.concat_tables([reader.fetch(part) for part in parts] or [got.slice(0, 0)])
        assert summed(fetched) == summed(got)
        assert [reader.return_part(part) for part in parts] == [True] * len(parts)


def _predicate(where):
    from persist_engine.rows.predicate_text import predicate_of

    return predicate_of(where)


def summed(table, *, at_times=False):
    sums = collections.Counter()
    for row in table.to_pylist():
        sums[repr((row["key"], row["val"], row["time"] if at_times else 0))] += row["diff"]
    return {key: diff for key, diff in sums.items() if diff}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [["id"], ["key.tag", "val.x"], ["val"], ["x", "d"], [], ["key", "o.dd"]])
@pytest.mark.parametrize("where", [None, "id < 120", "x = 0.5 AND tag IS NOT NULL"])
@pytest.mark.parametrize("shard", ["shard", "compacted"])
def test_a_read_of_columns_equals_those_columns_of_the_full_read(world, columns, where, shard):
    client, _ = client_of(world)
    with client.open_leased_reader(getattr(world, shard), purpose="test") as reader:
        whole = world.whole[shard]
        whole = whole if where is None else Filter(_predicate(where), SCHEMA).apply(whole)
        with reader.snapshot(79, where=where, columns=columns) as snapshot:
            got = snapshot.to_table()
            assert got.schema == snapshot.updates_schema
            pieces = [
                b
                for split in snapshot.splits(3)
                for b in SnapshotSplit.from_bytes(split.to_bytes()).to_batches(reader.blob)
            ]
            assert repr(pa.Table.from_batches(pieces, schema=got.schema).to_pylist()) == repr(got.to_pylist())
    tops = {"id": "key", "tag": "key", "x": "val", "d": "val", "place": "val", "o.dd": "val"}
    shown = {
        side: [n for n, s in tops.items() if s == side and ({n, f"{side}.{n}", side} & set(columns))]
        for side in ("key", "val")
    }
    expected = [
        {
            "key": {n: r["key"][n] for n in shown["key"]},
            "val": {n: r["val"][n] for n in shown["val"]},
            "time": r["time"],
            "diff": r["diff"],
        }
        for r in whole.to_pylist()
    ]
    assert repr(got.to_pylist()) == repr(expected)


def test_a_lone_compacted_run_is_read_by_column(world, monkeypatch):
    """All rows are at one time in one run. Nothing has to be merged, so only the selected columns are decoded."""
    client, _ = client_of(world)
    with client.open_leased_reader(world.compacted, purpose="test") as reader:
        whole = reader.snapshot(79).to_table()
        monkeypatch.setattr("persist_engine.parts.contents.read_consolidated", None)
        got = reader.snapshot(79, columns=["id"]).to_table()
        assert got.column("key").to_pylist() == [{"id": row["id"]} for row in whole.column("key").to_pylist()]
        assert got.column("diff") == whole.column("diff")


def test_parts_without_a_matching_row_are_not_fetched(world):
    """Spec 15.7."""
    client, counts = client_of(world)
    with client.open_leased_reader(world.shard, purpose="test") as reader:
        reader.snapshot(79).to_table()
        everything = counts["fetched_parts"]
        counts.clear()
        with reader.snapshot(79, where="id >= 700 AND d IS NOT NULL") as snapshot:
            assert snapshot.to_table().num_rows
        assert 0 < counts["fetched_parts"] < everything / 4
        assert counts["stats_skipped_parts"] == everything - counts["fetched_parts"]
        assert counts["stats_audits"] == 0
        counts.clear()
        assert reader.snapshot(79, where="id > 5000").to_table().num_rows == 0
        assert counts["fetched_parts"] == 0


@pytest.mark.slow
def test_a_count_fetches_no_part_whose_count_state_holds(world):
    """Spec 15.8."""
    client, counts = client_of(world)
    with client.open_leased_reader(world.shard, purpose="test") as reader:
        expected = sum(reader.snapshot(79).to_table().column("diff").to_pylist())
        counts.clear()
        assert reader.snapshot(79).count() == expected
        assert counts["fetched_parts"] == 0
        for as_of in (0, 5, 34, 78):
            part_way = sum(reader.snapshot(as_of).to_table().column("diff").to_pylist())
            counts.clear()
            assert reader.snapshot(as_of).count() == part_way
        assert counts["fetched_parts"] < 8
        counts.clear()
        assert reader.snapshot(79, where="id IS NOT NULL OR id IS NULL").count() == expected
        assert counts["fetched_parts"] <= len(list(reader.blob.list_prefix(f"{world.shard}/n")))
        assert reader.snapshot(79, where=Not(And((Compare("id", ">", 10**9),)))).count() >= 0


def test_a_count_excludes_rows_outside_the_appended_bounds():
    """Sums of diffs include rows that a narrower append hides (bug 20)."""
    world = World(settings=settings(), env=AheadEnv())
    client, _ = client_of(world)
    shard_id = world.shard_id()
    schema = Schema.from_ddl("id INT")
    with client.open_writer(shard_id, schema, purpose="test") as writer:
        batch = writer.batch([(((i,), ()), i, 1) for i in range(10)], lower=at(0), upper=at(10))
        writer.compare_and_append([], expected_upper=at(0), new_upper=at(4))
        writer.compare_and_append_batch([batch], expected_upper=at(4), new_upper=at(7))
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        for as_of in (3, 4, 5, 6):
            snapshot = reader.snapshot(as_of)
            assert snapshot.count() == snapshot.to_table().num_rows == max(0, as_of - 3)
            assert snapshot.count() == reader.snapshot(as_of, columns=[]).to_table().num_rows


def test_an_audit_reports_wrong_statistics_with_part_and_column(world):
    def mend(stats):
        columns = [
            (n, dataclasses.replace(c, upper="-5", lower="-9") if n == "key.id" else c) for n, c in stats.columns
        ]
        return PartStats(tuple(columns), stats.time_min, stats.time_max)

    shard = fill(world, appends=2, seed=3, mend=mend)
    for audit, is_found in ((0, False), (100, True)):
        client, counts = client_of(world, audit=audit)
        with client.open_leased_reader(shard, purpose="test") as reader:
            snapshot = reader.snapshot(19, where="id > 100")
            splits = [SnapshotSplit.from_bytes(split.to_bytes()) for split in snapshot.splits(2)]
            if not is_found:
                assert snapshot.to_table().num_rows == 0  # the reason for audits
                continue
            keys = {f"{shard}/{part.key}" for batch in snapshot._named for part in batch.parts}
            for read in (
                snapshot.to_table,
                snapshot.count,
                lambda s=splits: [list(s_.to_batches(reader.blob)) for s_ in s],
                lambda s=snapshot: [list(part.fetch(reader.blob)) for part in s.lease_parts()],
                lambda s=snapshot: [list(pickle.loads(pickle.dumps(p)).fetch(reader.blob)) for p in s.lease_parts()],
            ):
                with pytest.raises(InvariantViolated, match=r"was skipped by its statistics.*key\.id") as caught:
                    read()
                assert f"{shard}/{caught.value.detail['key']}" in keys
                assert caught.value.detail["columns"] == ["key.id"]
            assert counts["stats_audits"]


def test_an_audit_reports_wrong_statistics_of_times(world):
    shard = fill(world, appends=1, mend=lambda stats: PartStats(stats.columns, 500, 600))
    client, _ = client_of(world, audit=100)
    with (
        client.open_leased_reader(shard, purpose="test") as reader,
        pytest.raises(InvariantViolated, match="the statistics of time are wrong"),
    ):
        reader.snapshot(9).to_table()


def test_an_audit_of_correct_statistics_reports_nothing(world):
    client, counts = client_of(world, audit=100)
    with client.open_leased_reader(world.shard, purpose="test") as reader:
        reader.snapshot(79, where="id >= 700").to_table()
        assert counts["stats_audits"] == counts["stats_skipped_parts"] > 0
        for event in reader.listen(0, where="id >= 700").next_batch(timeout_s=0):
            assert event
        leased = [
            *reader.snapshot(79, where="id >= 700").lease_parts(),
            *reader.listen(0, where="id >= 700").next_parts(timeout_s=0).parts,
        ]
        audits = [part for part in leased if part.is_audit]
        audited = counts["stats_audits"]
        assert [reader.fetch(part).num_rows for part in audits] == [0] * len(audits)
        assert counts["stats_audits"] == audited + len(audits) > audited
        assert reader.leased_parts == len(leased)
    with pytest.raises(InvalidUsage, match="stats_audit_percent"):
        ReadSettings(stats_audit_percent=101)


def test_undecodable_statistics_in_state_are_corrupt_data(world):
    def mend(stats):
        return PartStats((("key.id", dataclasses.replace(stats.columns[0][1], lower="nonsense")),))

    shard = fill(world, appends=1, mend=mend)
    client, _ = client_of(world)
    with client.open_leased_reader(shard, purpose="test") as reader, pytest.raises(CorruptData, match="nonsense"):
        reader.snapshot(9, where="id > 100").to_table()


def test_a_filtered_listener_yields_the_matching_updates_and_all_progress(world):
    client, counts = client_of(world)

    def events(where):
        with client.open_leased_reader(world.shard, purpose="test") as reader:
            listen = reader.listen(25, where=where)
            out, progress = [], []
            while listen.frontier != at(80):
                for event in listen.next_batch(timeout_s=0):
                    (out.append(event.table) if isinstance(event, Updates) else progress.append(event))
        return pa.concat_tables(out), progress

    whole, all_progress = events(None)
    counts.clear()
    got, progress = events("id >= 500 AND x IS NOT NULL")
    assert progress == all_progress
    assert summed(got, at_times=True) == summed(
        Filter(parse_predicate("id >= 500 AND x IS NOT NULL"), SCHEMA).apply(whole), at_times=True
    )
    assert counts["stats_skipped_parts"]


def test_a_filtered_subscription_filters_snapshot_and_listener(world):
    client, _ = client_of(world)
    sums = collections.Counter()
    with client.open_leased_reader(world.shard, purpose="test") as reader:
        expected = summed(reader.snapshot(79, where="id < 300").to_table())
        for event in reader.subscribe(35, where="id < 300"):
            if not isinstance(event, Updates):
                if event.frontier == at(80):
                    break
                continue
            for key, diff in summed(event.table).items():
                sums[key] += diff
    assert {key: diff for key, diff in sums.items() if diff} == expected


def test_contents_can_be_read_more_than_once():
    world = World(settings=settings(), env=AheadEnv())
    shard_id = fill(world, appends=2)
    client, _ = client_of(world)
    with (
        client.open_leased_reader(shard_id, purpose="test") as reader,
        reader.snapshot(19, where="id < 40") as snapshot,
    ):
        assert isinstance(snapshot._contents, Contents)
        assert repr(snapshot.to_table().to_pylist()) == repr(snapshot.to_table().to_pylist())
        assert snapshot.rows_estimate >= snapshot.to_table().num_rows
    with pytest.raises(InvalidUsage, match="closed"):
        snapshot.count()
    with pytest.raises(InvalidUsage, match="closed"):
        snapshot.lease_parts()
