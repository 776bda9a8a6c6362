"""Writes the dashboards into the chart. `--check` exits with 1 and names the files that are not current."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fleet
import one_shard
import one_sink
import the_operator
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).resolve().parents[1] / "persist-operator" / "files" / "monitoring" / "dashboards"
BOARDS = {"fleet": fleet, "shard": one_shard, "sink": one_sink, "operator": the_operator}


def rendered() -> dict[str, str]:
    """The JSON of all dashboards by file name."""
    return {
        f"{name}.json": json.dumps(board.made(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for name, board in BOARDS.items()
    }


def stale(folder: Path) -> list[str]:
    """The names of files in `folder` that are missing, left over, or differ."""
    wanted = rendered()
    found = {path.name: path.read_text() for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def write(folder: Path) -> None:
    """Make `folder` hold exactly the dashboards."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    for name, text in rendered().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        names = stale(FOLDER)
        if names:
            sys.exit(f"error: not current: {', '.join(names)}. Run `make dashboards`.")
    else:
        write(FOLDER)
