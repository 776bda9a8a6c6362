"""The canary of the chart is a resource that the CRD takes, and the one that the operator is configured to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from persist_operator.api.schema_check import load_schemas
from persist_operator.bridge import CANARY_KEY
from persist_operator.settings import OperatorSettings

CHART = Path(__file__).resolve().parents[2] / "charts" / "persist-operator"
Manifest = dict[str, Any]
STORES = {"blob": "s3://bucket/persist", "consensus": "redis://redis:6379/0"}
PROFILES = {"storageProfiles": {"eu": STORES, "us": STORES}, "defaultProfile": "us"}


def canaries(manifests: list[Manifest]) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == "PersistShard"]


def settings_of(manifests: list[Manifest]) -> OperatorSettings:
    (config,) = [one for one in manifests if one["kind"] == "ConfigMap" and "operator.yaml" in one["data"]]
    return OperatorSettings.parse(config["data"]["operator.yaml"])


def test_the_operator_writes_the_canary_that_the_chart_makes(template: Callable[..., list[Manifest]]) -> None:
    manifests = template({"canary": {"enabled": True, "intervalSeconds": 30}})
    (canary,) = canaries(manifests)
    assert load_schemas().check(canary) == []
    assert canary["spec"]["schema"] == {"key": CANARY_KEY}
    settings = settings_of(manifests).canary
    assert settings.resource == f"{canary['metadata']['namespace']}/{canary['metadata']['name']}"
    assert settings.interval_seconds == 30
    (elsewhere,) = canaries(template({"canary": {"enabled": True, "storageProfile": "eu"}, **PROFILES}))
    assert elsewhere["spec"]["storageProfile"] == "eu"


def test_there_is_none_unless_it_is_asked_for(template: Callable[..., list[Manifest]]) -> None:
    manifests = template({})
    assert canaries(manifests) == []
    assert settings_of(manifests).canary.resource == ""


def test_the_operator_must_watch_it(run_helm: Callable[..., Any]) -> None:
    values = {"canary": {"enabled": True}, "watch": {"namespaces": ["red"]}}
    done = run_helm("template", "persist", str(CHART), "--namespace", "sys", "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert "does not watch namespace sys" in done.stderr
    values["watch"] = {"namespaces": ["red", "sys"]}
    done = run_helm("template", "persist", str(CHART), "--namespace", "sys", "--kube-version", "1.34.0", values=values)
    assert len(canaries(list(yaml.safe_load_all(done.stdout)))) == 1


def test_a_profile_that_is_not_there_is_refused(run_helm: Callable[..., Any]) -> None:
    values = {"canary": {"enabled": True, "storageProfile": "nope"}, **PROFILES}
    done = run_helm("template", "persist", str(CHART), "--namespace", "sys", "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert 'canary.storageProfile "nope" is not among storageProfiles (eu, us)' in done.stderr
