"""Hides secrets in all that a process writes: its own output, and that of the Java process which it starts. Must not know: what is secret.

SUBTLE: Java writes to the file descriptors that it inherits, so the descriptors themselves lead through a pipe. Its logs show the texts of
errors, in which a connector may quote a password.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from persist_engine.base.secrets import HIDDEN

_CHUNK = 1 << 16
#: A line is passed on in pieces from this length on, so that a line without an end takes no memory.
_LINE_MAX = 1 << 20
_DRAINED_S = 5.0
_STDOUT, _STDERR = 1, 2


def hide(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """`data` with each of `secrets` hidden."""
    for secret in secrets:
        data = data.replace(secret, HIDDEN.encode())
    return data


def forms(secrets: Sequence[str]) -> list[bytes]:
    """The byte strings to look for, longest first: each secret as it is, and as a JSON text has it."""
    written = {
        form
        for one in secrets
        if one
        for form in (one, json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1])
    }
    return [one.encode() for one in sorted(written, key=lambda one: (-len(one), one))]


@contextmanager
def hidden_output(secrets: Sequence[str]) -> Iterator[None]:
    """In the block, whatever this process and those that it starts write to stdout and stderr has `secrets` hidden. Without secrets,
    nothing changes. Afterwards this process writes directly again, and what was written in the block has been passed on. The processes
    that it started go on writing through the filter, until this process ends.
    """
    looked_for = forms(secrets)
    if not looked_for:
        yield
        return
    streams = [_Filtered(descriptor, looked_for) for descriptor in (_STDOUT, _STDERR)]
    try:
        yield
    finally:
        for stream in streams:
            stream.restore()


class _Filtered:
    """One descriptor that leads through a pipe, and the thread that reads the pipe."""

    def __init__(self, descriptor: int, secrets: list[bytes]) -> None:
        self._descriptor, self._secrets = descriptor, secrets
        self._overlap = max(map(len, secrets)) - 1
        #: Written into the pipe by `drain`. No text of a log contains it.
        self._mark = b"\x00persist-hidden-output\x00\n"
        self._drained = threading.Semaphore(0)
        _flush()
        self._target = os.dup(descriptor)
        self._source, self._end = os.pipe()
        os.dup2(self._end, descriptor)
        threading.Thread(name=f"hidden-output-{descriptor}", target=self._copy, daemon=True).start()

    def restore(self) -> None:
        """Writes directly again, after what was written before has been passed on."""
        _flush()
        self.drain()
        os.dup2(self._target, self._descriptor)
        # The last lines of the processes that go on.
        atexit.register(self.drain)

    def drain(self) -> None:
        """Waits until all that was written before is passed on."""
        with suppress(OSError):
            os.write(self._end, self._mark)
            self._drained.acquire(timeout=_DRAINED_S)

    def _copy(self) -> None:
        held = b""
        while chunk := os.read(self._source, _CHUNK):
            held += chunk
            while self._mark in held:
                before, _, held = held.partition(self._mark)
                self._pass_on(before)
                self._drained.release()
            whole, end, rest = held.rpartition(b"\n")
            if end:
                self._pass_on(whole + end)
                held = rest
            elif len(held) > _LINE_MAX:
                shown = hide(held, self._secrets)
                # A secret may continue in the next chunk.
                self._write(shown[: len(shown) - self._overlap])
                held = shown[len(shown) - self._overlap :]

    def _pass_on(self, data: bytes) -> None:
        self._write(hide(data, self._secrets))

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # nothing reads the output of this process any more
            while data:
                data = data[os.write(self._target, data) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
