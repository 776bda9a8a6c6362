"""The chart as helm renders it: valid, restricted, least-privileged, and repeatable for GitOps."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from persist_engine.base.errors import InvalidUsage
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR
from persist_operator.settings import InlineStorage, OperatorSettings, ShardingSettings

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


def profiles(**changes: Manifest) -> Manifest:
    """Values with these profiles, each on valid stores."""
    stores = {"blob": "s3://b", "consensus": "redis://r:6379/0"}
    return {"storageProfiles": {name: {**stores, **change} for name, change in changes.items()}}


SETS = pytest.mark.parametrize("values", [{}, STORES, FULL, SMALL], ids=["none", "stores", "full", "small"])


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


@pytest.mark.slow
def test_the_operator_is_known_in_stores_by_its_release_unless_it_has_a_name(
    template: Callable[..., list[Manifest]],
) -> None:
    assert operator_config(template({}))["operatorId"] == "sys/persist-persist-operator"
    assert operator_config(template({"operatorId": "eu-1/main"}))["operatorId"] == "eu-1/main"


@pytest.mark.parametrize(
    "wrong",
    [
        {"operatorId": "a b"},
        {"operatorId": "x" * 129},
        {"storageProfiles": {"default": {"blob": "s3://b/p", "consensus": "redis://r/0", "takeOver": "All"}}},
    ],
)
def test_an_impossible_owner_is_refused_at_install(run_helm: Callable[..., Any], wrong: Manifest) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=wrong)
    assert done.returncode != 0
    assert "operatorId" in done.stderr or "takeOver" in done.stderr


@pytest.mark.slow
@SETS
def test_lint_is_clean(run_helm: Callable[..., Any], values: Manifest) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@SETS
def test_every_pod_is_restricted(template: Callable[..., list[Manifest]], values: Manifest) -> None:
    """The rules of the restricted pod security standard, and a read-only root file system."""
    pods = list(pod_specs(template(values)))
    assert len(pods) == (4 if values.get("rbac", {}).get("create", True) else 3)
    for name, spec in pods:
        for banned in ("hostNetwork", "hostPID", "hostIPC"):
            assert not spec.get(banned), name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert all({"configMap", "emptyDir", "secret"} & set(volume) for volume in spec.get("volumes", []))
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in context
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


@SETS
def test_selectors_find_the_operator_and_nothing_else(
    template: Callable[..., list[Manifest]], values: Manifest
) -> None:
    manifests = template(values)
    (deployment,) = of_kind(manifests, "Deployment")
    test_pods = of_kind(manifests, "Pod")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        *(one["spec"]["selector"] for one in of_kind(manifests, "Service")),
    ]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(manifests, "PodDisruptionBudget")]
    for selector in selectors:
        assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        assert not [pod for pod in test_pods if selector.items() <= pod["metadata"]["labels"].items()]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 65}, "replicas"),
        ({"sharding": {"slices": 128}}, "slices"),
        ({"replicas": "two"}, "replicas"),
        ({"image": {"digest": "sha256:short"}}, "digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"storageProfiles": {"default": {"blob": "s3://b"}}}, "consensus"),
        ({"storageProfiles": {"default": {"blob": "ftp://b", "consensus": "redis://r"}}}, "blob"),
        ({"storageProfiles": {"default": {"blob": "s3://b", "consensus": "redis://user:secret@r:6379"}}}, "consensus"),
        ({"storageProfiles": {"default": {"blob": "s3://b", "consensus": "redis://r", "secret": "s"}}}, "secret"),
        ({"storageProfiles": {"default": {"blob": "s3://k:s@b", "consensus": "redis://r"}}}, "blob"),
        ({"storageProfiles": {"default": {"blob": "s3://b", "consensus": "redis://r?password_file=/x"}}}, "consensus"),
        ({"storageProfiles": {"default": {"blob": "s3://b", "consensus": "redis://r?password=x"}}}, "consensus"),
        ({"storageProfiles": {"default": {"blob": "s3://b?credentials_dir=/x", "consensus": "redis://r"}}}, "blob"),
        ({"storageProfiles": {"a/b": {"blob": "s3://b", "consensus": "redis://r"}}}, "a/b"),
        (profiles(default={"allowedNamespaces": {"names": ["Not_a_name"]}}), "names"),
        (profiles(default={"allowedNamespaces": {"name": ["a"]}}), "name"),
        (profiles(default={"allowedNamespaces": {"matchLabels": {"a": 1}}}), "matchLabels"),
        ({"watch": {"namespaces": ["Not_a_name"]}}, "namespaces"),
        ({"watch": {"clusterWide": "yes"}}, "clusterWide"),
        ({"workload": {"allow": {"hostpath": True}}}, "hostpath"),
        ({"loop": {"resync": 5}}, "resync"),
        ({"limits": {"executors": 5}}, "executors"),
        ({"limits": {"total": 0}}, "total"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"metrics": {"port": 80}}, "port"),
        ({"workload": {"maintenanceMemory": "much"}}, "maintenanceMemory"),
    ],
)
def test_the_values_schema_refuses_bad_values_by_name(
    run_helm: Callable[..., Any], values: Manifest, says: str
) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**STORES, "defaultProfile": "main"}, 'defaultProfile "main" is not among storageProfiles (default)'),
        ({"watch": {"clusterWide": True, "namespaces": ["red"]}}, "leave watch.namespaces empty"),
        ({"replicas": 2, "leaderElection": {"enabled": False}}, "replicas above 1 need leaderElection.enabled"),
        ({"replicas": 3}, "replicas above 2 need sharding.enabled"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    run_helm: Callable[..., Any], values: Manifest, says: str
) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert says in done.stderr


def test_replicas_that_share_the_resources_have_a_lease_for_each_pod(template: Callable[..., list[Manifest]]) -> None:
    manifests = template({**STORES, "replicas": 5, "sharding": {"enabled": True, "leaseSeconds": 8}})
    (deployment,) = of_kind(manifests, "Deployment")
    assert deployment["spec"]["replicas"] == 5
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    fields = {one["name"]: one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for one in container["env"]}
    assert fields["POD_UID"] == "metadata.uid"
    settings = OperatorSettings.parse(yaml.safe_dump(operator_config(manifests)))
    assert settings.sharding == ShardingSettings(enabled=True, lease_seconds=8)
    (role,) = [one for one in of_kind(manifests, "Role") if one["metadata"]["name"].endswith("-leader")]
    verbs = {verb for rule in role["rules"] if not rule.get("resourceNames") for verb in rule["verbs"]}
    assert verbs == {"get", "list", "update", "create"}, "and none to delete: Kubernetes collects a Lease with its pod"


def test_one_leader_may_update_its_own_lease_only(template: Callable[..., list[Manifest]]) -> None:
    (role,) = [one for one in of_kind(template({}), "Role") if one["metadata"]["name"].endswith("-leader")]
    unnamed = {verb for rule in role["rules"] if not rule.get("resourceNames") for verb in rule["verbs"]}
    assert unnamed == {"create"}


def test_an_old_cluster_is_refused(run_helm: Callable[..., Any]) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.31.0")
    assert done.returncode != 0
    assert "kubeVersion" in done.stderr


@SETS
def test_no_secret_is_read_and_no_wildcards(template: Callable[..., list[Manifest]], values: Manifest) -> None:
    manifests = template(values)
    for role in of_kind(manifests, "Role") + of_kind(manifests, "ClusterRole"):
        for rule in role["rules"]:
            assert "secrets" not in rule["resources"] or set(rule["verbs"]) == {"create", "delete"}
            assert "*" not in [*rule["resources"], *rule["verbs"], *rule["apiGroups"]]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_watching_some_namespaces_needs_nothing_cluster_wide(template: Callable[..., list[Manifest]]) -> None:
    manifests = template({**FULL, "rbac": {"aggregate": False}})
    assert not of_kind(manifests, "ClusterRole")
    assert not of_kind(manifests, "ClusterRoleBinding")
    assert {role["metadata"]["namespace"] for role in of_kind(manifests, "Role")} == {"red", "blue", "sys"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"sys"}),
        ({"watch": {"namespaces": ["red", "blue"]}}, {"red", "blue"}),
        ({"workload": {"namespaces": ["green"]}}, {"green"}),
    ],
)
def test_drivers_get_an_account_in_each_workload_namespace(
    template: Callable[..., list[Manifest]], values: Manifest, expected: set[str]
) -> None:
    accounts = [
        one for one in of_kind(template(values), "ServiceAccount") if one["metadata"]["name"] == "persist-spark-driver"
    ]
    assert {one["metadata"]["namespace"] for one in accounts} == expected


@pytest.mark.slow
def test_crds_are_those_of_the_repository_and_are_kept(template: Callable[..., list[Manifest]]) -> None:
    source = {
        document["metadata"]["name"]: document
        for path in (ROOT / "crds").glob("*.yaml")
        for document in [yaml.safe_load(path.read_text())]
    }
    assert source.keys() == {"persistshards.persistshard.io", "sparksinks.persistshard.io"}
    for keep in (True, False):
        rendered = {
            one["metadata"]["name"]: one
            for one in of_kind(template({"crds": {"keep": keep}}), "CustomResourceDefinition")
        }
        assert rendered.keys() == source.keys()
        for name, crd in rendered.items():
            assert crd["metadata"].get("annotations", {}).pop("helm.sh/resource-policy", None) == (
                "keep" if keep else None
            )
            assert crd["spec"] == source[name]["spec"]


def test_the_operator_understands_the_configuration(template: Callable[..., list[Manifest]]) -> None:
    """OperatorSettings reads the configuration that the chart writes. It refuses unknown keys."""
    settings = OperatorSettings.parse(yaml.safe_dump(operator_config(template(FULL))))
    assert settings.storage_profiles["default"].secret_name == "persist-store"
    assert settings.namespaces == ("red", "blue")
    assert settings.workload.service_accounts == ("etl",)
    assert settings.workload.allow.secrets == ("api-key",)
    assert not settings.workload.allow.host_path
    assert settings.images.engine == "persist-engine:0.1.0"
    assert settings.images.pull_secrets == ("registry",)
    assert settings.workload.driver_cpu_request == "200m"
    assert settings.loop.workers == 8
    assert (settings.limits.drivers, settings.limits.per_store, settings.limits.total) == (3, 2, None)
    assert settings.leader.namespace == "sys"
    assert settings.http_port == 8080


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


@pytest.mark.slow
def test_the_configuration_change_restarts_the_operator(template: Callable[..., list[Manifest]]) -> None:
    checksums = [
        of_kind(template({"logLevel": level}), "Deployment")[0]["spec"]["template"]["metadata"]["annotations"][
            "checksum/config"
        ]
        for level in ("INFO", "DEBUG")
    ]
    assert checksums[0] != checksums[1]


@pytest.mark.slow
def test_rendering_is_repeatable_and_reads_nothing_from_the_cluster(run_helm: Callable[..., Any]) -> None:
    """GitOps renders repeatedly and without a cluster: no lookup, nothing random, no hooks except the tests."""
    once, again = (
        run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=FULL).stdout for _ in range(2)
    )
    assert "kind: Deployment" in once
    assert once == again
    text = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    assert not re.search(
        r"\b(lookup|randAlphaNum|randAlpha|genCA|genSelfSignedCert|uuidv4|now)\b",
        re.sub(r"{{-? ?/\*.*?\*/", "", text, flags=re.DOTALL),
    )
    assert set(re.findall(r"helm\.sh/hook: (\S+)", text)) == {"test"}


def test_each_namespaced_object_says_its_namespace(template: Callable[..., list[Manifest]]) -> None:
    cluster_wide = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    cluster_wide |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    for one in template(FULL):
        assert ("namespace" in one["metadata"]) == (one["kind"] not in cluster_wide), one["kind"]


def test_optional_objects_are_rendered_when_they_are_enabled(template: Callable[..., list[Manifest]]) -> None:
    plain, full = template({}), template(FULL)
    assert not of_kind(plain, "ServiceMonitor")
    assert len(of_kind(full, "ServiceMonitor")) == 1
    assert not of_kind(plain, "PodDisruptionBudget")
    assert len(of_kind(full, "PodDisruptionBudget")) == 1
    (spec,) = [spec for name, spec in pod_specs(full) if "-test-" not in name]
    secret = {"secretName": "persist-store", "optional": True, "defaultMode": 0o440}
    assert {"name": "store-0", "secret": secret} in spec["volumes"]
    assert not [volume for _, spec in pod_specs(plain) for volume in spec.get("volumes", []) if "secret" in volume]


def test_sync_crds_finds_a_stale_copy(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sync_crds", ROOT / "charts" / "sync_crds.py")
    assert spec is not None
    assert spec.loader is not None
    sync = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sync)
    source, chart = tmp_path / "crds", tmp_path / "chart"
    source.mkdir()
    (source / "a.yaml").write_text("a: 1\n")
    assert sync.differences(source, chart) == ["a.yaml"]
    sync.copy(source, chart)
    assert sync.differences(source, chart) == []
    (source / "a.yaml").write_text("a: 2\n")
    (chart / "left-over.yaml").write_text("b: 1\n")
    assert sync.differences(source, chart) == ["a.yaml", "left-over.yaml"]
    sync.copy(source, chart)
    assert sync.differences(source, chart) == []


def test_each_profile_has_a_folder_with_its_own_secret(template: Callable[..., list[Manifest]]) -> None:
    """The operator reads credentials in these folders. The environment, which all its threads share, has none."""
    values = profiles(red={"secretName": "red-s"}, blue={"secretName": "blue-s"}, pink={"secretName": "red-s"}, open={})
    manifests = template({**values, "defaultProfile": "red"})
    (spec,) = [spec for name, spec in pod_specs(manifests) if "-test-" not in name]
    secrets = {one["name"]: one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
    (container,) = spec["containers"]
    mounts = {one["mountPath"]: secrets[one["name"]] for one in container["volumeMounts"] if one["name"] in secrets}
    assert mounts == {
        f"{OPERATOR_CREDENTIALS_DIR}/{name}": secret
        for name, secret in (("red", "red-s"), ("blue", "blue-s"), ("pink", "red-s"))
    }
    assert not [one for one in container["env"] if one["name"].startswith("AWS_")]


def test_the_allowed_namespaces_of_a_profile_reach_the_operator(template: Callable[..., list[Manifest]]) -> None:
    allowed = {"names": ["red"], "matchLabels": {"persist": "yes"}}
    values = profiles(default={"allowedNamespaces": allowed}, closed={})
    settings = OperatorSettings.parse(yaml.safe_dump(operator_config(template(values))))
    open_to = settings.storage_profiles["default"].allowed_namespaces
    assert [open_to.allow("red", {}), open_to.allow("x", {"persist": "yes"}), open_to.allow("x", {})] == [
        True,
        True,
        False,
    ]
    assert not settings.storage_profiles["closed"].allowed_namespaces.allow("red", {"persist": "yes"})


@pytest.mark.slow
@pytest.mark.parametrize("watch", [{"namespaces": ["red", "blue"]}, {"clusterWide": True}])
@pytest.mark.parametrize("labels", [None, {}, {"persist": "yes"}])
def test_namespaces_are_read_only_where_a_profile_asks_for_labels(
    template: Callable[..., list[Manifest]], labels: Manifest | None, watch: Manifest
) -> None:
    values = profiles(default={} if labels is None else {"allowedNamespaces": {"matchLabels": labels}}) | {
        "watch": watch
    }
    rules = [rule for role in of_kind(template(values), "ClusterRole") for rule in role["rules"]]
    found = [rule for rule in rules if "namespaces" in rule["resources"]]
    watched = {"resourceNames": watch["namespaces"]} if "namespaces" in watch else {}
    assert found == ([{"apiGroups": [""], "resources": ["namespaces"], **watched, "verbs": ["get"]}] if labels else [])


def test_crds_have_a_chart_of_their_own(run_helm: Callable[..., Any], template: Callable[..., list[Manifest]]) -> None:
    done = run_helm("template", "crds", str(ROOT / "charts" / "persist-operator-crds"), "--kube-version", "1.34.0")
    assert done.returncode == 0, done.stderr
    alone = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert alone == of_kind(template({}), "CustomResourceDefinition")
    assert run_helm(
        "lint", "--strict", str(ROOT / "charts" / "persist-operator-crds"), values={"kept": True}
    ).returncode


def test_labels_of_the_user_are_on_every_object_and_select_nothing(template: Callable[..., list[Manifest]]) -> None:
    labelled = template({**FULL, "commonLabels": {"cost-center": "12"}})
    without = [
        f"{one['kind']}/{one['metadata']['name']}"
        for one in labelled
        if one["kind"] != "CustomResourceDefinition" and one["metadata"]["labels"].get("cost-center") != "12"
    ]
    assert without == []
    (deployment,) = of_kind(labelled, "Deployment")
    assert "cost-center" not in deployment["spec"]["selector"]["matchLabels"]


def test_a_registry_is_before_every_image_that_the_chart_names(template: Callable[..., list[Manifest]]) -> None:
    rendered = template(
        {**STORES, "image": {"registry": "registry.example.com/team/"}, "images": {"spark": "mine/spark:1"}}
    )
    (deployment,) = of_kind(rendered, "Deployment")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example.com/team/persist-operator:{version}"
    (config,) = [one for one in of_kind(rendered, "ConfigMap") if "operator.yaml" in one["data"]]
    images = yaml.safe_load(config["data"]["operator.yaml"])["images"]
    assert images["engine"] == f"registry.example.com/team/persist-engine:{version}"
    assert images["spark"] == "mine/spark:1"


def test_probes_and_strategy_are_the_users_and_what_is_asked_is_not(template: Callable[..., list[Manifest]]) -> None:
    values = {
        "probes": {"liveness": {"periodSeconds": 33}},
        "strategy": {"type": "Recreate"},
        "terminationGracePeriodSeconds": 9,
    }
    (deployment,) = of_kind(template(values), "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert spec["terminationGracePeriodSeconds"] == 9
    (container,) = spec["containers"]
    http = {"path": "/healthz", "port": "http"}
    assert container["livenessProbe"] == {
        "httpGet": http,
        "periodSeconds": 33,
        "timeoutSeconds": 5,
        "failureThreshold": 6,
    }
    assert container["startupProbe"] == {"httpGet": http, "periodSeconds": 2, "failureThreshold": 60}


def test_further_objects_are_rendered_with_the_release(template: Callable[..., list[Manifest]]) -> None:
    as_yaml = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": "{{ .Release.Namespace }}"},
    }
    as_text = 'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: b, namespace: "{{ .Release.Namespace }}"}\n'
    extra = [one for one in template({"extraObjects": [as_yaml, as_text]}) if one["metadata"]["name"] in {"a", "b"}]
    assert [one["metadata"]["namespace"] for one in extra] == ["sys", "sys"]


@pytest.mark.parametrize(
    "values",
    [{"image": {"registry": "https://x"}}, {"probes": {"liveness": {"httpGet": {}}}}, {"commonLabels": {"a": 1}}],
)
def test_such_values_are_refused(run_helm: Callable[..., Any], values: Manifest) -> None:
    assert run_helm("lint", str(CHART), values=values).returncode


def test_the_table_of_values_has_every_value_and_the_examples_are_valid(
    template: Callable[..., list[Manifest]],
) -> None:
    spec = importlib.util.spec_from_file_location("values_table", ROOT / "charts" / "values_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0
    text = '# Of a.\na:\n  # Of b.\n  b: 1   # more\n\n  c: "#"\n#  d: 2\ne: {}   # x | <y>\n'
    assert module.comments(text) == {"a": "Of a.", "a.b": "Of b. more", "e": "x | <y>"}
    assert module.table(text).splitlines()[6:] == [
        "| `a` |  | Of a. |",
        "| `a.b` | `1` | Of b. more |",
        "| `a.c` | `'#'` |  |",
        "| `e` | `{}` | x \\| &lt;y> |",
    ]
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    for example in yaml.safe_load(annotations["artifacthub.io/crdsExamples"]):
        assert load_schemas().check(example) == []


def test_the_page_of_the_chart_names_the_images_that_it_installs(template: Callable[..., list[Manifest]]) -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    named = {one["image"] for one in yaml.safe_load(annotations["artifacthub.io/images"])}
    manifests = template({})
    rendered = {container["image"] for _, spec in pod_specs(manifests) for container in spec["containers"]}
    images = operator_config(manifests)["images"]
    assert named == {*rendered, images["engine"], images["spark"]}
    assert {one["kind"] for one in yaml.safe_load(annotations["artifacthub.io/changes"])} <= {
        "added",
        "changed",
        "fixed",
    }
