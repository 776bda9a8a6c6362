"""A shard on files and SQLite whose bytes can be damaged, and the command line."""

import pytest
from persist_engine import ShardId
from persist_kit.disk import Disk


@pytest.fixture
def disk(tmp_path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def shard_id() -> ShardId:
    return ShardId.new()
