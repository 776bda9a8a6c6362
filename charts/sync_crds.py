"""Copies crds/ into the charts, or with `--check` reports copies that differ. crds/ is the single source."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "crds"
CHARTS = [
    Path(__file__).resolve().parent / name / "files" / "crds" for name in ("persist-operator", "persist-operator-crds")
]


def differences(source: Path, chart: Path) -> list[str]:
    """Names of files that are missing, stale or left over in a chart; empty when the copies equal the source."""
    ours = {path.name: path.read_bytes() for path in source.glob("*.yaml")}
    shipped = {path.name: path.read_bytes() for path in chart.glob("*.yaml")}
    return sorted(name for name in ours.keys() | shipped.keys() if ours.get(name) != shipped.get(name))


def copy(source: Path, chart: Path) -> None:
    """Copy all files and delete the others, so that `differences` is empty. Idempotent."""
    chart.mkdir(parents=True, exist_ok=True)
    for stale in chart.glob("*.yaml"):
        stale.unlink()
    for path in sorted(source.glob("*.yaml")):
        (chart / path.name).write_bytes(path.read_bytes())


def main(arguments: list[str]) -> int:
    """Copy unless `--check` is given. Returns 0 when the copies equal the source."""
    if not any(SOURCE.glob("*.yaml")):
        sys.stderr.write(f"error: no CRDs in {SOURCE.name}/\n")
        return 1
    if "--check" not in arguments:
        for chart in CHARTS:
            copy(SOURCE, chart)
    stale = sorted({name for chart in CHARTS for name in differences(SOURCE, chart)})
    if stale:
        sys.stderr.write(f"error: the charts' copies of crds/ differ: {', '.join(stale)}. Run `make crds`.\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
