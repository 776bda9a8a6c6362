"""Renders the chart with the real helm; shared by the chart's tests."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from persist_kit.neighbours import neighbours

(chart_values,) = neighbours(__file__, "chart_values")
CHART, Manifest = chart_values.CHART, dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> str:
    """Path of helm: on PATH, or where `make setup` installs it."""
    cache = Path(os.environ.get("CACHE", Path.home() / ".cache" / "persist-operator")) / "bin" / "helm"
    found = shutil.which("helm") or (str(cache) if cache.is_file() else None)
    if found is None:
        pytest.fail("helm is not installed: run `bash .ci/tools.sh helm`")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """Path of promtool, which checks and runs rules."""
    found = shutil.which("promtool")
    if found is None:
        pytest.fail("promtool is not installed: run `bash .ci/tools.sh prometheus`")
    return found


@pytest.fixture(scope="session")
def run_helm(helm: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Call helm. A non-zero exit does not raise, so that tests can check refusals. Helm lives for a tenth of a second and collects no garbage."""
    environ = {**os.environ, "GOGC": "off"}

    def call(*arguments: str, values: Manifest | None = None) -> subprocess.CompletedProcess[str]:
        given = [] if values is None else ["--values", "-"]
        return subprocess.run(
            [helm, *arguments, *given],
            input=yaml.safe_dump(values or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environ,
        )

    return call


@pytest.fixture(scope="session")
def template(run_helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., list[Manifest]]:
    """The manifests for some values, rendered once a session and copied. Fails the test if helm refuses the values."""
    rendered: dict[str, list[Manifest]] = {}

    def render(values: Manifest | None = None, *, namespace: str = "sys") -> list[Manifest]:
        key = json.dumps([values, namespace])
        if key not in rendered:
            rendered[key] = rendering(values, namespace)
        return copy.deepcopy(rendered[key])

    def rendering(values: Manifest | None, namespace: str) -> list[Manifest]:
        done = run_helm(
            "template", "persist", str(CHART), "--namespace", namespace, "--kube-version", "1.34.0", values=values or {}
        )
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if document]  # noqa: S506

    return render
