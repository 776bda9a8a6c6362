"""Graceful stops in the chart: the port and the key that the operator gets, the rights for the key, and what they switch off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from chart_values import CHART, FULL, SMALL, STORES, Manifest, of_kind, operator_config, pod_specs
from persist_operator.cluster.stops import KEY_FILE
from persist_operator.settings import OperatorSettings, StopSettings

OFF: Manifest = {"gracefulStop": {"enabled": False}}
NAME = "persist-persist-operator-stop-key"


def parsed(manifests: list[Manifest]) -> StopSettings:
    return OperatorSettings.parse(yaml.safe_dump(operator_config(manifests))).graceful_stop


def test_the_operator_knows_the_port_and_its_key(template: Callable[..., list[Manifest]]) -> None:
    assert parsed(template(STORES)) == StopSettings(port=7080, namespace="sys", secret_name=NAME)
    assert parsed(template({"gracefulStop": {"port": 9999}})).port == 9999
    assert parsed(template(OFF)).port is None


def test_the_operator_mounts_the_key_even_before_it_exists(template: Callable[..., list[Manifest]]) -> None:
    (spec,) = [spec for name, spec in pod_specs(template({})) if "-test-" not in name]
    assert {
        "name": "stop",
        "secret": {"secretName": NAME, "optional": True, "defaultMode": 0o440},
    } in spec["volumes"]
    mounts = spec["containers"][0]["volumeMounts"]
    assert {"name": "stop", "mountPath": str(KEY_FILE.parent), "readOnly": True} in mounts


def test_the_chart_has_no_key(template: Callable[..., list[Manifest]]) -> None:
    """A random value would be another one at each rendering, which GitOps tools show as a difference for ever."""
    assert of_kind(template(FULL), "Secret") == []


def rules_of(manifests: list[Manifest]) -> list[Manifest]:
    roles = [one for one in of_kind(manifests, "Role") if one["metadata"]["name"].endswith("-leader")]
    return [rule for role in roles for rule in role["rules"]]


@pytest.mark.parametrize(
    ("elects", "stops", "resources"),
    [
        (True, True, ["leases", "leases", "secrets"]),
        (True, False, ["leases", "leases"]),
        (False, True, ["secrets"]),
        (False, False, []),
    ],
)
def test_the_operator_may_create_the_key_in_its_own_namespace(
    template: Callable[..., list[Manifest]], elects: bool, stops: bool, resources: list[str]
) -> None:
    values = {"leaderElection": {"enabled": elects}, "gracefulStop": {"enabled": stops}}
    rules = rules_of(template({**values, "watch": {"namespaces": ["red"]}}))
    assert [one for rule in rules for one in rule["resources"]] == resources
    assert [rule["verbs"] for rule in rules if rule["resources"] == ["secrets"]] == [["create"]] * stops


def test_without_it_nothing_is_left_of_it(template: Callable[..., list[Manifest]]) -> None:
    text = yaml.safe_dump_all(template({**FULL, **OFF}))
    assert "7080" not in text
    assert "stop-key" not in text
    assert "stop-key" not in yaml.safe_dump_all(of_kind(template(SMALL), "Role"))


@pytest.mark.parametrize(
    "values",
    [
        {"gracefulStop": {"port": 7078}},
        {"gracefulStop": {"port": 4040}},
        {"gracefulStop": {"port": 80}},
        {"gracefulStop": {"on": True}},
        {"gracefulStop": {"port": 9464}, "metrics": {"podMonitor": {"enabled": True}}},
    ],
)
def test_a_port_that_drivers_cannot_have_is_refused(run_helm: Callable[..., Any], values: Manifest) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert "gracefulStop" in done.stderr
