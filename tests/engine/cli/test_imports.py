"""What loads with `connect` and with a command: modules are counted, since seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from persist_engine import __version__
from persist_engine.cli import main as cli

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
COMMAND_MODULES_MAX = {"ls": 113, "read": 160, "describe": 138}
VERSION_MODULES_MAX = 9


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


def test_a_command_loads_no_other_command(shop):
    modules = loaded(MAIN, "ls", *shop.args)
    assert "persist_engine.cli.tables.commands" in modules
    assert not {"persist_engine.cli.admin", "persist_engine.cli.inspect", "persist_engine.cli.maintain"} & modules


@pytest.mark.parametrize("name", [*cli.GROUPS, *cli.COMMANDS])
def test_a_command_alone_is_the_one_of_all(name):
    def shape(command):
        inner = getattr(command, "commands", {})
        options = [(each.name, each.opts, each.default, each.required, each.help) for each in command.params]
        return command.help, command.epilog, command.rich_help_panel, options, {key: shape(inner[key]) for key in inner}

    alone = typer.main.get_command(cli.application(name))
    assert list(alone.commands) == [name]
    assert shape(alone.commands[name]) == shape(cli.parser().commands[name])


@pytest.mark.parametrize(
    ("line", "called"),
    [
        ("ls --json", "ls"),
        ("--metrics ls read t", "read"),
        ("--profile=dev --metrics=m maintain auto", "maintain"),
        ("--profile", None),
        ("", None),
        ("--help", None),
        ("--version ls", None),
        ("--unknown ls", None),
        ("raed t", None),
        ("local up", None),
    ],
)
def test_the_command_of_a_line_is_found_only_where_it_is_certain(line, called):
    assert cli._called(line.split()) == called


def test_the_version_needs_no_parser():
    modules = loaded(MAIN, "--version")
    assert not {"typer", "pyarrow", "numpy", "pydantic", "logging", "importlib.metadata"} & modules
    check(modules, VERSION_MODULES_MAX)


def test_the_version_is_the_one_that_the_parser_shows(persist):
    code, out, _ = persist("--version")
    shown = subprocess.run([sys.executable, "-c", MAIN, "--version"], check=True, capture_output=True, text=True)
    assert (code, out, shown.stdout) == (0, shown.stdout, f"persist {__version__}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_version_that_cannot_be_written_is_an_error():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "--version"], check=False, stdout=full, stderr=subprocess.PIPE
        )
    assert (done.returncode, b"No space left" in done.stderr) == (1, True)


def test_garbage_is_collected_once_a_command_is_loaded(shop):
    """And what is there at the end of the process is not gone through."""
    script = "import gc\nfrom persist_engine.cli import options\nfrom persist_engine.cli.__main__ import main\n"
    script += "seen = [gc.isenabled()]\nbefore = options.loaded\n"
    script += "def after():\n    seen.append(gc.isenabled()); before(); seen.append((gc.isenabled(), gc.get_freeze_count() > 10_000))\n"
    script += "import atexit, os\ndef check():\n    if seen != [True, False, (True, True)]: os._exit(9)\n"
    script += "options.loaded = after\natexit.register(check)\nmain()\n"
    assert "persist_engine.cli.tables.commands" in loaded(script, "ls", *shop.args)


def test_a_command_ends_without_taking_the_interpreter_apart(shop):
    """A thread of Arrow that let go of a buffer then aborted one `admin verify` in twenty, after all was done. What is registered for the end
    of the process is called.
    """
    script = (
        "import atexit, os\nclass Loud:\n    def __del__(self): os.write(2, b'taken apart')\n"
        "loud = Loud()\natexit.register(os.write, 2, b'ended')\n" + MAIN
    )
    command = [sys.executable, "-c", script, "ls", *shop.args]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "ended")
    assert done.stdout == "name\tid\n"
