"""The Job of one maintenance run: one pod, one try (the plan repeats), no access to the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from persist_engine.storage.addresses import S3Address

from persist_operator.api import names, quantity
from persist_operator.api.pod_template import check_account
from persist_operator.api.resource import Meta
from persist_operator.api.shard import CREDENTIALS_DIR, InlineLocation, StoreLocation
from persist_operator.api.sink_pods import MAINTENANCE_TEMPLATE
from persist_operator.manifests import pods
from persist_operator.settings import OperatorSettings

COMPONENT = "maintenance"
CONTAINER = "maintain"
#: Where Kubernetes takes a container's last words from.
TERMINATION_LOG = "/dev/termination-log"


def maintenance_job(
    meta: Meta,
    *,
    kind: names.MaintenanceKind,
    name: str,
    shard_id: str,
    location: StoreLocation,
    seqno: int,
    reason: str,
    memory: str | None,
    ttl_seconds: int,
    priority_class_name: str | None,
    service_account_name: str | None,
    template: Mapping[str, Any],
    settings: OperatorSettings,
) -> dict[str, Any]:
    """The manifest. `memory` in Kubernetes' form; the operator's default when None. PodRefused when `template` says what it may not."""
    memory = memory or settings.workload.maintenance_memory
    return _job(
        meta,
        name=name,
        labels={names.LABEL_KIND: kind, names.LABEL_SEQNO: str(seqno)},
        annotations={names.ANNOTATION_REASON: reason},
        arguments_=arguments(kind, shard_id, *location.urls(CREDENTIALS_DIR), memory=memory),
        location=location,
        size=(settings.workload.maintenance_cpu, memory),
        seconds=(settings.workload.maintenance_deadline_seconds, ttl_seconds),
        priority_class_name=priority_class_name,
        service_account_name=service_account_name,
        template=template,
        settings=settings,
    )


def inspection_job(
    meta: Meta,
    *,
    name: str,
    location: InlineLocation,
    wish: str,
    known_seqno: int,
    revision: str,
    ttl_seconds: int,
    priority_class_name: str | None,
    service_account_name: str | None,
    template: Mapping[str, Any],
    settings: OperatorSettings,
) -> dict[str, Any]:
    """The Job that looks after a shard on the resource's own stores, under the rules of maintenance. PodRefused likewise."""
    inline = settings.inline_storage
    blob, consensus = location.urls(CREDENTIALS_DIR)
    if known_seqno:
        # Whether conditional writes exclude was seen when the shard was made, and is by each process that writes to it.
        blob = replace(S3Address.parse(blob), probe=False).url
    give_up_s = max(1, inline.deadline_seconds // 4)
    return _job(
        meta,
        name=name,
        labels={
            names.LABEL_KIND: names.INSPECTION,
            names.LABEL_SEQNO: str(known_seqno),
            names.LABEL_REVISION: revision,
        },
        annotations={},
        arguments_=[
            "maintain", "tend",
            "--wish", wish,
            "--blob", blob,
            "--consensus", consensus,
            "--report", TERMINATION_LOG,
            "--give-up", str(give_up_s),
            "--json",
        ],
        location=location,
        size=(inline.cpu, inline.memory),
        seconds=(inline.deadline_seconds, ttl_seconds),
        priority_class_name=priority_class_name,
        service_account_name=service_account_name,
        template=template,
        settings=settings,
    )  # fmt: skip


def _job(
    meta: Meta,
    *,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    arguments_: list[str],
    location: StoreLocation,
    size: tuple[str, str],
    seconds: tuple[int, int],
    priority_class_name: str | None,
    service_account_name: str | None,
    template: Mapping[str, Any],
    settings: OperatorSettings,
) -> dict[str, Any]:
    """`size`: cpu and memory; `seconds`: until it is ended, and until its remains go."""
    check_account(
        service_account_name, where="spec.maintenance.serviceAccountName", known=settings.workload.service_accounts
    )
    labels = {**pods.base_labels(meta, COMPONENT), names.LABEL_SHARD: meta.name, **labels}
    (cpu, memory), (deadline_s, ttl_s) = size, seconds
    container = {
        "name": CONTAINER,
        "image": settings.images.engine,
        "imagePullPolicy": settings.images.pull_policy,
        "args": arguments_,
        "env": [{"name": "HOME", "value": "/tmp"}, *pods.credential_env(location)],  # noqa: S108 - an emptyDir of the pod
        "resources": {
            "requests": {"cpu": cpu, "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": pods.container_security(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [pods.mount("tmp", "/tmp"), *pods.credential_mounts(location)],  # noqa: S108
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "containers": [container],
        "volumes": [pods.empty_dir("tmp"), *pods.credential_volumes(location)],
        **pods.pull_secrets(settings.images.pull_secrets),
        **({"serviceAccountName": service_account_name} if service_account_name else {}),
        **({"priorityClassName": priority_class_name} if priority_class_name else {}),
    }
    pod = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    allow = settings.workload.allow
    pod = pods.with_template(pod, template, where=MAINTENANCE_TEMPLATE, role="maintenance", allow=allow)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.metadata("PersistShard", meta, name, labels, annotations),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline_s,
            "ttlSecondsAfterFinished": ttl_s,
            "template": pod,
        },
    }


def arguments(
    kind: names.MaintenanceKind, shard_id: str, blob: str, consensus: str, *, memory: str | None
) -> list[str]:
    """The command line of the engine for one run. `memory`: what a compaction's process may take; None: the engine's default."""
    bound = memory if kind == "compaction" else None
    return [
        "maintain", names.VERB[kind],
        "--shard", shard_id,
        "--blob", blob,
        "--consensus", consensus,
        "--report", TERMINATION_LOG,
        "--json",
        *(() if bound is None else ("--memory-mib", str(quantity.to_mebibytes(bound)))),
    ]  # fmt: skip
