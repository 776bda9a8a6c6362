"""`persist` and `python -m persist_engine.cli`: starts the command line, or says which extra brings it."""

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
    """Run the command line of this process and exit. Without its packages: one line on stderr, and the exit code of usage. An
    interrupt while it loads ends it in silence, as a later one does.
    """
    keep_pandas_out()
    load_without_collection()
    if sys.argv[1:] == ["--version"]:
        with suppress(OSError, AttributeError):  # which the long way reports
            sys.stdout.write(f"persist {__version__}\n")
            sys.stdout.flush()
            sys.exit(0)
    try:
        with needs_extra("cli", "the command line"):
            from persist_engine.cli.main import main as run
    except InvalidUsage as error:
        sys.stderr.write(f"error: {error.kind.value}: {error}\n")
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:  # loading takes long enough for a change of mind
        sys.exit(EXIT_INTERRUPTED)
    try:
        run()
    except SystemExit as ended:
        _end(ended)


def _end(ended: SystemExit) -> NoReturn:
    """Ends the process as `ended` says, without taking the interpreter apart.

    SUBTLE: Arrow's threads may still let go of buffers that Python owns. A thread that asks for the interpreter's lock while the
    interpreter is taken apart is ended within C++ code, which aborts the process: after all was done, with code 134.
    """
    if ended.code is None or isinstance(ended.code, int):
        atexit._run_exitfuncs()
        with suppress(OSError):  # what could not be written is reported in the ordinary way
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code or 0)
    raise ended


if __name__ == "__main__":
    main()
