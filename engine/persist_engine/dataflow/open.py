"""Opens sinks and upserts, which write a shard from its desired contents, on the handles of a client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from persist_engine.client.arguments import expect, expect_count, expect_schema, unexpected
from persist_engine.client.client import PersistClient
from persist_engine.client.write.handle import WriteHandle
from persist_engine.dataflow.sink.handle import Sink, SinkOptions
from persist_engine.dataflow.upsert.follow import Hydration
from persist_engine.dataflow.upsert.handle import UpsertHandle
from persist_engine.dataflow.upsert.stores import SPILL_BYTES, Backend, store_opener
from persist_engine.flow.refresh import Refresh
from persist_engine.model.frontier import TimeLike, time_of
from persist_engine.model.ids import ShardId
from persist_engine.rows.errors_column import with_errors
from persist_engine.rows.schema import Schema


def open_sink(
    client: PersistClient,
    shard_id: ShardId,
    schema: Schema,
    *,
    workers: int = 1,
    as_of: TimeLike = 0,
    read_only: bool = False,
    errors: bool = False,
    refresh: Refresh | None = None,
    memory_limit_bytes: int = 256 << 20,
    spill_directory: Path | None = None,
    purpose: str = "sink",
) -> Sink:
    """Opens a running sink that keeps the shard equal to the collection of its inputs (see dataflow.sink; `SinkOptions` describes the
    arguments). Creates the shard when it does not exist, and registers a leased reader (one commit). Raises SchemaMismatch for another
    schema, and when the shard's schema has evolved past `schema`.
    """
    expect(client, PersistClient, "client", "a PersistClient")
    options = SinkOptions(
        workers=workers,
        as_of=time_of(as_of, "as_of"),
        read_only=read_only,
        errors=errors,
        refresh=refresh,
        memory_limit_bytes=memory_limit_bytes,
        spill_directory=spill_directory,
    )
    tagged = with_errors(expect_schema(schema)) if errors else schema
    writer = _open_correcting_writer(client, shard_id, tagged, purpose=purpose)
    return Sink(
        schema,
        open_reader=lambda: client.open_leased_reader(shard_id, tagged, purpose=purpose),
        writer=writer,
        options=options,
    )


def open_upsert(
    client: PersistClient,
    shard_id: ShardId,
    schema: Schema,
    *,
    backend: Backend = "memory",
    directory: Path | str | None = None,
    spill_bytes: int = SPILL_BYTES,
    on_hydration: Callable[[Hydration], None] | None = None,
    purpose: str,
) -> UpsertHandle:
    """Opens a handle that upserts into the shard, so that each key has its last value. Creates the shard when it does not exist. Registers
    a writer and a leased reader at first use. Its reader lets since advance to the last time written. Earlier times stay readable only as
    far as the shard's retention or other readers hold them (see UpsertHandle).

    `backend` says where the current values are kept: `memory`; `rocksdb`, which uses `directory` (it belongs to the handle alone and is
    emptied first); `auto`, which moves them there once they exceed `spill_bytes`; or `shard`, which keeps none. With `shard`, each call
    reads the values of its keys from the shard. So the first call need not wait, which is good for few commands at a time on a shard of
    many keys; `upsert_stream` is refused. `on_hydration` receives the progress of rebuilding or reading the values, in the waiting thread.

    Raises SchemaMismatch for another schema, and when the shard's schema has evolved past `schema`. Raises InvalidUsage for a backend
    without its directory.
    """
    expect(client, PersistClient, "client", "a PersistClient")
    expect_count(spill_bytes, "spill_bytes", least=0)
    if not isinstance(directory, Path | str | None):
        raise unexpected(directory, "directory", "a path, or None")
    if on_hydration is not None and not callable(on_hydration):
        raise unexpected(on_hydration, "on_hydration", "a function, or None")
    versions = client.versions
    open_store = store_opener(backend, directory, spill_bytes=spill_bytes, env=versions.env, metrics=versions.metrics)
    writer = _open_correcting_writer(client, shard_id, schema, purpose=purpose)
    return UpsertHandle(
        writer,
        lambda: client.open_leased_reader(shard_id, schema, purpose=purpose),
        open_store,
        keeps_all=backend != "shard",
        on_hydration=on_hydration,
    )


def _open_correcting_writer(client: PersistClient, shard_id: ShardId, schema: Schema, *, purpose: str) -> WriteHandle:
    """Opens a writer that may retract the rows that it reads: see WriteHandle.check_newest_schema."""
    writer = client.open_writer(shard_id, schema, purpose=purpose)
    writer.check_newest_schema()
    return writer
