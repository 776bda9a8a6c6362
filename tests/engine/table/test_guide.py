"""The pages about tables run as printed, and so do the examples of docstrings."""

from __future__ import annotations

import dataclasses
import doctest
from pathlib import Path

import persist_engine
import pytest
from persist_engine import Change, ChangeFeed, Database, Listing, Scan, Table, TableInfo, Written
from persist_engine import connect as connect_to
from persist_engine.table import connect
from persist_engine.table.pictures.timeline import Timeline, Write

HOWTO = Path(__file__).resolve().parents[3] / "docs" / "howto"
PAGES = ("tables.md", "from-deltalake-and-pyiceberg.md")
#: Called by the database when a table gets another name.
NOT_FOR_USERS = {"renamed"}
KINDS = (Database, Table, Scan, ChangeFeed, Change, Written, TableInfo, Listing, Timeline, Write)


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
        public = {name for name, base in public_of(kind).items() if callable(vars(base)[name])}
        assert public
        missing = sorted(name for name in public if f".{name}(" not in run)
        assert not missing, f"{kind.__name__}: {missing}"


def test_the_example_of_connect():
    assert doctest.testmod(connect).failed == 0


def public_of(kind):
    """The public names of a class, also of those that it inherits from ours, by the class that documents them."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("persist_engine.")]
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    found = {}
    for base in ours:
        for name in vars(base):
            if not name.startswith("_") and name not in fields | NOT_FOR_USERS:
                found.setdefault(name, base)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_examples_of_docstrings(tmp_path, kind):
    """Each public method and property shows one, and so does each class, which runs in a database of its own. Of what a class inherits and
    what it makes anew, that of the class counts.
    """
    found = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__.startswith("persist_engine.")]):
        for each in doctest.DocTestFinder(recurse=True).find(base, base.__name__):
            found[each.name.partition(".")[2]] = each
    missing = [name for name in ("", *public_of(kind)) if not found[name].examples]
    assert not missing, f"{kind.__name__} shows no example of {missing}"
    for number, each in enumerate(one for one in found.values() if one.examples):
        with connect_to(tmp_path / str(number), maintain=False) as db:
            orders = db.create("orders", key="id BIGINT", value="name STRING")
            orders.append([{"id": 1, "name": "ada"}, {"id": 2, "name": "lin"}])
            each.globs = {"db": db, "orders": orders}
            report: list[str] = []
            runner = doctest.DocTestRunner()
            runner.run(each, out=report.append)
            assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_every_public_class_of_tables_is_looked_at():
    """Those of the package's names that live in the room."""
    room = {name for name, module in persist_engine.MODULES.items() if module.startswith("table.")}
    assert {kind.__name__ for kind in KINDS} >= room - {"connect"}
