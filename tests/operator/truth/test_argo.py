"""The Lua for Argo CD: it shows every phase as kstatus computes it, and offers the requests that can have an effect."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from persist_operator.api import conditions, names
from phases import CURRENT, FAILED, IN_PROGRESS


def customizations():
    """The Lua of the ConfigMap that users merge into Argo CD's: (health or actions, kind) -> script, or discovery and actions."""
    text = (Path(__file__).parents[3] / "examples/gitops/argocd/argocd-cm.yaml").read_text()
    data = {tuple(key.split(".", 2)[2].split(".", 1)): value for key, value in yaml.safe_load(text)["data"].items()}
    return {(part, kind.partition("_")[2]): value for (part, kind), value in data.items()}


#: What Argo CD shows of what kstatus computes. Suspended comes first: it is an order, not a fault.
HEALTH = {CURRENT: "Healthy", IN_PROGRESS: "Progressing", FAILED: "Degraded", "Terminating": "Progressing"}


def test_a_resource_that_no_operator_has_seen_is_in_progress(
    shard_resource, sink_resource, kstatus, kstatus_twin, argo, tmp_path
):
    """By the status that its definition gives it. Without one, kstatus would take it for Current."""
    new = [shard_resource(), sink_resource()]
    assert [one["status"] for one in new] == [{"observedGeneration": 0}] * 2
    assert kstatus(new) == [kstatus_twin(one) for one in new] == [IN_PROGRESS] * 2
    shown = [argo("health", customizations()["health", one["kind"]], [one], tmp_path)[0] for one in new]
    assert [one["status"] for one in shown] == ["Progressing"] * 2


@pytest.mark.slow
def test_argo_shows_what_kstatus_computes_in_every_phase(shards, sinks, broken, argo, kstatus, tmp_path):
    kinds = {"PersistShard": shards, "SparkSink": sinks}
    for kind, resources in kinds.items():
        every = [*resources.values(), *(one for (_, _), one in broken.items() if one["kind"] == kind)]
        script = customizations()["health", kind]
        shown = argo("health", script, every, tmp_path)
        for resource, health, computed in zip(every, shown, kstatus(every), strict=True):
            is_suspended = computed != IN_PROGRESS and conditions.is_true(resource["status"], "Suspended")
            assert health["status"] == ("Suspended" if is_suspended else HEALTH[computed]), (resource, health)
            assert health["message"]
        assert argo("health", script, [{**every[0], "status": {}}], tmp_path)[0]["status"] == "Progressing"
        without = {key: value for key, value in every[0].items() if key != "status"}
        assert argo("health", script, [without], tmp_path)[0]["status"] == "Progressing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spec", "status", "enabled"),
    [
        ("PersistShard", {"paused": True}, {}, set()),
        ("SparkSink", {"paused": True}, {}, set()),
        ("PersistShard", {}, {}, {"compact", "gc", "rollup", "verify", "orphan-scan"}),
        ("PersistShard", {"suspend": True}, {}, set()),
        (
            "PersistShard",
            {"suspend": True},
            {"plan": {"id": "4f2c", "approved": False}},
            {"approve"},
        ),
        ("SparkSink", {}, {}, {"restart"}),
        ("SparkSink", {}, {"rollout": {"state": "ReadyToPromote"}}, {"restart", "promote"}),
        ("SparkSink", {}, {"rollout": {"state": "RolledBack"}}, {"restart"}),
        ("SparkSink", {"suspend": True}, {"rollout": {"state": "ReadyToPromote"}}, set()),
    ],
)
def test_argo_offers_the_requests_that_can_have_an_effect(kind, spec, status, enabled, argo, tmp_path):
    annotations = {"annotations": {names.ANNOTATION_PAUSED: "true"}} if spec == {"paused": True} else {}
    resource = {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {"name": "x", **annotations},
        "spec": spec,
        "status": status,
    }
    actions = yaml.safe_load(customizations()["actions", kind])
    (offered,) = argo("discovery", actions["discovery.lua"], [resource], tmp_path)
    assert {name for name, one in offered.items() if not one["disabled"]} == enabled
    scripts = {one["name"]: one["action.lua"] for one in actions["definitions"]}
    assert scripts.keys() == offered.keys()
    for name in enabled:
        (changed,) = argo("action", scripts[name], [resource], tmp_path)
        (annotation,) = changed["metadata"].pop("annotations").items()
        assert annotation[0] == f"{names.REQUEST_PREFIX}{name}"
        is_time = re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", annotation[1])
        assert annotation[1] == "4f2c" if name == "approve" else is_time
        assert {**changed, "spec": spec, "status": status} == resource, "nothing else is changed"


def test_argo_reads_what_the_lua_says():
    command = [sys.executable, Path(__file__).parents[3] / "examples/gitops/argocd/build.py", "--check"]
    assert subprocess.run(command, check=False).returncode == 0
