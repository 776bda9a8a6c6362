"""Storage usage: every blob is in one bucket, whatever happens during the audit."""

import itertools
import random
from dataclasses import replace

import pytest
from persist_engine.base.errors import Indeterminate
from persist_engine.base.metrics import NoMetrics, PrometheusMetrics
from persist_engine.codec.keys import parse_blob_key, shard_prefix
from persist_engine.model.ids import ShardId
from persist_engine.work.audit.references import CHUNK_BLOBS, Bucket, listed_in_chunks, looks_leaked
from persist_engine.work.audit.usage import TRACKERS_MAX, audit_usage, referenced_usage
from persist_kit.recorded import RecordedShard, aged
from prometheus_client import CollectorRegistry, generate_latest

UUID = "00000000-0000-0000-0000-0000000000"


@pytest.fixture
def shard():
    return aged()[0]


def fill(blob, prefix):
    """Adds more blobs than a chunk of a listing holds."""
    for number in range(CHUNK_BLOBS + 100):
        blob.set(f"{prefix}{number:012x}", b"1")


def audited(shard, *, blob=None, metrics=None, prefix="", on_listed=None):
    client = shard.client()

    def machine_of(shard_id):
        return client.machine(shard_id) if shard_id in set(client.shards()) else None

    found = audit_usage(
        blob or shard.blob,
        machine_of,
        retry=client.versions.retry,
        metrics=metrics or NoMetrics(),
        prefix=prefix,
        on_listed=on_listed,
    )
    assert sum(each.blobs.total() for each in found.shards.values()) + found.foreign_blobs == len(
        list(shard.blob.list_prefix(""))
    )
    return found


@pytest.mark.slow
def test_each_blob_is_counted_in_the_bucket_that_the_states_imply(shard):
    """Spec 14.11, B.7."""
    mine = audited(shard).shards[shard.shard_id]
    state = shard.client().machine(shard.shard_id).refresh()
    assert mine.blobs[Bucket.ROLLUPS] == len(state.rollups) + 1, "and the mark that the shard was created"
    assert mine.blobs[Bucket.CURRENT] == sum(len(batch.parts) for batch in state.trace.batches())
    assert mine.bytes[Bucket.CURRENT] == state.trace.sizes.blob_bytes
    assert mine.blobs[Bucket.REFERENCED_NOT_CURRENT] > 10, "inputs of compactions, not collected yet"
    assert mine.blobs[Bucket.LEAKED] == mine.blobs[Bucket.NOT_LEAKED_NOT_REFERENCED] == 0
    assert mine.total_bytes == sum(info.size_bytes for info in shard.blob.list_prefix(""))
    assert mine.writers.total() == mine.total_bytes
    assert set(mine.writers) == {"n0000100", "rollups"}


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        ("n0000100/p{}", Bucket.NOT_LEAKED_NOT_REFERENCED),
        ("n9999999/p{}", Bucket.NOT_LEAKED_NOT_REFERENCED),
        ("v1/r{}", Bucket.LEAKED),
        ("v99999/r{}", Bucket.NOT_LEAKED_NOT_REFERENCED),
    ],
)
def test_an_unnamed_blob_is_leaked_only_when_no_process_can_link_it_any_more(shard, name, bucket):
    shard.blob.set(f"{shard.shard_id}/{name.replace('{}', UUID + 'aa')}", b"12345")
    mine = audited(shard).shards[shard.shard_id]
    assert (mine.blobs[bucket], mine.bytes[bucket]) == (1, 5)


def test_parts_of_code_too_old_to_open_the_shard_are_leaked(shard):
    newer = replace(shard.client().machine(shard.shard_id).state, applier_version="0.2.0")
    too_old, old_enough = (parse_blob_key(f"{shard.shard_id}/{code}/p{UUID}aa") for code in ("n0000009", "n0000100"))
    assert looks_leaked(too_old, newer)
    assert not looks_leaked(old_enough, newer)


def test_regression_26_blobs_of_a_shard_that_consensus_does_not_know_are_all_leaked(shard):
    """An interrupted reset left them, and the audit crashed over it."""
    gone = ShardId("s" + UUID + "bb")
    shard.blob.set(f"{gone}/v1/r{UUID}cc", b"123")
    shard.blob.set(f"{gone}/n0000100/p{UUID}dd", b"45")
    found = audited(shard)
    assert not found.shards[gone].exists
    assert dict(found.shards[gone].bytes) == {Bucket.LEAKED: 5}
    assert found.shards[shard.shard_id].exists


def test_foreign_keys_are_counted_apart(shard):
    for key in ("foreign/key", f"{shard.shard_id}/odd", "top", f"{shard.shard_id}/n1/x"):
        shard.blob.set(key, b"123")
    found = audited(shard)
    assert (found.foreign_blobs, found.foreign_bytes) == (4, 12)
    assert found.to_json()["foreign_bytes"] == 12


