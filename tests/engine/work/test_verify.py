"""Verification finds each kind of damage by its name, and nothing in a sound shard."""

import copy
import dataclasses

import pyarrow as pa
import pytest
from persist_engine import Antichain, Appended, Schema
from persist_engine.base.settings import BatchSettings, MaintenanceSettings, Settings
from persist_engine.base.versioned import SeqNo, VersionedData
from persist_engine.codec import row_groups
from persist_engine.codec.batch import decode_transmittable, encode_transmittable
from persist_engine.codec.damage import checksum
from persist_engine.codec.keys import blob_key, rollup_key
from persist_engine.codec.part import decode_part, encode_part
from persist_engine.codec.row_groups import footing_of
from persist_engine.codec.state import Rollup, decode_rollup, encode_rollup
from persist_engine.codec.state_diff import decode_state_diff, encode_state_diff
from persist_engine.model.batch import ColumnStats, HollowBatch, HollowRollup
from persist_engine.model.diff.state_diff import StateDiff
from persist_engine.model.frontier import MINIMUM, Description
from persist_engine.model.ids import RollupId
from persist_engine.model.queries import latest_rollup, seqno_since
from persist_engine.model.shared_map import SharedMap
from persist_engine.model.spine.flatten import pushed
from persist_engine.model.spine.trace import Trace
from persist_engine.work.audit import verify, verify_parts
from persist_engine.work.audit.finding import FindingKind, Severity
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_engine.work.gc import collectable, gc_and_truncate
from persist_engine.work.repair.force import force_compaction
from persist_engine.work.rollup import write_rollup
from persist_kit.recorded import SCHEMA, Meanwhile, RecordedShard, aged
from persist_kit.world import SCHEMA as WORLD_SCHEMA
from persist_kit.world import World, row

A = Antichain.of


def verified(shard, **how):
    return verify_shard(shard.client().machine(shard.shard_id), **how)


def kinds(found):
    return {finding.kind for finding in found.findings}


def some_part(shard):
    """The first part that the newest state names, with its batch."""
    state = shard.client().machine(shard.shard_id).refresh()
    return next((part, batch) for batch in state.trace.batches() for part in batch.parts)


@pytest.fixture(scope="module")
def prepared():
    return aged()[0]


@pytest.fixture
def shard(prepared):
    return prepared.copy()


@pytest.mark.slow
def test_a_sound_shard_has_no_findings_before_and_after_collection(shard):
    """Spec 14.12."""
    first = verified(shard)
    assert (first.findings, first.is_corrupt) == ([], False)
    assert first.parts == first.parts_read > 20
    assert first.rollups >= 3
    bounds = shard.client().machine(shard.shard_id).versions.live_diff_bounds(shard.shard_id)
    assert first.versions == bounds.count
    gc_and_truncate(shard.client().machine(shard.shard_id))
    second = verified(shard)
    assert second.findings == []
    assert second.versions < first.versions


@pytest.mark.slow
def test_a_sample_reads_less_but_always_the_same_and_misses_no_missing_part(shard):
    tenth, again, none = (verified(shard, sample=share) for share in (0.3, 0.3, 0.0))
    assert 0 < tenth.parts_read < tenth.parts
    assert tenth == again
    assert none.parts_read == 0
    part, _ = some_part(shard)
    shard.blob.delete(blob_key(shard.shard_id, part.key))
    found = verified(shard, sample=0.0)
    (finding,) = found.findings
    assert (finding.kind, finding.key) == (FindingKind.MISSING_BLOB, blob_key(shard.shard_id, part.key))
    assert finding.severity is Severity.ERROR


@pytest.mark.slow
def test_flipped_bytes_and_cut_parts_are_found_by_key(shard):
    part, _ = some_part(shard)
    key = blob_key(shard.shard_id, part.key)
    data = shard.blob.get(key)
    shard.blob.set(key, data[:100] + bytes([data[100] ^ 1]) + data[101:])
    found = verified(shard)
    assert [(each.kind, each.key) for each in found.findings] == [(FindingKind.CORRUPT, key)]
    shard.blob.set(key, data[:-1])
    assert kinds(verified(shard)) == {FindingKind.WRONG_SIZE, FindingKind.CORRUPT}


