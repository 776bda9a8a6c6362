"""The checker says "linearizable" of what is, and not of what is not: it is not trusted on its word either."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from persist_kit.histories.main import find_checker


def line(process: int, call: int, end: int, *steps: tuple, outcome: str = "ok") -> dict:
    return {"process": process, "call": call, "return": end, "txn": list(steps), "outcome": outcome}


def append(value: int, which: int = 1) -> tuple:
    return ("append", which, value)


def read(*values: int, which: int = 1) -> tuple:
    return ("r", which, list(values))


def verdict(tmp_path: Path, lines: list[dict], *options: str) -> tuple[int, str]:
    history = tmp_path / "history.jsonl"
    history.write_text("".join(json.dumps(each) + "\n" for each in lines))
    run = subprocess.run([find_checker(), *options, history], capture_output=True, text=True, check=False)
    return run.returncode, run.stdout or run.stderr


SOUND = {
    "nothing": [],
    "one after the other": [line(1, 0, 1, append(5)), line(2, 2, 3, read(5), append(6), read(5, 6))],
    "at once, in either order": [
        line(1, 0, 9, append(5)),
        line(2, 0, 9, append(6)),
        line(3, 10, 11, read(6, 5)),
    ],
    "two lists at one moment": [line(1, 0, 9, append(5), append(6, 2)), line(2, 0, 9, read(), read(which=2))],
    "unknown and happened": [line(1, 0, 0, append(5), outcome="unknown"), line(2, 5, 6, read(5))],
    "unknown and happened late": [
        line(1, 0, 0, append(5), outcome="unknown"),
        line(2, 5, 6, read()),
        line(2, 7, 8, read(5)),
    ],
    "unknown and never happened": [line(1, 0, 0, append(5), outcome="unknown"), line(2, 5, 6, read())],
    "failed": [line(1, 0, 1, append(5), outcome="fail"), line(2, 5, 6, read())],
}
BROKEN = {
    "a stale read": [line(1, 0, 1, append(5)), line(2, 2, 3, read())],
    "an append that is gone": [line(1, 0, 1, append(5)), line(2, 2, 3, read(5), append(6)), line(1, 4, 5, read(6))],
    "an append twice": [line(1, 0, 1, append(5)), line(2, 2, 3, read(5, 5))],
    "an order that turned": [
        line(1, 0, 9, append(5)),
        line(2, 0, 9, append(6)),
        line(3, 10, 11, read(5, 6)),
        line(3, 12, 13, read(6, 5)),
    ],
    "half of a transaction": [line(1, 0, 9, append(5), append(6, 2)), line(2, 0, 9, read(5), read(which=2))],
    "two reads that disagree on the order": [
        line(1, 0, 20, append(5)),
        line(2, 0, 20, append(6, 2)),
        line(3, 1, 2, read(5), read(which=2)),
        line(4, 3, 4, read(), read(6, which=2)),
    ],
    "a failed append that shows": [line(1, 0, 1, append(5), outcome="fail"), line(2, 5, 6, read(5))],
    "an unknown append that comes and goes": [
        line(1, 0, 0, append(5), outcome="unknown"),
        line(2, 5, 6, read(5)),
        line(2, 7, 8, read()),
    ],
}


@pytest.mark.parametrize("lines", SOUND.values(), ids=SOUND)
def test_a_sound_history_is_linearizable(lines, tmp_path):
    assert verdict(tmp_path, lines)[0] == 0


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN)
def test_a_broken_history_is_not_and_is_drawn(lines, tmp_path):
    html = tmp_path / "history.html"
    code, said = verdict(tmp_path, lines, "-html", str(html))
    assert (code, json.loads(said)["verdict"]) == (1, "not linearizable")
    assert "<html" in html.read_text()


@pytest.mark.parametrize(
    "lines",
    [
        [line(1, 0, 1, ("swap", 1, 2))],
        [line(1, 5, 1, append(5))],
        [line(1, 0, 1, append(5), outcome="maybe")],
        [line(1, 0, 1, ("r", 1, None))],
        [line(1, 0, 1, ("append", 1))],
    ],
    ids=["verb", "times", "outcome", "no answer", "short"],
)
def test_an_invalid_history_is_refused(lines, tmp_path):
    assert verdict(tmp_path, lines)[0] == 3
