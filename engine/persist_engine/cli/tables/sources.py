"""Opens the sources of rows: files, packed or not, and standard input. Infers the format and the packing of a file from its name.

Knows no columns.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from persist_engine.base.errors import InvalidUsage
from persist_engine.cli.tables.commands import InputFormat

STDIN = "-"
#: A file of Python or of Arrow. Arrow declares no types for it.
Source = Any

#: The format for each suffix of a file's name.
_SUFFIXES = {
    ".csv": InputFormat.CSV,
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".json": InputFormat.JSONL,
    ".parquet": InputFormat.PARQUET,
    ".arrow": InputFormat.ARROW,
    ".arrows": InputFormat.ARROW,
}
#: The codec of Arrow for each suffix of a packed file.
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_OTHER_CODECS = frozenset({".xz", ".lzma", ".zip", ".7z", ".z", ".br", ".snappy", ".sz"})


def codec_of(name: str) -> str | None:
    """The codec with which the file of this name is packed. None when it is not packed, which includes standard input. Raises InvalidUsage
    when Arrow cannot unpack it.
    """
    suffix = Path(name).suffix.lower()
    if suffix in _OTHER_CODECS:
        raise InvalidUsage(f"is packed as {suffix}, which persist cannot read: unpack it, or pack it as .gz or .zst")
    return _CODECS.get(suffix)


def format_of(name: str) -> InputFormat:
    """The format that the name of a file implies. Raises InvalidUsage when it implies none."""
    if name == STDIN:
        raise InvalidUsage(f"standard input has no name to show its format: give --format {'|'.join(InputFormat)}")
    path = Path(name)
    is_packed = path.suffix.lower() in _CODECS.keys() | _OTHER_CODECS
    found = _SUFFIXES.get((path.with_suffix("") if is_packed else path).suffix.lower())
    if found is None:
        raise InvalidUsage(f"{name}: its name does not show its format: give --format {'|'.join(InputFormat)}")
    return found


def shown(name: str) -> str:
    """The name as messages show it."""
    return "standard input" if name == STDIN else name


@contextmanager
def opened(name: str) -> Iterator[tuple[Source, Callable[[], int]]]:
    """Yields the unpacked bytes, and a function that returns how many bytes of the file were read so far. A packed file is read like a
    pipe. Raises OSError for a file that cannot be opened. Reading raises OSError when the file is not packed as its name says, or was cut
    off.
    """
    with ExitStack() as stack:
        file: Any = _stdin() if name == STDIN else stack.enter_context(Path(name).open("rb"))
        if codec := codec_of(name):
            if not file.peek(1):
                raise InvalidUsage("is empty, but a packed file never is: the program that wrote it failed")
            unpacked: Any = stack.enter_context(pa.input_stream(file, compression=codec))
            yield io.BufferedReader(unpacked), file.tell
        else:
            source = stack.enter_context(_without_python(file))
            yield source, source.tell


def _stdin() -> IO[bytes]:
    if sys.stdin is None:  # the process was started without it
        raise InvalidUsage("is closed: give it a file or a pipe")
    return sys.stdin.buffer


@contextmanager
def _without_python(opened: IO[bytes]) -> Iterator[Source]:
    """Yields the rest of the file as a file that Arrow reads without the interpreter. Arrow's own files begin at the start and need to
    seek. So this yields `opened` itself for a pipe, and for a file of which a shell has already read the first lines. Only the caller's
    thread may read such a file. A thread of Arrow that reads in Python may still wait for a writer, or for the interpreter, when the
    process ends. The process then aborts or hangs.
    """
    try:
        is_begun = os.lseek(opened.fileno(), 0, os.SEEK_CUR) > 0
        source = None if is_begun else pa.OSFile(f"/dev/fd/{opened.fileno()}")
    except OSError:  # a pipe, or bytes in memory
        source = None
    if source is None:
        yield opened
        return
    with source:
        yield source
