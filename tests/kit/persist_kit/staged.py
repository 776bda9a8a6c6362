"""What tests of staged batches share: a writer with batch settings of its own, and the blobs that its shard names."""

from __future__ import annotations

from typing import Any

from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.write.handle import WriteHandle

from persist_kit.world import SCHEMA, World


def opened(**batch: Any) -> tuple[World, WriteHandle]:
    """A fresh shard's writer whose batches are made as `batch` says, and its world."""
    world = World(settings=Settings(batch=BatchSettings(**batch)))
    return world, world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")


def named_keys(writer: WriteHandle) -> set[str]:
    """Keys of all blobs that the shard's newest batches name."""
    state = writer.machine.refresh()
    return {f"{writer.shard_id}/{key}" for batch in state.trace.batches() for key in batch.blob_keys()}
