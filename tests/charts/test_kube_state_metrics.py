"""The configuration of kube-state-metrics reads fields that the resources have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
Manifest = dict[str, Any]
SCHEMAS = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path in (ROOT / "crds").glob("*.yaml")
    for crd in [yaml.load(path.read_text(), yaml.CSafeLoader)]
}
FILE = ROOT / "charts/persist-operator/files/monitoring/kube-state-metrics.yaml"
RESOURCES: list[Manifest] = yaml.safe_load(FILE.read_text())["spec"]["resources"]
METADATA = {"generation": "integer", "deletionTimestamp": "string", "namespace": "string", "name": "string"}


def field(kind: str, path: list[str]) -> Manifest:
    """The schema of a field. AssertionError when the resource has no such field."""
    if path[0] == "metadata":
        assert path[1] in METADATA, path
        return {"type": METADATA[path[1]]}
    schema: Manifest = SCHEMAS[kind]
    for name in path:
        schema = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        assert isinstance(schema, dict), f"{kind} has no {'.'.join(path)}"
    return schema


def test_both_kinds_are_there() -> None:
    assert [one["groupVersionKind"]["kind"] for one in RESOURCES] == ["PersistShard", "SparkSink"]
    for one in RESOURCES:
        assert one["groupVersionKind"]["group"] == "persistshard.io"
        assert one["groupVersionKind"]["version"] == "v1alpha1"
        assert one["labelsFromPath"] == {"namespace": ["metadata", "namespace"], "name": ["metadata", "name"]}


@pytest.mark.parametrize("one", RESOURCES, ids=lambda one: one["groupVersionKind"]["kind"])
def test_each_metric_reads_a_field_that_has_a_number(one: Manifest) -> None:
    kind, names = one["groupVersionKind"]["kind"], set()
    for metric in one["metrics"]:
        assert metric.keys() == {"name", "help", "each"}
        assert metric["name"] not in names
        names.add(metric["name"])
        assert metric["each"].keys() == {"type", "gauge"}
        gauge = metric["each"]["gauge"]
        found = field(kind, gauge["path"])
        if "valueFrom" in gauge:
            inner = found["items"]["properties"]
            assert {path[0] for path in [gauge["valueFrom"], *gauge["labelsFromPath"].values()]} <= inner.keys()
        else:
            is_time = found["type"] == "string" and gauge["path"][-1].endswith(("Time", "Timestamp"))
            assert found["type"] in {"integer", "number", "boolean"} or is_time, gauge["path"]


def test_a_field_that_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="PersistShard has no status.nothing"):
        field("PersistShard", ["status", "nothing"])


def test_the_chart_renders_it_when_asked(template: Callable[..., list[Manifest]]) -> None:
    def maps(values: Manifest) -> list[Manifest]:
        return [one for one in template(values) if one["metadata"]["name"].endswith("-kube-state-metrics")]

    (found,) = maps({"kubeStateMetrics": {"enabled": True, "labels": {"team": "data"}}})
    assert yaml.safe_load(found["data"]["config.yaml"])["spec"]["resources"] == RESOURCES
    assert found["metadata"]["labels"]["team"] == "data"
    assert not maps({})
