"""Manifests are restricted, owned, selectable by their labels, and complete for Spark in client mode."""

import json
from base64 import b64decode, b64encode
from dataclasses import replace

import pytest
import yaml
from persist_operator.api import names
from persist_operator.api.pod_template import PodRefused
from persist_operator.api.schema_check import crd_dir
from persist_operator.api.shard import ShardSchema, StoreLocation
from persist_operator.manifests.driver import driver_manifests
from persist_operator.manifests.maintenance import maintenance_job
from persist_operator.manifests.spark_compaction import compaction_job, compaction_secret
from persist_operator.plan.actions import StartDriver, StartMaintenance
from persist_operator.settings import StopSettings, WorkloadAllow

RPC_SECRET = bytes(range(32))
LOCATION = StoreLocation(blob="s3://b/p", consensus="redis://r:6379/0", secret_name="persist-store")


@pytest.fixture
def job(make_shard, settings):
    def make(**changes):
        values = {
            "kind": "compaction", "name": "flights-compact-7", "shard_id": names.shard_id_of("u"), "location": LOCATION,
            "seqno": 7, "reason": "because", "memory": "2Gi", "record_days": 90, "ttl_seconds": 60, "priority_class_name": None,
            "service_account_name": None, "template": {}, **changes,
        }  # fmt: skip
        return StartMaintenance(**values)

    def manifest(**changes):
        return maintenance_job(make(**changes), make_shard().meta, settings)

    manifest.action = make
    return manifest


@pytest.fixture
def driver(make_sink, settings):
    def make(spec=None, location=LOCATION, name="load", settings=settings, stop_digest=None):
        sink = make_sink(spec, name=name)
        action = StartDriver(
            spec=sink.spec, name=names.driver_name(name, sink.spec.revision, 3), attempt=3, run_number=2,
            run_id="uid-sink-2", scheduled_ms=None, executor_prefix=names.executor_prefix(name, "uid-sink", 3),
            shard_id=names.shard_id_of("u"), schema=ShardSchema(key="id BIGINT", value=""), location=location,
        )  # fmt: skip
        manifests = driver_manifests(action, sink.meta, settings, rpc_secret=RPC_SECRET, stop_digest=stop_digest)
        return {one["kind"]: one for one in manifests}

    return make


def allowing(settings, *secrets):
    return replace(settings, workload=replace(settings.workload, allow=WorkloadAllow(secrets=secrets)))


def conf_of(manifests):
    lines = manifests["ConfigMap"]["data"]["spark-defaults.conf"].splitlines()
    return dict(line.split("=", 1) for line in lines)


def executor_of(manifests):
    return json.loads(manifests["ConfigMap"]["data"]["executor.yaml"])


def assert_restricted(spec):
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == 10001
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in paths
    for volume in spec["volumes"]:
        assert set(volume) <= {"name", "emptyDir", "secret", "configMap", "downwardAPI"}


def test_every_pod_is_restricted(job, driver):
    manifests = driver()
    for spec in (job()["spec"]["template"]["spec"], manifests["Pod"]["spec"], executor_of(manifests)["spec"]):
        assert_restricted(spec)
        assert spec["restartPolicy"] == "Never"


