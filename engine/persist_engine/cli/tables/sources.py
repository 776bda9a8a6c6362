"""Where the bytes of rows come from: files, packed or not, and standard input; and what their names say of them.

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
#: A file of Python, or one of Arrow, which declares no types.
Source = Any

#: What names of files end in.
_SUFFIXES = {
    ".csv": InputFormat.CSV,
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".json": InputFormat.JSONL,
    ".parquet": InputFormat.PARQUET,
    ".arrow": InputFormat.ARROW,
    ".arrows": InputFormat.ARROW,
}
#: What names of packed files end in, and the codec of Arrow.
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_OTHER_CODECS = frozenset({".xz", ".lzma", ".zip", ".7z", ".z", ".br", ".snappy", ".sz"})


def codec_of(name: str) -> str | None:
    """How the file of this name is packed; standard input never is. InvalidUsage for what Arrow does not unpack."""
    suffix = Path(name).suffix.lower()
    if suffix in _OTHER_CODECS:
        raise InvalidUsage(f"is packed as {suffix}, which is not read: unpack it, or pack it as .gz or .zst")
    return _CODECS.get(suffix)


def format_of(name: str) -> InputFormat:
    """The format that the name of a file says. InvalidUsage if it says none."""
    if name == STDIN:
        raise InvalidUsage(f"standard input says no format: give --format {'|'.join(InputFormat)}")
    path = Path(name)
    is_packed = path.suffix.lower() in _CODECS.keys() | _OTHER_CODECS
    found = _SUFFIXES.get((path.with_suffix("") if is_packed else path).suffix.lower())
    if found is None:
        raise InvalidUsage(f"{name}: its name says no format: give --format {'|'.join(InputFormat)}")
    return found


def shown(name: str) -> str:
    """The name in messages."""
    return "standard input" if name == STDIN else name


@contextmanager
def opened(name: str) -> Iterator[tuple[Source, Callable[[], int]]]:
    """The unpacked bytes, and how many bytes of the file were read so far. What is packed is a pipe. OSError for what cannot be opened,
    and while reading for what is not packed as its name says, or was cut off.
    """
    with ExitStack() as stack:
        file: Any = _stdin() if name == STDIN else stack.enter_context(Path(name).open("rb"))
        if codec := codec_of(name):
            if not file.peek(1):
                raise InvalidUsage("is empty, and no packed file is: what wrote it has failed")
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
    """The rest of the file, for Arrow to read without the interpreter. Arrow's own files begin at the start and want to seek, so a pipe
    stays what it is, and so does a file of which a shell has read the first lines. The caller alone may read those: a thread of Arrow that
    reads in Python may still wait for a writer, or for the interpreter, when the process ends, which then aborts or does not end.
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
