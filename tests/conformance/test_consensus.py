"""Every consensus adapter and wrapper obeys the laws of Consensus (spec 3.1 to 3.6)."""

from __future__ import annotations

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.storage.consensus_mem import MemConsensus
from persist_engine.storage.metered import MeteredConsensus
from persist_engine.testing.conformance import ConsensusTests
from persist_engine.testing.faults import Faults, FaultyConsensus
from persist_kit.world import CountedConsensus
from prometheus_client import CollectorRegistry


class TestMem(ConsensusTests):
    @pytest.fixture
    def open_store(self, consensus_at, fresh_name):
        with consensus_at(f"mem:{fresh_name}") as open_store:
            yield open_store


class TestSqlite(ConsensusTests):
    @pytest.fixture
    def open_store(self, consensus_at, tmp_path):
        with consensus_at(f"sqlite://{tmp_path}/consensus.db") as open_store:
            yield open_store


@pytest.mark.redis
class TestRedis(ConsensusTests):
    @pytest.fixture
    def open_store(self, consensus_at, redis, fresh_name):
        with consensus_at(f"{redis.url}?prefix={fresh_name}*:") as open_store:
            yield open_store


@pytest.mark.redis
class TestRedisBehindTls(ConsensusTests):
    @pytest.fixture
    def open_store(self, consensus_at, redis_behind_tls, fresh_name):
        server = redis_behind_tls
        with consensus_at(f"{server.url}?ca_file={server.ca_file}&prefix={fresh_name}*:") as open_store:
            yield open_store


class TestMetered(ConsensusTests):
    @pytest.fixture
    def open_store(self):
        inner, metrics = MemConsensus(), PrometheusMetrics(CollectorRegistry())
        return lambda: MeteredConsensus(inner, env=SystemEnv(), metrics=metrics)


class TestFaultyWithoutFaults(ConsensusTests):
    @pytest.fixture
    def open_store(self):
        inner = MemConsensus()
        return lambda: FaultyConsensus(inner, Faults())


class TestCounted(ConsensusTests):
    @pytest.fixture
    def open_store(self):
        counted = CountedConsensus(MemConsensus())
        return lambda: counted
