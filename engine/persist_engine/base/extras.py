"""The extras of this distribution: which packages each one brings, and the error that names the extra to install.

`persist-engine` alone is enough to read files. Drivers, the command line and the test suites need packages of their own; code that
imports one of these packages does so under `needs_extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persist_engine.base.errors import InvalidUsage

DISTRIBUTION = "persist-engine"

#: The top modules that the packages of each extra bring. `pyproject.toml` names the packages; a test compares the two.
EXTRAS = {
    "s3": frozenset({"boto3", "botocore"}),
    "redis": frozenset({"redis"}),
    "rocksdb": frozenset({"rocksdict"}),
    "cli": frozenset({"typer", "rich"}),
    "testing": frozenset({"pytest"}),
}


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """A context for importing the modules of `extra`. Raises InvalidUsage when its packages are not installed; the error names
    `purpose`, the missing module and the extra to install. If a module is missing for any other reason, its own error is raised.
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
