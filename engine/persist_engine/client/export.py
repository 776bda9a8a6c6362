"""Export: a whole shard as a directory of Parquet files and a manifest that proves them complete.

    <directory>/_manifest.json           written last; without it the export is not complete
    <directory>/part-00000.parquet ...   columns key, val, time, diff; sorted by (key, val, time) over all files

Exports either the contents at one time, or all updates that are still distinguishable, from since to upper. Any Parquet reader reads the
files, and `sha256sum` checks them. The shard does not change, except for a reader's lease.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from persist_engine.base.env import system_random_bytes
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.version import APPLIER_VERSION
from persist_engine.client.client import PersistClient
from persist_engine.client.read.handle import source_of
from persist_engine.client.read.snapshot import SinceAhead
from persist_engine.model.ids import ShardId
from persist_engine.parts.fetch import CompactionFilter, read_consolidated, runs_of
from persist_engine.rows.columns import storable
from persist_engine.rows.schema import Schema
from persist_engine.storage.directories import make_directory, sync_directory

#: Readers of directories skip names that begin with an underscore.
MANIFEST = "_manifest.json"
#: The format of the manifest.
FORMAT = 1
#: A file is closed when its rows take this many bytes in memory. It is smaller on disk.
FILE_BYTES = 256 << 20
MEMORY_BYTES = 256 << 20

#: Receives the bytes read and the bytes in all; for progress bars.
OnBytesRead = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One file: its rows, its size on disk, and the SHA-256 of its bytes."""

    name: str
    rows: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of an export. With `as_of`, it has the contents at that time, and all rows carry that time. Without, it has the
    updates in [since, upper). Frontiers are times, None when closed. Schemas are DDL.
    """

    format: int
    shard_id: str
    engine_version: str
    seqno: int
    since: int | None
    upper: int | None
    as_of: int | None
    key_schema: str
    val_schema: str
    rows: int
    size_bytes: int
    files: tuple[ExportedFile, ...]

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return asdict(self)


def export_shard(
    client: PersistClient,
    shard_id: ShardId,
    directory: Path,
    *,
    as_of: int | Literal["latest"] | None,
    on_read: OnBytesRead | None = None,
    memory_bytes: int = MEMORY_BYTES,
    file_bytes_max: int = FILE_BYTES,
) -> Manifest:
    """Writes the shard's contents at `as_of` (`latest`: the newest complete time), or its history (None), into `directory`. The directory
    must be missing or empty. It appears complete or not at all, and is durable when this returns. Each file has at most about
    `file_bytes_max`.

    Raises InvalidUsage when `as_of` is before since, or when the directory cannot be written. Raises Unavailable when `as_of` is not yet
    complete. Streams in about `memory_bytes`. A lease keeps the data while it is read; raises Fenced when it ended meanwhile.
    """
    if as_of == "latest":
        upper = client.recent_upper(shard_id)
        if upper.time == 0:
            raise InvalidUsage(f"shard {shard_id} has no complete time yet: nothing was appended")
        as_of = upper.newest_complete
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidUsage(f"{directory} exists and is not an empty directory")
    # The name must be unique. A process id is not: another container, or a killed process, may have the same one.
    partial = directory.with_name(f".{directory.name}.{system_random_bytes(8).hex()}.partial")
    try:
        make_directory(partial)
        manifest = _export(
            client, shard_id, partial, as_of, on_read=on_read, memory_bytes=memory_bytes, file_bytes_max=file_bytes_max
        )
        _write_durably(partial / MANIFEST, json.dumps(manifest.to_json(), indent=2, ensure_ascii=False).encode())
        sync_directory(partial)
        if directory.exists():
            directory.rmdir()
        partial.replace(directory)
        sync_directory(directory.parent)
    except OSError as error:
        raise InvalidUsage(f"cannot write {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _export(
    client: PersistClient,
    shard_id: ShardId,
    directory: Path,
    as_of: int | None,
    *,
    on_read: OnBytesRead | None,
    memory_bytes: int,
    file_bytes_max: int,
) -> Manifest:
    with client.open_leased_reader(shard_id, purpose="persist admin export") as reader:
        # Pin first. Then the blobs of every version that is newest from here on stay as long as the lease. Without the pin, heartbeats
        # would release them.
        pin, machine = reader.pin(), client.machine(shard_id)
        state, schema = machine.refresh(), reader.schema
        batches = tuple(state.trace.batches())
        total_bytes = max(1, sum(batch.size_bytes for batch in batches))
        read = 0

        def count_read(count: int) -> None:
            nonlocal read
            read += count
            if on_read is not None:
                on_read(read, total_bytes)

        if as_of is None:
            source = source_of(reader, "export")
            row_filter, runs = CompactionFilter(reader.since), runs_of(source.expanded(batches))
            tables = read_consolidated(source, runs, row_filter, memory_bytes=memory_bytes, on_fetched=count_read)
            files = _files(tables, directory, schema, file_bytes_max)
        else:
            answer = reader.snapshot(as_of, timeout_s=0)
            if isinstance(answer, SinceAhead):
                raise InvalidUsage(answer.refused(f"cannot export {shard_id}"), as_of=as_of)
            with answer as snapshot:
                rows = (pa.Table.from_batches([batch]) for batch in snapshot.to_batches(on_fetched=count_read))
                files = _files(rows, directory, schema, file_bytes_max)
        pin.release()
    return Manifest(
        format=FORMAT,
        shard_id=str(shard_id),
        engine_version=APPLIER_VERSION,
        seqno=int(state.seqno),
        since=state.trace.since.time,
        upper=state.trace.upper.time,
        as_of=as_of,
        key_schema=schema.key_ddl,
        val_schema=schema.val_ddl,
        rows=sum(file.rows for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        files=tuple(files),
    )


def _files(tables: Iterator[pa.Table], directory: Path, schema: Schema, file_bytes_max: int) -> list[ExportedFile]:
    """Splits the stream into files. Writes at least one file, so that the schema of an empty shard can be read too."""
    stored = _storable(schema.updates_schema)
    files: list[ExportedFile] = []
    table = next(tables, None)
    while table is not None or not files:
        path = directory / f"part-{len(files):05}.parquet"
        rows = size_bytes = 0
        with pq.ParquetWriter(path, stored, compression="zstd") as writer:
            while table is not None and (rows == 0 or size_bytes + table.nbytes <= file_bytes_max):
                writer.write_table(pa.table([storable(table.column(name)) for name in stored.names], schema=stored))
                rows, size_bytes = rows + table.num_rows, size_bytes + table.nbytes
                table = next(tables, None)
        files.append(_finished(path, rows))
    return files


def _storable(schema: pa.Schema) -> pa.Schema:
    """`schema` without structs that have no fields, because Parquet cannot hold these. So a shard without values has no column val."""
    return pa.schema([field for field in schema if not pa.types.is_struct(field.type) or field.type.num_fields])


def _finished(path: Path, rows: int) -> ExportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return ExportedFile(path.name, rows, file.tell(), digest)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
