"""Reads streams of Arrow's IPC format and refuses those that were cut off."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage

#: The last bytes of a stream. They are optional in the format, but every writer that finishes writes them.
_END = b"\xff\xff\xff\xff\0\0\0\0"


def stream_tables(source: IO[bytes] | pa.NativeFile) -> Iterator[pa.Table]:
    """The rows of a stream, one batch at a time, after a table without rows. Raises InvalidUsage after the last batch when the mark of the
    end is missing. Arrow itself accepts the end of the file in its place, even when the writer was killed between two batches.
    """
    tail = None if isinstance(source, pa.NativeFile) else _Tail(source)
    with pa.ipc.open_stream(source if tail is None else tail) as stream:
        yield stream.schema.empty_table()
        for batch in stream:
            yield pa.Table.from_batches([batch])
        if tail is None:
            source.seek(max(0, source.tell() - len(_END)))
        if (source.read(len(_END)) if tail is None else tail.last) != _END:
            raise InvalidUsage(
                "is not arrow that the table accepts: it has no mark of its end, so its writer stopped early; write it again, and close "
                "the writer"
            )


class _Tail(io.RawIOBase):
    """A pipe that keeps the last bytes that were read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.last = source, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self.last = (self.last + data[-len(_END) :])[-len(_END) :]
        return data
