"""The Job of a compaction on Spark: its pod is the driver, in client mode, and requests the executors.

It is the Job of a compaction in a pod (`maintenance.maintenance_job`) with another container, so that runs of both kinds are observed,
bounded in time and removed in the same way. Executors reach the driver at the address of its pod, and its files are annotations of the pod.
So there is no Service and no ConfigMap to remove later. Driver and executors authenticate each other with the Secret of the Job, which is
removed when the next compaction starts.
"""

from __future__ import annotations

from typing import Any

from persist_operator.api import names, quantity
from persist_operator.api.resource import Meta
from persist_operator.api.shard import CREDENTIALS_DIR
from persist_operator.api.sink_pods import MAINTENANCE_TEMPLATE
from persist_operator.manifests import maintenance, pods, sink_files, sink_memory
from persist_operator.plan.actions import StartMaintenance
from persist_operator.settings import OperatorSettings, WorkloadAllow

#: Heaps. The JVMs only schedule: rows are in the Python workers, beside the heap.
_DRIVER_HEAP_MIB, _EXECUTOR_HEAP_MIB = 1024, 512
_CONF, _EXECUTOR = "spark-defaults.conf", "executor.yaml"


def compaction_secret(action: StartMaintenance, meta: Meta, secret: bytes) -> dict[str, Any]:
    """The Secret of the Job. `secret` are random bytes; only this Secret contains them."""
    head = pods.metadata("PersistShard", meta, action.name, pods.base_labels(meta, maintenance.COMPONENT), {})
    return pods.rpc_secret(head, action.name, meta, secret)


def compaction_job(action: StartMaintenance, meta: Meta, settings: OperatorSettings) -> dict[str, Any]:
    """The manifest of the Job. It needs `compaction_secret`. Raises PodRefused when the resource requests a forbidden pod."""
    job = maintenance.maintenance_job(action, meta, settings)
    template = job["spec"]["template"]
    template["metadata"]["labels"][names.LABEL_ROLE] = "driver"
    template["metadata"]["annotations"] |= {
        names.ANNOTATION_SPARK_CONF: sink_files.properties_text(spark_conf(action, meta, settings)),
        names.ANNOTATION_EXECUTOR: sink_files.json_text(executor_template(action, meta, allow=settings.workload.allow)),
    }
    spec = template["spec"]
    # The service account of the resource may not create executors, so the driver would wait for them until its deadline.
    spec["serviceAccountName"] = settings.workload.driver_service_account
    spec["automountServiceAccountToken"] = True
    spec["containers"] = [_container(action, spec["containers"][0], settings)]
    spec["volumes"] = [*spec["volumes"], pods.empty_dir("scratch"), _files(), pods.rpc_volume(action.name, meta)]
    return job


def spark_conf(action: StartMaintenance, meta: Meta, settings: OperatorSettings) -> dict[str, str]:
    """The Spark configuration of the driver. The driver gets the name and the address of its pod from its arguments."""
    cpu = settings.workload.executor_cpu_request
    task_mib = quantity.to_mebibytes(action.memory or settings.workload.maintenance_memory)
    return {
        "spark.ui.enabled": "false",
        "spark.kubernetes.executor.enablePollingWithResourceVersion": "true",
        **({"spark.kubernetes.executor.request.cores": cpu} if cpu else {}),
        **sink_files.in_pods(meta, executor_prefix=names.executor_prefix(meta.name, meta.uid, action.name)),
        "spark.driver.memory": f"{_DRIVER_HEAP_MIB}m",
        "spark.executor.instances": str(action.spark_executors),
        "spark.executor.cores": "1",
        "spark.executor.memory": f"{_EXECUTOR_HEAP_MIB}m",
        "spark.executor.memoryOverhead": f"{sink_memory.overhead_mib(_EXECUTOR_HEAP_MIB, task_mib)}m",
        "spark.kubernetes.container.image": settings.images.spark,
        "spark.kubernetes.container.image.pullPolicy": settings.images.pull_policy,
        **sink_files.pull_secrets(settings.images.pull_secrets),
    }


def executor_template(action: StartMaintenance, meta: Meta, *, allow: WorkloadAllow) -> dict[str, Any]:
    """The pod template of the executors, with the placement and the priority of the shard's maintenance pods. Spark fills in the rest."""
    location, priority = action.location, action.priority_class_name
    labels = {
        **pods.base_labels(meta, maintenance.COMPONENT),
        names.LABEL_SHARD: meta.name,
        names.LABEL_KIND: action.kind,
        names.LABEL_ROLE: "executor",
    }
    volumes = [pods.rpc_volume(action.name, meta), *pods.credential_volumes(location)]
    pod = sink_files.executor_pod(labels, location, mounts=pods.credential_mounts(location), volumes=volumes)
    if priority:
        pod["spec"]["priorityClassName"] = priority
    return pods.with_template(pod, action.template, where=MAINTENANCE_TEMPLATE, role="maintenance", allow=allow)


def arguments(action: StartMaintenance, *, credentials_dir: str, properties: str, report: str) -> list[str]:
    """The command line of `persist-spark`, without the arguments that only a pod needs."""
    blob, consensus = action.location.urls(credentials_dir)
    stores = ["--blob", blob, "--consensus", consensus]
    return [
        "compact",
        "--shard", action.shard_id,
        *stores,
        "--properties", properties,
        "--report", report,
        *maintenance.bounds(full=action.full, max_bytes=action.max_bytes),
        "--record-days", str(action.record_days),
    ]  # fmt: skip


def _container(action: StartMaintenance, plain: dict[str, Any], settings: OperatorSettings) -> dict[str, Any]:
    scratch = sink_files.scratch_dir()
    memory = f"{_DRIVER_HEAP_MIB + sink_memory.overhead_mib(_DRIVER_HEAP_MIB, sink_memory.DRIVER_MIB)}Mi"
    files = f"{sink_files.CONFIG_DIR}/{_CONF}"
    command = arguments(action, credentials_dir=CREDENTIALS_DIR, properties=files, report=maintenance.TERMINATION_LOG)
    return {
        **plain,
        "image": settings.images.spark,
        # Kubernetes replaces $(NAME) by the variable.
        "args": [*command, "--pod", "$(POD_NAME)", "--host", "$(POD_IP)"],
        "env": [
            *plain["env"],
            {"name": "SPARK_LOCAL_DIRS", "value": scratch},
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
            ),
        ],
        "ports": [
            {"name": "driver", "containerPort": sink_files.DRIVER_PORT},
            {"name": "blockmanager", "containerPort": sink_files.BLOCK_MANAGER_PORT},
        ],
        "resources": {
            "requests": {"cpu": settings.workload.driver_cpu_request or "1", "memory": memory},
            "limits": {"memory": memory},
        },
        "volumeMounts": [
            *plain["volumeMounts"],
            pods.mount("scratch", scratch),
            pods.mount("config", sink_files.CONFIG_DIR, read_only=True),
            pods.rpc_mount(),
        ],
    }


def _files() -> dict[str, Any]:
    items = ((_CONF, names.ANNOTATION_SPARK_CONF), (_EXECUTOR, names.ANNOTATION_EXECUTOR))
    return {
        "name": "config",
        "downwardAPI": {
            "items": [
                {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
                for path, annotation in items
            ]
        },
    }
