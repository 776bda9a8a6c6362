"""Nothing that calls itself a store goes unproven: every class with a port's verbs has a conformance test, or a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import persist_engine.storage
import persist_engine.testing
import persist_kit
import pytest
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus

#: See test_blob.py and test_consensus.py.
PROVEN = {
    Blob: {"MemBlob", "FileBlob", "S3Blob", "MeteredBlob", "FaultyBlob"},
    Consensus: {
        "MemConsensus",
        "SqliteConsensus",
        "RedisConsensus",
        "MeteredConsensus",
        "FaultyConsensus",
        "CountedConsensus",
    },
}
#: They judge what passes by the rules of one simulated shard, and so take no other keys and values, or list as of two moments on purpose.
SIMULATED = {"WatchedBlob", "WatchedConsensus", "JudgedBlob", "RoutedConsensus", "PagedBlob"}


def classes_with(verbs: set[str]) -> Iterator[str]:
    for package in (persist_engine.storage, persist_engine.testing, persist_kit):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if info.name.endswith((".main", "list_append")):  # programs
                continue
            module = importlib.import_module(info.name)
            for name, value in inspect.getmembers(module, inspect.isclass):
                if value.__module__ == info.name and verbs <= set(dir(value)) and value not in PROVEN:
                    yield name


@pytest.mark.parametrize("port", [Blob, Consensus], ids=["blob", "consensus"])
def test_every_store_and_wrapper_is_proven(port: type):
    verbs = {name for name, _ in inspect.getmembers(port, inspect.isfunction) if not name.startswith("_")}
    assert {"address", "close"} < verbs
    assert set(classes_with(verbs)) - SIMULATED == PROVEN[port]
