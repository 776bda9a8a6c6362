"""The children of one attempt of a sink: ConfigMap, Secret, headless Service, driver Pod. All but the Secret have the attempt's name."""

from __future__ import annotations

from typing import Any

from persist_operator.api import names, quantity, sink_pods, times
from persist_operator.api.resource import Meta
from persist_operator.api.shard import CREDENTIALS_DIR
from persist_operator.manifests import pods, scheduling, sink_files, sink_memory
from persist_operator.plan.actions import PromoteDriver, StartDriver
from persist_operator.settings import OperatorSettings

COMPONENT = "sink"
#: The name of the port by which a PodMonitor finds the driver's metrics.
METRICS_PORT = "metrics"
_Stop = tuple[int, str] | None


def driver_manifests(
    action: StartDriver, meta: Meta, settings: OperatorSettings, *, rpc_secret: bytes, stop_digest: str | None = None
) -> list[dict[str, Any]]:
    """The manifests of an attempt in the order of their creation. The ConfigMap comes first, because the operator finds leftovers by it.
    The pod comes last, because it needs the others. `rpc_secret`: random bytes for this attempt; only its Secret contains them.
    `stop_digest`: the digest of the token that stops the driver; None: it listens for no stop. Raises PodRefused when the resource requests
    a forbidden pod.
    """
    spec = action.spec
    sink_pods.check(spec, settings.workload)
    image = spec.spark.image or settings.images.spark
    labels = {
        **pods.base_labels(meta, COMPONENT),
        names.LABEL_SINK: meta.name,
        names.LABEL_ROLE: "driver",
        names.LABEL_ATTEMPT: str(action.attempt),
        names.LABEL_RUN: str(action.run_number),
        names.LABEL_REVISION: spec.revision,
        names.LABEL_STORE: names.store_label(action.location.consensus),
    }
    annotations = {names.ANNOTATION_RUN_ID: action.run_id}
    if action.scheduled_ms is not None:
        annotations[names.ANNOTATION_SCHEDULED_TIME] = times.to_text(action.scheduled_ms)
    if action.stands_by:
        annotations[names.ANNOTATION_STANDBY] = "true"
    head = pods.metadata("SparkSink", meta, action.name, labels, annotations)
    document = sink_files.sink_document(action, meta, credentials_dir=CREDENTIALS_DIR)
    conf = sink_files.spark_conf(action, meta, image=image, settings=settings)
    executor = sink_files.executor_template(action, meta, allow=settings.workload.allow)
    secret = pods.rpc_secret(head, action.name, meta, rpc_secret)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": head,
        "immutable": True,
        "data": {
            "sink.json": sink_files.json_text(document),
            "spark-defaults.conf": sink_files.properties_text(conf),
            "executor.yaml": sink_files.json_text(executor),
        },
    }
    pod = _pod(head, meta, action, image=image, settings=settings, stop=_stop(action, settings, stop_digest))
    return [config_map, secret, _service(head), pod]


def promotion_manifest(action: PromoteDriver, meta: Meta) -> dict[str, Any]:
    """The ConfigMap that orders a driver on standby to take over. The driver's pod mounts it before it exists, and the kubelet shows its
    file when it exists. So the operator needs no right to change pods, and the driver needs no right to read objects.
    """
    labels = {**pods.base_labels(meta, COMPONENT), names.LABEL_SINK: meta.name, names.LABEL_ROLE: "promotion"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pods.metadata("SparkSink", meta, names.promotion_name(action.name), labels, {}),
        "immutable": True,
        "data": {sink_files.PROMOTION_KEY: action.name},
    }


def _service(head: dict[str, Any]) -> dict[str, Any]:
    """The headless Service. With it, executors can resolve the driver's name even before the pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": head,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {
                names.LABEL_OWNER_UID: head["labels"][names.LABEL_OWNER_UID],
                names.LABEL_ROLE: "driver",
                names.LABEL_ATTEMPT: head["labels"][names.LABEL_ATTEMPT],
            },
            "ports": [
                {"name": "driver", "port": sink_files.DRIVER_PORT},
                {"name": "blockmanager", "port": sink_files.BLOCK_MANAGER_PORT},
            ],
        },
    }


def _own_annotation(namespace: str, name: str) -> str:
    """The place of the driver's progress: an annotation of its own pod. The operator reads pods anyway, and connects to none."""
    return f"{sink_files.API_SERVER}/api/v1/namespaces/{namespace}/pods/{name}#{names.ANNOTATION_PROGRESS}"


