"""The files of a driver: sink.json, spark-defaults.conf and the pod template of its executors.

The local runner writes sink.json too (`sink_document`). The other two files are for pods only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from persist_engine.codec.sink_run import SinkRun, SinkSource, encode_sink_run
from persist_engine.model.ids import ShardId

from persist_operator.api import names, quantity, sink_pods
from persist_operator.api.resource import Meta
from persist_operator.api.shard import StoreLocation
from persist_operator.api.sink import SparkSpec
from persist_operator.manifests import pods, scheduling, sink_memory
from persist_operator.plan.actions import StartDriver
from persist_operator.settings import OperatorSettings, WorkloadAllow

CONFIG_DIR = "/etc/persist"
#: The folder and the name of the file whose appearance orders a driver on standby to take over.
PROMOTION_DIR, PROMOTION_KEY = "/etc/persist-promotion", "promoted"
#: The address of the API server in every pod.
API_SERVER = "https://kubernetes.default.svc"
DRIVER_PORT, BLOCK_MANAGER_PORT = 7078, 7079
#: The part of the grace period in which a driver that has committed stops Spark.
_STOP_SPARK_SECONDS = 15
_SCRATCH_DIR = "/var/data/spark"
#: Spark refuses a peer that does not know the attempt's secret, and encrypts the traffic. The secret is in a file, because Spark would
#: copy a secret from its configuration in clear into the executors' pods.
_AUTHENTICATED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret.file": f"{pods.RPC_DIR}/{pods.RPC_KEY}",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}


def sink_document(
    action: StartDriver,
    meta: Meta,
    *,
    credentials_dir: str,
    input_credentials_dir: str = pods.INPUT_CREDENTIALS_DIR,
    is_bounded: bool = False,
) -> dict[str, Any]:
    """The contents of sink.json. input, envelope and write are as the user wrote them. `credentials_dir`: the folder with the stores'
    credentials, if they have a Secret. `input_credentials_dir`: the folder with the credentials for the stores of the input shard, if they
    have another Secret. `is_bounded`: a stream ends when its source has no new rows.
    """
    spec, schema = action.spec, action.schema
    blob, consensus = action.location.urls(credentials_dir)
    return encode_sink_run(
        SinkRun(
            sink_id=meta.key,
            run_id=action.run_id,
            shard_id=ShardId(action.shard_id),
            key_schema=schema.key,
            val_schema=schema.value,
            blob=blob,
            consensus=consensus,
            input=spec.input,
            envelope=spec.envelope,
            write=spec.write,
            write_mode=spec.write_mode,
            purpose=f"sink {meta.key}",
            stream=_stream(action, is_bounded=is_bounded) if spec.mode == "Streaming" else None,
            source=_source(action, credentials_dir, input_credentials_dir),
        )
    )


def _source(action: StartDriver, credentials_dir: str, input_credentials_dir: str) -> SinkSource | None:
    source = action.source
    if source is None:
        return None
    folder = credentials_dir if pods.shares_secret(source, action.location) else input_credentials_dir
    blob, consensus = source.location.urls(folder)
    return SinkSource(shard_id=ShardId(source.shard_id), blob=blob, consensus=consensus)


def _stream(action: StartDriver, *, is_bounded: bool) -> dict[str, Any]:
    """The settings of a stream. The driver waits for the batch in flight as long as its grace period allows, minus the time to
    stop Spark.
    """
    spec = action.spec
    grace = spec.termination_grace_seconds
    interval = {} if spec.commit_interval_seconds is None else {"commitIntervalSeconds": spec.commit_interval_seconds}
    standby = {"standby": True} if action.stands_by else {}
    fresh = {} if spec.fresh_seconds is None else {"freshSeconds": spec.fresh_seconds}
    return {
        **interval,
        **standby,
        **fresh,
        "bounded": is_bounded,
        "stopSeconds": max(grace - _STOP_SPARK_SECONDS, grace // 2),
    }


def spark_conf(action: StartDriver, meta: Meta, *, image: str, settings: OperatorSettings) -> dict[str, str]:
    """The Spark configuration of a driver in client mode inside a pod. Keys of the operator override those of the user."""
    spec, name = action.spec, action.name
    driver, executor = spec.spark.driver, spec.spark.executor
    cpu = settings.workload.executor_cpu_request
    return {
        "spark.ui.showConsoleProgress": "false",
        "spark.kubernetes.executor.enablePollingWithResourceVersion": "true",
        **spec.spark.conf,
        **({"spark.kubernetes.executor.request.cores": cpu} if cpu else {}),
        **in_pods(meta, executor_prefix=action.executor_prefix),
        "spark.driver.host": f"{name}.{meta.namespace}.svc",
        "spark.driver.memory": f"{quantity.to_mebibytes(driver.memory)}m",
        **_numbers(spec.spark),
        "spark.executor.cores": str(executor.cores),
        "spark.executor.memory": f"{quantity.to_mebibytes(executor.memory)}m",
        "spark.executor.memoryOverhead": f"{sink_memory.executor_overhead_mib(spec)}m",
        "spark.kubernetes.container.image": image,
        "spark.kubernetes.container.image.pullPolicy": spec.spark.image_pull_policy or settings.images.pull_policy,
        **pull_secrets(spec.spark.image_pull_secrets or settings.images.pull_secrets),
        # With this name, Spark makes the driver pod the owner of its executors, so that they are deleted with it.
        "spark.kubernetes.driver.pod.name": name,
    }


def _numbers(spark: SparkSpec) -> dict[str, str]:
    """The settings for the number of executors. An executor with rows that a run still needs stays, because Spark does not count it
    as idle.
    """
    instances, dynamic = spark.executor.instances, spark.dynamic
    if dynamic is None:
        return {"spark.executor.instances": str(instances)}
    first = str(min(max(instances, dynamic.least), dynamic.most))
    name = "spark.dynamicAllocation"
    return {
        "spark.executor.instances": first,
        f"{name}.enabled": "true",
        f"{name}.initialExecutors": first,
        f"{name}.minExecutors": str(dynamic.least),
        f"{name}.maxExecutors": str(dynamic.most),
        # There is no shuffle service in pods. So executors with shuffled data stay until the data are no longer needed.
        f"{name}.shuffleTracking.enabled": "true",
    }


def in_pods(meta: Meta, *, executor_prefix: str) -> dict[str, str]:
    """The settings of every Spark driver in client mode inside a pod, for any application."""
    return {
        "spark.master": f"k8s://{API_SERVER}",
        "spark.submit.deployMode": "client",
        "spark.app.name": meta.key,
        "spark.driver.bindAddress": "0.0.0.0",  # noqa: S104 - inside the pod; executors connect to its own address or name
        "spark.driver.port": str(DRIVER_PORT),
        "spark.driver.blockManager.port": str(BLOCK_MANAGER_PORT),
        # The port is fixed for executors too, because a NetworkPolicy must name it.
        "spark.blockManager.port": str(BLOCK_MANAGER_PORT),
        **_AUTHENTICATED,
        "spark.dynamicAllocation.enabled": "false",
        "spark.kubernetes.namespace": meta.namespace,
        "spark.kubernetes.executor.podNamePrefix": executor_prefix,
        "spark.kubernetes.executor.podTemplateFile": f"{CONFIG_DIR}/executor.yaml",
        "spark.kubernetes.executor.podTemplateContainerName": names.EXECUTOR_CONTAINER,
        "spark.kubernetes.executor.disableConfigMap": "true",
        # Otherwise executors get the bind address, 0.0.0.0, instead of the driver's host.
        "spark.kubernetes.executor.useDriverPodIP": "false",
        # The operator owns the Service, and there are no volume claims. With these keys, the driver needs no right to list them when it
        # ends.
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    }


def executor_template(action: StartDriver, meta: Meta, *, allow: WorkloadAllow) -> dict[str, Any]:
    """The pod template of a driver's executors: the restricted profile, the operator's labels, credentials and the user's template. Spark
    fills in the rest.
    """
    location = action.location
    labels = {
        **pods.base_labels(meta, "sink"),
        names.LABEL_SINK: meta.name,
        names.LABEL_ROLE: "executor",
        names.LABEL_ATTEMPT: str(action.attempt),
    }
    rpc = pods.rpc_volume(action.name, meta)
    pod = executor_pod(labels, location, mounts=pods.sink_mounts(action), volumes=[rpc, *pods.sink_volumes(action)])
    pod = scheduling.scheduled(pod, action.spec.spark.scheduler, application=action.name)
    template = action.spec.spark.executor.template
    return pods.with_template(pod, template, where=sink_pods.EXECUTOR_TEMPLATE, role="executor", allow=allow)


def executor_pod(
    labels: Mapping[str, str],
    location: StoreLocation,
    *,
    mounts: Sequence[Mapping[str, Any]],
    volumes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The pod of an executor, for any application, with these mounts and volumes and a folder for temporary files. `volumes` has the Secret
    of the run.
    """
    container = {
        "name": names.EXECUTOR_CONTAINER,
        "env": [{"name": "HOME", "value": "/tmp"}, *pods.credential_env(location)],  # noqa: S108
        "securityContext": pods.container_security(),
        "volumeMounts": [pods.mount("tmp", "/tmp"), pods.rpc_mount(), *mounts],  # noqa: S108
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": dict(labels)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pods.pod_security(),
            "containers": [container],
            "volumes": [pods.empty_dir("tmp"), *volumes],
        },
    }


def properties_text(conf: Mapping[str, str]) -> str:
    """The text of spark-defaults.conf, sorted and escaped like a properties file."""

    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")

    return "".join(f"{escaped(key)}={escaped(value)}\n" for key, value in sorted(conf.items()))


def json_text(document: Mapping[str, Any]) -> str:
    """The text of a JSON file, with sorted keys. JSON is YAML too."""
    return json.dumps(document, indent=1, sort_keys=True)


def scratch_dir() -> str:
    """The folder for the spills of the driver's Spark."""
    return _SCRATCH_DIR


def pull_secrets(found: Sequence[str]) -> dict[str, str]:
    """The setting for executors; none without secrets."""
    return {"spark.kubernetes.container.image.pullSecrets": ",".join(found)} if found else {}
