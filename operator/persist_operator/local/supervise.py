"""Runs one command and records how it ended: `python -m persist_operator.local.supervise EXIT_FILE -- COMMAND...`.

Stands between the runner and a child, so that the exit code outlives the runner. Passes SIGTERM on to the child.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """The child's exit code (128 + signal when a signal ended it), also written to EXIT_FILE."""
    exit_file, separator, command = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if separator != "--" or not command:
        sys.stderr.write("usage: supervise EXIT_FILE -- COMMAND...\n")
        return 64
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    code = 128 - code if code < 0 else code
    temporary = exit_file.with_suffix(".tmp")
    temporary.write_text(str(code), encoding="ascii")
    temporary.replace(exit_file)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
