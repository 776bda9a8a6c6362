"""Pod templates of resources: an accepted template leaves the pods restricted and without foreign Secrets, every other field is
refused by name.
"""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from persist_kit.depth import draws
from persist_operator.api import names, spark_conf
from persist_operator.api.pod_template import PodRefused, check_template
from persist_operator.api.schema_check import load_schemas
from persist_operator.api.shard import ShardSchema, StoreLocation
from persist_operator.api.sink import Sink
from persist_operator.manifests.driver import driver_manifests
from persist_operator.manifests.maintenance import maintenance_job
from persist_operator.plan.actions import StartDriver, StartMaintenance
from persist_operator.settings import OperatorSettings, WorkloadAllow, WorkloadSettings

LOCATION = StoreLocation(blob="s3://b/p", consensus="redis://r:6379/0", secret_name="persist-store")
RESTRICTED = OperatorSettings()
OURS = {"persist-store", names.rpc_secret_name("load-00000000-3", "uid-sink")}
WHERE = "spec.spark.driver.template"
RPC_SECRET = bytes(range(32))


def sink_of(spark):
    spec = {
        "shardRef": {"name": "flights"},
        "input": {"type": "Format", "format": {"name": "csv"}},
        "envelope": {"type": "Append"},
        "spark": spark,
    }
    made = {"apiVersion": names.API_VERSION, "kind": "SparkSink", "metadata": {"name": "load", "uid": "uid-sink"}}
    return Sink.of(load_schemas().default({**made, "spec": spec}))


def pods_of(spark, operator_settings=RESTRICTED):
    """Driver pod and executor template."""
    sink = sink_of(spark)
    action = StartDriver(
        spec=sink.spec, name="load-00000000-3", attempt=3, run_number=2, run_id="r-2", scheduled_ms=None,
        executor_prefix="load-x", shard_id=names.shard_id_of("u"), schema=ShardSchema(key="id BIGINT", value=""),
        location=LOCATION,
    )  # fmt: skip
    manifests = driver_manifests(action, sink.meta, operator_settings, rpc_secret=RPC_SECRET)
    by_kind = {one["kind"]: one for one in manifests}
    return by_kind["Pod"], json.loads(by_kind["ConfigMap"]["data"]["executor.yaml"])


def both(template, operator_settings=RESTRICTED):
    return pods_of({"driver": {"template": template}, "executor": {"template": template}}, operator_settings)


def job_of(shard, template, operator_settings=RESTRICTED, account=None):
    action = StartMaintenance(
        kind="gc", name="flights-gc-7", shard_id=names.shard_id_of("u"), location=LOCATION, seqno=7,
        reason="because", memory=None, record_days=90, ttl_seconds=60, priority_class_name=None, service_account_name=account,
        template=template,
    )  # fmt: skip
    return maintenance_job(action, shard.meta, operator_settings)["spec"]["template"]


def violations(pod, allowed_secrets=frozenset(OURS)):
    """Violations of the restricted Pod Security Standard, of the allowed Secrets, and of the driver's own token as the only one."""
    spec, found = pod["spec"], []
    for name in (
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "shareProcessNamespace",
        "hostAliases",
        "initContainers",
        "ephemeralContainers",
    ):
        if spec.get(name):
            found.append(name)
    security = spec["securityContext"]
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        found.append("runs as root")
    if security.get("seccompProfile") != {"type": "RuntimeDefault"} or set(security) & {"sysctls", "windowsOptions"}:
        found.append("pod security context")
    if len(spec["containers"]) != 1:
        found.append("containers")
    for container in spec["containers"]:
        if container["securityContext"] != {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }:  # fmt: skip
            found.append("container security context")
        if any(port.get("hostPort") for port in container.get("ports", [])) or container.get("lifecycle"):
            found.append("ports or lifecycle")
        paths = [one["mountPath"] for one in container["volumeMounts"]]
        if len(set(paths)) != len(paths) or any(one.get("mountPropagation") for one in container["volumeMounts"]):
            found.append("mounts")
        references = [one.get("valueFrom", {}).get("secretKeyRef") for one in container.get("env", [])]
        references += [one.get("secretRef") for one in container.get("envFrom", [])]
        found += [f"Secret {one['name']}" for one in references if one and one["name"] not in allowed_secrets]
    permitted = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    for volume in spec["volumes"]:
        if not set(volume) - {"name"} <= permitted:
            found.append(f"volume {volume}")
        sources = volume.get("projected", {}).get("sources", [])
        if any(set(one) - {"configMap", "downwardAPI", "secret"} for one in sources):
            found.append("projected token")
        mounted = [volume["secret"]["secretName"]] if "secret" in volume else []
        mounted += [one["secret"]["name"] for one in sources if "secret" in one]
        found += [f"Secret {name}" for name in mounted if name not in allowed_secrets]
    return found