@pytest.mark.parametrize("which", ["newest", "earliest"])
def test_a_damaged_or_missing_rollup_is_found(shard, which):
    state = shard.client().machine(shard.shard_id).refresh()
    seqno = max(state.rollups) if which == "newest" else min(state.rollups)
    key = blob_key(shard.shard_id, state.rollups[seqno].key)
    machine = shard.client().machine(shard.shard_id)
    data = shard.blob.get(key)
    shard.blob.set(key, data[:-4] + b"\0\0\0\0")
    assert FindingKind.CORRUPT in kinds(verify_shard(machine))
    shard.blob.delete(key)
    machine = shard.copy().client().machine(shard.shard_id) if which == "earliest" else machine
    found = verify_shard(machine)
    assert FindingKind.MISSING_BLOB in kinds(found)
    assert found.is_corrupt


@pytest.mark.slow
def test_a_rollup_of_another_history_is_found(shard):
    state = shard.client().machine(shard.shard_id).refresh()
    seqno, rollup = latest_rollup(state)
    key = blob_key(shard.shard_id, rollup.key)
    decoded = decode_rollup(shard.blob.get(key), key=key)
    forged = dataclasses.replace(decoded.state, hostname="elsewhere")
    machine = shard.client().machine(shard.shard_id)
    shard.blob.set(key, encode_rollup(Rollup(forged, decoded.diffs)))
    assert FindingKind.ROLLUP_DIFFERS in kinds(verify_shard(machine))


def flat_shard(world):
    """A shard as left by code that stored no structure: one empty batch, before {1}."""
    shard_id = world.shard_id()
    world.process().initialise(shard_id, WORLD_SCHEMA)
    first = world.process().machine(shard_id).refresh()
    seqno = SeqNo(first.seqno + 1)
    key = rollup_key(seqno, RollupId.from_bytes(bytes(16)))
    empty = HollowBatch.empty(Description(MINIMUM, A(1), MINIMUM))
    trace = Trace(pushed(MINIMUM, [empty]), structured=False)
    state = dataclasses.replace(first, seqno=seqno, rollups=SharedMap({seqno: HollowRollup(key, None)}), trace=trace)
    diff = StateDiff(
        applier_version=state.applier_version,
        seqno_from=first.seqno,
        seqno_to=seqno,
        walltime_ms=state.walltime_ms,
        latest_rollup_key=key,
        shard_id=shard_id,
        birth=state.birth,
    )
    entry = VersionedData(seqno, encode_state_diff(diff))
    world.blob.set(blob_key(shard_id, key), encode_rollup(Rollup(dataclasses.replace(state, tag=entry.tip.tag))))
    world.consensus.compare_and_set(shard_id, first.tip, entry)
    world.consensus.truncate(shard_id, entry.seqno, entry.tip)
    return shard_id


def test_regression_replicas_of_a_flat_trace_may_group_its_empty_batches_as_they_like():
    """A compaction left a second empty batch beside one. A reader of the rollup finds them fused. Verification called it corrupt."""
    world = World(
        settings=Settings(
            batch=BatchSettings(inline_part_bytes_max=0), maintenance=MaintenanceSettings(structure_flat_traces=False)
        )
    )
    shard_id = flat_shard(world)
    client = world.process()
    with client.open_writer(shard_id, WORLD_SCHEMA, purpose="test") as writer:
        batches = [writer.batch([row(1, "a", 1, diff)], lower=A(1), upper=A(2)) for diff in (1, -1)]
        writer.compare_and_append_batch(batches, expected_upper=A(1), new_upper=A(2))
    machine = client.machine(shard_id)
    for spine_batch in machine.state.trace.spine_batches():
        compact(machine, spine_batch.request())
    assert [batch.rows for batch in machine.state.trace.batches()] == [0, 0]
    write_rollup(machine)
    found = verify_shard(world.process().machine(shard_id))
    assert (found.rollups, found.findings) == (2, [])


def test_a_diff_that_does_not_apply_is_found_and_the_rest_is_still_checked(shard):
    log = shard.consensus.scan(shard.shard_id, 0, 10_000)
    entry = next(entry for entry in log[2:] if decode_state_diff(entry.data, key="").legacy_batches)
    forged = dataclasses.replace(decode_state_diff(entry.data, key=""), legacy_batches=())
    other = shard.copy()
    other.consensus = type(shard.consensus)()
    expected = None
    for each in log:
        data = encode_state_diff(forged) if each.seqno == entry.seqno else each.data
        new = VersionedData(each.seqno, data)
        other.consensus.compare_and_set(shard.shard_id, expected, new)
        expected = new.tip
    found = verify_shard(other.client().machine(shard.shard_id))
    assert found.is_corrupt
    assert kinds(found) & {FindingKind.DIFF_DOES_NOT_APPLY, FindingKind.CORRUPT}
    assert found.parts_read > 0