def test_only_the_driver_may_talk_to_the_api_server(job, driver):
    manifests = driver()
    assert job()["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert executor_of(manifests)["spec"]["automountServiceAccountToken"] is False
    assert manifests["Pod"]["spec"]["automountServiceAccountToken"] is True
    assert manifests["Pod"]["spec"]["serviceAccountName"] == "persist-spark-driver"


def test_every_child_is_owned_by_its_resource(job, driver):
    for child in (job(), *driver().values()):
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["controller"] is True
        assert owner["uid"] in {"uid-shard", "uid-sink"}
        assert child["metadata"]["labels"][names.LABEL_OWNER_UID] == owner["uid"]
        assert child["metadata"]["labels"][names.LABEL_MANAGED_BY] == names.MANAGER


def test_the_maintenance_job_tries_once_and_reports(job):
    made = job()
    assert made["spec"]["backoffLimit"] == 0
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["args"] == [
        "maintain", "compact", "--shard", names.shard_id_of("u"), "--blob", "s3://b/p?credentials_dir=/var/run/secrets/persist/store",
        "--consensus", "redis://r:6379/0?credentials_dir=/var/run/secrets/persist/store", "--report", "/dev/termination-log", "--json",
        "--memory-mib", "2048", "--record-days", "90",
    ]  # fmt: skip
    assert container["resources"]["limits"]["memory"] == "2Gi"
    assert {
        "name": "AWS_SHARED_CREDENTIALS_FILE",
        "value": "/var/run/secrets/persist/store/aws-credentials",
    } in container["env"]
    assert "--memory-mib" not in job(kind="gc")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "memory" in job(memory=None)["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


SPARK = {"runner": "Spark", "spark_executors": 3}


@pytest.fixture
def compaction(make_shard, settings, job):
    """The Job of a compaction on Spark, and its two files as Kubernetes shows them."""

    def make(**changes):
        action = job.action(**SPARK, **changes)
        made = compaction_job(action, make_shard().meta, settings)
        notes = made["spec"]["template"]["metadata"]["annotations"]
        conf = dict(line.split("=", 1) for line in notes[names.ANNOTATION_SPARK_CONF].splitlines())
        return made, conf, json.loads(notes[names.ANNOTATION_EXECUTOR])

    return make


def test_a_compaction_on_spark_is_the_job_of_a_compaction_with_a_driver_in_it(compaction, job):
    made, conf, executor = compaction()
    plain = job(runner="Pod")
    assert {**made["spec"], "template": None} == {**plain["spec"], "template": None}
    assert made["metadata"]["labels"] == {**plain["metadata"]["labels"], names.LABEL_RUNNER: "Spark"}
    pod, (container,) = made["spec"]["template"]["spec"], made["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "persist-spark:0.1.0"
    assert container["args"] == [
        "compact", "--shard", names.shard_id_of("u"), "--blob", "s3://b/p?credentials_dir=/var/run/secrets/persist/store",
        "--consensus", "redis://r:6379/0?credentials_dir=/var/run/secrets/persist/store",
        "--properties", "/etc/persist/spark-defaults.conf", "--report", "/dev/termination-log", "--record-days", "90",
        "--pod", "$(POD_NAME)", "--host", "$(POD_IP)",
    ]  # fmt: skip
    assert {one["name"] for one in container["env"]} >= {"POD_NAME", "POD_IP", "AWS_SHARED_CREDENTIALS_FILE"}
    assert container["name"] == job()["spec"]["template"]["spec"]["containers"][0]["name"], "the operator reads its end"
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("persist-spark-driver", True)
    (files,) = [one["downwardAPI"]["items"] for one in pod["volumes"] if "downwardAPI" in one]
    assert {one["path"] for one in files} == {"spark-defaults.conf", "executor.yaml"}
    assert conf["spark.kubernetes.executor.podTemplateFile"] == "/etc/persist/executor.yaml"
    assert (conf["spark.executor.instances"], conf["spark.executor.cores"]) == ("3", "1")
    # 512m of heap, and beside it Spark's 384 and the memory limit of a task.
    assert (conf["spark.executor.memory"], conf["spark.executor.memoryOverhead"]) == ("512m", "2432m")
    assert "spark.driver.host" not in conf
    assert conf["spark.authenticate"] == "true"
    assert executor["metadata"]["labels"][names.LABEL_ROLE] == "executor"
    assert executor["spec"]["automountServiceAccountToken"] is False


def test_a_compaction_gets_its_bound_of_bytes_wherever_it_runs(compaction, job):
    def given(made):
        return " ".join(made["spec"]["template"]["spec"]["containers"][0]["args"])

    for bounds, options in (({"max_bytes": 700}, "--max-bytes 700"), ({"max_bytes": 700, "full": True}, "--full")):
        assert options in given(job(kind="compaction", **bounds))
        assert options in given(compaction(**bounds)[0])
    assert "--max-bytes" not in given(compaction(full=True)[0]) + given(job(kind="compaction"))


def test_a_compaction_keeps_its_records_for_as_long_as_the_shard_says_wherever_it_runs(compaction, job):
    """Spec 14.16."""
    for made in (job(kind="compaction", record_days=7), compaction(record_days=7)[0]):
        args = made["spec"]["template"]["spec"]["containers"][0]["args"]
        assert args[args.index("--record-days") + 1] == "7"


def test_pods_of_a_compaction_on_spark_are_restricted_and_share_a_secret_of_the_job(compaction, make_shard, job):
    made, _, executor = compaction(template={"spec": {"nodeSelector": {"pool": "cheap"}}}, priority_class_name="low")
    secret = compaction_secret(job.action(**SPARK), make_shard().meta, RPC_SECRET)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-shard"
    for spec in (made["spec"]["template"]["spec"], executor["spec"]):
        assert_restricted(spec)
        (rpc,) = [one["secret"]["secretName"] for one in spec["volumes"] if one["name"] == "rpc"]
        assert rpc == secret["metadata"]["name"]
        assert rpc.startswith("persist-rpc-flights-compact-7-")
        assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"pool": "cheap"}, "low")
    assert b64encode(RPC_SECRET).decode() not in json.dumps(made)
    notes = made["spec"]["template"]["metadata"]["annotations"]
    assert sum(len(key) + len(value) for key, value in notes.items()) < 16 << 10, "Kubernetes allows 256 KiB"


def test_no_secret_is_mounted_when_the_profile_has_none(job, driver):
    bare = StoreLocation(blob="s3://b", consensus="redis://r:6379/0")
    specs = (job(location=bare)["spec"]["template"]["spec"], driver(location=bare)["Pod"]["spec"])
    for spec in specs:
        assert all("secret" not in volume or volume["name"] == "rpc" for volume in spec["volumes"])
        assert all(one["name"] != "AWS_SHARED_CREDENTIALS_FILE" for one in spec["containers"][0]["env"])


def test_the_drivers_sink_json_holds_the_contract(driver):
    document = json.loads(driver({"write": {"parallelism": 3}})["ConfigMap"]["data"]["sink.json"])
    assert document == {
        "sink_id": "team/load",
        "run_id": "uid-sink-2",
        "shard_id": names.shard_id_of("u"),
        "schema": {"key": "id BIGINT", "value": ""},
        "location": {
            "blob": "s3://b/p?credentials_dir=/var/run/secrets/persist/store",
            "consensus": "redis://r:6379/0?credentials_dir=/var/run/secrets/persist/store",
        },
        "input": {"type": "Format", "allowEmpty": False, "format": {"name": "parquet", "options": {"path": "/data"}}},
        "envelope": {"type": "Append"},
        "write": {"targetBatchBytes": "64Mi", "parallelism": 3},
        "purpose": "sink team/load",
    }


def test_spark_runs_in_client_mode_behind_the_headless_service(driver):
    manifests = driver({"spark": {"executor": {"instances": 4, "cores": 2, "memory": "2Gi"}}})
    conf, pod, service = conf_of(manifests), manifests["Pod"], manifests["Service"]
    assert conf["spark.driver.host"] == f"{service['metadata']['name']}.team.svc"
    assert conf["spark.kubernetes.driver.pod.name"] == pod["metadata"]["name"]
    assert (conf["spark.executor.instances"], conf["spark.executor.cores"]) == ("4", "2")
    assert (conf["spark.executor.memory"], conf["spark.executor.memoryOverhead"]) == ("2048m", "1536m")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
    assert {int(conf["spark.driver.port"]), int(conf["spark.driver.blockManager.port"])} <= ports
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1792Mi"
    template = executor_of(manifests)
    assert template["spec"]["containers"][0]["name"] == conf["spark.kubernetes.executor.podTemplateContainerName"]
    assert template["metadata"]["labels"][names.LABEL_ROLE] == "executor"


@pytest.mark.parametrize(
    ("spec", "executor_mib", "driver_mib"),
    [
        ({}, 384 + 192 + 6 * 64, 384 + 352),
        ({"write": {"targetBatchBytes": "128Mi"}}, 384 + 192 + 6 * 128, 384 + 352),
        ({"write": {"targetBatchBytes": 4_000_000}}, 384 + 192 + 23, 384 + 352),
        ({"spark": {"executor": {"cores": 4}, "driver": {"cores": 4}}}, 384 + 4 * (192 + 6 * 64), 384 + 352),
        ({"spark": {"executor": {"memory": "10Gi"}, "driver": {"memory": "20Gi"}}}, 1024 + 576, 2048 + 352),
        ({"spark": {"executor": {"memoryOverhead": "600Mi"}, "driver": {"memoryOverhead": 1}}}, 600, 1),
    ],
    ids=["defaults", "large parts", "small parts", "cores", "large heaps", "given"],
)
def test_memory_overhead_follows_the_task_sizes(driver, spec, executor_mib, driver_mib):
    """The operator rounds its own value up to 64 MiB and keeps a value of the user as it is."""
    manifests = driver(spec)
    conf = conf_of(manifests)
    given = "memoryOverhead" in spec.get("spark", {}).get("executor", {})

    def rounded(mib):
        return mib if given else -(-mib // 64) * 64

    assert conf["spark.executor.memoryOverhead"] == f"{rounded(executor_mib)}m"
    pod_mib = int(manifests["Pod"]["spec"]["containers"][0]["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert pod_mib - int(conf["spark.driver.memory"].removesuffix("m")) == rounded(driver_mib)


def test_user_conf_is_kept_and_escaped_and_never_overrides_ours(driver):
    conf = conf_of(
        driver({"spark": {"conf": {"spark.sql.shuffle.partitions": "8", "spark.x": "a\nspark.master=evil"}}})
    )
    assert conf["spark.sql.shuffle.partitions"] == "8"
    assert conf["spark.x"] == "a\\nspark.master=evil"
    assert conf["spark.master"].startswith("k8s://")


def test_driver_and_executors_authenticate_by_a_secret_of_the_attempt(driver):
    """Only the Secret holds the bytes; pods and configuration name files. The named Secret is created, and this sink owns it."""
    manifests = driver()
    secret, pod, executor, conf = manifests["Secret"], manifests["Pod"], executor_of(manifests), conf_of(manifests)
    assert b64decode(secret["data"]["secret"]) == RPC_SECRET
    assert secret["immutable"] is True
    assert secret["metadata"]["name"] == names.rpc_secret_name(pod["metadata"]["name"], "uid-sink")
    for one in (pod, executor):
        (volume,) = [found for found in one["spec"]["volumes"] if found["name"] == "rpc"]
        (mount,) = [found for found in one["spec"]["containers"][0]["volumeMounts"] if found["name"] == "rpc"]
        assert volume["secret"] == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}
        assert conf["spark.authenticate.secret.file"] == f"{mount['mountPath']}/secret"
    assert (conf["spark.authenticate"], conf["spark.network.crypto.enabled"]) == ("true", "true")
    assert conf["spark.network.crypto.saslFallback"] == "false"
    others = json.dumps([one for kind, one in manifests.items() if kind != "Secret"])
    for form in (RPC_SECRET.hex(), b64encode(RPC_SECRET).decode()):
        assert form not in others


def test_only_the_driver_mounts_the_secret_options_of_the_input(driver, settings):
    source = {
        "type": "Format",
        "format": {"name": "jdbc", "options": {"dbtable": "t"}, "optionsSecretName": "orders-db"},
    }
    manifests = driver({"input": source}, settings=allowing(settings, "orders-db"))
    pod, executor = manifests["Pod"]["spec"], executor_of(manifests)["spec"]
    assert_restricted(pod)
    (volume,) = [one for one in pod["volumes"] if one.get("secret", {}).get("secretName") == "orders-db"]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--options") + 1] == mount["mountPath"]
    assert mount["readOnly"]
    assert "orders-db" not in json.dumps(executor)
    assert "--options" not in driver()["Pod"]["spec"]["containers"][0]["args"]


def test_only_the_driver_mounts_the_files_of_the_function_that_makes_the_input(driver):
    source = {"type": "Python", "python": {"module": "orders", "function": "load", "configMapName": "orders-input-v2"}}
    manifests = driver({"input": source})
    pod, executor = manifests["Pod"]["spec"], executor_of(manifests)["spec"]
    assert_restricted(pod)
    (volume,) = [one for one in pod["volumes"] if one.get("configMap") == {"name": "orders-input-v2"}]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--code") + 1] == mount["mountPath"]
    assert mount["readOnly"]
    assert "orders-input-v2" not in json.dumps(executor)
    assert json.loads(manifests["ConfigMap"]["data"]["sink.json"])["input"]["python"] == source["python"]
    del source["python"]["configMapName"]
    assert "--code" not in driver({"input": source})["Pod"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("listed", [(), ("other", "orders-db-2")])
@pytest.mark.parametrize(
    ("kind", "block"), [("Format", {"format": {"name": "jdbc"}}), ("Python", {"python": {"module": "orders"}})]
)
def test_a_secret_that_the_installation_does_not_list_is_refused(driver, settings, listed, kind, block):
    ((name, fields),) = block.items()
    source = {"type": kind, name: {**fields, "optionsSecretName": "orders-db"}}
    with pytest.raises(
        PodRefused, match=f"spec.input.{name}.optionsSecretName: Secret 'orders-db' is not among"
    ) as refused:
        driver({"input": source}, settings=allowing(settings, *listed))
    assert refused.value.reason == "SecretNotAllowed"


@pytest.mark.parametrize(
    ("scheduler", "labels", "annotations", "fields"),
    [
        ({"name": "Default"}, {}, {}, {}),
        ({"name": "Default", "priorityClassName": "high"}, {}, {}, {"priorityClassName": "high"}),
        ({"name": "Kueue", "queue": "team"}, {"kueue.x-k8s.io/queue-name": "team"}, {}, {}),
        (
            {"name": "Volcano", "queue": "team", "priorityClassName": "high"},
            {},
            {"scheduling.volcano.sh/queue-name": "team"},
            {"schedulerName": "volcano", "priorityClassName": "high"},
        ),
        ({"name": "Volcano"}, {}, {}, {"schedulerName": "volcano"}),
        (
            {"name": "YuniKorn", "queue": "root.team"},
            {"queue": "root.team", "applicationId": "DRIVER"},
            {},
            {"schedulerName": "yunikorn"},
        ),
        ({"name": "YuniKorn"}, {"applicationId": "DRIVER"}, {}, {"schedulerName": "yunikorn"}),
    ],
)
def test_driver_and_executors_are_in_the_queue_that_the_resource_names(driver, scheduler, labels, annotations, fields):
    plain, manifests = driver(), driver({"spark": {"scheduler": scheduler}})
    name = manifests["Pod"]["metadata"]["name"]
    labels = {key: name if value == "DRIVER" else value for key, value in labels.items()}
    for before, pod in ((plain["Pod"], manifests["Pod"]), (executor_of(plain), executor_of(manifests))):
        added = {
            key: value for key, value in pod["metadata"]["labels"].items() if key not in before["metadata"]["labels"]
        }
        assert added == labels
        marks = pod["metadata"].get("annotations", {})
        assert {key: marks[key] for key in marks if "volcano" in key} == annotations
        assert {key: pod["spec"][key] for key in ("schedulerName", "priorityClassName") if key in pod["spec"]} == fields
    for kind in ("ConfigMap", "Secret", "Service"):
        assert not manifests[kind]["metadata"]["labels"].keys() & labels.keys()


@pytest.mark.parametrize("role", ["driver", "executor"])
@pytest.mark.parametrize(("field", "value"), [("schedulerName", "mine"), ("priorityClassName", "low")])
def test_a_template_that_disagrees_with_the_scheduler_is_refused(driver, role, field, value):
    scheduler = {"name": "Volcano", "queue": "q", "priorityClassName": "high"}
    with pytest.raises(
        PodRefused, match=rf"spec\.spark\.{role}\.template\.spec\.{field}: spec\.spark\.scheduler sets it"
    ):
        driver({"spark": {"scheduler": scheduler, role: {"template": {"spec": {field: value}}}}})
    agreeing = {"schedulerName": "volcano", "priorityClassName": "high"}
    driver({"spark": {"scheduler": scheduler, role: {"template": {"spec": agreeing}}}})


@pytest.mark.parametrize(
    ("instances", "limits", "expected"),
    [
        (2, None, {"executor.instances": "2", "dynamicAllocation.enabled": "false"}),
        (2, {"enabled": False}, {"executor.instances": "2", "dynamicAllocation.enabled": "false"}),
        (2, {"enabled": True, "maxExecutors": 8}, (2, 1, 8)),
        (1, {"enabled": True, "minExecutors": 3, "maxExecutors": 8}, (3, 3, 8)),
        (20, {"enabled": True, "minExecutors": 0, "maxExecutors": 8}, (8, 0, 8)),
    ],
)
def test_the_number_of_executors_is_fixed_or_has_limits(driver, instances, limits, expected):
    if isinstance(expected, tuple):
        first, least, most = map(str, expected)
        expected = {
            "executor.instances": first,
            "dynamicAllocation.enabled": "true",
            "dynamicAllocation.initialExecutors": first,
            "dynamicAllocation.minExecutors": least,
            "dynamicAllocation.maxExecutors": most,
            "dynamicAllocation.shuffleTracking.enabled": "true",
        }
    spark = {"executor": {"instances": instances}, **({} if limits is None else {"dynamicAllocation": limits})}
    conf = conf_of(
        driver({"spark": {**spark, "conf": {"spark.dynamicAllocation.minExecutors": "5"} if limits is None else {}}})
    )
    found = {
        key: value for key, value in conf.items() if key.startswith(("spark.dynamicAllocation", "spark.executor.inst"))
    }
    found.pop("spark.dynamicAllocation.minExecutors") if limits is None else None
    assert found == {f"spark.{key}": value for key, value in expected.items()}


def test_the_scale_subresource_names_fields_that_exist():
    crd = yaml.safe_load((crd_dir() / "sparksinks.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    scale = version["subresources"]["scale"]
    kinds = {"specReplicasPath": "integer", "statusReplicasPath": "integer", "labelSelectorPath": "string"}
    assert scale.keys() == kinds.keys()
    for field, kind in kinds.items():
        at = version["schema"]["openAPIV3Schema"]
        for name in scale[field].removeprefix(".").split("."):
            at = at["properties"][name]
        assert at["type"] == kind


def test_the_web_interface_listens_on_loopback(driver):
    """RPC listens for other pods on the fixed ports of driver and executors. The web interface binds to SPARK_LOCAL_IP."""
    manifests = driver()
    conf, container = conf_of(manifests), manifests["Pod"]["spec"]["containers"][0]
    assert {"name": "SPARK_LOCAL_IP", "value": "127.0.0.1"} in container["env"]
    assert conf["spark.driver.bindAddress"] == "0.0.0.0"
    assert conf["spark.blockManager.port"] == conf["spark.driver.blockManager.port"] == "7079"
    assert {one["containerPort"] for one in container["ports"]} == {7078, 7079}
    assert {one["port"] for one in manifests["Service"]["spec"]["ports"]} == {7078, 7079}


def test_names_of_children_fit_for_the_longest_resource_names():
    longest = "a" * 40
    for kind in names.MAINTENANCE_KINDS:
        assert max(len(names.maintenance_name(longest, kind, 2**63 - 1, retry=n)) for n in (0, 99, 100, 10**9)) <= 63
    assert len(names.driver_name(longest, "0" * 8, 999_999)) <= 63
    assert len(names.executor_prefix(longest, "uid", 1)) <= 47


def test_a_driver_serves_its_metrics_where_the_settings_say(driver, settings):
    (quiet,) = driver()["Pod"]["spec"]["containers"]
    assert "--metrics-port" not in quiet["args"]
    assert {one["name"] for one in quiet["ports"]} == {"driver", "blockmanager"}
    scraped = replace(settings, workload=replace(settings.workload, driver_metrics_port=9464))
    (container,) = driver(settings=scraped)["Pod"]["spec"]["containers"]
    assert container["args"][container["args"].index("--metrics-port") + 1] == "9464"
    assert {"name": "metrics", "containerPort": 9464} in container["ports"]


def test_a_driver_listens_for_a_stop_when_there_is_a_key_and_a_network_of_its_own(driver, settings):
    digest = "5f" * 32
    stopped = replace(
        settings,
        graceful_stop=StopSettings(port=7081),
        workload=replace(settings.workload, allow=WorkloadAllow(host_network=True)),
    )
    (container,) = driver(settings=stopped, stop_digest=digest)["Pod"]["spec"]["containers"]
    args = container["args"]
    assert (args[args.index("--stop-port") + 1], args[args.index("--stop-digest") + 1]) == ("7081", digest)
    assert {"name": names.STOP_PORT, "containerPort": 7081} in container["ports"]
    template = {"template": {"spec": {"hostNetwork": True}}}
    for spec, given, stands in (
        (None, None, stopped),
        (None, digest, settings),
        ({"spark": {"driver": template}}, digest, stopped),
    ):
        (quiet,) = driver(spec, settings=stands, stop_digest=given)["Pod"]["spec"]["containers"]
        assert not [one for one in quiet["args"] if one.startswith("--stop")]
        assert {one["name"] for one in quiet["ports"]} == {"driver", "blockmanager"}


def test_runs_of_one_version_have_names_of_their_own_as_long_as_a_job_stays():
    """A Job stays for a week at most, and audits of an idle shard come every five minutes. The hundred and first found the Job of the
    first, and its old report counted as the new run's.
    """
    week_s, every_s = 604_800, 300
    found = [names.maintenance_name("flights", "verify", 42, retry=number) for number in range(week_s // every_s + 1)]
    assert len(set(found)) == len(found)
