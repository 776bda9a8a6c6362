"""Runs one command and records how it ended: `python -m persist_operator.local.supervise FOLDER LOCK_FD -- COMMAND...`.

The supervisor is the parent of the command, so that the exit code outlives the runner. LOCK_FD is an open, locked file that the command
inherits too. The lock is free when both processes are gone, so it shows other processes whether the child runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

#: A shell's exit code for a command that cannot be run.
_CANNOT_RUN = 126


def main() -> int:
    """Run the command and pass SIGTERM on. Returns its exit code (128 + signal after a signal), and writes it to FOLDER/exit."""
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        sys.stderr.write("usage: supervise FOLDER LOCK_FD -- COMMAND...\n")
        return 64
    folder, lock, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    # A SIGTERM that arrives before the command runs stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _write(folder / "pid", str(os.getpid()))
    try:
        process = subprocess.Popen(command, pass_fds=(lock,), preexec_fn=_unblock)  # noqa: PLW1509 - no threads here
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error}\n")
        _write(folder / "exit", str(_CANNOT_RUN))
        return _CANNOT_RUN
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    _unblock()
    code = process.wait()
    code = 128 - code if code < 0 else code
    _write(folder / "exit", str(code))
    return code


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="ascii")
    temporary.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