def lying(shard, edit):
    """Appends a batch with its only part's descriptor as `edit` returns it, as a faulty writer does. The verification, and the part's key."""
    with shard.client().open_writer(shard.shard_id, SCHEMA, purpose="faulty") as writer:
        lower, upper = A(shard.upper), A(shard.upper + 1)
        updates = [(((number, "a"), (number % 2,)), shard.upper, 1) for number in range(10)]
        batch = writer.batch(updates, lower=lower, upper=upper)
        shard_id, version, hollow = decode_transmittable(batch.to_transmittable())
        ((meta, (part,)),) = hollow.runs()
        changed = HollowBatch.of_runs(hollow.desc, hollow.rows, [(meta, [edit(part)])])
        sent = writer.batch_from_transmittable(encode_transmittable(shard_id, version, changed), is_only_copy=True)
        assert isinstance(writer.append_batch(sent, lower, upper), Appended)
    return verified(shard), blob_key(shard.shard_id, part.key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["upper", "lower", "nulls", "time_min", "time_max", "diff_min", "key_lower", "sum", "unknown column"]
)
def test_bounds_that_would_hide_rows_are_found(shard, what):
    def edit(part):
        columns = dict(part.stats.columns)
        stats = columns["val.x"]
        match what:
            case "upper":
                columns["val.x"] = ColumnStats(stats.null_count, stats.lower, "-1")
            case "lower":
                columns["val.x"] = ColumnStats(stats.null_count, "2", stats.upper)
            case "nulls":
                columns["val.x"] = ColumnStats(stats.null_count + 1, stats.lower, stats.upper)
            case "unknown column":
                columns["val.y"] = stats
        changed = dataclasses.replace(part.stats, columns=tuple(columns.items()))
        match what:
            case "time_min":
                changed = dataclasses.replace(changed, time_min=changed.time_max + 1)
            case "time_max":
                changed = dataclasses.replace(changed, time_max=changed.time_min - 1)
            case "diff_min":
                changed = dataclasses.replace(changed, diff_min=changed.diff_min + 1)
            case "key_lower":
                return dataclasses.replace(part, key_lower=b"\xff")
            case "sum":
                return dataclasses.replace(part, diffs_sum=part.diffs_sum + 1)
        return dataclasses.replace(part, stats=changed)

    found, key = lying(shard, edit)
    expected = FindingKind.WRONG_SUM if what == "sum" else FindingKind.STATS_NOT_CONSERVATIVE
    assert {(each.kind, each.key) for each in found.findings} == {(expected, key)}


@pytest.mark.slow
def test_rows_out_of_order_in_a_sorted_run_are_found(shard):
    def backwards(old):
        key = blob_key(shard.shard_id, old.key)
        part = decode_part(shard.blob.get(key), key=key, schema=SCHEMA)
        table = part.table.take(list(range(part.table.num_rows))[::-1])
        data = encode_part(table, desc=part.desc, schema=SCHEMA)
        shard.blob.set(key, data)
        return dataclasses.replace(old, checksum=checksum(data), size_bytes=len(data), footer=footing_of(data))

    found, key = lying(shard, backwards)
    assert FindingKind.OUT_OF_ORDER in {each.kind for each in found.findings if each.key == key}


@pytest.mark.slow
def test_a_footer_that_state_describes_wrongly_is_found(shard):
    """A read of the whole part does not need it; a read of a range of keys does."""

    def other_footer(old):
        return dataclasses.replace(old, footer=dataclasses.replace(old.footer, checksum=checksum(b"")))

    found, key = lying(shard, other_footer)
    assert [(each.kind, each.key) for each in found.findings] == [(FindingKind.CORRUPT, key)]
    assert "footer" in found.findings[0].message


@pytest.mark.slow
def test_bounds_of_a_row_group_that_would_hide_a_key_are_found(shard, monkeypatch):
    """Only a reader of a range of keys looks at them."""
    narrow = ColumnStats(0, "-7", "-7")

    def narrowed(old):
        key = blob_key(shard.shard_id, old.key)
        part = decode_part(shard.blob.get(key), key=key, schema=SCHEMA)
        monkeypatch.setattr(row_groups, "column_stats", lambda _column: narrow)
        data = encode_part(part.table, desc=part.desc, schema=SCHEMA)
        shard.blob.set(key, data)
        return dataclasses.replace(old, checksum=checksum(data), size_bytes=len(data), footer=footing_of(data))

    found, key = lying(shard, narrowed)
    assert {(each.kind, each.key) for each in found.findings} == {(FindingKind.STATS_NOT_CONSERVATIVE, key)}
    assert all("the key in row group 0" in each.message for each in found.findings)


