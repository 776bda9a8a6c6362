"""A real Prometheus, which scrapes the targets of a test or those that its own jobs find, evaluates rules, and answers queries; and a real
Alertmanager, to which it sends alerts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from persist_kit.servers import Server, ServerMissing


class PrometheusServer(Server):
    """Scrapes each target (host:port) at the interval `every`, with the target's labels, as an installation in a cluster does; or the
    targets that `jobs`, the scrape configurations of a test, find. Evaluates the groups of rules at the same interval, and sends alerts to
    `alertmanager` (host:port).
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Mapping[str, str]],
        *,
        groups: list[dict[str, Any]] | None = None,
        alertmanager: str | None = None,
        jobs: list[dict[str, Any]] | None = None,
        every: str = "250ms",
    ) -> None:
        scraped = [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()]
        static = {"job_name": "persist-metrics", "honor_labels": True, "static_configs": scraped}
        rules = folder / "rules.yml"
        rules.write_text(json.dumps({"groups": groups or []}))  # JSON is YAML
        informed = [{"static_configs": [{"targets": [alertmanager]}]}] if alertmanager else []
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "scrape_configs": jobs or [static],
            "rule_files": [str(rules)],
            "alerting": {"alertmanagers": informed},
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))
        program = _program("prometheus")
        super().__init__(
            lambda port: [
                program,
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
            lambda port: _get(port, "/-/ready")[0] == 200,
            folder,
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The present series of the expression. Raises ValueError with Prometheus' message when it cannot be evaluated."""
        status, body = _get(self.port, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        answer = json.loads(body)
        if status != 200:
            raise ValueError(f"{expression}: {answer['error']}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def without_series(self, expressions: Mapping[str, str], *, within_s: float) -> dict[str, str]:
        """The `expressions`, by name, that have returned no series within this time. Returns as soon as all have returned some."""
        left, end_s = dict(expressions), time.monotonic() + within_s
        while True:
            left = {name: text for name, text in left.items() if not self.query(text)}
            if not left or time.monotonic() >= end_s:
                return left
            time.sleep(0.2)


def panel_queries(dashboards: Path, values: Mapping[str, str]) -> dict[str, str]:
    """The queries of all panels of the dashboards in a folder, by file, title and reference, with `values` for their variables."""
    found = {}
    for path in sorted(dashboards.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for one in panel.get("panels") or [panel]:
                for target in one.get("targets", ()):
                    text = target["expr"]
                    for name, value in values.items():
                        text = text.replace(name, value)
                    found[f"{path.stem}: {one['title']}: {target['refId']}"] = text
    return found


class AlertmanagerServer(Server):
    """A single Alertmanager without peers. It notifies no receiver. A test reads the alerts from it."""

    def __init__(self, folder: Path) -> None:
        file = folder / "alertmanager.yml"
        file.write_text(json.dumps({"route": {"receiver": "none"}, "receivers": [{"name": "none"}]}))
        program = _program("prometheus-alertmanager")
        super().__init__(
            lambda port: [
                program,
                f"--config.file={file}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
                "--log.level=error",
            ],
            lambda port: _get(port, "/-/ready")[0] == 200,
            folder,
        )

    def firing(self) -> list[dict[str, Any]]:
        """The alerts that are active now, as its API shows them."""
        status, body = _get(self.port, "/api/v2/alerts?active=true")
        alerts: list[dict[str, Any]] = json.loads(body) if status == 200 else []
        return alerts


@contextmanager
def prometheus_server(
    targets: Mapping[str, Mapping[str, str]],
    *,
    groups: list[dict[str, Any]] | None = None,
    alertmanager: str | None = None,
    jobs: list[dict[str, Any]] | None = None,
    every: str = "250ms",
) -> Iterator[PrometheusServer]:
    """A Prometheus without earlier samples. It takes less than a second and 60 MB."""
    with tempfile.TemporaryDirectory(prefix="persist-prometheus-") as folder:
        server = PrometheusServer(
            Path(folder), targets, groups=groups, alertmanager=alertmanager, jobs=jobs, every=every
        )
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def alertmanager_server() -> Iterator[AlertmanagerServer]:
    """An Alertmanager without alerts."""
    with tempfile.TemporaryDirectory(prefix="persist-alertmanager-") as folder:
        server = AlertmanagerServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerMissing(f"{name} is not installed: run `bash .ci/tools.sh prometheus`")
    return found


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b'{"error": "no answer"}'
