"""docs/spec.md and what cites it: every citation names a rule, every rule is cited by code or a test, and the versions in its
table are those of the code.

Citations are written "spec 9.3", "spec 9.3, 9.4", "spec 11.2 to 11.9", "spec 8.5 c", "spec 17" (a section), "spec B.4" and
"spec 20, bug 6"; beside that a test called `regression_6_...` or `bug_31_...` cites its bug.
"""

from __future__ import annotations

import re
import struct
import zlib
from functools import cache
from pathlib import Path

import pytest
from persist_engine.base.errors import Incompatible, PersistError
from persist_engine.codec import inline_part, part
from persist_engine.codec.envelope import Kind, opened
from persist_engine.pb import batch_pb2

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "spec.md").read_text()
RULES = re.findall(r"^\*\*((?:\d+|[A-C])\.\d+)\*\* ", TEXT, re.MULTILINE)
SECTIONS = set(re.findall(r"^## (?:Appendix )?(\d+|[A-C])\. ", TEXT, re.MULTILINE))
CITING = ("engine", "operator", "spark-images", "tests")

_RULE = r"(?:\d+|[A-C])\.\d+(?: [a-d]\b)?"
_ITEM = rf"(?:{_RULE}|\d+\b|bugs? \d+[a-c]?|Appendix [A-C])"
_CITATION = re.compile(rf"\b[Ss]pec ({_ITEM}(?:(?:, | and | to |; section ){_ITEM})*)")
_BUG = re.compile(r"\b[Bb]ug (\d+)[a-c]?\b|(?:regression|bug)_(\d+)[a-c]?_")


@cache
def texts() -> dict[str, str]:
    """Code, tests and scripts by path, every run of blanks and comment marks one blank."""
    found = {}
    for folder in CITING:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".py", ".txt", ".lua", ".md"} or "/pb/" in str(path) or path == Path(__file__):
                continue
            found[path.relative_to(ROOT).as_posix()] = re.sub(r"\s*\n\s*(?:#:?|--)?\s*", " ", path.read_text())
    return found


def cited(text: str) -> set[str]:
    """The rules and sections that `text` cites."""
    out = {f"20.{one or other}" for one, other in _BUG.findall(text)}
    for citation in _CITATION.findall(text):
        items = re.split(r"(, | and | to |; section )", citation)
        previous = ""
        for separator, item in zip(["", *items[1::2]], items[::2], strict=True):
            name = re.sub(r" [a-d]$", "", item).removeprefix("Appendix ")
            if item.startswith("bug"):
                name = "20." + re.sub(r"\D", "", item)
            if separator == " to ":
                out |= {one for one in RULES if within(one, previous, name)}
            out.add(name)
            previous = name
    return out


def within(rule: str, first: str, last: str) -> bool:
    section, _, number = rule.partition(".")
    bounds = first.partition("."), last.partition(".")
    same = section == bounds[0][0] == bounds[1][0]
    return same and int(bounds[0][2]) <= int(number) <= int(bounds[1][2])


def test_rules_are_numbered_without_gaps() -> None:
    assert len(RULES) > 250
    for section in SECTIONS:
        numbers = [int(rule.partition(".")[2]) for rule in RULES if rule.partition(".")[0] == section]
        assert numbers == list(range(1, len(numbers) + 1)), section


def test_the_document_refers_to_its_own_rules() -> None:
    inside = {rule for group in re.findall(r"\((\d+\.\d+(?:, \d+\.\d+)*)\)", TEXT) for rule in group.split(", ")}
    inside |= {f"20.{number}" for number in re.findall(r"\(bug (\d+)\)", TEXT)}
    assert len(inside) > 20
    assert inside <= set(RULES)


def test_every_bug_names_a_test_of_its_own() -> None:
    """The index of tests/regressions has it for the same bug; `test_index.py` there sees that it exists."""
    index = (ROOT / "tests" / "regressions" / "README.md").read_text()
    known = {
        number: set(re.findall(r"`([^`]+)`", row)) for number, row in re.findall(r"^\| (\d+) \|(.+)$", index, re.M)
    }
    named = re.findall(r"^\*\*20\.(\d+)\*\* [^*]+?Test:\s`([^`]+)`\.$", TEXT, re.MULTILINE)
    assert len(named) == len(known) == 35
    assert [(number, name) for number, name in named if name not in known[number]] == []


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("what falls due (spec 9.3, 9.4).", {"9.3", "9.4"}),
        ("levels (spec 11.2 to 11.4; see there)", {"11.2", "11.3", "11.4"}),
        ("Spec 8.5 c, 8.6 and 8.7.", {"8.5", "8.6", "8.7"}),
        ("(spec 9.9; section 20, bug 22)", {"9.9", "20", "20.22"}),
        ("(spec 11, 12, Appendix C) (spec 9.16, B.4)", {"11", "12", "C", "9.16", "B.4"}),
        ("def test_regression_1b_a(): bug 15", {"20.1", "20.15"}),
        ("the spec changed; spec.replicas", set()),
    ],
)
def test_citations_are_found(text: str, rules: set[str]) -> None:
    assert cited(text) == rules


@pytest.mark.slow
def test_every_citation_names_a_rule() -> None:
    known = {*RULES, *SECTIONS}
    wrong = {path: names for path, text in texts().items() if (names := cited(text) - known)}
    assert wrong == {}


@pytest.mark.slow
def test_every_rule_is_cited() -> None:
    everywhere = {name for text in texts().values() for name in cited(text)}
    assert [rule for rule in RULES if rule not in everywhere] == []


def versions() -> dict[str, int]:
    table = TEXT.split("**29.2**")[1].split("**29.3**")[0]
    return {kind: int(number) for kind, number in re.findall(r"^\| .+ \| `?(\w+)`? \| (\d+) \|$", table, re.MULTILINE)}


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_the_table_has_the_newest_version_of_each_message(kind: Kind) -> None:
    """Spec 29.2: one more than it says is refused, and it is not."""
    newest = versions()[kind.value.decode()]
    assert not is_too_new(kind, newest)
    assert is_too_new(kind, newest + 1)


def is_too_new(kind: Kind, version: int) -> bool:
    front = struct.pack("<4sH", b"PST" + kind.value, version)
    try:
        opened(kind, front + struct.pack("<I", zlib.crc32(front)), batch_pb2.Antichain(), "key")
    except Incompatible:
        return True
    except PersistError:
        return False
    return False


def test_the_table_has_the_newest_version_of_parts() -> None:
    """Spec 29.2."""
    assert versions()["Parquet"] == part.PART_FORMAT
    assert versions()["PSTI"] == inline_part.INLINE_FORMAT
