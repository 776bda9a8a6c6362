"""Stores that resources name themselves: off by default, and what the chart does when they are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from chart_values import CHART, FULL, Manifest, of_kind, operator_config
from persist_engine.base.errors import InvalidUsage
from persist_operator.settings import InlineStorage, OperatorSettings

INLINE: Manifest = {
    "enabled": True,
    "allowedEndpoints": ["minio.stores.svc:9000", "*.s3.example"],
    "allowedConsensus": ["redis.stores.svc"],
    "allowedSecrets": ["team-store"],
    "inspectSeconds": 30,
    "memory": "300Mi",
}


def test_inline_storage_is_off_and_reaches_the_operator_when_it_is_on(template: Callable[..., list[Manifest]]) -> None:
    def parsed(values: Manifest) -> OperatorSettings:
        return OperatorSettings.parse(yaml.safe_dump(operator_config(template(values))))

    assert parsed(FULL).inline_storage == InlineStorage()
    on = parsed({"storage": {"inline": INLINE}}).inline_storage
    assert (on.enabled, on.allowed_endpoints) == (True, ("minio.stores.svc:9000", "*.s3.example"))
    assert (on.allowed_consensus, on.allowed_secrets) == (("redis.stores.svc",), ("team-store",))
    assert (on.inspect_seconds, on.deadline_seconds, on.cpu, on.memory) == (30, 120, "50m", "300Mi")


@pytest.mark.slow
def test_null_lists_of_inline_storage_are_empty(template: Callable[..., list[Manifest]]) -> None:
    """`allowedSecrets:` without a value removes the default."""
    lists = dict.fromkeys(("allowedEndpoints", "allowedConsensus", "allowedSecrets"))
    made = template({"storage": {"inline": {"enabled": True, **lists}}})
    assert OperatorSettings.parse(yaml.safe_dump(operator_config(made))).inline_storage == InlineStorage(enabled=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_executors_mount_the_secrets_of_inline_stores_only_where_those_are_on(
    template: Callable[..., list[Manifest]], enabled: bool
) -> None:
    values = {"storage": {"inline": {**INLINE, "enabled": enabled}}}
    (found,) = [
        one
        for one in of_kind(template(values), "ValidatingAdmissionPolicy")
        if one["metadata"]["name"].endswith("-executors")
    ]
    assert ("team-store" in yaml.safe_dump(found)) == enabled


def test_inline_storage_adds_no_right_and_no_pod(template: Callable[..., list[Manifest]]) -> None:
    def others(values: Manifest) -> list[Manifest]:
        kinds = {"ConfigMap", "Deployment", "ValidatingAdmissionPolicy"}
        return [one for one in template(values) if one["kind"] not in kinds]

    assert others({"storage": {"inline": INLINE}}) == others({})


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["http://s3", "s3/path", "*", "*.", "a b", "u@s3", "s3:x", "", "s3?x", "*s3"])
def test_an_inline_address_that_is_no_server_is_refused_at_install(run_helm: Callable[..., Any], wrong: str) -> None:
    for name in ("allowedEndpoints", "allowedConsensus"):
        values = {"storage": {"inline": {"enabled": True, name: [wrong]}}}
        done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
        assert done.returncode != 0
        assert name in done.stderr
        with pytest.raises(InvalidUsage):
            InlineStorage(allowed_endpoints=(wrong,))
