"""The files of a table as a dataset of pyarrow, for engines that plan over files: polars' `scan_pyarrow_dataset`, DuckDB, Dask.

These engines read each file separately, so every row of every file must be a row of the table: no retraction, no row outside the bounds of
its batch, no older schema. This module decides that from descriptors and opens no file. It holds no lease: see `dataset_of`. When an engine
opens a file, the footer is compared with the descriptor.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from persist_engine.base.errors import CorruptData, InvalidUsage
from persist_engine.codec.damage import checksum
from persist_engine.codec.inline_part import decode_inline
from persist_engine.codec.keys import blob_key
from persist_engine.model.batch import HollowPart, HollowRun, InlinePart, RunPart
from persist_engine.parts.listings import listed
from persist_engine.rows.schema import Schema
from persist_engine.shard.machine import Machine

_PARQUET = ("parquet/1", "parquet/2")

Read = Callable[[str, int, int], "bytes | None"]
"""Reads a range of a blob, from its key, a start and a size. None when the blob is gone."""


def dataset_of(machine: Machine) -> ds.Dataset:
    """The newest contents, with the columns `key`, `val`, `time` and `diff` of the files (`diff` is 1). Raises InvalidUsage, which says
    what to do, when the files hold more than the rows.

    The dataset names files but does not protect them: after a later write, maintenance may delete them, and reading raises
    FileNotFoundError. It works with every store that a table can have.
    """
    state = machine.refresh()
    inline: list[pa.Table] = []
    files: list[HollowPart] = []
    for spine_batch in state.trace.spine_batches():
        for _, batch in spine_batch.parts:
            for meta, members in batch.runs() if batch.parts else ():
                for part in _expanded(machine, members):
                    _check(part, machine, is_cut=meta.truncated or part.ts_rewrite is not None)
                    if isinstance(part, InlinePart):
                        inline.append(_rows(part, machine.schema))
                    else:
                        assert isinstance(part, HollowPart)
                        files.append(part)
    schema = machine.schema.updates_schema
    held = ds.dataset(pa.concat_tables([schema.empty_table(), *inline]))
    if not files:
        return held
    parts = {blob_key(machine.shard_id, part.key): part for part in files}

    def read(key: str, start: int, size_bytes: int) -> bytes | None:
        get = partial(machine.blob.get_range, key, start, size_bytes)
        return machine.retry.external("get part", get, shard=machine.shard_id)

    store = fs.PyFileSystem(_Store(read, parts))
    pages = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    stored = ds.FileSystemDataset.from_paths(
        list(parts),
        schema=schema,
        format=ds.ParquetFileFormat(default_fragment_scan_options=pages),
        filesystem=store,
    )
    return ds.dataset([stored, held]) if inline else stored


def _expanded(machine: Machine, members: Sequence[RunPart]) -> Iterator[RunPart]:
    for member in members:
        if isinstance(member, HollowRun):
            yield from _expanded(machine, listed(machine, member))
        else:
            yield member


def _check(part: RunPart, machine: Machine, *, is_cut: bool) -> None:
    if part.schema_id != machine.schema_id:
        raise InvalidUsage(
            "its files have the columns that the table had before alter(): optimize() gives them the new ones once rows were written "
            "with these; until then, to_reader() reads the newest rows"
        )
    if is_cut or (isinstance(part, HollowPart) and part.format not in _PARQUET):
        raise InvalidUsage("its files were written for other times than the table has now: call optimize()")
    # The sum alone is not enough: two rows with the diffs 3 and -1 have the same sum.
    least = part.stats.diff_min if isinstance(part, HollowPart) and part.stats is not None else None
    if part.diffs_sum != part.rows or (isinstance(part, HollowPart) and least != 1):
        raise _more_than_rows()


def _more_than_rows() -> InvalidUsage:
    return InvalidUsage(
        "its files hold rows that were changed or deleted, or come several times: call optimize(); if they stay, `retain` keeps the "
        "past readable, and to_reader() reads the newest rows without it"
    )


def _rows(part: InlinePart, schema: Schema) -> pa.Table:
    rows = decode_inline(part.data, format_name=part.format, key="an inline part", schema=schema).table
    if pc.min(rows.column("diff")).as_py() != 1:  # an inline part has no statistics, so look at the rows
        raise _more_than_rows()
    return rows


class _Store(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """The blobs of one table as files that can only be read."""

    def __init__(self, read: Read, parts: dict[str, HollowPart]) -> None:
        self._read, self._parts = read, parts

    def get_type_name(self) -> str:
        return "persist"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [
            fs.FileInfo(path, fs.FileType.File, size=self._parts[path].size_bytes)
            if path in self._parts
            else fs.FileInfo(path, fs.FileType.NotFound)
            for path in paths
        ]

    def get_file_info_selector(self, _selector: fs.FileSelector) -> list[fs.FileInfo]:
        return self.get_file_info(list(self._parts))

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(io.BufferedReader(_File(self._read, path, self._parts[path])), mode="r")

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    def _refuse(self, *_: object) -> None:
        raise NotImplementedError("a dataset of a table can only be read")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


class _File(io.RawIOBase):
    """One blob, read in ranges. Raises CorruptData when it does not end with the footer of its part, which says where everything else is.
    The pages have checksums that pyarrow verifies. A part without a footer in its descriptor is read and verified whole.
    """

    def __init__(self, read: Read, key: str, part: HollowPart) -> None:
        self._read, self._key, self._size_bytes, self._at = read, key, part.size_bytes, 0
        size, expected = (
            (part.size_bytes, part.checksum) if part.footer is None else (part.footer.size_bytes, part.footer.checksum)
        )
        self._tail_at = part.size_bytes - size
        self._tail = self._get(self._tail_at, size)
        if (found := checksum(self._tail)) != expected:
            raise CorruptData(f"part {key}: the checksum of its footer is {found}, state says {expected}", key=key)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # narrower than any buffer
        wanted = min(len(buffer), self._size_bytes - self._at)
        if wanted <= 0:
            return 0
        behind = self._at - self._tail_at
        found = self._tail[behind : behind + wanted] if behind >= 0 else self._get(self._at, min(wanted, -behind))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _get(self, start: int, size_bytes: int) -> bytes:
        found = self._read(self._key, start, size_bytes)
        if found is None:
            raise FileNotFoundError(
                f"{self._key} was deleted after the table was written again: call to_dataset() once more"
            )
        return found
