"""A real Prometheus that scrapes one target of a test, and its queries."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from persist_kit.servers import Server, ServerMissing

_CONFIG = {
    "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
    "scrape_configs": [{"job_name": "persist-metrics", "honor_labels": True}],
}


class PrometheusServer(Server):
    """Scrapes `target` (host:port) four times a second, and gives it `labels`, as an installation in a cluster does."""

    def __init__(self, folder: Path, target: str, labels: Mapping[str, str]) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise ServerMissing("prometheus is not installed: run `bash .ci/tools.sh prometheus`")
        config: dict[str, Any] = json.loads(json.dumps(_CONFIG))
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target], "labels": dict(labels)}]
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
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
        """The series that the expression gives now. ValueError with Prometheus' message when it cannot be evaluated."""
        status, body = _get(self.port, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        answer = json.loads(body)
        if status != 200:
            raise ValueError(f"{expression}: {answer['error']}")
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextmanager
def prometheus_server(target: str, labels: Mapping[str, str]) -> Iterator[PrometheusServer]:
    """A Prometheus without earlier samples. It takes less than a second and 60 MB."""
    with tempfile.TemporaryDirectory(prefix="persist-prometheus-") as folder:
        server = PrometheusServer(Path(folder), target, labels)
        try:
            yield server
        finally:
            server.stop()


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b'{"error": "no answer"}'