def test_the_checker_of_this_file_finds_each_violation():
    """`violations` must report each of these changes, or the other tests prove nothing."""
    pod, _ = both({})
    assert violations(pod) == []
    spec = pod["spec"]
    for change in (
        {"hostNetwork": True},
        {"volumes": [*spec["volumes"], {"name": "h", "hostPath": {"path": "/"}}]},
        {"volumes": [*spec["volumes"], {"name": "s", "secret": {"secretName": "other"}}]},
        {"securityContext": {**spec["securityContext"], "runAsUser": 0}},
        {"containers": [*spec["containers"], {"name": "x", "securityContext": {}, "volumeMounts": []}]},
    ):
        assert violations({**pod, "spec": {**spec, **change}})


GOOD = {
    "metadata": {
        "labels": {"team": "a", "kueue.x-k8s.io/queue-name": "q"},
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    },
    "spec": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"topologyKey": "zone"}],
        "priorityClassName": "low",
        "volumes": [{"name": "in", "emptyDir": {}}, {"name": "cfg", "configMap": {"name": "c"}}],
        "containers": [
            {
                "env": [
                    {"name": "MINE", "value": "1"},
                    {"name": "K", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
                ],
                "envFrom": [{"configMapRef": {"name": "c"}}],
                "volumeMounts": [
                    {"name": "in", "mountPath": "/in"},
                    {"name": "cfg", "mountPath": "/cfg", "readOnly": True},
                ],
            }
        ],
    },
}


def test_templates_are_merged_as_a_strategic_patch():
    for pod in both(GOOD):
        (container,) = pod["spec"]["containers"]
        assert pod["metadata"]["labels"]["team"] == "a"
        assert pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        for name in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"):
            assert pod["spec"][name] == GOOD["spec"][name]
        assert {"name": "MINE", "value": "1"} in container["env"]
        assert container["envFrom"] == [{"configMapRef": {"name": "c"}}]
        assert {"name": "in", "mountPath": "/in"} in container["volumeMounts"]
        assert {"name": "in", "emptyDir": {}} in pod["spec"]["volumes"]
        assert violations(pod) == []


def test_duplicate_names_in_a_template_reach_the_api_server():
    """No field of a template is dropped silently. Kubernetes refuses two volumes of one name."""
    twice = [{"name": "spark-local-dir-1", "emptyDir": {}}, {"name": "spark-local-dir-1", "configMap": {"name": "c"}}]
    for pod in both({"spec": {"volumes": twice}}):
        assert [one for one in pod["spec"]["volumes"] if one["name"] == "spark-local-dir-1"] == twice


def test_maintenance_takes_placement_and_nothing_that_runs_code(make_shard):
    placed = {"metadata": GOOD["metadata"], "spec": {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "spot"}]}}
    pod = job_of(make_shard(), placed)
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert pod["metadata"]["labels"]["team"] == "a"
    assert violations(pod) == []
    with pytest.raises(PodRefused) as refused:
        job_of(make_shard(), GOOD)
    for name in ("volumes", "containers", "priorityClassName"):
        assert f"spec.maintenance.template.spec.{name}:" in str(refused.value)


