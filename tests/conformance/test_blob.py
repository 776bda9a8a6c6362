"""Every blob adapter and wrapper obeys the laws of Blob (spec 4.1)."""

from __future__ import annotations

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.metrics import PrometheusMetrics
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.storage.metered import MeteredBlob
from persist_engine.testing.conformance import BlobTests
from persist_engine.testing.faults import Faults, FaultyBlob
from prometheus_client import CollectorRegistry


class TestMem(BlobTests):
    @pytest.fixture
    def open_store(self, blobs_at, fresh_name):
        with blobs_at(f"mem:{fresh_name}") as open_store:
            yield open_store


class TestFile(BlobTests):
    @pytest.fixture
    def open_store(self, blobs_at, tmp_path):
        with blobs_at(f"file://{tmp_path}/blobs") as open_store:
            yield open_store


@pytest.mark.s3
class TestS3(BlobTests):
    @pytest.fixture
    def open_store(self, blobs_at, s3, fresh_name):
        # The probe, a second of racing puts, has tests of its own.
        with blobs_at(f"{s3.location(f'conformance/{fresh_name}')}&probe=false") as open_store:
            yield open_store


class TestMetered(BlobTests):
    @pytest.fixture
    def open_store(self):
        inner, metrics = MemBlob(), PrometheusMetrics(CollectorRegistry())
        return lambda: MeteredBlob(inner, env=SystemEnv(), metrics=metrics)


class TestFaultyWithoutFaults(BlobTests):
    @pytest.fixture
    def open_store(self):
        inner = MemBlob()
        return lambda: FaultyBlob(inner, Faults())
