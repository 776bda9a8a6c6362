"""The configuration of all tests. Properties draw the same examples in every run, so a failure in CI repeats everywhere, and the change
caused it.

`make test ARGS=--hypothesis-profile=default` draws other examples, and remembers failures. A failure that it finds becomes a test.
"""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from persist_engine.cli import main as cli
from persist_kit import jvm
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


os.environ |= jvm.environ()

#: The file system in memory that Linux has.
IN_MEMORY = Path("/dev/shm")
#: A whole run holds some 700 MB at once, a run of one file much less. A container often has a /dev/shm of 64 MiB.
ROOM_BYTES = 4 << 30


def _keep_folders_in_memory():
    """Puts the folders of tests and of their servers into memory if it has room and TMPDIR does not say where they belong. Stores call fsync
    at each write. On a disk that takes milliseconds, and shows no more: no test takes the power from the machine.
    """
    if "TMPDIR" in os.environ or not os.access(IN_MEMORY, os.W_OK) or shutil.disk_usage(IN_MEMORY).free < ROOM_BYTES:
        return
    os.environ["TMPDIR"] = str(IN_MEMORY)
    tempfile.tempdir = None  # what this process found before


_keep_folders_in_memory()


#: Files that mostly wait, and the seconds that they take on a quiet machine. They begin first, so that other files use the cores meanwhile.
LONGEST = {
    "tests/operator/test_alerts_delivered.py": 189,
    "tests/operator/local/test_runner.py": 57,
    "tests/operator/test_lifecycle.py": 56,
    "tests/engine/work/test_compaction_memory.py": 48,
    "tests/test_tutorial.py": 40,
    "tests/operator/local/test_local_rollout.py": 37,
    "tests/linearizability/test_list_append.py": 35,
    "tests/operator/test_lost_redis.py": 33,
    "tests/operator/local/test_local_spark.py": 33,
}


class SparkTogether(LoadFileScheduling):
    """Distributes files over the processes of `-n`. At most two processes take files of tests/spark, because a JVM and its data are costly.
    With four processes or more, two begin with these files, and the other processes run the files that mostly wait. With fewer processes,
    one begins with these files, and a second process takes some of them when it has no other files left.
    """

    def __init__(self, config, log):
        super().__init__(config, log)
        config.option.loadscopereorder = False  # keeps the order of `pytest_collection_modifyitems`

    def _assign_work_unit(self, node):
        takes_spark = node in self.nodes[: 2 if len(self.nodes) > 3 else 1]
        mine = (file for file in self.workqueue if file.startswith("tests/spark/") == takes_spark)
        if (file := next(mine, None)) is not None:
            self.workqueue.move_to_end(file, last=False)
        elif node not in self.nodes[:2]:
            node.shutdown()
            return
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return SparkTogether(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items):
    """Puts the longest files first, then all files with slow tests, so that no process is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: -LONGEST.get(item.nodeid.partition("::")[0], item.path in slow))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempts objects that live to the end of the run from garbage collection: modules and some ten thousand tests. Otherwise the collector
    would traverse all of them several times during the collection of tests, and later take a quarter of a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def persist(monkeypatch, capfd):
    """Runs `persist ARGS` in this process. Returns (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["persist", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run
