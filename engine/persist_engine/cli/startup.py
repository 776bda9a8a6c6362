"""Makes commands of `persist` start and end fast: keeps pandas out of the process, and collects no garbage while modules load.

If pandas is installed, Arrow imports it when it makes its first scalar or its first numpy array. That takes longer than most commands.
Arrow needs pandas only for nanoseconds and for objects of pandas. A shard holds no nanoseconds, and `persist` has no such objects.

The modules that a command loads stay until it ends. The collector would scan all of them several times.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "pandas"


class _Refusing:
    """A finder of modules that finds nothing, and ends the search for pandas with an error."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for pandas, as if it were not installed. Returns None for any other module."""
        if fullname == NAME:
            raise ModuleNotFoundError(f"No module named {NAME!r} in a command of persist", name=NAME)
        return None


_FINDER = _Refusing()


def keep_pandas_out() -> None:
    """Makes pandas look as if it were not installed in this process, unless it was imported before. Idempotent."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def let_pandas_in() -> None:
    """Undoes `keep_pandas_out`, for commands of other distributions, which may need pandas. Idempotent."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


def load_without_collection() -> None:
    """Stops the collection of garbage until `loaded` is called. For the main thread of a new process."""
    gc.disable()


def loaded() -> None:
    """Exempts what was loaded from collection, and starts to collect garbage. Does nothing unless `load_without_collection` was called."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
