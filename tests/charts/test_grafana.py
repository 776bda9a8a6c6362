"""Grafana with the dashboards and the alert rules of the chart, over a real Prometheus. Where there is no Grafana, its files are checked."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from persist_kit.prometheus import prometheus_server
from persist_kit.servers import Server
from persist_operator.handlers.probes import ProbeServer
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

Manifest = dict[str, Any]
GRAFANA = next((found for name in ("grafana", "grafana-server") if (found := shutil.which(name))), None)
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
#: Where packages put Grafana's own files.
HOME = next(
    (
        folder
        for folder in (Path("/usr/share/grafana"), *([Path(GRAFANA).resolve().parents[1]] if GRAFANA else []))
        if (folder / "conf" / "defaults.ini").is_file()
    ),
    None,
)
ON: Manifest = {
    "grafana": {"dashboards": {"enabled": True}, "alerts": {"enabled": True, "datasourceUid": "prometheus"}}
}
SETTINGS = {
    "GF_AUTH_ANONYMOUS_ENABLED": "true",
    "GF_AUTH_ANONYMOUS_ORG_ROLE": "Admin",
    "GF_ANALYTICS_REPORTING_ENABLED": "false",
    "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    "GF_PLUGINS_PREINSTALL_DISABLED": "true",
    "GF_LOG_LEVEL": "warn",
}


def provisioned(folder: Path, manifests: list[Manifest], prometheus_url: str) -> Path:
    """A provisioning folder as the sidecars of Grafana's chart would fill it from the ConfigMaps of the chart."""
    for name in ("datasources", "dashboards", "alerting", "boards"):
        (folder / name).mkdir(parents=True)
    source = {"name": "Prometheus", "type": "prometheus", "uid": "prometheus", "url": prometheus_url, "isDefault": True}
    write(folder / "datasources" / "prometheus.yaml", {"apiVersion": 1, "datasources": [{**source, "access": "proxy"}]})
    provider = {"name": "persist", "folder": "persist", "type": "file", "options": {"path": str(folder / "boards")}}
    write(folder / "dashboards" / "persist.yaml", {"apiVersion": 1, "providers": [provider]})
    for one in manifests:
        labels = one["metadata"].get("labels", {})
        target = {"grafana_dashboard": "boards", "grafana_alert": "alerting"}
        for label, place in target.items():
            if one["kind"] == "ConfigMap" and labels.get(label) == "1":
                for name, text in one["data"].items():
                    (folder / place / name).write_text(text)
    return folder


def write(file: Path, document: Manifest) -> None:
    file.write_text(yaml.safe_dump(document))


@pytest.fixture
def rendered(template: Callable[..., list[Manifest]]) -> list[Manifest]:
    return template(ON)


def test_the_files_that_grafana_reads_fit_together(rendered: list[Manifest], tmp_path: Path) -> None:
    folder = provisioned(tmp_path / "made", rendered, "http://127.0.0.1:9090")
    boards = [json.loads(path.read_text()) for path in sorted((folder / "boards").iterdir())]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 4
    (alerts,) = (yaml.safe_load(path.read_text()) for path in (folder / "alerting").iterdir())
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len(rules) > 45
    for group in alerts["groups"]:
        assert group["folder"]
        assert group["orgId"] == 1
    for rule in rules:
        by_ref = {one["refId"]: one for one in rule["data"]}
        assert rule["condition"] in by_ref
        assert {one["datasourceUid"] for one in rule["data"]} == {source["uid"], "__expr__"}
        assert all(one["model"]["refId"] == ref for ref, one in by_ref.items())
        assert set(rule) >= {"uid", "title", "for", "noDataState", "execErrState", "labels", "annotations"}
    for board in boards:
        (choice,) = [one for one in board["templating"]["list"] if one["name"] == "datasource"]
        assert (choice["type"], choice["query"]) == ("datasource", source["type"])


class GrafanaServer(Server):
    """A Grafana with this provisioning. Each visitor is its administrator."""

    def __init__(self, folder: Path, provisioning: Path) -> None:
        program, home = str(GRAFANA), str(HOME)
        server = [program, "server"] if program.endswith("/grafana") else [program]
        self._folder, self._provisioning = folder, provisioning

        def command(port: int) -> list[str]:
            paths = {"data": folder / "data", "logs": folder / "logs", "plugins": folder / "plugins"}
            options = [f"cfg:default.paths.{name}={path}" for name, path in paths.items()]
            options += [f"cfg:default.paths.provisioning={provisioning}", f"cfg:default.server.http_port={port}"]
            return [
                "env",
                *(f"{name}={value}" for name, value in SETTINGS.items()),
                *server,
                "--homepath",
                home,
                *options,
            ]

        super().__init__(command, lambda port: get(port, "/api/health")[0] == 200, folder)


def get(port: int, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    except (OSError, ValueError):
        return 0, None
    finally:
        connection.close()


@pytest.fixture
def operator() -> Iterator[int]:
    """The port of an operator's metrics."""
    registry = CollectorRegistry()
    OperatorMetrics(registry).leader.set(1)
    server = ProbeServer(
        0, registry=registry, sick_of=lambda: None, waits_for=lambda: None, refresh=lambda: None, host="127.0.0.1"
    )
    server.start()
    yield server.port
    server.stop()


@pytest.mark.slow
@pytest.mark.skipif(
    GRAFANA is None or HOME is None,
    reason="no grafana with its files on this machine: put Grafana 10 or newer on PATH, as its packages do",
)
def test_a_real_grafana_takes_all_dashboards_and_rules(rendered: list[Manifest], operator: int, tmp_path: Path) -> None:
    with prometheus_server(f"127.0.0.1:{operator}", {"namespace": "sys", "pod": "persist-0"}) as prometheus:
        provisioning = provisioned(tmp_path / "provisioning", rendered, f"http://{prometheus.address}")
        with tempfile.TemporaryDirectory(prefix="persist-grafana-") as folder:
            grafana = GrafanaServer(Path(folder), provisioning)
            try:
                check(grafana, provisioning)
                screenshots(grafana, Path(os.environ.get("SCREENSHOTS", str(tmp_path))))
            finally:
                grafana.stop()


def check(grafana: GrafanaServer, provisioning: Path) -> None:
    for path in (provisioning / "boards").iterdir():
        board = json.loads(path.read_text())
        code, found = get(grafana.port, f"/api/dashboards/uid/{board['uid']}")
        assert (code, found["dashboard"]["title"]) == (200, board["title"])
        assert len(found["dashboard"]["panels"]) == len(board["panels"])
    wanted = [path.read_text() for path in (provisioning / "alerting").iterdir()]
    rules = [rule["uid"] for text in wanted for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    code, found = get(grafana.port, "/api/v1/provisioning/alert-rules")
    assert code == 200
    assert sorted(one["uid"] for one in found) == sorted(rules)


def screenshots(grafana: GrafanaServer, folder: Path) -> None:
    """A picture of each dashboard; a panel without data says so, and none shows an error. Nothing without a Chromium."""
    if CHROMIUM is None:
        return
    for uid in ("fleet", "operator", "shard", "sink"):
        picture = folder / f"grafana-{uid}.png"
        url = f"http://{grafana.address}/d/persist-{uid}?kiosk"
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1600,2400",
        ]
        command += ["--virtual-time-budget=20000", f"--screenshot={picture}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
        assert picture.stat().st_size > 20_000