def _stop(action: StartDriver, settings: OperatorSettings, digest: str | None) -> _Stop:
    """The port on which the driver listens for a stop, with the digest. On a node's own network, the operator asks no driver."""
    port, template = settings.graceful_stop.port, action.spec.spark.driver.template
    is_on_node = (template.get("spec") or {}).get("hostNetwork")
    return None if port is None or digest is None or is_on_node else (port, digest)


def _arguments(
    head: dict[str, Any], meta: Meta, action: StartDriver, metrics_port: int | None, stop: _Stop
) -> list[str]:
    return [
        *("driver", "--spec", f"{sink_files.CONFIG_DIR}/sink.json"),
        *("--properties", f"{sink_files.CONFIG_DIR}/spark-defaults.conf"),
        *("--progress", _own_annotation(meta.namespace, head["name"])),
        *(("--metrics-port", str(metrics_port)) if metrics_port is not None else ()),
        *(("--stop-port", str(stop[0]), "--stop-digest", stop[1]) if stop is not None else ()),
        *(("--options", pods.OPTIONS_DIR) if action.spec.options_secret else ()),
        *(("--code", pods.CODE_DIR) if action.spec.code_config_map else ()),
        *(("--promote", f"{sink_files.PROMOTION_DIR}/{sink_files.PROMOTION_KEY}") if action.stands_by else ()),
    ]


def _ports(metrics_port: int | None, stop: _Stop) -> list[dict[str, Any]]:
    ports = {
        "driver": sink_files.DRIVER_PORT,
        "blockmanager": sink_files.BLOCK_MANAGER_PORT,
        METRICS_PORT: metrics_port,
        names.STOP_PORT: None if stop is None else stop[0],
    }
    return [{"name": name, "containerPort": port} for name, port in ports.items() if port is not None]


def _pod(
    head: dict[str, Any], meta: Meta, action: StartDriver, *, image: str, settings: OperatorSettings, stop: _Stop
) -> dict[str, Any]:
    spec, location = action.spec, action.location
    driver = spec.spark.driver
    memory = f"{quantity.to_mebibytes(driver.memory) + sink_memory.driver_overhead_mib(spec)}Mi"
    scratch, metrics_port = sink_files.scratch_dir(), settings.workload.driver_metrics_port
    container = {
        "name": names.DRIVER_CONTAINER,
        "image": image,
        "imagePullPolicy": spec.spark.image_pull_policy or settings.images.pull_policy,
        "args": _arguments(head, meta, action, metrics_port, stop),
        "env": [
            {"name": "SPARK_LOCAL_DIRS", "value": scratch},
            # The web interface listens on this address, which `kubectl port-forward` reaches and other pods do not. RPC has another
            # address.
            {"name": "SPARK_LOCAL_IP", "value": "127.0.0.1"},
            {"name": "HOME", "value": "/tmp"},  # noqa: S108
            *pods.credential_env(location),
        ],
        "ports": _ports(metrics_port, stop),
        "resources": {
            "requests": {"cpu": settings.workload.driver_cpu_request or str(driver.cores), "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": pods.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            pods.mount("tmp", "/tmp"),  # noqa: S108
            pods.mount("scratch", scratch),
            pods.mount("config", sink_files.CONFIG_DIR, read_only=True),
            pods.rpc_mount(),
            *([pods.mount("promotion", sink_files.PROMOTION_DIR, read_only=True)] if action.stands_by else []),
            *pods.sink_mounts(action),
            *pods.options_mounts(action),
        ],
    }
    promotion = {"name": names.promotion_name(head["name"]), "optional": True}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": head,
        "spec": {
            # The operator repeats attempts. A driver that restarted in place would find its own former executors.
            "restartPolicy": "Never",
            "serviceAccountName": spec.spark.service_account_name or settings.workload.driver_service_account,
            "automountServiceAccountToken": True,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": spec.termination_grace_seconds,
            "securityContext": pods.pod_security(),
            "containers": [container],
            "volumes": [
                pods.empty_dir("tmp"),
                pods.empty_dir("scratch"),
                {"name": "config", "configMap": {"name": head["name"]}},
                pods.rpc_volume(head["name"], meta),
                *([{"name": "promotion", "configMap": promotion}] if action.stands_by else []),
                *pods.sink_volumes(action),
                *pods.options_volumes(action),
            ],
            **pods.pull_secrets(spec.spark.image_pull_secrets or settings.images.pull_secrets),
        },
    }
    where, allow = sink_pods.DRIVER_TEMPLATE, settings.workload.allow
    pod = scheduling.scheduled(pod, spec.spark.scheduler, application=action.name)
    return pods.with_template(pod, driver.template, where=where, role="driver", allow=allow)
