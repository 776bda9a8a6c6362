"""Tables in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from persist_engine import Database, Table, connect


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with connect(tmp_path / "shop", maintain=False) as opened:
        assert opened.client, "which makes the stores"
        yield opened


@pytest.fixture
def orders(db: Database) -> Table:
    return db.create("orders", key="id BIGINT", value="name STRING, price DECIMAL(10,2)")
