"""Shared code of tests of upserts: commands as tables, and the resulting contents."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from persist_engine.client.client import PersistClient
from persist_engine.dataflow.open import open_upsert
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.model.ids import ShardId

from persist_kit.world import SCHEMA

Row = tuple[int, str | None]


def commands(*rows: Row, **more: list[Any]) -> pa.Table:
    """A table of upserts of SCHEMA. A row without a name is a deletion. `more` are further columns of integers."""
    keys = pa.array([{"id": key} for key, _ in rows], SCHEMA.key_type)
    vals = pa.array([None if name is None else {"name": name} for _, name in rows], SCHEMA.val_type)
    return pa.table({"key": keys, "val": vals, **{k: pa.array(v, pa.int64()) for k, v in more.items()}})


def opened(client: PersistClient, shard_id: ShardId, **more: Any) -> UpsertHandle:
    """An upsert handle on a shard of SCHEMA."""
    return open_upsert(client, shard_id, SCHEMA, purpose="test", **more)


def contents(client: PersistClient, shard_id: ShardId, as_of: int | None = None) -> dict[int, str]:
    """The contents of the shard. Fails unless every key has at most one value."""
    if as_of is None:
        upper = client.recent_upper(shard_id).time
        assert upper is not None, "a closed shard needs an as_of"
        as_of = upper - 1
    if as_of < 0:
        return {}
    with client.open_leased_reader(shard_id, purpose="check") as reader:
        rows = reader.snapshot(as_of).to_table().to_pylist()
    assert {r["diff"] for r in rows} <= {1}
    assert len({r["key"]["id"] for r in rows}) == len(rows)
    return {r["key"]["id"]: r["val"]["name"] for r in rows}
