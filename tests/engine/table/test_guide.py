"""The guide to tables runs as printed, and so do the examples of docstrings."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from persist_engine.table import connect

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "tables.md"


def test_the_guide_prints_what_it_shows(tmp_path):
    text = GUIDE.read_text()
    assert "file:///tmp/shop" in text
    parsed = doctest.DocTestParser().get_doctest(
        text.replace("file:///tmp/shop", f"file://{tmp_path}"), {}, "tables.md", str(GUIDE), 0
    )
    assert len(parsed.examples) > 20
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    report: list[str] = []
    runner.run(parsed, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("module", [connect], ids=lambda module: module.__name__)
def test_examples_of_docstrings(module):
    assert doctest.testmod(module).failed == 0
