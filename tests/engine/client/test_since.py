"""SinceHandle: a hold that outlives processes, fenced by a token."""

from __future__ import annotations

import pytest
from persist_engine import Antichain, CriticalReaderId, ShardId
from persist_engine.model.commands import CriticalDowngraded, OpaqueMismatch
from persist_kit.world import SCHEMA, World, row

A = Antichain.of
CRITICAL = CriticalReaderId.from_bytes(b"c" * 16)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def shard_id(world: World) -> ShardId:
    shard_id = world.shard_id()
    writer = world.process().open_writer(shard_id, SCHEMA, purpose="test")
    writer.append([row(1, "a", 0)], lower=A(0), upper=A(50))
    return shard_id


def test_the_since_of_the_shard_follows_the_hold_and_never_passes_it(world: World, shard_id: ShardId):
    client = world.process()
    handle = client.open_critical_since(shard_id, CRITICAL, opaque=b"one", purpose="test")
    assert (handle.since, handle.opaque) == (A(0), b"one")
    assert handle.compare_and_downgrade_since(b"one", (b"one", A(7))) == CriticalDowngraded(A(7))
    reader = client.open_leased_reader(shard_id, purpose="ahead")
    reader.downgrade_since(A(20))
    assert client.machine(shard_id).refresh().trace.since == A(7)
    assert handle.compare_and_downgrade_since(b"one", (b"one", A(3))) == CriticalDowngraded(A(7))


def test_a_newer_owner_fences_the_older_one(world: World, shard_id: ShardId):
    """Spec 15.10."""
    old = world.process().open_critical_since(shard_id, CRITICAL, opaque=b"old")
    new = world.process().open_critical_since(shard_id, CRITICAL, opaque=b"new")
    assert new.opaque == b"old"
    assert new.compare_and_downgrade_since(b"old", (b"new", A(5))) == CriticalDowngraded(A(5))
    assert old.compare_and_downgrade_since(b"old", (b"old", A(9))) == OpaqueMismatch(b"new", A(5))
    assert (old.opaque, old.since) == (b"new", A(5))
    assert new.since == A(5)


def test_downgrades_in_a_loop_are_rate_limited(world: World, shard_id: ShardId):
    handle = world.process().open_critical_since(shard_id, CRITICAL, opaque=b"one")
    assert handle.maybe_compare_and_downgrade_since(b"one", (b"one", A(1))) == CriticalDowngraded(A(1))
    before = world.consensus.calls.copy()
    assert handle.maybe_compare_and_downgrade_since(b"one", (b"one", A(2))) is None
    assert world.consensus.calls == before
    world.env.advance_ms(30_000)
    assert handle.maybe_compare_and_downgrade_since(b"one", (b"one", A(3))) == CriticalDowngraded(A(3))


def test_a_clock_set_back_does_not_stop_downgrades(world: World, shard_id: ShardId):
    handle = world.process().open_critical_since(shard_id, CRITICAL, opaque=b"one")
    assert handle.maybe_compare_and_downgrade_since(b"one", (b"one", A(1))) == CriticalDowngraded(A(1))
    world.env.advance_ms(-86_400_000)
    world.env.advance_ms(30_000)
    assert handle.maybe_compare_and_downgrade_since(b"one", (b"one", A(2))) == CriticalDowngraded(A(2))


def test_regression_22_expiring_leaves_the_since_where_it_was(world: World, shard_id: ShardId):
    """Regression for bug 22 of the specification: expiry moved the since and broke restarts."""
    client = world.process()
    handle = client.open_critical_since(shard_id, CRITICAL, opaque=b"one")
    handle.compare_and_downgrade_since(b"one", (b"one", A(5)))
    ahead = client.open_critical_since(shard_id, CriticalReaderId.from_bytes(b"a" * 16), opaque=b"one")
    ahead.compare_and_downgrade_since(b"one", (b"one", A(9)))
    assert handle.expire()
    assert not handle.expire()
    assert client.machine(shard_id).refresh().trace.since == A(5)
