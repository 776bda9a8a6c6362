"""Storage usage: every blob is in one bucket, whatever happens during the audit."""

import pytest
from persist_engine.base.errors import Indeterminate
from persist_engine.base.metrics import NoMetrics, PrometheusMetrics
from persist_engine.codec.keys import PartKey, parse_blob_key, shard_prefix
from persist_engine.model.ids import ShardId
from persist_engine.work.audit import references, usage
from persist_engine.work.audit.references import Bucket
from persist_engine.work.audit.usage import audit_usage, referenced_usage
from persist_kit.recorded import RecordedShard, aged
from prometheus_client import CollectorRegistry, generate_latest

UUID = "00000000-0000-0000-0000-0000000000"


@pytest.fixture
def shard():
    return aged()[0]


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


def test_parts_of_code_too_old_to_open_the_shard_are_leaked(shard, monkeypatch):
    shard.blob.set(f"{shard.shard_id}/n0000100/p{UUID}aa", b"x")
    key = parse_blob_key(f"{shard.shard_id}/n0000100/p{UUID}aa")
    assert isinstance(key, PartKey)
    assert not references.looks_leaked(key, shard.client().machine(shard.shard_id).state)
    monkeypatch.setattr(references, "may_write", lambda code, state: code > (0, 1, 0))
    assert audited(shard).shards[shard.shard_id].blobs[Bucket.LEAKED] == 1


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


def test_any_order_and_any_chunk_size_give_the_same_audit(shard, monkeypatch):
    for seed in (5, 6, 7):
        other = RecordedShard(seed)
        other.blob, other.consensus = shard.blob, shard.consensus
        other.append(times=3)
    expected = audited(shard).to_json()
    monkeypatch.setattr(references, "CHUNK_BLOBS", 3)
    monkeypatch.setattr(usage, "TRACKERS_MAX", 1)
    seen = []
    assert audited(shard, on_listed=lambda blobs, _: seen.append(blobs)).to_json() == expected
    assert len(seen) > 10
    assert audited(shard).to_json()["shards"][0]["total_bytes"] > 0


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


def test_a_blob_linked_during_the_listing_is_not_reported_as_unreferenced(shard, monkeypatch):
    """The audit lists first and asks state then. A blob appended between the two counts as current."""
    real = usage.listed_in_chunks

    def appended_meanwhile(blob, prefix):
        yield from real(blob, prefix)
        shard.append(times=2)
        yield from real(blob, prefix)

    client = shard.client()
    monkeypatch.setattr(usage, "listed_in_chunks", appended_meanwhile)
    found = audit_usage(shard.blob, client.machine, retry=client.versions.retry, metrics=NoMetrics())
    assert found.shards[shard.shard_id].blobs[Bucket.NOT_LEAKED_NOT_REFERENCED] == 0


class Breaking:
    """A store whose first listing breaks off in the middle."""

    def __init__(self, inner):
        self._inner, self.broken = inner, 0

    def list_prefix(self, prefix):
        for index, row in enumerate(self._inner.list_prefix(prefix)):
            if index == 20 and not self.broken:
                self.broken += 1
                raise Indeterminate("the connection is gone")
            yield row


def test_a_broken_listing_is_restarted_and_counts_nothing_twice(shard, monkeypatch):
    monkeypatch.setattr(references, "CHUNK_BLOBS", 3)
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


def test_a_listing_is_processed_chunk_by_chunk(monkeypatch):
    """However many blobs there are, memory holds one chunk of them."""
    monkeypatch.setattr(references, "CHUNK_BLOBS", 10)
    pulled = []

    class Endless:
        def list_prefix(self, prefix):
            while True:
                pulled.append(prefix)
                yield prefix

    chunks = references.listed_in_chunks(Endless(), "s1/")
    assert [len(next(chunks)) for _ in range(3)] == [10, 10, 10]
    assert len(pulled) == 30
