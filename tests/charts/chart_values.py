"""Values of the chart, from none to many, and what of its manifests the tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "persist-operator"
Manifest = dict[str, Any]
STORES: Manifest = {
    "storageProfiles": {
        "default": {
            "blob": "s3://bucket/prefix?region=eu-central-1",
            "consensus": "redis://redis.stores.svc:6379/0",
            "secretName": "persist-store",
            "allowedNamespaces": {"names": ["red"]},
        }
    }
}
FULL: Manifest = {
    **STORES,
    "replicas": 2,
    "watch": {"namespaces": ["red", "blue"]},
    "pullSecrets": ["registry"],
    "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "workload": {
        "namespaces": ["red"],
        "driverCpuRequest": "200m",
        "serviceAccounts": ["etl"],
        "allow": {"secrets": ["api-key"]},
        "serviceAccount": {"annotations": {"cloud/role": "writer"}},
    },
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "priorityClassName": "high",
    "loop": {"workers": 8, "resyncSeconds": 60},
    "limits": {"drivers": 3, "perStore": 2},
    "podAnnotations": {"note": "x"},
    "podLabels": {"team": "data"},
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
}
SMALL: Manifest = {
    "crds": {"enabled": False},
    "rbac": {"create": False},
    "serviceAccount": {"create": False},
    "leaderElection": {"enabled": False},
}
SETS = pytest.mark.parametrize("values", [{}, STORES, FULL, SMALL], ids=["none", "stores", "full", "small"])


def profiles(**changes: Manifest) -> Manifest:
    """Values with these profiles, each on valid stores."""
    stores = {"blob": "s3://b", "consensus": "redis://r:6379/0"}
    return {"storageProfiles": {name: {**stores, **change} for name, change in changes.items()}}


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for one in manifests:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        elif "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def operator_config(manifests: list[Manifest]) -> Manifest:
    (found,) = of_kind(manifests, "ConfigMap")
    return yaml.safe_load(found["data"]["operator.yaml"])
