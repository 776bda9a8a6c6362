"""A shard on files and SQLite whose bytes can be damaged, and the command line."""

import sys

import pytest
from persist_engine import ShardId
from persist_engine.cli import main as cli
from persist_engine.testing.disk import Disk


@pytest.fixture
def disk(tmp_path) -> Disk:
    return Disk(tmp_path)


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


@pytest.fixture
def shard_id() -> ShardId:
    return ShardId.new()
