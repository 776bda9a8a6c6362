"""Keeps pandas out of the processes of `persist`.

Where pandas is installed, Arrow imports it with the first scalar or the first numpy array that it makes, which takes longer than most
commands. Arrow needs it for nanoseconds and for pandas' own objects only. A shard holds no nanoseconds, and `persist` has no such objects.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "pandas"


class _Refusing:
    """A finder of modules that finds nothing, and ends the search for one module."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """ModuleNotFoundError for pandas, as where it is not installed; None for any other module."""
        if fullname == NAME:
            raise ModuleNotFoundError(f"No module named {NAME!r} in a command of persist", name=NAME)
        return None


_FINDER = _Refusing()


def keep_pandas_out() -> None:
    """From now on pandas counts as not installed in this process, unless it was imported before. Idempotent."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def let_pandas_in() -> None:
    """Undo `keep_pandas_out`: for commands of other distributions, which may need pandas. Idempotent."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
