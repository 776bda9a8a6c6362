"""The flights example as modules and its prepared input, for the tests of both."""

import importlib.util
import sys
from pathlib import Path

import pytest

FLIGHTS = Path(__file__).resolve().parents[2] / "examples" / "flights"


@pytest.fixture(scope="session")
def script():
    """Loads a module of the example, which is no package."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"flights_{name}", FLIGHTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def data(script, tmp_path_factory):
    """The folder that `prepare.py` fills."""
    out = tmp_path_factory.mktemp("flights")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", "--out", str(out)])
        script("prepare").main()
    return out
