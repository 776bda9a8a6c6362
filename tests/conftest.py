"""Properties draw the same examples in every run: a failure in CI repeats everywhere, and is the change's own.

`make test ARGS=--hypothesis-profile=default` draws others, and remembers those that failed; what it finds becomes a test.
"""

import sys

import pytest
from hypothesis import settings
from persist_engine.cli import main as cli
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


class OneSparkProcess(LoadFileScheduling):
    """Deals out files to the processes of `-n`. All files of tests/spark go to one process, because a JVM and its data are dear."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "tests/spark" if file.startswith("tests/spark/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return OneSparkProcess(config, log) if config.getvalue("dist") == "loadfile" else None


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
