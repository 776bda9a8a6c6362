"""Hollow runs: long runs behind listings read as the parts they stand for, and come and go with them."""

import dataclasses

import pytest
from persist_engine.base.errors import CorruptData, Incompatible, InvalidUsage, MissingBlob, Unavailable
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, CompactionSettings, RetrySettings, Settings
from persist_engine.cli.inspect import commands as inspect_command
from persist_engine.codec.batch import decode_batch, encode_batch, encode_run_listing
from persist_engine.codec.damage import checksum
from persist_engine.codec.envelope import Kind, sealed
from persist_engine.codec.keys import blob_key, part_key
from persist_engine.model.batch import HollowBatch, HollowPart, HollowRun, RunMeta, RunOrder
from persist_engine.model.diff.state_diff import BlobRef, live_blobs
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import PartId, ShardId, staged_ms
from persist_engine.parts.listings import deletion_waves, expand, listed, listing_of, spill_runs, with_nested
from persist_engine.parts.write import delete_parts
from persist_engine.pb import batch_pb2 as pb
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.references import Bucket
from persist_engine.work.audit.usage import audit_usage
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact, compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.repair.restore import restore_shard
from persist_engine.work.rollup import write_rollup
from persist_kit.states import part
from persist_kit.world import SCHEMA, AheadEnv, World, row

at = Antichain.of
DESC = Description(at(0), at(9), at(0))


def settings(**batch):
    return Settings(
        batch=BatchSettings(**{"target_part_bytes": 1024, "inline_part_bytes_max": 0, "run_parts_max": 2, **batch}),
        retry=RetrySettings(give_up_ms=20),
        compaction=CompactionSettings(claim_ms=0),
    )


@pytest.fixture
def world():
    return World(settings=settings(), env=AheadEnv())


@pytest.fixture
def machine(world):
    client = world.process()
    shard_id = world.shard_id()
    client.initialise(shard_id, SCHEMA)
    return client.machine(shard_id)


def made_up(count, *, order=RunOrder.STRUCTURED):
    names = [f"n0000100/p{number:08}-0000-0000-0000-000000000000" for number in range(count)]
    parts = tuple(dataclasses.replace(part(name), key_lower=bytes([max(200 - i, 0)])) for i, name in enumerate(names))
    return HollowBatch(DESC, count, parts, (), (RunMeta(order=order),))


def depth(machine, members):
    runs = [each for each in members if isinstance(each, HollowRun)]
    return 1 + max(depth(machine, listed(machine, run)) for run in runs) if runs else 0


@pytest.mark.parametrize(("count", "levels"), [(2, 0), (3, 1), (4, 1), (5, 2), (17, 4)])
def test_a_long_run_is_listed_level_by_level_and_expands_to_what_it_was(machine, count, levels):
    batch = made_up(count)
    spilled = spill_runs(machine, batch)
    assert len(spilled.parts) <= 2
    assert depth(machine, spilled.parts) == levels
    assert expand(machine, [spilled]) == (batch,)
    assert sum(each.rows for each in spilled.parts) == count
    assert sum(each.part_count for each in spilled.parts) == count
    assert sum(each.diffs_sum for each in spilled.parts) == count
    assert min(each.key_lower for each in spilled.parts) == bytes([201 - count])
    blobs = [ref.partial_key for ref in with_nested(machine, refs(spilled))]
    assert len(blobs) == len(set(blobs)) == sum(each.blob_count for each in spilled.parts)
    assert decode_batch(encode_batch(spilled)) == spilled


def refs(batch):
    return [BlobRef("run" if isinstance(each, HollowRun) else "part", each.key) for each in batch.parts]


def test_runs_without_order_and_short_ones_stay_as_they_are(machine):
    for batch in (made_up(9, order=RunOrder.UNORDERED), made_up(2), HollowBatch.empty(DESC)):
        assert spill_runs(machine, batch) == batch
    two = HollowBatch.of_runs(DESC, 4, [(RunMeta(), made_up(2).parts), (RunMeta(), made_up(2).parts)])
    assert spill_runs(machine, two) == two


def test_nothing_is_listed_unless_asked_for(world):
    client = world.process(settings=Settings())
    shard_id = world.shard_id()
    client.initialise(shard_id, SCHEMA)
    assert spill_runs(client.machine(shard_id), made_up(5000)) == made_up(5000)
    with pytest.raises(InvalidUsage, match="run_parts_max must be at least 2"):
        BatchSettings(run_parts_max=1)


