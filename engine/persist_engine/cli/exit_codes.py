"""The exit codes of `persist`, one for each kind of error. Scripts and maintenance Jobs read them."""

from __future__ import annotations

from persist_engine.base.errors import (
    CorruptData,
    Fenced,
    Incompatible,
    InvalidUsage,
    InvariantViolated,
    PersistError,
    StorageError,
    Unavailable,
)

#: `persist admin proof` found that something is left.
EXIT_NOT_PROVEN = 3
EXIT_USAGE = 64
EXIT_CORRUPT = 74
#: The first class that fits decides, so subclasses stand before their parents.
EXIT_CODES: tuple[tuple[type[PersistError], int], ...] = (
    (InvalidUsage, EXIT_USAGE),
    (StorageError, 70),
    (Unavailable, 70),
    (Fenced, 71),
    (CorruptData, EXIT_CORRUPT),
    (Incompatible, 75),
    (InvariantViolated, 73),
    (PersistError, 1),
)
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


def exit_code(error: PersistError) -> int:
    """The code with which the process exits after `error`."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))