SPEC, ONE = f"{WHERE}.spec", f"{WHERE}.spec.containers[0]"
REFUSED = [
    ({"spec": {"hostNetwork": True}}, f"{SPEC}.hostNetwork"),
    ({"spec": {"hostPID": True}}, f"{SPEC}.hostPID"),
    ({"spec": {"hostAliases": []}}, f"{SPEC}.hostAliases"),
    ({"spec": {"dnsConfig": {}}}, f"{SPEC}.dnsConfig"),
    ({"spec": {"initContainers": []}}, f"{SPEC}.initContainers"),
    ({"spec": {"serviceAccountName": "admin"}}, f"{SPEC}.serviceAccountName"),
    ({"spec": {"automountServiceAccountToken": True}}, f"{SPEC}.automountServiceAccountToken"),
    ({"spec": {"securityContext": {"runAsUser": 0}}}, f"{SPEC}.securityContext"),
    ({"spec": {"nodeSelecter": {}}}, f"{SPEC}.nodeSelecter"),
    ({"spec": {"nodeSelector": []}}, f"{SPEC}.nodeSelector: must be a mapping"),
    ({"spec": {"priorityClassName": "system-node-critical"}}, f"{SPEC}.priorityClassName"),
    ({"kind": "Pod"}, f"{WHERE}.kind"),
    ({"metadata": {"name": "x"}}, f"{WHERE}.metadata.name"),
    ({"metadata": {"labels": {names.LABEL_ROLE: "executor"}}}, names.LABEL_ROLE),
    ({"metadata": {"labels": {"spark-role": "executor"}}}, "spark-role"),
    ({"metadata": {"labels": {"a": 1}}}, "must be a text"),
    ({"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/driver": "unconfined"}}}, "apparmor"),
    ({"metadata": {"annotations": {"cdi.k8s.io/x": "vendor.com/net=nic0"}}}, "cdi.k8s.io"),
    ({"spec": {"containers": [{}, {"image": "evil"}]}}, f"{SPEC}.containers: must be a list of one"),
    ({"spec": {"containers": [{"name": "sidecar"}]}}, f"{ONE}.name"),
    ({"spec": {"containers": [{"image": "evil"}]}}, f"{ONE}.image"),
    ({"spec": {"containers": [{"command": ["sh"]}]}}, f"{ONE}.command"),
    ({"spec": {"containers": [{"securityContext": {"privileged": True}}]}}, f"{ONE}.securityContext"),
    ({"spec": {"containers": [{"env": [{"name": "SPARK_CONF_DIR", "value": "/evil"}]}]}}, f"{ONE}.env[0].name"),
    ({"spec": {"containers": [{"env": [{"name": "PYSPARK_SUBMIT_ARGS", "value": "--conf x"}]}]}}, f"{ONE}.env[0].name"),
    ({"spec": {"containers": [{"env": [{"name": "_SPARK_AUTH_SECRET", "value": "known"}]}]}}, f"{ONE}.env[0].name"),
    ({"spec": {"containers": [{"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]}]}}, f"{ONE}.env[0].valueFrom.secretKeyRef: Secret 'other'"),
    ({"spec": {"containers": [{"env": [{"name": "A", "valueFrom": {"fileKeyRef": {}}}]}]}}, f"{ONE}.env[0].valueFrom.fileKeyRef"),
    ({"spec": {"containers": [{"envFrom": [{"secretRef": {"name": "other"}}]}]}}, f"{ONE}.envFrom[0].secretRef"),
    ({"spec": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}}, f"{SPEC}.volumes[0].hostPath"),
    ({"spec": {"volumes": [{"name": "h", "csi": {"driver": "x"}}]}}, f"{SPEC}.volumes[0].csi"),
    ({"spec": {"volumes": [{"name": "h", "secret": {"secretName": "persist-rpc-other"}}]}}, f"{SPEC}.volumes[0].secret"),
    ({"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}]}}, f"{SPEC}.volumes[0].name"),
    ({"spec": {"volumes": [{"name": "h", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}}, f"{SPEC}.volumes[0].projected.sources[0].serviceAccountToken"),
    ({"spec": {"volumes": [{"name": "h", "projected": {"sources": [{"secret": {"name": "other"}}]}}]}}, f"{SPEC}.volumes[0].projected.sources[0].secret"),
    ({"spec": {"containers": [{"volumeMounts": [{"name": "store", "mountPath": "/s"}]}]}}, f"{ONE}.volumeMounts[0].name"),
    ({"spec": {"volumes": [{"name": ["v"]}], "containers": [{"volumeMounts": [{"name": {}, "mountPath": "/s"}]}]}}, f"{ONE}.volumeMounts[0].name"),
    *(
        ({"spec": {"volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"volumeMounts": [{"name": "v", "mountPath": path}]}]}}, f"{ONE}.volumeMounts[0].mountPath")
        for path in ("/etc/persist", "/etc/./persist/x", "/etc//persist", "/var/run/secrets/persist/rpc", "/var", "/tmp/", "/", "/opt/app/lib", "x", "/a/../etc/persist")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("template", "path"), REFUSED, ids=[path[-60:] for _, path in REFUSED])
def test_a_template_field_that_is_not_on_the_list_is_refused_by_its_path(template, path):
    with pytest.raises(PodRefused) as refused:
        pods_of({"driver": {"template": template}})
    assert path in str(refused.value)
    assert refused.value.reason == "InvalidTemplate"


def test_the_installation_can_allow_refused_template_fields():
    allow = WorkloadAllow(host_path=True, host_network=True, privileged=True, secrets=("mine",))
    open_settings = OperatorSettings(workload=WorkloadSettings(allow=allow))
    template = {
        "spec": {
            "hostNetwork": True,
            "volumes": [{"name": "h", "hostPath": {"path": "/mnt"}}, {"name": "s", "secret": {"secretName": "mine"}}],
            "containers": [
                {
                    "securityContext": {"privileged": True, "allowPrivilegeEscalation": True},
                    "envFrom": [{"secretRef": {"name": "mine"}}],
                }
            ],
        }
    }
    for pod in both(template, open_settings):
        assert pod["spec"]["hostNetwork"] is True
        assert {"name": "h", "hostPath": {"path": "/mnt"}} in pod["spec"]["volumes"]
        security = pod["spec"]["containers"][0]["securityContext"]
        assert (security["privileged"], security["allowPrivilegeEscalation"]) == (True, True)
    with pytest.raises(PodRefused, match="'theirs' is not among"):
        both({"spec": {"volumes": [{"name": "s", "secret": {"secretName": "theirs"}}]}}, open_settings)


WORDS = st.sampled_from(
    ["name", "spec", "metadata", "labels", "annotations", "containers", "initContainers", "volumes", "env", "envFrom", "volumeMounts",
     "secret", "secretName", "secretRef", "secretKeyRef", "valueFrom", "hostPath", "path", "projected", "sources", "serviceAccountToken",
     "securityContext", "privileged", "runAsUser", "hostNetwork", "hostPID", "capabilities", "mountPath", "mountPropagation", "image",
     "command", "nodeSelector", "tolerations", "affinity", "schedulerName", "emptyDir", "configMap", "csi", "optional", "subPath", "key",
     "persistshard.io/role", "spark-role", "a", ""]
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 5),
    st.sampled_from(["driver", "executor", "other", "persist-store", "tmp", "in", "/in", "/etc/persist", "/", "/var/run", "SPARK_CONF_DIR", "MINE", ""]),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=12,
)
CONTAINERS = st.fixed_dictionaries(
    {},
    optional={
        "name": LEAVES,
        "env": st.lists(
            st.one_of(TREES, st.fixed_dictionaries({"name": LEAVES}, optional={"value": LEAVES, "valueFrom": TREES})),
            max_size=3,
        ),
        "envFrom": st.lists(TREES, max_size=2),
        "volumeMounts": st.lists(
            st.one_of(TREES, st.fixed_dictionaries({"name": st.one_of(LEAVES, TREES), "mountPath": LEAVES})), max_size=2
        ),
        "securityContext": TREES,
    },
)
VOLUMES = st.one_of(
    TREES, st.builds(lambda name, source, value: {"name": name, source: value}, st.one_of(LEAVES, TREES), WORDS, TREES)
)
TEMPLATES = st.one_of(
    st.dictionaries(WORDS, TREES, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "metadata": st.one_of(TREES, st.fixed_dictionaries({"labels": TREES})),
            "spec": st.one_of(
                TREES,
                st.fixed_dictionaries(
                    {},
                    optional={
                        "containers": st.one_of(TREES, st.lists(CONTAINERS, max_size=2)),
                        "volumes": st.lists(VOLUMES, max_size=3),
                        "nodeSelector": TREES,
                        "hostNetwork": st.booleans(),
                    },
                ),
            ),
        },
    ),
)


@functools.cache
def plain_pods():
    return both({})


@pytest.mark.slow
@settings(max_examples=draws(300), deadline=None)
@given(template=TEMPLATES)
def test_pods_stay_restricted_under_every_template(template):
    """A template is refused, or merged without a change to the fields of the operator. No other exception escapes."""
    try:
        pods = both(template)
    except PodRefused:
        return
    for pod, ours in zip(pods, plain_pods(), strict=True):
        assert violations(pod) == []
        container, own = pod["spec"]["containers"][0], ours["spec"]["containers"][0]
        for name in ("image", "args", "command", "resources", "ports"):
            assert container.get(name) == own.get(name)
        assert (
            pod["metadata"].items()
            >= {k: v for k, v in ours["metadata"].items() if k not in {"labels", "annotations"}}.items()
        )
        # A template is part of the revision.
        kept = {k: v for k, v in ours["metadata"]["labels"].items() if k != names.LABEL_REVISION}
        assert pod["metadata"]["labels"].items() >= kept.items()
        for name in ("env", "volumeMounts"):
            assert container[name][: len(own[name])] == own[name]
        assert pod["spec"]["volumes"][: len(ours["spec"]["volumes"])] == ours["spec"]["volumes"]


@pytest.mark.slow
@settings(max_examples=draws(150), deadline=None)
@given(template=TEMPLATES)
def test_maintenance_pods_stay_restricted_under_every_template(template):
    try:
        check_template(template, where="t", role="maintenance", allow=WorkloadAllow())
    except PodRefused:
        return
    assert set(template.get("spec") or {}) <= {
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "schedulerName",
    }


#: Keys of Spark 4.3 that bypass the templates, the namespace, the accounts or the authentication.
AROUND = [
    "spark.master", "spark.remote", "spark.submit.deployMode", "spark.app.name", "spark.driver.host", "spark.driver.bindAddress",
    "spark.driver.memory", "spark.executor.instances", "spark.blockManager.port", "spark.dynamicAllocation.enabled",
    "spark.authenticate", "spark.authenticate.secret", "spark.authenticate.secret.executor.file", "spark.network.crypto.enabled",
    "spark.network.crypto.saslFallback", "spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.ui.port", "spark.ui.reverseProxy",
    "spark.executorEnv._SPARK_AUTH_SECRET", "spark.executorEnv.SPARK_CONF_DIR", "spark.executorEnv.AWS_SHARED_CREDENTIALS_FILE",
    "spark.kubernetes.namespace", "spark.kubernetes.context", "spark.kubernetes.container.image", "spark.kubernetes.trust.certificates",
    "spark.kubernetes.authenticate.caCertFile", "spark.kubernetes.authenticate.executor.serviceAccountName",
    "spark.kubernetes.driver.master", "spark.kubernetes.driver.pod.name", "spark.kubernetes.driver.podTemplateFile",
    "spark.kubernetes.driver.volumes.hostPath.x.mount.path", "spark.kubernetes.executor.volumes.hostPath.x.options.path",
    "spark.kubernetes.executor.secrets.other", "spark.kubernetes.executor.secretKeyRef.A", "spark.kubernetes.driver.secretKeyRef.A",
    "spark.kubernetes.executor.label.x", "spark.kubernetes.executor.annotation.x", "spark.kubernetes.driver.service.annotation.x",
    "spark.kubernetes.executor.podTemplateFile", "spark.kubernetes.executor.podNamePrefix", "spark.kubernetes.executor.container.image",
    "spark.kubernetes.executor.scheduler.name", "spark.kubernetes.executor.node.selector.x", "spark.kubernetes.node.selector.x",
    "spark.kubernetes.executor.pod.featureSteps", "spark.kubernetes.executor.pod.excludedFeatureSteps",
    "spark.kubernetes.executor.securityContext.allowPrivilegeEscalation", "spark.kubernetes.securityContext.allowPrivilegeEscalation",
    "spark.kubernetes.allocation.pods.allocator", "spark.kubernetes.kerberos.tokenSecret.name", "spark.kubernetes.hadoop.configMapName",
    "spark.kubernetes.file.upload.path", "spark.kubernetes.driverEnv.X", "spark.kubernetes.key.of.a.later.release",
    "spark.master=local", "spark.master:local", "spark.master local", " spark.master", "spark.master ", "\tspark.master", "#x", "",
    "spark.master\nspark.x", "spark.mast\\u0065r", "hadoop.x", "spark.",
]  # fmt: skip
FREE = [
    "spark.sql.shuffle.partitions", "spark.hadoop.fs.s3a.endpoint", "spark.jars", "spark.plugins", "spark.executor.extraClassPath",
    "spark.executorEnv.PYTHONHASHSEED", "spark.eventLog.enabled", "spark.network.timeout", "spark.rpc.message.maxSize",
    "spark.ui.retainedJobs", "spark.kubernetes.allocation.batch.size", "spark.kubernetes.executor.limit.cores",
    "spark.kubernetes.executor.deleteOnTermination", "spark.kubernetes.local.dirs.tmpfs", "spark.masterful", "spark.driver.hostile",
]  # fmt: skip


def crd_refuses(key):
    spec = {
        "shardRef": {"name": "a"},
        "input": {"type": "Format", "format": {"name": "csv"}},
        "envelope": {"type": "Append"},
    }
    made = {"apiVersion": names.API_VERSION, "kind": "SparkSink", "metadata": {"name": "n"}}
    errors = load_schemas().check({**made, "spec": {**spec, "spark": {"conf": {key: "x"}}}})
    assert all(error.path == "spec.spark.conf" for error in errors), errors
    return bool(errors)


@pytest.mark.parametrize("key", AROUND)
def test_spark_conf_that_bypasses_the_template_is_refused_by_its_key(key):
    with pytest.raises(PodRefused, match=r"spec\.spark\.conf") as refused:
        pods_of({"conf": {"spark.sql.shuffle.partitions": "8", key: "x"}})
    assert f"[{key!r}]" in str(refused.value)
    assert "shuffle" not in str(refused.value)
    assert refused.value.reason == "InvalidConf"
    assert crd_refuses(key)


@pytest.mark.parametrize("key", FREE)
def test_spark_conf_of_the_application_is_accepted(key):
    pods_of({"conf": {key: "x"}})
    assert not crd_refuses(key)


@pytest.mark.slow
@settings(max_examples=draws(400), deadline=None)
@given(
    key=st.lists(
        st.sampled_from(sorted({part for key in AROUND + FREE for part in key.split(".")})), min_size=1, max_size=5
    ).map(lambda parts: "spark." + ".".join(part for part in parts if part != "spark"))
)
def test_the_definition_and_the_operator_refuse_the_same_keys(key):
    assert crd_refuses(key) == spark_conf.is_refused(key)


@pytest.mark.parametrize(
    "value",
    [
        "-Dspark.master=local",
        "-Xss1m '-Dspark.kubernetes.namespace=other'",
        '-D"spark.x"=1',
        "@/tmp/options",
        "-Xss1m @f",
        "-XX:Flags=/tmp/f",
    ],
)
def test_java_options_that_set_a_spark_key_are_refused(value):
    for key in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions", "spark.driver.defaultJavaOptions"):
        with pytest.raises(PodRefused, match="Spark's own properties"):
            pods_of({"conf": {key: value}})
    pods_of({"conf": {"spark.driver.extraJavaOptions": "-XX:+UseG1GC -Duser.email=a@b"}})


def test_service_accounts_outside_the_list_are_refused(make_shard):
    listed = OperatorSettings(workload=WorkloadSettings(service_accounts=("etl",)))
    pod, _ = pods_of({"serviceAccountName": "etl"}, listed)
    assert pod["spec"]["serviceAccountName"] == "etl"
    assert job_of(make_shard(), {}, listed, account="etl")["spec"]["serviceAccountName"] == "etl"
    with pytest.raises(PodRefused, match="'admin' is not among workload.serviceAccounts") as refused:
        pods_of({"serviceAccountName": "admin"}, listed)
    assert refused.value.reason == "ServiceAccountNotAllowed"
    with pytest.raises(PodRefused, match=r"spec\.maintenance\.serviceAccountName"):
        job_of(make_shard(), {}, account="etl")
