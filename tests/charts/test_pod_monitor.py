"""Drivers serve their metrics where the PodMonitor looks for them, and only what may connect to that port does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from persist_operator.manifests.driver import METRICS_PORT
from persist_operator.settings import OperatorSettings

CHART = Path(__file__).resolve().parents[2] / "charts" / "persist-operator"
Manifest = dict[str, Any]
PODS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def monitored(**changes: Any) -> Manifest:
    return {"metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, **changes}}}


def named(manifests: list[Manifest], kind: str, end: str = "") -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind and one["metadata"]["name"].endswith(end)]


def test_the_monitor_selects_drivers_and_their_port(template: Callable[..., list[Manifest]]) -> None:
    manifests = template(
        {**monitored(interval="10s"), "watch": {"namespaces": ["red"]}, "workload": {"namespaces": ["blue"]}}
    )
    (monitor,) = named(manifests, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/managed-by": "persist-operator",
        "app.kubernetes.io/component": "sink",
        "persistshard.io/role": "driver",
    }
    assert set(monitor["spec"]["namespaceSelector"]["matchNames"]) == {"red", "blue"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == (METRICS_PORT, "10s")
    (everywhere,) = named(template({**monitored(), "watch": {"clusterWide": True}}), "PodMonitor")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}


def settings_of(manifests: list[Manifest]) -> OperatorSettings:
    (config,) = [one for one in named(manifests, "ConfigMap") if "operator.yaml" in one["data"]]
    return OperatorSettings.parse(config["data"]["operator.yaml"])


def test_the_operator_gives_drivers_the_port_that_is_scraped(template: Callable[..., list[Manifest]]) -> None:
    assert settings_of(template(monitored(port=9999))).workload.driver_metrics_port == 9999
    assert settings_of(template({})).workload.driver_metrics_port is None
    assert named(template({}), "PodMonitor") == []


@pytest.mark.parametrize("allowed", [[], PODS], ids=["all", "some"])
def test_the_port_is_open_to_what_may_scrape(template: Callable[..., list[Manifest]], allowed: list[Manifest]) -> None:
    manifests = template(monitored(allowFrom=allowed))
    (sinks,) = named(manifests, "NetworkPolicy", "-sinks")
    spark, _, scrape = sinks["spec"]["ingress"]
    assert {one["port"] for one in spark["ports"]} == {7078, 7079}
    assert scrape["ports"] == [{"protocol": "TCP", "port": 9464}]
    assert scrape.get("from", []) == allowed
    (maintenance,) = named(manifests, "NetworkPolicy", "-maintenance")
    assert "ingress" not in maintenance["spec"]


@pytest.mark.parametrize("port", [7078, 7079, 7080, 80])
def test_a_port_that_drivers_cannot_have_is_refused(run_helm: Callable[..., Any], port: int) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=monitored(port=port))
    assert done.returncode != 0
    assert "port" in done.stderr
