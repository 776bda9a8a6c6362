"""The extras of this distribution: which packages each one brings, and the error that names the extra to install.

A reader of files installs `persist-engine` alone. Drivers, the command line and the test suites need packages of their own; what
imports such a package does so under `needs_extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.errors import InvalidUsage

DISTRIBUTION = "persist-engine"

#: Extra -> the top modules that its packages bring. `pyproject.toml` names the packages; a test compares the two.
EXTRAS = {
    "s3": frozenset({"boto3", "botocore"}),
    "redis": frozenset({"redis"}),
    "rocksdb": frozenset({"rocksdict"}),
    "cli": frozenset({"typer", "rich"}),
    "testing": frozenset({"pytest"}),
}


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Import the modules of `extra` in here. InvalidUsage when its packages are not installed: it names `purpose`, the missing
    module and the extra to install. A module that is missing for any other reason raises as it did.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS[extra]:
            raise
        raise InvalidUsage(
            f"{purpose} needs the Python module {module}, which is not installed: install {DISTRIBUTION}[{extra}]",
            extra=extra,
            module=module,
        ) from error
