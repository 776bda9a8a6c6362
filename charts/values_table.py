"""Writes VALUES.md of the chart from values.yaml, or with `--check` reports that it differs: each value, its default, and its comment.

A comment stands behind its value, or in the lines before it. A value without a comment stands below one that has it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent / "persist-operator"
HEAD = """# Values of the chart persist-operator

Made from `values.yaml` by `make crds`.

| value | default | what it is |
|---|---|---|
"""
_LINE = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z0-9]+):(?P<rest>.*)$")
#: Of an example that is commented out, two blanks follow the mark.
_PROSE = re.compile(r"^ *# (?P<text>\S.*)$")
_COMMENT = re.compile(r"(?:^|\s)#\s?(?P<text>.*)$")
_DEFAULT_MAX = 60


def comments(text: str) -> dict[str, str]:
    """Path -> comment, of the values that have one. A line without a comment ends it."""
    found: dict[str, str] = {}
    path: list[str] = []
    before: list[str] = []
    for line in text.splitlines():
        prose = _PROSE.match(line)
        if prose:
            before.append(prose["text"])
            continue
        match = _LINE.match(line)
        if match is None:
            before = []
            continue
        path = [*path[: len(match["indent"]) // 2], match["name"]]
        behind = _COMMENT.search(re.sub(r'"[^"]*"', '""', match["rest"]))
        text_found = " ".join(filter(None, [*before, behind["text"].strip() if behind else ""]))
        if text_found:
            found[".".join(path)] = text_found
        before = []
    return found


def defaults(value: Any, path: str = "") -> dict[str, Any]:
    """Path -> default of every value; a mapping with values has no default of its own."""
    if isinstance(value, dict) and value:
        below = {
            key: one
            for name, each in value.items()
            for key, one in defaults(each, f"{path}.{name}" if path else name).items()
        }
        return {path: None, **below} if path else below
    return {path: value}


def table(text: str) -> str:
    """The document. A mapping without a comment has no row: its values have theirs."""
    said = comments(text)
    rows = []
    for path, default in defaults(yaml.safe_load(text)).items():
        if default is None and path not in said:
            continue
        shown = (
            "" if default is None else yaml.safe_dump(default, default_flow_style=True, width=10_000).splitlines()[0]
        )
        cell = f"`{shown[:_DEFAULT_MAX]}`" if shown else ""
        rows.append(f"| `{path}` | {cell} | {_escaped(said.get(path, ''))} |\n")
    return HEAD + "".join(rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Write unless `--check` is given. Returns 0 when the document is what values.yaml says."""
    made, target = table((CHART / "values.yaml").read_text(encoding="utf-8")), CHART / "VALUES.md"
    if "--check" not in arguments:
        target.write_text(made, encoding="utf-8")
    if not target.is_file() or target.read_text(encoding="utf-8") != made:
        sys.stderr.write("error: VALUES.md of the chart is not what values.yaml says. Run `make crds`.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
