"""Properties draw the same examples in every run: a failure in CI repeats everywhere, and is the change's own.

`make test ARGS=--hypothesis-profile=default` draws others, and remembers those that failed; what it finds becomes a test.
"""

import sys

import pytest
from hypothesis import settings
from persist_engine.cli import main as cli

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def persist(monkeypatch, capfd):
    """Runs `persist ARGS` in this process; (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["persist", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run
