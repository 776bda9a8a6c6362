"""Restoring from a bucket that keeps versions: what was deleted comes back, and a whole shard with it."""

from __future__ import annotations

import boto3
import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import NotKept
from persist_engine.base.metrics import NoMetrics
from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.ids import ShardId
from persist_engine.storage.open import open_blob, open_consensus
from persist_engine.testing.faults import Faults, FaultyBlob
from persist_engine.work.repair.restore import restore_shard
from persist_kit.disk import write
from persist_kit.servers import s3_server
from persist_kit.world import contents

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def server():
    with s3_server(versioned=True) as running:
        yield running


@pytest.fixture
def blob(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=f"http://{server.address}", region_name=server.region).put_bucket_versioning(
        Bucket=server.bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    opened = open_blob(server.location("one"), env=SystemEnv(), metrics=NoMetrics())
    yield opened
    opened.close()


def test_a_deleted_object_comes_back_whatever_happened_to_it(blob):
    blob.set("s1/n1/p1", b"content")
    blob.set("s1/n1/p11", b"neighbour")
    blob.restore("s1/n1/p1")
    for _ in range(2):
        blob.delete("s1/n1/p1")
        assert blob.get("s1/n1/p1") is None
        blob.restore("s1/n1/p1")
        assert blob.get("s1/n1/p1") == b"content"
    blob.delete("s1/n1/p11")
    blob.restore("s1/n1/p1")
    assert blob.get("s1/n1/p11") is None, "neighbours are left alone"
    with pytest.raises(NotKept, match="keeps no version"):
        blob.restore("s1/n1/p2")


def test_a_shard_whose_blobs_are_all_gone_comes_back(blob, server, fresh_name, tmp_path):
    """Also where the first try to restore each object finds the store away: that is no object lost (spec 14.10)."""
    location = Location(blob=server.location(fresh_name), consensus=f"sqlite://{tmp_path}/consensus.db")
    settings = Settings(retry=RetrySettings(give_up_ms=1000), batch=BatchSettings(inline_part_bytes_max=0))
    shard_id = ShardId.new()
    with PersistClient.open(location, settings=settings) as client:
        write(client, shard_id, range(4))
        expected = contents(client, shard_id, 3)
        keys = [info.key for info in client.versions.blob.list_prefix(shard_id)]
        for key in keys:
            client.versions.blob.delete(key)
    faults, env, metrics = Faults(), SystemEnv(), NoMetrics()
    for key in keys:
        faults.fail_next("restore", happened=False, answered=True, matching=key)
    faulty = FaultyBlob(open_blob(location.blob, env=env, metrics=metrics), faults)
    consensus = open_consensus(location.consensus, env=env, metrics=metrics)
    with PersistClient(faulty, consensus, settings=settings, env=env, metrics=metrics) as client:
        found = restore_shard(client.versions, shard_id, commit=True)
        assert set(found.restored) == set(found.missing) == {key for key in keys if not key.endswith("/created")}
        assert found.lost == []
        assert faults.injected == len(found.restored)
        assert contents(client, shard_id, 3) == expected
        assert restore_shard(client.versions, shard_id, commit=True).missing == []
