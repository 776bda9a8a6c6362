"""Hides secrets in the output of this process and of the Java process that it starts. Must not know: what is secret.

SUBTLE: Java writes to the file descriptors that it inherits, so the descriptors themselves lead through a pipe. Java's logs contain the
texts of errors, in which a connector may quote a password.
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
#: A line of at least this length is passed on in pieces, so that a line without an end does not fill the memory.
_LINE_MAX = 1 << 20
_DRAINED_S = 5.0
_STDOUT, _STDERR = 1, 2


def hide(data: bytes, secrets: Sequence[bytes]) -> bytes:
    """`data` with each of `secrets` hidden."""
    for secret in secrets:
        data = data.replace(secret, HIDDEN.encode())
    return data


def forms(secrets: Sequence[str]) -> list[bytes]:
    """The byte strings to hide, longest first: each secret unchanged, and in the form that it has in JSON text."""
    written = {
        form
        for one in secrets
        if one
        for form in (one, json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1])
    }
    return [one.encode() for one in sorted(written, key=lambda one: (-len(one), one))]


@contextmanager
def hidden_output(secrets: Sequence[str]) -> Iterator[None]:
    """Within the block, hides `secrets` in the stdout and stderr of this process and of the processes that it starts. Without secrets,
    nothing changes. After the block this process writes directly again, and all output of the block has been passed on. The processes that
    it started still write through the filter, until this process ends.
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
        #: `drain` writes it into the pipe. No log text contains it.
        self._mark = b"\x00persist-hidden-output\x00\n"
        self._drained = threading.Semaphore(0)
        _flush()
        self._target = os.dup(descriptor)
        self._source, self._end = os.pipe()
        os.dup2(self._end, descriptor)
        threading.Thread(name=f"hidden-output-{descriptor}", target=self._copy, daemon=True).start()

    def restore(self) -> None:
        """Makes the process write directly again, after all earlier output has been passed on."""
        _flush()
        self.drain()
        os.dup2(self._target, self._descriptor)
        # Passes on the last lines of processes that are still running.
        atexit.register(self.drain)

    def drain(self) -> None:
        """Waits until all earlier output has been passed on."""
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
        with suppress(OSError):  # no process reads this output any more
            while data:
                data = data[os.write(self._target, data) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
