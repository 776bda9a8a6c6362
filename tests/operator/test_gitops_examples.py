"""The files that users copy into their Git: resources that the API server takes, and definitions that no tool prunes."""

from pathlib import Path

import yaml
from persist_operator.api.schema_check import load_schemas

GITOPS = Path(__file__).parents[2] / "examples/gitops"


def documents(folder):
    return [
        one for path in sorted(GITOPS.glob(f"{folder}/*.yaml")) for one in yaml.safe_load_all(path.read_text()) if one
    ]


def test_the_resources_are_valid_and_come_in_their_order():
    named = yaml.safe_load((GITOPS / "shards/kustomization.yaml").read_text())["resources"]
    assert set(named) == {path.name for path in GITOPS.glob("shards/*.yaml")} - {"kustomization.yaml"}
    waves = {}
    for one in documents("shards"):
        if one["kind"] != "Kustomization":
            assert load_schemas().check(one) == []
            waves[one["kind"]] = int(one["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"])
    assert waves["PersistShard"] < waves["SparkSink"]
    (shard,) = [one for one in documents("shards") if one["kind"] == "PersistShard"]
    assert shard["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == "Prune=confirm"


def test_flux_prunes_no_definition_and_waits_for_every_resource():
    by_name = {one["metadata"]["name"]: one["spec"] for one in documents("flux") if one["kind"] == "Kustomization"}
    definitions, shards = by_name["persist-definitions"], by_name["persist-shards"]
    assert definitions["prune"] is False
    (patch,) = definitions["patches"]
    (change,) = yaml.safe_load(patch["patch"])
    assert change["value"] == {"kustomize.toolkit.fluxcd.io/prune": "disabled"}
    assert shards["wait"] is True
    assert {one["kind"] for one in shards["healthCheckExprs"]} == {"PersistShard", "SparkSink"}
    assert {one["apiVersion"] for one in shards["healthCheckExprs"]} == {"persistshard.io/v1alpha1"}
    assert {one["name"] for one in shards["dependsOn"]} <= set(by_name)
    (release,) = [one["spec"] for one in documents("flux") if one["kind"] == "HelmRelease"]
    assert release["values"]["crds"] == {"enabled": False}


def test_the_values_of_the_example_are_values_of_the_chart():
    (release,) = [one["spec"] for one in documents("flux") if one["kind"] == "HelmRelease"]
    known = yaml.safe_load((GITOPS.parents[1] / "charts/persist-operator/values.yaml").read_text())
    assert release["values"].keys() <= known.keys()
