"""The files that a driver reads: sink.json, spark-defaults.conf and the executors' pod template.

`sink_document` is also what the local runner writes; the other two are for pods only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from persist_engine.codec.sink_run import SinkRun, encode_sink_run
from persist_engine.model.ids import ShardId

from persist_operator.api import names, quantity, sink_pods
from persist_operator.api.resource import Meta
from persist_operator.api.sink import SinkSpec
from persist_operator.manifests import pods, sink_memory
from persist_operator.plan.actions import StartDriver
from persist_operator.settings import OperatorSettings, WorkloadAllow

CONFIG_DIR = "/etc/persist"
DRIVER_PORT, BLOCK_MANAGER_PORT = 7078, 7079
EXECUTOR_CONTAINER = "executor"
_SCRATCH_DIR = "/var/data/spark"
#: A peer that cannot prove to know the attempt's secret is refused, and no other can read along. As a file: Spark puts a secret
#: that it is given otherwise in clear into the executors' pods.
_AUTHENTICATED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret.file": f"{pods.RPC_DIR}/{pods.RPC_KEY}",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}


def sink_document(action: StartDriver, meta: Meta, *, credentials_dir: str) -> dict[str, Any]:
    """The driver's request; input, envelope and write as the user wrote them. The driver reads the stores' credentials, if a Secret
    holds them, from `credentials_dir`.
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
            purpose=f"sink {meta.key}",
        )
    )


def spark_conf(action: StartDriver, meta: Meta, *, image: str, settings: OperatorSettings) -> dict[str, str]:
    """Spark's configuration for a driver in client mode inside a pod. The user's keys first, ours over them."""
    spec, name = action.spec, action.name
    driver, executor = spec.spark.driver, spec.spark.executor
    cpu = settings.workload.executor_cpu_request
    return {
        "spark.ui.showConsoleProgress": "false",
        "spark.kubernetes.executor.enablePollingWithResourceVersion": "true",
        **spec.spark.conf,
        **({"spark.kubernetes.executor.request.cores": cpu} if cpu else {}),
        "spark.master": "k8s://https://kubernetes.default.svc",
        "spark.submit.deployMode": "client",
        "spark.app.name": meta.key,
        "spark.driver.host": f"{name}.{meta.namespace}.svc",
        "spark.driver.bindAddress": "0.0.0.0",  # noqa: S104 - inside the pod; executors come through the headless Service
        "spark.driver.port": str(DRIVER_PORT),
        "spark.driver.blockManager.port": str(BLOCK_MANAGER_PORT),
        # Executors would listen on any port: a NetworkPolicy has to know which.
        "spark.blockManager.port": str(BLOCK_MANAGER_PORT),
        **_AUTHENTICATED,
        "spark.driver.memory": f"{quantity.to_mebibytes(driver.memory)}m",
        "spark.dynamicAllocation.enabled": "false",
        "spark.executor.instances": str(executor.instances),
        "spark.executor.cores": str(executor.cores),
        "spark.executor.memory": f"{quantity.to_mebibytes(executor.memory)}m",
        "spark.executor.memoryOverhead": f"{sink_memory.executor_overhead_mib(spec)}m",
        "spark.kubernetes.namespace": meta.namespace,
        "spark.kubernetes.container.image": image,
        "spark.kubernetes.container.image.pullPolicy": spec.spark.image_pull_policy or settings.images.pull_policy,
        **_pull_secrets(spec, settings),
        # With its name Spark makes the driver pod the owner of the executors: they die with it.
        "spark.kubernetes.driver.pod.name": name,
        "spark.kubernetes.executor.podNamePrefix": action.executor_prefix,
        "spark.kubernetes.executor.podTemplateFile": f"{CONFIG_DIR}/executor.yaml",
        "spark.kubernetes.executor.podTemplateContainerName": EXECUTOR_CONTAINER,
        "spark.kubernetes.executor.disableConfigMap": "true",
        # Otherwise executors are told the bind address, 0.0.0.0, instead of the driver's host.
        "spark.kubernetes.executor.useDriverPodIP": "false",
        # The Service is the operator's, and no volume claims are made: the driver needs no right to look for its own at the end.
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    }


def executor_template(action: StartDriver, meta: Meta, *, allow: WorkloadAllow) -> dict[str, Any]:
    """Pod template of the executors of a driver: the restricted profile, our labels, credentials, and what the user adds. Spark fills
    in the rest.
    """
    location = action.location
    labels = {
        **pods.base_labels(meta, "sink"),
        names.LABEL_SINK: meta.name,
        names.LABEL_ROLE: "executor",
        names.LABEL_ATTEMPT: str(action.attempt),
    }
    container = {
        "name": EXECUTOR_CONTAINER,
        "env": [{"name": "HOME", "value": "/tmp"}, *pods.credential_env(location)],  # noqa: S108
        "securityContext": pods.container_security(),
        "volumeMounts": [pods.mount("tmp", "/tmp"), pods.rpc_mount(), *pods.credential_mounts(location)],  # noqa: S108
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pods.pod_security(),
            "containers": [container],
            "volumes": [pods.empty_dir("tmp"), pods.rpc_volume(action.name, meta), *pods.credential_volumes(location)],
        },
    }
    template = action.spec.spark.executor.template
    return pods.with_template(pod, template, where=sink_pods.EXECUTOR_TEMPLATE, role="executor", allow=allow)


def properties_text(conf: Mapping[str, str]) -> str:
    """spark-defaults.conf: sorted, with what a properties file needs escaped."""

    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")

    return "".join(f"{escaped(key)}={escaped(value)}\n" for key, value in sorted(conf.items()))


def json_text(document: Mapping[str, Any]) -> str:
    """JSON for a file, sorted. JSON is YAML too."""
    return json.dumps(document, indent=1, sort_keys=True)


def scratch_dir() -> str:
    """Where the driver's Spark spills."""
    return _SCRATCH_DIR


def _pull_secrets(spec: SinkSpec, settings: OperatorSettings) -> dict[str, str]:
    found = spec.spark.image_pull_secrets or settings.images.pull_secrets
    return {"spark.kubernetes.container.image.pullSecrets": ",".join(found)} if found else {}
