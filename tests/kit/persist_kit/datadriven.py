"""Scripts as tests: `directive name=value ...`, lines of input, `----`, the expected answer, a blank line.

This module parses, compares and rewrites scripts. The caller defines the directives. `# ` lines are comments and survive a rewrite.

    push-batch lower=0 upper=10 rows=100
    ----
    ok
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """One directive with its arguments and input. `line` is its line number, for messages."""

    directive: str
    args: dict[str, str]
    input: str
    expected: str
    line: int


def parse(text: str) -> list[Case]:
    """All cases of a script, in order. ValueError for a directive without `----`."""
    cases: list[Case] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith("#"):
            at += 1
            continue
        start = at
        while at < len(lines) and lines[at] != "----":
            at += 1
        if at == len(lines):
            raise ValueError(f"line {start + 1}: a directive without ----")
        head, body = lines[start].split(), lines[start + 1 : at]
        end = at + 1
        while end < len(lines) and lines[end].strip():
            end += 1
        args = dict(word.split("=", 1) for word in head[1:])
        cases.append(Case(head[0], args, "\n".join(body), "\n".join(lines[at + 1 : end]), start + 1))
        at = end
    return cases


def run(path: Path, answer: Callable[[Case], str], *, rewrite: bool = False) -> None:
    """Asserts that `answer` gives the expected answer to every case of the script at `path`. With `rewrite`, writes the actual answers into
    the script instead.
    """
    text = path.read_text()
    answers: list[str] = []
    for case in parse(text):
        got = answer(case).strip("\n")
        answers.append(got)
        assert rewrite or got == case.expected, (
            f"{path.name}:{case.line} {case.directive}\n--- got\n{got}\n--- expected\n{case.expected}"
        )
    if rewrite:
        path.write_text(rewritten(text, answers))


def rewritten(text: str, answers: list[str]) -> str:
    """The script with these answers, one per case, and otherwise unchanged."""
    out: list[str] = []
    left = iter(answers)
    in_answer = False
    for line in text.splitlines():
        if in_answer and line.strip():
            continue
        in_answer = line == "----"
        out += [line, *next(left).splitlines()] if in_answer else [line]
    return "\n".join(out) + "\n"
