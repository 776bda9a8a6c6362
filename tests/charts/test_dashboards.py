"""The dashboards as Grafana would take them: current, complete, of the SDK's types, with queries that Prometheus can parse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.builders import prometheus as builders
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "charts/dashboards/build.py"
FOLDER = ROOT / "charts/persist-operator/files/monitoring/dashboards"
FILES = sorted(FOLDER.glob("*.json"))
Manifest = dict[str, Any]
ALL = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
#: Units that Grafana knows and the dashboards use.
UNITS = {"short", "s", "bytes", "Bps", "ops", "reqps"}
VARIABLES = {
    "$namespace": "team",
    "$shard": "flights",
    "$sink": "load",
    "$__rate_interval": "5m",
}


def panels(board: Manifest) -> Iterator[Manifest]:
    """All panels that show something, those of collapsed rows too."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def expressions(board: Manifest) -> list[str]:
    """The queries of all panels, with values for variables."""
    found = []
    for panel in panels(board):
        for target in panel["targets"]:
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            found.append(text)
    return found


def test_the_chart_has_what_the_program_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(BUILD), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_dashboard_that_was_edited_by_hand_is_found(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(BUILD.parent)!r}); import build, pathlib; print(build.stale(pathlib.Path({str(tmp_path)!r})))"
    for path in FILES:
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "shard.json").write_text((FOLDER / "shard.json").read_text().replace('"Ready"', '"Well"'))
    (tmp_path / "old.json").write_text("{}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['old.json', 'shard.json']"


@ALL
def test_the_types_of_grafana_take_it_and_give_it_back(path: Path) -> None:
    plugins.register_default_plugins()
    text = path.read_text()
    decoded = models.Dashboard.from_json(json.loads(text))
    assert json.loads(json.dumps(decoded, cls=JSONEncoder)) == json.loads(text)
    queries = [target for panel in decoded.panels or [] for target in getattr(panel, "targets", None) or []]
    wanted = type(builders.Dataquery().build())
    assert all(isinstance(query, wanted) for query in queries)


def test_uids_never_change() -> None:
    boards = [json.loads(path.read_text()) for path in FILES]
    assert [board["uid"] for board in boards] == [f"persist-{path.stem}" for path in FILES]
    assert [path.stem for path in FILES] == ["fleet", "operator", "shard", "sink"]


@ALL
def test_each_panel_is_described_and_has_a_unit(path: Path) -> None:
    board = json.loads(path.read_text())
    found = list(panels(board))
    assert found
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["description"] != panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, panel["title"]
        assert defaults["noValue"] == "unknown", panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        for target in panel["targets"]:
            assert "vector(0)" not in target["expr"], "an unknown value is not 0"
        if panel["type"] == "timeseries":
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False


@ALL
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@ALL
def test_variables_are_those_that_queries_use(path: Path) -> None:
    board = json.loads(path.read_text())
    declared = {f"${one['name']}" for one in board["templating"]["list"]} - {"$datasource"}
    text = json.dumps([*board["panels"], *(one["query"] for one in board["templating"]["list"])])
    used = {name for name in re.findall(r"\$[a-z_]+", text) if name not in {"$__rate_interval", "$datasource"}}
    assert used == declared


def test_prometheus_parses_every_query(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"q:{path.stem}:{at}", "expr": text}
        for path in FILES
        for at, text in enumerate(expressions(json.loads(path.read_text())))
    ]
    file = tmp_path / "queries.yaml"

    def check(found: list[Manifest]) -> subprocess.CompletedProcess[str]:
        file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": found}]}))
        return subprocess.run(
            [promtool, "check", "rules", "--lint=none", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = check(rules)
    assert done.returncode == 0, done.stderr
    assert check([*rules, {"record": "q:bad", "expr": "sum(rate(x[5m])"}]).returncode != 0


def test_each_dashboard_is_a_config_map_that_grafana_finds(template: Callable[..., list[Manifest]]) -> None:
    def found(values: Manifest) -> dict[str, Manifest]:
        manifests = template({"grafana": {"dashboards": {"enabled": True, **values}}})
        return {
            next(iter(one["data"])): one
            for one in manifests
            if one["kind"] == "ConfigMap" and "-grafana-" in one["metadata"]["name"]
        }

    maps = found({})
    assert maps.keys() == {f"persist-{path.name}" for path in FILES}
    for name, one in maps.items():
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "persist"}
        assert one["data"][name] == (FOLDER / name.removeprefix("persist-")).read_text()
        assert len(json.dumps(one)) < 500_000, "the API server takes a megabyte"
    other = found({"label": "board", "labelValue": "yes", "folder": ""})
    assert {one["metadata"]["labels"]["board"] for one in other.values()} == {"yes"}
    assert all("annotations" not in one["metadata"] for one in other.values())
