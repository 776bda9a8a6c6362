"""`persist` and `python -m persist_engine.cli`: starts the command line, or says which extra installs it."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from persist_engine import __version__
from persist_engine.base.errors import InvalidUsage
from persist_engine.base.extras import needs_extra
from persist_engine.cli.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from persist_engine.cli.startup import keep_pandas_out, load_without_collection


def main() -> NoReturn:
    """Run the command line of this process and exit. When its packages are not installed, it prints one line on stderr and exits with the
    code of usage. An interrupt ends the process silently, also while the command line loads.
    """
    keep_pandas_out()
    load_without_collection()
    if sys.argv[1:] == ["--version"]:
        with suppress(OSError, AttributeError):  # the code below reports these errors
            sys.stdout.write(f"persist {__version__}\n")
            sys.stdout.flush()
            sys.exit(0)
    try:
        with needs_extra("cli", "the command line"):
            from persist_engine.cli.main import main as run
    except InvalidUsage as error:
        sys.stderr.write(f"error: {error.kind.value}: {error}\n")
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:  # loading takes so long that a user may interrupt it
        sys.exit(EXIT_INTERRUPTED)
    try:
        run()
    except SystemExit as ended:
        _end(ended)


def _end(ended: SystemExit) -> NoReturn:
    """Ends the process with the code of `ended`, without finalizing the interpreter.

    SUBTLE: Arrow's threads may still release buffers that Python owns. When a thread asks for the interpreter's lock while the
    interpreter is being finalized, Python ends that thread within C++ code. That aborts the process with code 134 although the command
    had succeeded.
    """
    if ended.code is None or isinstance(ended.code, int):
        atexit._run_exitfuncs()
        with suppress(OSError):  # an ordinary exit then reports that the output could not be written
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code or 0)
    raise ended


if __name__ == "__main__":
    main()
