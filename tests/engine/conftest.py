"""Most tests of handles: one shard that no process has opened, on fresh stores in memory."""

from __future__ import annotations

import pytest
from persist_engine import ShardId
from persist_kit.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def shard_id(world: World) -> ShardId:
    return world.shard_id()
