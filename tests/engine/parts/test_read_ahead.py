"""Fetching ahead: which parts, in which order, and within how many bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from persist_engine.base.metrics import NoMetrics
from persist_engine.model.batch import HollowPart, InlinePart
from persist_engine.model.frontier import EMPTY, MINIMUM, Description
from persist_engine.parts import read_ahead
from persist_engine.parts.read_ahead import FetchAhead, RunToRead
from persist_kit.sim.threads import InlinePool

DESC = Description(MINIMUM, EMPTY, MINIMUM)


@pytest.fixture
def fetched(monkeypatch) -> list[str]:
    """The parts that were fetched, in order; a fetch is over when it is begun."""
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", InlinePool)
    return []


def ahead_of(fetched: list[str], runs: list[str], *, budget_bytes: int) -> FetchAhead:
    """Runs of parts by name, of 10 bytes each; "." is one in state."""

    def part(name: str):
        if name == ".":
            return InlinePart(data=b"", rows=1, diffs_sum=1)
        return HollowPart(key=name, size_bytes=10, rows=1, diffs_sum=1, checksum="")

    def get(part, _desc) -> bytes:
        if isinstance(part, HollowPart):
            fetched.append(part.key)
        return b""

    source = SimpleNamespace(get=get, metrics=NoMetrics(), path="test")
    to_read = [RunToRead.of(DESC, tuple(part(name) for name in run), is_sorted=True) for run in runs]
    return FetchAhead(source, to_read, budget_bytes=budget_bytes)


def test_the_first_part_of_every_run_comes_before_the_second_of_any(fetched):
    ahead_of(fetched, ["abcd", "e", "f.g", ""], budget_bytes=1000)
    assert fetched == list("aefbcgd")


def test_no_more_is_fetched_ahead_than_the_budget_holds(fetched):
    ahead = ahead_of(fetched, ["abc", "def"], budget_bytes=35)
    assert fetched == list("adb")
    ahead.take(0, 0)
    assert fetched == list("adbe"), "what was taken makes room for one more"
    ahead.take(1, 0)
    ahead.take(0, 1)
    assert fetched == list("adbecf")


def test_what_is_asked_for_is_fetched_whatever_the_budget_and_once(fetched):
    ahead = ahead_of(fetched, ["ab", "cd"], budget_bytes=5)
    assert fetched == []
    for slot in [(0, 0), (1, 0), (0, 1), (1, 1)]:
        ahead.take(*slot)
    assert fetched == list("acbd")


def test_what_was_taken_before_its_turn_is_not_fetched_again(fetched):
    ahead = ahead_of(fetched, ["ab", "cd"], budget_bytes=10)
    assert fetched == ["a"]
    ahead.take(1, 0)
    ahead.take(0, 0)
    assert fetched == list("acb")