def test_a_spill_that_fails_leaves_no_listing_behind(world, machine):
    batch = made_up(9)
    world.faults.fail_next("set", happened=True, times=50)
    with pytest.raises(Unavailable):
        spill_runs(machine, batch)
    world.faults.heal()
    assert world.blob_keys(machine.shard_id, kind="part") == set()


def test_a_rewrite_of_the_run_holds_for_all_parts_below(machine):
    spilled = spill_runs(machine, made_up(7))
    rewritten = tuple(dataclasses.replace(each, ts_rewrite=at(5)) for each in spilled.parts)
    (batch,) = expand(machine, [dataclasses.replace(spilled, parts=rewritten)])
    assert {each.ts_rewrite for each in batch.parts} == {at(5)}


def test_reading_an_unexpanded_batch_is_refused(machine):
    with pytest.raises(Exception, match="before its hollow runs were expanded"):
        list(spill_runs(machine, made_up(3)).part_runs())


# -- damage ------------------------------------------------------------------------------------------------------------


def one_run(machine, parts=None):
    """A batch of one hollow run, and the key and bytes of its listing."""
    spilled = spill_runs(machine, made_up(3)) if parts is None else parts
    run = spilled.parts[0]
    key = blob_key(machine.shard_id, run.key)
    return spilled, run, key, machine.blob.get(key)


def relisted(machine, run, data):
    """The batch of one run whose listing was replaced by `data`, its checksum in state being that of `data`."""
    machine.blob.set(blob_key(machine.shard_id, run.key), data)
    return HollowBatch(DESC, run.rows, (dataclasses.replace(run, checksum=checksum(data)),), (), (RunMeta(),))


