"""README.md names a test for each of the 35 bugs, and every one it names exists."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", (TESTS / "regressions" / "README.md").read_text(), re.MULTILINE)


def test_every_bug_has_a_story() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 36))


def test_every_named_test_exists() -> None:
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    scripts = {path.relative_to(TESTS / "datadriven").as_posix() for path in (TESTS / "datadriven").rglob("*.txt")}
    named = {(number, name) for number, row in ROWS for name in re.findall(r"`([^`]+)`", row)}
    assert len(named) >= 35
    assert sorted(each for each in named if each[1] not in defined | scripts) == []


def test_every_bug_that_is_put_back_has_its_place() -> None:
    """`put_back.py` takes minutes and runs by hand: when code moves, its bugs must move along."""
    spec = importlib.util.spec_from_file_location("put_back", TESTS / "regressions" / "put_back.py")
    assert spec is not None
    assert spec.loader is not None
    put_back = sys.modules["put_back"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(put_back)
    engine = put_back.ROOT / "engine" / "persist_engine"
    edits = [(bug.name, file, now) for bug in put_back.BUGS for file, now, _ in bug.edits]
    assert len(edits) >= 35
    assert [edit for edit in edits if (engine / edit[1]).read_text().count(edit[2]) != 1] == []
