"""README.md names a test for each of the 35 bugs, and every one it names exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", (TESTS / "regressions" / "README.md").read_text(), re.MULTILINE)


def test_every_bug_has_a_story() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 36))


def test_every_story_is_told() -> None:
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    scripts = {path.relative_to(TESTS / "datadriven").as_posix() for path in (TESTS / "datadriven").rglob("*.txt")}
    named = {(number, name) for number, told in ROWS for name in re.findall(r"`([^`]+)`", told)}
    assert len(named) >= 35
    assert sorted(each for each in named if each[1] not in defined | scripts) == []