@pytest.mark.slow
def test_diffs_that_unlink_other_blobs_than_the_state_are_found(shard, monkeypatch):
    real = verify.deleted_blobs
    dropped = []

    def forgetful(diff):
        gone = list(real(diff))
        dropped.extend(gone[:1])
        return gone[1:]

    monkeypatch.setattr(verify, "deleted_blobs", forgetful)
    assert FindingKind.REFERENCES_DIFFER in kinds(verified(shard))
    assert dropped


def test_a_blob_collected_during_verification_is_no_finding(shard):
    slow = copy.copy(shard)
    collect = lambda: gc_and_truncate(shard.client().machine(shard.shard_id))  # noqa: E731
    slow.blob = Meanwhile(shard.blob, "list_prefix", collect, before=True)
    found = verified(slow)
    assert slow.blob.is_done
    assert found.findings == []
    assert found.collected > 0


@pytest.mark.slow
def test_blobs_deleted_by_an_interrupted_collection_are_no_finding(shard):
    """Found by simulation: a collection deletes first and truncates last. Versions that no process may read name missing blobs."""
    machine = shard.client().machine(shard.shard_id)
    to = seqno_since(machine.refresh())
    gone = [blob for step in collectable(machine, to) for blob in step.blobs]
    assert len(gone) > 5
    for blob in gone:
        shard.blob.delete(blob_key(shard.shard_id, blob.partial_key))
    found = verified(shard)
    assert (found.findings, found.collected) == ([], len(gone))
    part, _ = some_part(shard)
    shard.blob.delete(blob_key(shard.shard_id, part.key))
    assert kinds(verified(shard)) == {FindingKind.MISSING_BLOB}


def test_an_empty_shard_is_sound():
    shard = RecordedShard()
    shard.client(Settings()).initialise(shard.shard_id, SCHEMA)
    found = verified(shard)
    assert (found.findings, found.versions, found.parts) == ([], 1, 0)


def test_float_bounds_do_not_hide_nan():
    import pyarrow as pa

    values = pa.chunked_array([pa.array([1.0, float("nan")])])
    assert list(verify_parts._beyond_bounds(values, ColumnStats(0, "1.0", "2.0"), "val.x", is_whole=True))
    assert not list(verify_parts._beyond_bounds(values, ColumnStats(0, "1.0", None), "val.x", is_whole=True))


def test_sums_of_diffs_beyond_int64_after_a_merge_are_sound():
    """The rows of each part add up to int64's greatest value. Together they wrap, as the descriptor's sum does."""
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, WORLD_SCHEMA, purpose="test") as writer:
        for time in range(2):
            writer.append([row(time, "x", time, 2**63 - 1)], lower=Antichain.of(time), upper=Antichain.of(time + 1))
    machine = client.machine(shard_id)
    force_compaction(machine, full=True)
    assert [part.diffs_sum for batch in machine.state.trace.batches() for part in batch.parts] == [-2]
    assert verify_shard(machine).findings == []


def test_bounds_of_keys_are_checked_under_the_schema_of_their_part():
    """As bytes, keys of two schemas do not compare: here a field was added between the two keys."""
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, Schema.from_ddl("a BIGINT, c BIGINT", "x INT"), purpose="test") as writer:
        updates = [(((1, 5), (1,)), 0, 1), (((1, -5), (2,)), 0, 1)]
        writer.append(updates, lower=Antichain.of(0), upper=Antichain.of(1))
    assert client.evolve_schema(shard_id, Schema.from_ddl("a BIGINT, b STRUCT<d: INT>, c BIGINT", "x BIGINT"))
    assert verify_shard(client.machine(shard_id)).findings == []


def test_a_schema_that_evolves_under_a_verification_is_no_damage():
    """Found by simulation (seed 1012045): parts of versions that came meanwhile were read under the schema of its beginning, and reported as
    corrupt.
    """
    world = World()
    shard_id = world.shard_id()
    client = world.process()
    with client.open_writer(shard_id, WORLD_SCHEMA, purpose="before") as writer:
        writer.compare_and_append([row(1, "ada", 0)], expected_upper=A(0), new_upper=A(1))
    wider = Schema(WORLD_SCHEMA.key, pa.schema([*WORLD_SCHEMA.val, ("note", pa.string())]))

    def evolves():
        client.evolve_schema(shard_id, wider)
        with client.open_writer(shard_id, wider, purpose="after") as writer:
            writer.compare_and_append([(((2,), ("lin", "new")), 1, 1)], expected_upper=A(1), new_upper=A(2))

    machine = world.process().machine(shard_id)
    world.consensus.after_next("scan", evolves)
    found = verify_shard(machine)
    assert (found.findings, found.rows) == ([], 2)
