"""What a process of `persist` does without, so that a command begins and ends soon: pandas, and the collection of garbage while it loads.

Where pandas is installed, Arrow imports it with the first scalar or the first numpy array that it makes, which takes longer than most
commands. Arrow needs it for nanoseconds and for pandas' own objects only. A shard holds no nanoseconds, and `persist` has no such objects.

What a command loads stays to its end. The collector would go through all of it several times.
"""

from __future__ import annotations

import gc
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


def load_without_collection() -> None:
    """From now on no garbage is collected, until `loaded`. For the main thread of a new process."""
    gc.disable()


def loaded() -> None:
    """Sets aside what was loaded, and collects garbage from now on. Does nothing unless `load_without_collection` was called before."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
