"""The command line as a function: `persist` runs in this process, with its own streams, folder and environment.

A separate process spends seconds of CPU time on imports. Tests start one only if the process itself is the subject: signals, terminals,
exit. The command sees the same as in a separate process: `sys.argv`, `os.environ`, the working folder, streams that are not a terminal.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from persist_engine.cli.main import main


def persist(
    *arguments: str, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `persist ARGUMENTS` to its end. Never raises for an exit code. Only the main thread may call it, one call at a time."""
    out, err = _stream(), _stream()
    code: object = 0
    with (
        _process_state(["persist", *arguments], os.environ if environ is None else environ),
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(arguments, code if isinstance(code, int) else 1, _text(out), _text(err))


@contextlib.contextmanager
def _process_state(argv: list[str], environ: Mapping[str, str]) -> Iterator[None]:
    before = sys.argv, dict(os.environ), signal.getsignal(signal.SIGTERM)
    wanted = dict(environ)
    try:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(wanted)
        yield
    finally:
        sys.argv = before[0]
        os.environ.clear()
        os.environ.update(before[1])
        signal.signal(signal.SIGTERM, before[2])


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()
