"""The project's version stands in `persist_engine/base/version.py`; the other places are copies.

version.py            print it
version.py --check    exit 1 and name the places that differ
version.py 0.2.0      set it everywhere
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = r"\d+\.\d+\.\d+"
#: File, and what stands before the version in it. The first is the source.
PLACES: tuple[tuple[str, str], ...] = (
    ("engine/persist_engine/base/version.py", r'^APPLIER_VERSION = "'),
    ("pyproject.toml", r'^version = "'),
    ("engine/pyproject.toml", r'^version = "'),
    ("operator/pyproject.toml", r'^version = "'),
    ("spark-images/pyproject.toml", r'^version = "'),
    ("tests/kit/pyproject.toml", r'^version = "'),
    ("charts/persist-operator/Chart.yaml", r"^version: "),
    ("charts/persist-operator/Chart.yaml", r"^appVersion: "),
    *(
        ("charts/persist-operator/Chart.yaml", rf"^      image: persist-{name}:")
        for name in ("operator", "engine", "spark")
    ),
    ("charts/persist-operator-crds/Chart.yaml", r"^version: "),
    ("charts/persist-operator-crds/Chart.yaml", r"^appVersion: "),
    ("operator/persist_operator/settings.py", r'^    engine: str = "persist-engine:'),
    ("operator/persist_operator/settings.py", r'^    spark: str = "persist-spark:'),
    *(
        ("uv.lock", rf'^name = "persist-{name}"\nversion = "')
        for name in ("engine", "kit", "operator", "spark", "workspace")
    ),
)


def versions() -> dict[tuple[str, str], str]:
    """The version at every place. SystemExit names a place that is no longer there."""
    found = {}
    for file, before in PLACES:
        match = re.search(f"{before}({VERSION})", (ROOT / file).read_text(), re.MULTILINE)
        if match is None:
            raise SystemExit(f"error: {file}: nothing matches {before!r}")
        found[file, before] = match[1]
    return found


def write(version: str) -> None:
    """Set `version` at every place."""
    for file, before in PLACES:
        path = ROOT / file
        path.write_text(
            re.sub(f"({before}){VERSION}", rf"\g<1>{version}", path.read_text(), count=1, flags=re.MULTILINE)
        )


def main(arguments: list[str]) -> int:
    """0, or 1 when places differ or the argument is no version."""
    if arguments and arguments != ["--check"]:
        if not re.fullmatch(VERSION, arguments[0]):
            sys.stderr.write(f"error: not a version: {arguments[0]}, expected major.minor.patch\n")
            return 1
        write(arguments[0])
    found = versions()
    source = found[PLACES[0]]
    differing = sorted(f"{file} has {version}" for (file, _), version in found.items() if version != source)
    if differing:
        sys.stderr.write(
            f"error: the version is {source}, but {'; '.join(differing)}. Run `python .ci/version.py {source}`.\n"
        )
        return 1
    sys.stdout.write(f"{source}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
