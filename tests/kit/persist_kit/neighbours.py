"""Imports modules without tests from the folders of test files. Test files have no package from which they could import them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def neighbours(conftest: str, *names: str) -> list[ModuleType]:
    """Loads the modules `names` of the folder of `conftest` (its `__file__`), in this order, and registers each under its name, so that the
    test files and later modules import it by that name. The names are unique among all test folders.
    """
    found = []
    for name in names:
        spec = importlib.util.spec_from_file_location(name, Path(conftest).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module)
    return found
