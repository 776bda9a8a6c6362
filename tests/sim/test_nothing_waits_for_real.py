"""Every module of the engine that starts or waits for threads, or leaves it to the garbage collector to let go, is
simulated, or stands here with a reason.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import persist_engine.client
import persist_engine.dataflow
import persist_engine.parts
import persist_engine.shard
import persist_engine.table
import persist_engine.work
import pytest
from persist_kit.sim import threads as sim_threads

PACKAGES = (
    persist_engine.client,
    persist_engine.dataflow,
    persist_engine.parts,
    persist_engine.shard,
    persist_engine.table,
    persist_engine.work,
)
NOT_SIMULATED = {
    # What they let go of is let go of when it is closed, which histories always do.
    "persist_engine.client.read.changes",
    "persist_engine.client.read.snapshot",
}


def names_holding(value: object) -> set[str]:
    found = set()
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            module = importlib.import_module(info.name)
            if any(held is value for held in vars(module).values()):
                found.add(info.name)
    return found


@pytest.mark.parametrize(
    ("value", "replaced"),
    [
        (threading, sim_threads._WITH_THREADING),
        (ThreadPoolExecutor, (*sim_threads._WITH_POOLS, *sim_threads._WITH_TASK_POOLS)),
        (weakref, sim_threads._WITH_WEAK_OWNERS),
    ],
    ids=["threading", "pools", "weak references"],
)
def test_every_user_of_threads_is_simulated(value: object, replaced: tuple):
    assert names_holding(value) - NOT_SIMULATED == {module.__name__ for module in replaced}
