"""Heartbeats of readers: how they are counted, how they end, and which versions they hold."""

from __future__ import annotations

import threading

import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.base.settings import (
    LeaseSettings,
    Settings,
)
from persist_engine.base.versioned import SeqNo
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.read.leased import Pins
from persist_engine.model.ids import ShardId
from persist_kit.world import SCHEMA, StillEnv, World
from prometheus_client import CollectorRegistry

PATIENCE_S = 60.0


def eventually(condition) -> bool:
    """Whether `condition` comes true. It does at once, except for other threads."""
    waiting, left = threading.Event(), int(PATIENCE_S / 0.02)
    while not condition() and left:
        left -= 1
        waiting.wait(0.02)
    return condition()


def test_heartbeats_are_counted():
    registry, world = CollectorRegistry(), World(env=StillEnv())
    settings = Settings(lease=LeaseSettings(reader_lease_ms=100))
    client = PersistClient(
        world.blob, world.consensus, settings=settings, env=world.env, metrics=PrometheusMetrics(registry)
    )
    shard_id = world.shard_id()

    def counted(outcome: str) -> float:
        return registry.get_sample_value("persist_heartbeat_total", {"outcome": outcome}) or 0

    client.initialise(shard_id, SCHEMA)
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        assert eventually(lambda: counted("renewed") >= 1)
        client.machine(shard_id).expire_leased_reader(reader.reader_id)
        assert eventually(lambda: counted("lost") == 1)


def test_a_heartbeat_of_a_closed_client_logs_once_and_ends(tmp_path, caplog):
    """It would log every half lease for the life of the process."""
    location = Location(blob=f"file://{tmp_path}/blobs", consensus=f"sqlite://{tmp_path}/consensus.db")
    client, shard_id = PersistClient.open(location, env=StillEnv()), ShardId.new()
    client.initialise(shard_id, SCHEMA)
    reader = client.open_leased_reader(shard_id, purpose="test", lease_ms=100)
    client.close()
    assert eventually(lambda: not reader._heartbeat._thread.is_alive())
    ends = [record for record in caplog.records if "the store was closed" in record.message]
    assert len(ends) == 1
    assert not reader._heartbeat.is_lost


def test_regression_a_released_version_is_not_pinned_again():
    """Parts were leased while their snapshot was closed. Every later heartbeat requested a released version and was refused."""
    pins = Pins()
    pin = pins.hold_current(lambda: SeqNo(5), holder=None)
    other = pins.hold(SeqNo(5))
    pin.release()
    assert pins.hold(SeqNo(5)).seqno == pins.oldest(SeqNo(9)) == 5
    other.release()
    assert pins.oldest(SeqNo(9)) == 9
    with pytest.raises(InvalidUsage, match="version v5 is no longer held"):
        pins.hold(SeqNo(5))
    assert pins.oldest(SeqNo(9)) == 9
