"""The pages about tables run as printed, and so do the examples of docstrings."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from persist_engine import ChangeFeed, Database, Scan, Table
from persist_engine import connect as connect_to
from persist_engine.table import connect

HOWTO = Path(__file__).resolve().parents[3] / "docs" / "howto"
PAGES = ("tables.md", "from-deltalake-and-pyiceberg.md")
#: Called by the database when a table gets another name.
NOT_FOR_USERS = {"renamed"}


def examples(page, folder):
    text = (HOWTO / page).read_text()
    assert "file:///tmp/shop" in text
    return doctest.DocTestParser().get_doctest(text.replace("file:///tmp/shop", f"file://{folder}"), {}, page, page, 0)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_shows(tmp_path, page):
    parsed = examples(page, tmp_path)
    assert len(parsed.examples) > 20
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    report: list[str] = []
    runner.run(parsed, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_every_public_method_has_an_example_that_runs(tmp_path):
    run = "".join(example.source for page in PAGES for example in examples(page, tmp_path).examples)
    for kind in (Database, Table, Scan, ChangeFeed):
        public = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        assert public
        missing = sorted(name for name in public - NOT_FOR_USERS if f".{name}(" not in run)
        assert not missing, f"{kind.__name__}: {missing}"


def test_the_example_of_connect():
    assert doctest.testmod(connect).failed == 0


@pytest.mark.parametrize("kind", [Database, Table, Scan, ChangeFeed], ids=lambda kind: kind.__name__)
def test_examples_of_docstrings(tmp_path, kind):
    """Each public method and property shows one, which runs in a database of its own. A table shows the most usual of its own together."""
    public = {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
    public = {kind.__name__} if kind is Table else public
    found = {each.name: each for each in doctest.DocTestFinder(recurse=True).find(kind, kind.__name__)}
    assert public
    assert not sorted(name for name in public if not found[name].examples)
    for number, each in enumerate(found.values()):
        with connect_to(tmp_path / str(number), maintain=False) as db:
            orders = db.create("orders", key="id BIGINT", value="name STRING")
            orders.append([{"id": 1, "name": "ada"}, {"id": 2, "name": "lin"}])
            each.globs = {"db": db, "orders": orders}
            report: list[str] = []
            runner = doctest.DocTestRunner()
            runner.run(each, out=report.append)
            assert runner.summarize(verbose=False).failed == 0, "".join(report)
