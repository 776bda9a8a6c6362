"""Shared code of tests of staged batches: a writer with its own batch settings, and the blobs that its shard names."""

from __future__ import annotations

from typing import Any

from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.write.handle import WriteHandle

from persist_kit.world import SCHEMA, World


def opened(**batch: Any) -> tuple[World, WriteHandle]:
    """A new world, and the writer of a new shard with the batch settings `batch`."""
    world = World(settings=Settings(batch=BatchSettings(**batch)))
    return world, world.process().open_writer(world.shard_id(), SCHEMA, purpose="test")


def named_keys(writer: WriteHandle) -> set[str]:
    """The keys of all blobs that the batches in the shard's newest state name."""
    state = writer.machine.refresh()
    return {f"{writer.shard_id}/{key}" for batch in state.trace.batches() for key in batch.blob_keys()}
