"""What the values of the chart do, and which values it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from chart_values import CHART, FULL, ROOT, STORES, Manifest, of_kind, operator_config, pod_specs, profiles
from persist_operator.api.shard import OPERATOR_CREDENTIALS_DIR
from persist_operator.settings import OperatorSettings, ShardingSettings


@pytest.mark.slow
def test_the_operator_is_known_in_stores_by_its_release_unless_it_has_a_name(
    template: Callable[..., list[Manifest]],
) -> None:
    assert operator_config(template({}))["operatorId"] == "sys/persist-persist-operator"
    assert operator_config(template({"operatorId": "eu-1/main"}))["operatorId"] == "eu-1/main"


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


def test_each_profile_has_a_folder_with_its_own_secret(template: Callable[..., list[Manifest]]) -> None:
    """The operator reads credentials in these folders. The environment, which all its threads share, has none."""
    values = profiles(red={"secretName": "red-s"}, blue={"secretName": "blue-s"}, pink={"secretName": "red-s"}, open={})
    manifests = template({**values, "defaultProfile": "red"})
    (spec,) = [spec for name, spec in pod_specs(manifests) if "-test-" not in name]
    secrets = {
        one["name"]: one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one and one["name"] != "stop"
    }
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


def test_security_contexts_are_the_users_and_null_leaves_a_field_out(template: Callable[..., list[Manifest]]) -> None:
    """As where the cluster gives each namespace a range of user ids. What is not named stays restricted."""
    values = {
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "containerSecurityContext": {"seLinuxOptions": {"level": "s0"}},
        "console": {"enabled": True},
    }
    pods = [pod for _, pod in pod_specs(template(values))]
    assert len(pods) == 5
    for pod in pods:
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seLinuxOptions": {"level": "s0"},
            }


def test_further_objects_are_rendered_with_the_release(template: Callable[..., list[Manifest]]) -> None:
    as_yaml = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": "{{ .Release.Namespace }}"},
    }
    as_text = 'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: b, namespace: "{{ .Release.Namespace }}"}\n'
    extra = [one for one in template({"extraObjects": [as_yaml, as_text]}) if one["metadata"]["name"] in {"a", "b"}]
    assert [one["metadata"]["namespace"] for one in extra] == ["sys", "sys"]


def test_optional_objects_are_rendered_when_they_are_enabled(template: Callable[..., list[Manifest]]) -> None:
    plain, full = template({}), template(FULL)
    assert not of_kind(plain, "ServiceMonitor")
    assert len(of_kind(full, "ServiceMonitor")) == 1
    assert not of_kind(plain, "PodDisruptionBudget")
    assert len(of_kind(full, "PodDisruptionBudget")) == 1
    (spec,) = [spec for name, spec in pod_specs(full) if "-test-" not in name]
    secret = {"secretName": "persist-store", "optional": True, "defaultMode": 0o440}
    assert {"name": "store-0", "secret": secret} in spec["volumes"]
    secrets = [
        volume["name"] for _, spec in pod_specs(plain) for volume in spec.get("volumes", []) if "secret" in volume
    ]
    assert secrets == ["stop"]


@pytest.mark.slow
def test_the_configuration_change_restarts_the_operator(template: Callable[..., list[Manifest]]) -> None:
    checksums = [
        of_kind(template({"logLevel": level}), "Deployment")[0]["spec"]["template"]["metadata"]["annotations"][
            "checksum/config"
        ]
        for level in ("INFO", "DEBUG")
    ]
    assert checksums[0] != checksums[1]


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


@pytest.mark.parametrize("name", ["123", "no", "null"])
def test_a_name_that_yaml_reads_as_something_else_stays_a_name(run_helm: Callable[..., Any], name: str) -> None:
    """`namespace: null` would be the namespace of the release, and `no` a boolean."""
    profile = {**STORES["storageProfiles"]["default"], "secretName": name, "allowedNamespaces": {"names": [name]}}
    values = {
        "watch": {"namespaces": [name]},
        "workload": {"serviceAccount": {"name": name}, "serviceAccounts": [name]},
        "defaultProfile": name,
        "storageProfiles": {name: profile},
        "pullSecrets": [name],
        "priorityClassName": name,
        "serviceAccount": {"name": name},
        "canary": {"enabled": True, "storageProfile": name},
        "console": {"enabled": True, "hostNames": [name]},
    }
    listed = {**values, "watch": {"namespaces": [name, "sys"]}}
    done = run_helm("template", name, str(CHART), "--namespace", name, "--kube-version", "1.34.0", values=listed)
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.safe_load_all(done.stdout) if one]

    def odd(value: Any, key: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for each, child in value.items():
                is_text = each in {"name", "namespace", "secretName", "serviceAccountName", "storageProfile"}
                if (is_text or key in {"labels", "matchLabels", "annotations"}) and not isinstance(child, str | dict):
                    yield f"{key}.{each}: {child!r}"
                yield from odd(child, str(each))
        elif isinstance(value, list):
            for child in value:
                yield from odd(child, key)

    assert list(odd([one for one in manifests if one["kind"] != "CustomResourceDefinition"])) == []
    settings = OperatorSettings.parse(yaml.safe_dump(operator_config(manifests)))
    assert settings.default_profile == name
    assert settings.storage_profiles[name].secret_name == name
    assert settings.workload.driver_service_account == name


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
        ({"fullnameOverride": "Not a name"}, "fullnameOverride"),
        ({"nameOverride": "a_b"}, "nameOverride"),
        ({"image": {"tag": "1.0: x"}}, "tag"),
        # Two labels of one name: the second would win, and the selectors of the chart would find nothing.
        ({"commonLabels": {"app.kubernetes.io/name": "mine"}}, "commonLabels"),
        ({"podLabels": {"app.kubernetes.io/component": "mine"}}, "podLabels"),
        ({"podAnnotations": {"checksum/config": "mine"}}, "podAnnotations"),
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


def test_an_old_cluster_is_refused(run_helm: Callable[..., Any]) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.31.0")
    assert done.returncode != 0
    assert "kubeVersion" in done.stderr


@pytest.mark.parametrize(
    "values",
    [{"image": {"registry": "https://x"}}, {"probes": {"liveness": {"httpGet": {}}}}, {"commonLabels": {"a": 1}}],
)
def test_such_values_are_refused(run_helm: Callable[..., Any], values: Manifest) -> None:
    assert run_helm("lint", str(CHART), values=values).returncode


def test_the_values_that_pages_print_render(template: Callable[..., list[Manifest]]) -> None:
    """Blocks whose every key is a value of the chart; `storage` alone is a part of a resource."""
    names = set(yaml.safe_load((CHART / "values.yaml").read_text()))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), CHART / "README.md"]
    rendered = set()
    for page in pages:
        for block in re.findall(r"^```yaml\n(\w.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            if names >= (keys := set(re.findall(r"^(\w+):", block, flags=re.MULTILINE))) and keys != {"storage"}:
                template(yaml.safe_load(block))
                rendered.add(page.name)
    assert {"README.md", "security.md", "scale.md", "monitoring.md"} <= rendered


def test_a_value_that_is_null_is_left_out_or_named(
    template: Callable[..., list[Manifest]], run_helm: Callable[..., Any]
) -> None:
    """A list whose every item is a comment is null, and helm takes null for the removal of the default."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def nulls(values: Manifest, known: Manifest) -> Manifest:
        found = {}
        for name, value in values.items():
            below = known.get("properties", {}).get(name, {})
            if name not in known.get("required", ()):
                found[name] = None
            elif isinstance(value, dict) and value:
                found[name] = nulls(value, below)
        return found

    left_out = nulls(yaml.safe_load((CHART / "values.yaml").read_text()), schema)
    assert left_out["resources"] is None
    assert left_out["image"]["tag"] is None
    OperatorSettings.parse(yaml.safe_dump(operator_config(template(left_out))))
    for values, name in (
        ({"loop": None}, "loop"),
        ({"watch": {"namespaces": None}}, "namespaces"),
        ({"workload": {"allow": {"secrets": None}}}, "secrets"),
    ):
        done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
        assert f"missing property '{name}'" in done.stderr
