"""The program of a table by name: what it prints, and that a run after an interrupted one books nothing twice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from persist_engine import connect

STOCK = Path(__file__).resolve().parents[2] / "examples" / "tables" / "stock.py"


def ran(folder):
    done = subprocess.run([sys.executable, STOCK, folder], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.slow
def test_a_second_run_changes_nothing(tmp_path):
    assert ran(tmp_path / "shop") == "nail: 0 -> 500\nscrew: 0 -> 200\nnail: 500 -> 380\nscarce: screw\n"
    assert ran(tmp_path / "shop") == "scarce: screw\n"


def test_a_run_goes_on_where_one_was_interrupted(tmp_path):
    spec = importlib.util.spec_from_file_location("stock", STOCK)
    stock = importlib.util.module_from_spec(spec)
    sys.modules["stock"] = stock
    try:
        spec.loader.exec_module(stock)
        with connect(tmp_path / "shop", maintain=False) as db:
            table = stock.opened(db)
            stock.book(table, stock.DELIVERIES[0])
            for delivery in stock.DELIVERIES:
                stock.book(table, delivery)
            assert table.to_pylist() == [{"article": "nail", "pieces": 380}, {"article": "screw", "pieces": 200}]
            assert stock.scarce(table, 201) == ["screw"]
    finally:
        del sys.modules["stock"]
