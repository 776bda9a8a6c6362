"""A read that continues after its snapshot or changes were closed ends with a clear error, because nothing holds the blobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.read.handle import ReadHandle
from persist_engine.model.frontier import Antichain
from persist_kit.world import SCHEMA, AheadEnv, World

#: More rows than a read yields in its first batch.
ROWS = pa.table(
    {
        "key": pa.StructArray.from_arrays([pa.array(np.arange(100_000))], ["id"]),
        "val": pa.StructArray.from_arrays([pa.repeat("x", 100_000)], ["name"]),
        "time": pa.repeat(0, 100_000),
        "diff": pa.repeat(1, 100_000),
    }
)
OPENERS: dict[str, Callable[[ReadHandle], Any]] = {
    "snapshot": lambda reader: reader.snapshot(1),
    "columns": lambda reader: reader.snapshot(1, columns=["id"]),
    "changes": lambda reader: reader.changes(None, 1),
    "rows": lambda reader: reader.changes(None, 1, shape="rows"),
}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
@pytest.mark.parametrize("begun", [False, True])
def test_a_read_ends_when_its_snapshot_or_changes_are_closed(opener: Callable[[ReadHandle], Any], begun: bool) -> None:
    world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)), env=AheadEnv())
    client, shard_id = world.process(), world.shard_id()
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append(ROWS, lower=Antichain.of(0), upper=Antichain.of(2))
    with client.open_leased_reader(shard_id, purpose="test") as reader:
        contents = opener(reader)
        batches = contents.to_batches()
        if begun:
            assert next(batches).num_rows
        contents.close()
        for key in world.blob_keys(shard_id, kind="part"):
            world.blob.delete(key)  # a collection may do this from now on
        with pytest.raises(InvalidUsage, match=f"of {shard_id} .* closed"):
            next(batches)