def test_missing_truncated_and_flipped_listings_are_named(machine):
    batch, run, key, data = one_run(machine)
    for damaged in (b"", data[:-1], data[: len(data) // 2], data + b"x", data[:20] + bytes([data[20] ^ 1]) + data[21:]):
        machine.blob.set(key, damaged)
        with pytest.raises(CorruptData, match=f"{key}: checksum"):
            expand(machine, [batch])
        with pytest.raises(CorruptData, match=key):
            expand(machine, [relisted(machine, run, damaged)])
        with pytest.raises(CorruptData, match=key):
            deletion_waves(machine, [run.key])
    machine.blob.delete(key)
    with pytest.raises(MissingBlob, match=key):
        expand(machine, [batch])


def test_foreign_newer_and_empty_listings_are_refused(machine):
    _, run, key, _ = one_run(machine)
    other = ShardId.from_bytes(b"\x09" * 16)
    parts = made_up(2).parts
    with pytest.raises(CorruptData, match=f"{key}: the run listing is of shard {other}"):
        expand(machine, [relisted(machine, run, encode_run_listing(other, parts))])
    with pytest.raises(Incompatible, match=key):
        expand(machine, [relisted(machine, run, encode_run_listing(machine.shard_id, parts, version="9.0.0"))])
    with pytest.raises(CorruptData, match=f"{key}.*a run of no parts"):
        expand(machine, [relisted(machine, run, encode_run_listing(machine.shard_id, ()))])
    with pytest.raises(CorruptData, match=f"{key}.*expected a run listing"):
        expand(machine, [relisted(machine, run, encode_batch(made_up(2)))])
    unknown = pb.RunListing(shard_id=machine.shard_id.to_bytes(), applier_version="0.1.0", parts=[pb.Part()])
    unknown.parts[0].MergeFromString(b"\x7a\x00")  # a field 15 of some later release
    with pytest.raises(
        Incompatible, match=f"{key}: the run listing holds a part of a kind that this code does not know"
    ):
        expand(machine, [relisted(machine, run, sealed(Kind.RUN_LISTING, unknown))])
    with pytest.raises(Incompatible, match="cannot verify"):
        expand(machine, [HollowBatch(DESC, 2, (dataclasses.replace(run, checksum="sha9:00"),), (), (RunMeta(),))])


def test_a_listing_that_leads_elsewhere_than_state_says_is_refused(machine):
    _, run, key, _ = one_run(machine)
    with pytest.raises(CorruptData, match=f"{key}: the run listing leads to 3 rows"):
        expand(machine, [relisted(machine, run, encode_run_listing(machine.shard_id, made_up(3).parts))])


def test_a_listing_that_names_itself_ends_in_an_error_not_in_a_loop(machine):
    """A checksum of 32 bits can be forged; the loop must end whatever the bytes say."""
    _, run, key, _ = one_run(machine)
    unverified = dataclasses.replace(run, checksum="crc32:00000000")

    def get(wanted, *, real=machine.blob.get):
        return encode_run_listing(machine.shard_id, [unverified]) if wanted == key else real(wanted)

    class Looped:
        shard_id, retry = machine.shard_id, machine.retry
        blob = type("Blob", (), {"get": staticmethod(get)})()

    data = get(key)
    forged = dataclasses.replace(run, checksum=checksum(data))
    unverified = forged  # the listing names itself, with a checksum that is not its own: the first step is accepted
    with pytest.raises(CorruptData, match="checksum|names it twice"):
        expand(Looped(), [HollowBatch(DESC, run.rows, (forged,), (), (RunMeta(),))])
    assert deletion_waves(Looped(), [run.key]) == [[run.key]]
    assert [ref.partial_key for ref in with_nested(Looped(), [BlobRef("run", run.key)])] == [run.key]


def test_a_part_that_two_listings_name_is_refused(machine):
    parts = made_up(2).parts
    runs = []
    for number in (7, 8):
        key = f"n0000100/p0000000{number}-0000-0000-0000-00000000000f"
        data = encode_run_listing(machine.shard_id, parts)
        machine.blob.set(blob_key(machine.shard_id, key), data)
        runs.append(listing_of(parts, key=key, data=data))
    with pytest.raises(CorruptData, match="names it twice"):
        expand(machine, [HollowBatch(DESC, 4, tuple(runs), (), (RunMeta(),))])


# -- through the whole engine -------------------------------------------------------------------------------------------


def filled(world, client, shard_id, appends=8, rows=60):
    """`appends` batches of several parts each."""
    contents = {}
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        for i in range(appends):
            updates = [row(1000 * i + j, f"name {j} " + "x" * 40, i) for j in range(rows)]
            contents |= {key: name for ((key,), (name,)), _, _ in updates}
            writer.compare_and_append(updates, expected_upper=at(i), new_upper=at(i + 1))
    return contents


def read(client, shard_id, as_of):
    with client.open_leased_reader(shard_id, purpose="test") as reader, reader.snapshot(as_of) as snapshot:
        table = snapshot.to_table()
        splits = [r for split in snapshot.splits(4) for b in split.to_batches(reader.blob) for r in b.to_pylist()]
        assert splits == table.to_pylist()
    return {r["key"]["id"]: r["val"]["name"] for r in table.to_pylist()}


def compacted(world, shard_id):
    """The shard compacted by a second process until nothing is left to do."""
    client = world.process()
    while any(outcome.applied for outcome in compact_due(client.machine(shard_id))):
        pass
    return client


@pytest.mark.slow
def test_compaction_lists_long_runs_and_everything_reads_them(world):
    client, shard_id = world.process(), world.shard_id()
    contents = filled(world, client, shard_id)
    other = compacted(world, shard_id)
    state = other.machine(shard_id).refresh()
    assert any(batch.has_hollow_runs for batch in state.trace.batches())
    assert state.trace.part_count > sum(len(batch.parts) for batch in state.trace.batches())
    assert read(other, shard_id, 7) == contents
    assert read(world.process(), shard_id, 7) == contents
    with other.open_leased_reader(shard_id, purpose="test") as reader:
        listen = reader.listen(0)
        got = [r["key"]["id"] for event in listen.next_batch(timeout_s=0) for r in _rows(event)]
    assert set(got) <= set(contents)
    places = [str(part) for part in other.metadata(shard_id, "parts")["part"].to_pylist()]
    assert any("lists" in place for place in places)
    on_disk = world.blob_keys(shard_id, kind="part")
    live = {blob_key(shard_id, ref.partial_key) for ref in with_nested(other.machine(shard_id), live_blobs(state))}
    assert live & on_disk == live - {key for key in live if "/v" in key}
    named = {key: by for key, _, _, by in inspect_command._blob_rows(other, shard_id)}
    assert all(named[key] == "newest" for key in live)


def _rows(event):
    return event.table.to_pylist() if hasattr(event, "table") else []


def collect(world, client, shard_id):
    """Rollup and GC until the newest state is all that is left."""
    machine = client.machine(shard_id)
    for _ in range(2):
        write_rollup(machine)
        gc_and_truncate(machine)


@pytest.mark.slow
def test_collection_deletes_what_listings_name_and_only_that(world):
    client, shard_id = world.process(), world.shard_id()
    contents = filled(world, client, shard_id)
    first = compacted(world, shard_id)
    machine = first.machine(shard_id)
    before = world.blob_keys(shard_id, kind="part")
    assert any(ref.kind == "run" for ref in live_blobs(machine.refresh()))
    # Everything changes and is compacted again: the first output, its listings included, becomes garbage.
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        gone = [row(key, val, 8, -1) for key, val in contents.items()]
        writer.compare_and_append(gone, expected_upper=at(8), new_upper=at(9))
        for i in range(9, 40):
            writer.compare_and_append([row(i, "new", i)], expected_upper=at(i), new_upper=at(i + 1))
    with client.open_leased_reader(shard_id, purpose="since") as reader:
        reader.downgrade_since(at(39))
    for _ in range(20):
        client.machine(shard_id).spine_exert(10**6)
    second = compacted(world, shard_id)
    collect(world, second, shard_id)
    machine = second.machine(shard_id)
    live = {blob_key(shard_id, ref.partial_key) for ref in with_nested(machine, live_blobs(machine.refresh()))}
    assert world.blob_keys(shard_id, kind="part") == {key for key in live if "/n" in key}
    assert not before & world.blob_keys(shard_id, kind="part")
    assert read(second, shard_id, 39) == dict.fromkeys(range(9, 40), "new")


def test_regression_an_interrupted_deletion_of_a_run_still_finds_its_children(world, machine):
    """The listing went first, and the process that finished the deletion no longer knew what it had named (bug 35)."""
    spilled = spill_runs(machine, made_up(9))
    keys = [ref.partial_key for ref in with_nested(machine, refs(spilled))]
    for key in keys:
        whole = blob_key(machine.shard_id, key)
        if machine.blob.get(whole) is None:
            machine.blob.set(whole, b"a part")
    assert len(world.blob_keys(machine.shard_id, kind="part")) == len(keys)
    # Every delete may be the last that this process does: after k of them another process starts over.
    for _ in range(len(keys) + 1):
        interrupted = _StopsAfterOne(machine)
        try:
            delete_parts(interrupted, spilled.parts)
        except InterruptedError:
            continue
        break
    assert world.blob_keys(machine.shard_id, kind="part") == set()


class _StopsAfterOne:
    """A store whose process dies at its second effective delete."""

    def __init__(self, machine):
        self.shard_id, self.retry, self.env, self.settings = (
            machine.shard_id,
            machine.retry,
            machine.env,
            machine.settings,
        )
        self.metrics, self._inner, self.blob, self._done = machine.metrics, machine.blob, self, 0

    def get(self, key):
        return self._inner.get(key)

    def delete(self, key):
        if self._inner.get(key) is not None:
            if self._done:
                raise InterruptedError
            self._done += 1
        return self._inner.delete(key)


@pytest.mark.slow
def test_a_refused_compaction_output_leaves_neither_parts_nor_listings(world):
    client, shard_id = world.process(), world.shard_id()
    contents = filled(world, client, shard_id)
    racing = world.process().machine(shard_id)
    racing.refresh()
    claimed, _ = racing.claim_compactions(max_requests=100)
    assert claimed.requests
    other = compacted(world, shard_id)
    before = world.blob_keys(shard_id, kind="part")
    outcomes = [compact(racing, req) for req in claimed.requests]
    assert not any(outcome.applied for outcome in outcomes)
    assert world.blob_keys(shard_id, kind="part") == before
    assert read(other, shard_id, 7) == contents


def test_a_run_says_when_the_first_blob_below_it_was_staged(world, machine):
    """The floor of an orphan scan holds for what a listing names too: those blobs may be deleted by then."""
    world.env.advance_ms(1000)
    spilled = spill_runs(machine, made_up(7))
    oldest = made_up(7).parts[0].key  # the ids of these parts hold small times
    assert {each.oldest_key for each in spilled.parts[:1]} == {oldest}
    assert spilled.staged_before(staged_ms(oldest) + 1) == oldest
    assert spilled.staged_before(staged_ms(oldest)) is None
    listing = spilled.parts[0]
    assert 0 <= world.env.now_ms() - staged_ms(listing.key) < 600_000


def test_part_types_answer_alike():
    hollow = HollowPart(made_up(1).parts[0].key, 10, 3, None, "crc32:0")
    assert (hollow.part_bytes_max, hollow.part_count, hollow.blob_count) == (10, 1, 1)
    run = listing_of([hollow, hollow], key=made_up(1).parts[0].key, data=b"12345")
    assert (run.rows, run.diffs_sum, run.hollow_bytes, run.part_bytes_max) == (6, None, 25, 10)
    assert (run.part_count, run.blob_count, run.inline_bytes) == (2, 3, 0)


# -- audits and administration see behind listings -----------------------------------------------------------------------


@pytest.fixture
def listed_shard(world):
    client, shard_id = world.process(), world.shard_id()
    contents = filled(world, client, shard_id)
    other = compacted(world, shard_id)
    machine = other.machine(shard_id)
    machine.refresh()
    collect(world, other, shard_id)
    refs_ = list(with_nested(machine, live_blobs(machine.refresh())))
    below = sorted({ref.partial_key for ref in refs_} - {ref.partial_key for ref in live_blobs(machine.state)})
    assert below
    return other, machine, contents, below


@pytest.mark.slow
def test_an_orphan_scan_deletes_nothing_that_a_listing_names(world, listed_shard):
    client, machine, contents, below = listed_shard
    stray = blob_key(machine.shard_id, part_key("0.1.0", PartId.staged_at(1, b"0123456789")))
    machine.blob.set(stray, b"not named by any state")
    world.env.advance_ms(10**9)
    write_rollup(machine)  # walltime moves on too
    found = scan_orphans(machine, older_than_ms=0, commit=True)
    assert machine.blob.get(stray) is None
    assert found.deleted >= 1
    assert all(machine.blob.get(blob_key(machine.shard_id, key)) is not None for key in below)
    assert read(client, machine.shard_id, 7) == contents


@pytest.mark.slow
def test_regression_an_orphan_scan_deletes_nothing_where_a_listing_is_lost(world, listed_shard):
    """What it listed looked unreferenced: the whole run was deleted, and to restore the listing brought nothing back."""
    client, machine, contents, below = listed_shard
    world.env.advance_ms(10**9)
    write_rollup(machine)
    refs_ = list(with_nested(machine, live_blobs(machine.refresh())))
    listings = [blob_key(machine.shard_id, ref.partial_key) for ref in refs_ if ref.kind == "run"]
    nested = [key for key in listings if key.partition("/")[2] in below]
    before = world.blob_keys(machine.shard_id, kind="part")
    for lost in {listings[0], nested[0]}:
        kept = machine.blob.get(lost)
        machine.blob.delete(lost)
        for commit in (False, True):
            with pytest.raises(MissingBlob, match="restore it first") as raised:
                scan_orphans(machine, older_than_ms=0, commit=commit)
            assert raised.value.detail["key"] == lost
        shard = audit_usage(machine.blob, lambda _: machine, retry=machine.retry, metrics=NoMetrics()).shards[
            machine.shard_id
        ]
        assert (lost in str(shard.problem), shard.blobs[Bucket.LEAKED]) == (True, 0)
        machine.blob.set(lost, kept)
    scan_orphans(machine, older_than_ms=0, commit=True)
    assert world.blob_keys(machine.shard_id, kind="part") == before
    assert read(client, machine.shard_id, 7) == contents


@pytest.mark.slow
def test_what_a_listing_names_counts_as_current_and_is_verified(listed_shard):
    client, machine, _, below = listed_shard
    keys = {blob_key(machine.shard_id, key) for key in below}
    usage = audit_usage(machine.blob, lambda _: machine, retry=machine.retry, metrics=NoMetrics())
    shard = usage.shards[machine.shard_id]
    live = {key for key in keys if "/n" in key}
    assert shard.blobs[Bucket.CURRENT] >= len(live)
    assert shard.blobs[Bucket.LEAKED] == shard.blobs[Bucket.NOT_LEAKED_NOT_REFERENCED] == 0
    assert verify_shard(machine).findings == []
    gone = sorted(keys)[0]
    machine.blob.delete(gone)
    assert gone in {finding.key for finding in verify_shard(machine).findings}
    report = restore_shard(machine.versions, machine.shard_id, commit=False)
    assert report.missing == [gone]
