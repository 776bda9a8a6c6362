"""Stores in memory for tests of sinks with threads."""

from __future__ import annotations

from collections import Counter

import pytest
from persist_engine import Antichain, PersistClient, Schema, ShardId
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.base.settings import BatchSettings, RetrySettings, Settings
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.testing.faults import Faults, FaultyBlob, FaultyConsensus
from persist_kit.world import SCHEMA
from prometheus_client import CollectorRegistry

A = Antichain.of
PATIENCE_S = 60.0


class Stores:
    """Stores that several clients share and that a test can break."""

    def __init__(self) -> None:
        self.blob, self.consensus, self.faults = MemBlob(), MemConsensus(), Faults()
        self.shard_id = ShardId.new()
        self.registry = CollectorRegistry()
        self.holders: list = []
        self.metrics = PrometheusMetrics(self.registry)

    def client(self, **batch) -> PersistClient:
        return PersistClient(
            FaultyBlob(self.blob, self.faults),
            FaultyConsensus(self.consensus, self.faults),
            settings=Settings(
                batch=BatchSettings(inline_part_bytes_max=0, **batch),
                retry=RetrySettings(initial_ms=1, clamp_ms=2, give_up_ms=50),
                retain_ms=None,
            ),
            env=SystemEnv(),
            metrics=self.metrics,
        )

    def hold(self, since: int = 0) -> None:
        """Keeps every time from `since` on readable. A sink's own reader releases them as it goes."""
        client = self.client()
        client.initialise(self.shard_id, SCHEMA)
        holder = client.open_leased_reader(self.shard_id, SCHEMA, purpose="hold")
        holder.downgrade_since(A(since))
        self.holders.append(holder)

    def blobs(self) -> int:
        return len(list(self.blob.list_prefix(f"{self.shard_id}/n")))

    def contents(self, as_of: int, schema: Schema = SCHEMA) -> Counter:
        with (
            self.client().open_leased_reader(self.shard_id, schema, purpose="check") as reader,
            reader.snapshot(as_of, timeout_s=PATIENCE_S) as snapshot,
        ):
            rows = snapshot.to_table().to_pylist()
        return Counter({(r["key"]["id"], r["val"]["name"]): r["diff"] for r in rows})


@pytest.fixture
def stores():
    stores = Stores()
    yield stores
    stores.faults.heal()
    for holder in stores.holders:
        holder.expire()
