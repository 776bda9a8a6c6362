"""The notebooks run in a kernel of their own, and show what they say that they show."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "examples" / "notebooks" / "tour.ipynb"


def shown(notebook, source):
    """What the cell with this text displays, by MIME type."""
    (cell,) = [each for each in notebook.cells if each.cell_type == "code" and source in each.source]
    return cell.outputs[-1].data


@pytest.mark.slow
def test_the_tour_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(TOUR, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert "<td>eve</td>" in shown(notebook, "no order costs less")["text/html"]
    assert "bob" not in shown(notebook, "no order costs less")["text/html"]
    assert eval(shown(notebook, "orders.at(first.time)")["text/plain"], {"Decimal": Decimal})[2]["name"] == "bob"
    assert "'delete'" in shown(notebook, "for change in orders.changes")["text/plain"]
    bars = ElementTree.fromstring(shown(notebook, "orders.timeline()")["image/svg+xml"]).iter(
        "{http://www.w3.org/2000/svg}rect"
    )
    assert any("updates" in "".join(bar.itertext()) for bar in bars)
    assert "7d" in shown(notebook, "orders.describe()")["text/html"]
    history = shown(notebook, "orders.history()")
    assert '{"job":"tour"}' in history["text/plain"]
    assert "<td>{&quot;job&quot;:&quot;tour&quot;}</td>" in history["text/html"]
    assert "<td>delete</td>" in shown(notebook, 'orders.changes("start")')["text/html"]
    assert "<td>retention</td>" in shown(notebook, "orders.holds()")["text/html"]
    assert shown(notebook, "duckdb.sql")["text/plain"] == "Decimal('16.50')"
    assert shown(notebook, "orders.optimize()")["text/plain"] == "False"