def test_one_unreadable_shard_does_not_stop_the_audit_of_the_others(shard):
    broken = RecordedShard(seed=7)
    broken.blob, broken.consensus = shard.blob, shard.consensus
    broken.append()
    (rollup,) = (key for key in shard.blobs() if key.startswith(f"{broken.shard_id}/v"))
    shard.blob.set(rollup, b"damaged")
    found = audited(shard)
    assert "Corrupt" in found.shards[broken.shard_id].problem
    assert found.shards[broken.shard_id].blobs[Bucket.LEAKED] == 0
    assert found.shards[shard.shard_id].problem is None


class Shuffled:
    """A store that lists in random order."""

    def __init__(self, inner):
        self._inner = inner

    def list_prefix(self, prefix):
        found = list(self._inner.list_prefix(prefix))
        random.Random(0).shuffle(found)
        return iter(found)


@pytest.mark.slow
def test_any_order_of_the_listing_gives_the_same_audit(shard):
    """Every chunk of the shuffled listing has blobs of more shards than the audit tracks at once."""
    for seed in range(TRACKERS_MAX):
        other = RecordedShard(seed + 5)
        other.blob, other.consensus = shard.blob, shard.consensus
        other.append(times=2)
    fill(shard.blob, f"{shard.shard_id}/n0000100/p00000000-0000-0000-0000-")
    expected = audited(shard).to_json()
    listed = []
    found = audited(shard, blob=Shuffled(shard.blob), on_listed=lambda blobs, _: listed.append(blobs))
    assert found.to_json() == expected
    assert (len(listed), len(expected["shards"])) == (2, TRACKERS_MAX + 1)
    assert all(each["total_bytes"] > 0 for each in expected["shards"])


def test_the_usage_of_one_shard_is_found_by_its_prefix(shard):
    """Spec 6.4."""
    shard.blob.set(f"s{UUID}ff/n0000100/p{UUID}aa", b"x")
    client = shard.client()
    found = audit_usage(
        shard.blob,
        client.machine,
        retry=client.versions.retry,
        metrics=NoMetrics(),
        prefix=shard_prefix(shard.shard_id),
    )
    assert set(found.shards) == {shard.shard_id}


def test_a_blob_linked_during_the_listing_is_not_reported_as_unreferenced(shard):
    """The audit lists first and reads state then. A blob appended between the two counts as current."""

    class Growing:
        """A store that lists its blobs, and then those of appends made meanwhile."""

        def list_prefix(self, prefix):
            before = list(shard.blob.list_prefix(prefix))
            yield from before
            shard.append(times=2)
            yield from (info for info in shard.blob.list_prefix(prefix) if info not in before)

    client = shard.client()
    found = audit_usage(Growing(), client.machine, retry=client.versions.retry, metrics=NoMetrics())
    assert found.shards[shard.shard_id].blobs[Bucket.NOT_LEAKED_NOT_REFERENCED] == 0
    assert found.shards[shard.shard_id].blobs.total() == len(list(shard.blob.list_prefix("")))


class Breaking:
    """A store whose first listing breaks off in the second chunk."""

    def __init__(self, inner):
        self._inner, self.broken = inner, 0

    def list_prefix(self, prefix):
        for index, row in enumerate(self._inner.list_prefix(prefix)):
            if index == CHUNK_BLOBS + 20 and not self.broken:
                self.broken += 1
                raise Indeterminate("the connection is gone")
            yield row


@pytest.mark.slow
def test_a_broken_listing_is_restarted_and_counts_nothing_twice(shard):
    fill(shard.blob, "foreign/")
    breaking = Breaking(shard.blob)
    assert audited(shard, blob=breaking).to_json() == audited(shard).to_json()
    assert breaking.broken == 1


def test_metrics_show_the_buckets(shard):
    registry = CollectorRegistry()
    audited(shard, metrics=PrometheusMetrics(registry))
    text = generate_latest(registry).decode()
    assert f'persist_usage_bytes{{bucket="leaked",shard="{shard.shard_id}"}} 0.0' in text.replace(
        f'{{shard="{shard.shard_id}",bucket="leaked"}}', f'{{bucket="leaked",shard="{shard.shard_id}"}}'
    )


def test_the_billed_bytes_of_a_shard_are_all_that_its_newest_version_names(shard):
    machine = shard.client().machine(shard.shard_id)
    billed = referenced_usage(machine)
    mine = audited(shard).shards[shard.shard_id]
    assert billed.parts_bytes == mine.bytes[Bucket.CURRENT]
    assert any(rollup.size_bytes is None for rollup in machine.state.rollups.values()), "the first, written before all"
    assert billed.rollups_bytes == mine.bytes[Bucket.ROLLUPS] > 0


def test_a_listing_is_processed_chunk_by_chunk():
    """However many blobs there are, memory holds one chunk of them."""
    pulled = itertools.count()

    class Endless:
        def list_prefix(self, prefix):
            return pulled

    chunks = listed_in_chunks(Endless(), "s1/")
    assert [len(next(chunks)) for _ in range(3)] == [CHUNK_BLOBS] * 3
    assert next(pulled) == 3 * CHUNK_BLOBS
