"""Tables in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from persist_engine import Database, SeededEnv, Table, connect

START_MS = 1_800_000_000_000
HOUR = 3_600_000


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with connect(tmp_path / "shop", maintain=False) as opened:
        assert opened.client, "which makes the stores"
        yield opened


@pytest.fixture
def orders(db: Database) -> Table:
    return db.create("orders", key="id BIGINT", value="name STRING, price DECIMAL(10,2)")


@pytest.fixture
def clock() -> SeededEnv:
    return SeededEnv(start_ms=START_MS)


@pytest.fixture
def timed(clock: SeededEnv, tmp_path: Path) -> Iterator[Table]:
    """Three writes, an hour apart, and an hour after the last."""
    with connect(tmp_path / "timed", env=clock, maintain=False) as db:
        table = db.create("timed", key="id BIGINT", value="name STRING")
        for name in "abc":
            table.upsert([{"id": 1, "name": name}])
            clock.advance_ms(HOUR)
        yield table
