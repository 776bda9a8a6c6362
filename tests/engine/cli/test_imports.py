"""What loads with `connect` and with a command: modules are counted, since seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: None of these is needed to open files, and each takes longer to load than a command has.
HEAVY = {"boto3", "botocore", "duckdb", "grpc", "pandas", "polars", "prometheus_client", "pyspark", "redis", "rich"}
#: Rooms that no reader needs.
UNREAD = (
    "persist_engine.dataflow.",
    "persist_engine.flow.",
    "persist_engine.work.audit.verify",
    "persist_engine.work.repair.",
)
#: Modules of the engine that may load, a few more than do now. All of it are more than 260.
CONNECT_MODULES_MAX = 121
COMMAND_MODULES_MAX = {"ls": 132, "read": 178, "describe": 161}
VERSION_MODULES_MAX = 38


MAIN = "from persist_engine.cli.__main__ import main\nmain()"


def loaded(script: str, *arguments: str) -> set[str]:
    """The modules that a process has when it ends."""
    shown = "import atexit, sys\natexit.register(lambda: sys.stderr.write('\\n' + ' '.join(sys.modules)))\n"
    done = subprocess.run(
        [sys.executable, "-c", shown + script, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def check(modules: set[str], engine_max: int) -> None:
    assert HEAVY & modules == set()
    ours = {name for name in modules if name.startswith("persist_engine.")}
    assert not [name for name in ours if name.startswith(UNREAD)]
    assert len(ours) <= engine_max


def test_the_package_itself_loads_no_arrow():
    assert not {"pyarrow", "numpy"} & loaded("import persist_engine")


def test_connect_loads_what_reads_and_no_driver():
    check(loaded("from persist_engine import connect"), CONNECT_MODULES_MAX)


@pytest.mark.parametrize("command", list(COMMAND_MODULES_MAX))
def test_a_command_loads_its_own_modules(shop, command):
    given = [command] if command == "ls" else [command, shop.shard_id]
    check(loaded(MAIN, *given, *shop.args), COMMAND_MODULES_MAX[command])


def test_the_version_needs_no_module_that_opens_stores():
    modules = loaded(MAIN, "--version")
    unused = {
        "pyarrow",
        "numpy",
        "google",
        "pydantic",
        "sqlite3",
        "tomllib",
        "email",
        "importlib.metadata",
        "importlib.abc",
    }
    assert not unused & modules
    check(modules, VERSION_MODULES_MAX)
