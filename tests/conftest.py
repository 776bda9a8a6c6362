"""Properties draw the same examples in every run: a failure in CI repeats everywhere, and is the change's own.

`make test ARGS=--hypothesis-profile=default` draws others, and remembers those that failed; what it finds becomes a test.
"""

import gc
import os
import sys

import pytest
from hypothesis import settings
from persist_engine.cli import main as cli
from persist_kit import jvm
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


os.environ |= jvm.environ()


#: Files that mostly wait, and the seconds that they take on a quiet machine. They begin first, so that others use the cores meanwhile.
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
    """Deals out files to the processes of `-n`. At most two processes take files of tests/spark, because a JVM and its data are dear: of
    four, both begin with them, so that the files that mostly wait are beside others to the end; of fewer, the second one helps at the end.
    """

    def __init__(self, config, log):
        super().__init__(config, log)
        config.option.loadscopereorder = False  # as collected: see `pytest_collection_modifyitems`

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
    """The longest files come first, then all with slow tests, so that no process is alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: -LONGEST.get(item.nodeid.partition("::")[0], item.path in slow))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Sets aside what lives to the end of the run: modules and some ten thousand tests. Garbage collection would go through all of it
    several times meanwhile, and later takes a quarter of a second each time.
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
    """Runs `persist ARGS` in this process; (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["persist", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    return run
