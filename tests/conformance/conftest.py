"""Servers shared by the conformance tests of one run, and the one way to hand out clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import NoMetrics
from persist_engine.storage.blob import Blob
from persist_engine.storage.consensus import Consensus
from persist_engine.storage.open import open_blob, open_consensus
from persist_kit.servers import RedisServer, S3Server, redis_server, s3_server

_numbers = itertools.count()


@contextmanager
def clients(open_one: Callable[[], Blob | Consensus]) -> Iterator[Callable[[], Blob | Consensus]]:
    """Hand out clients and close them all in the end."""
    opened: list[Blob | Consensus] = []

    def open_another() -> Blob | Consensus:
        opened.append(open_one())
        return opened[-1]

    try:
        yield open_another
    finally:
        for store in opened:
            store.close()


@pytest.fixture
def blobs_at() -> Callable:
    return lambda url: clients(lambda: open_blob(url, env=SystemEnv(), metrics=NoMetrics()))


@pytest.fixture
def consensus_at() -> Callable:
    return lambda url: clients(lambda: open_consensus(url, env=SystemEnv(), metrics=NoMetrics()))


@pytest.fixture
def fresh_name() -> str:
    """A name no other test of this run has."""
    return f"t{next(_numbers)}"


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def redis_behind_tls() -> Iterator[RedisServer]:
    with redis_server(tls=True) as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
