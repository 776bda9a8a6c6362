"""The Job of one maintenance run or one inspection: one pod, one try (the plan repeats), no access to the API server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from persist_engine.storage.addresses import S3Address

from persist_operator.api import names, quantity
from persist_operator.api.pod_template import check_account
from persist_operator.api.resource import Meta
from persist_operator.api.shard import CREDENTIALS_DIR, StoreLocation
from persist_operator.api.sink_pods import MAINTENANCE_TEMPLATE
from persist_operator.manifests import pods
from persist_operator.plan.actions import StartInspection, StartMaintenance, StartReclaim
from persist_operator.plan.keeping.auditing import Audit
from persist_operator.settings import OperatorSettings

COMPONENT = "maintenance"
#: The file from which Kubernetes takes a container's termination message.
TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The parts of a Job that depend on its kind: labels, command, size and deadline."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    arguments: Sequence[str]
    cpu: str
    memory: str
    deadline_seconds: int


def maintenance_job(
    action: StartMaintenance | StartInspection | StartReclaim, meta: Meta, settings: OperatorSettings
) -> dict[str, Any]:
    """The manifest of the Job of `action` for the resource `meta`. Raises PodRefused when the resource requests a forbidden pod."""
    check_account(
        action.service_account_name,
        where="spec.maintenance.serviceAccountName",
        known=settings.workload.service_accounts,
    )
    match action:
        case StartMaintenance():
            work = _maintenance(action, settings)
        case StartReclaim():
            work = _reclaim(action, settings)
        case _:
            work = _inspection(action, settings)
    store = {names.LABEL_STORE: names.store_label(action.location.consensus)}
    labels = {**pods.base_labels(meta, COMPONENT), names.LABEL_SHARD: meta.name, **store, **work.labels}
    account, priority = action.service_account_name, action.priority_class_name
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "containers": [_container(work, action.location, settings)],
        "volumes": [pods.empty_dir("tmp"), *pods.credential_volumes(action.location)],
        **pods.pull_secrets(settings.images.pull_secrets),
        **({"serviceAccountName": account} if account else {}),
        **({"priorityClassName": priority} if priority else {}),
    }
    pod = {"metadata": {"labels": labels, "annotations": dict(work.annotations)}, "spec": spec}
    allow = settings.workload.allow
    pod = pods.with_template(pod, action.template, where=MAINTENANCE_TEMPLATE, role="maintenance", allow=allow)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.metadata("PersistShard", meta, action.name, labels, work.annotations),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": work.deadline_seconds,
            "ttlSecondsAfterFinished": action.ttl_seconds,
            "template": pod,
        },
    }


def _maintenance(action: StartMaintenance, settings: OperatorSettings) -> _Work:
    memory = action.memory or settings.workload.maintenance_memory
    return _Work(
        labels={
            names.LABEL_KIND: action.kind,
            names.LABEL_SEQNO: str(action.seqno),
            **({names.LABEL_RUNNER: action.runner} if action.runner else {}),
        },
        annotations={names.ANNOTATION_REASON: action.reason},
        arguments=arguments(action, *action.location.urls(CREDENTIALS_DIR), memory=memory),
        cpu=settings.workload.maintenance_cpu,
        memory=memory,
        deadline_seconds=settings.workload.maintenance_deadline_seconds,
    )


def _reclaim(action: StartReclaim, settings: OperatorSettings) -> _Work:
    blob, consensus = action.location.urls(CREDENTIALS_DIR)
    return _Work(
        labels={names.LABEL_KIND: names.RECLAIM},
        annotations={},
        arguments=reclaim_arguments(action, blob, consensus),
        cpu=settings.workload.maintenance_cpu,
        memory=settings.workload.maintenance_memory,
        deadline_seconds=settings.workload.maintenance_deadline_seconds,
    )


def _inspection(action: StartInspection, settings: OperatorSettings) -> _Work:
    inline = settings.inline_storage
    blob, consensus = action.location.urls(CREDENTIALS_DIR)
    if action.known_seqno:
        # An inspection need not test conditional writes. The creation of the shard and every process that writes to it do that.
        blob = replace(S3Address.parse(blob), probe=False).url
    return _Work(
        labels={
            names.LABEL_KIND: names.INSPECTION,
            names.LABEL_SEQNO: str(action.known_seqno),
            names.LABEL_REVISION: action.revision,
        },
        annotations={},
        arguments=[
            "maintain", "tend",
            "--wish", action.wish,
            "--blob", blob,
            "--consensus", consensus,
            "--report", TERMINATION_LOG,
            "--give-up", str(max(1, inline.deadline_seconds // 4)),
            "--json",
        ],
        cpu=inline.cpu,
        memory=inline.memory,
        deadline_seconds=inline.deadline_seconds,
    )  # fmt: skip


def _container(work: _Work, location: StoreLocation, settings: OperatorSettings) -> dict[str, Any]:
    return {
        "name": names.MAINTENANCE_CONTAINER,
        "image": settings.images.engine,
        "imagePullPolicy": settings.images.pull_policy,
        "args": list(work.arguments),
        "env": [{"name": "HOME", "value": "/tmp"}, *pods.credential_env(location)],  # noqa: S108 - an emptyDir of the pod
        "resources": {
            "requests": {"cpu": work.cpu, "memory": work.memory},
            "limits": {"memory": work.memory},
        },
        "securityContext": pods.container_security(),
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [pods.mount("tmp", "/tmp"), *pods.credential_mounts(location)],  # noqa: S108
    }


def reclaim_arguments(action: StartReclaim, blob: str, consensus: str) -> list[str]:
    """The engine's command line for one run that deletes a shard's data."""
    return [
        "maintain", "reclaim",
        *(() if action.shard_id is None else ("--shard", action.shard_id)),
        "--owner", action.owner,
        *(() if action.shard_id is None else ("--own-hold", names.critical_id_of(action.shard_id))),
        "--blob", blob,
        "--consensus", consensus,
        "--max-deletes", str(action.deletes_max),
        "--record-days", str(action.record_days),
        "--report", TERMINATION_LOG,
        "--json",
        *(("--purge",) if action.purge else ()),
    ]  # fmt: skip


def arguments(action: StartMaintenance, blob: str, consensus: str, *, memory: str | None) -> list[str]:
    """The engine's command line for one run. `memory` is the memory limit of a compaction; None for the engine's default."""
    bound = memory if action.kind == "compaction" else None
    return [
        "maintain", names.VERB[action.kind],
        "--shard", action.shard_id,
        "--blob", blob,
        "--consensus", consensus,
        "--report", TERMINATION_LOG,
        "--json",
        *bounds(full=action.full, max_bytes=action.max_bytes),
        *(() if bound is None else ("--memory-mib", str(quantity.to_mebibytes(bound)))),
        *(() if action.audit is None else _audit_options(action.audit)),
        *(() if action.kind == "verify" else ("--record-days", str(action.record_days))),
    ]  # fmt: skip


def _audit_options(audit: Audit) -> tuple[str, ...]:
    if audit.mode:
        return ("--mode", audit.mode)
    limit = () if audit.deletes_max is None else ("--max-deletes", str(audit.deletes_max))
    return ("--older-than-seconds", str(audit.min_age_seconds), *limit)


def bounds(*, full: bool, max_bytes: int | None) -> list[str]:
    """How much of the work a run does, as options of the engine's command and of that of the Spark image."""
    if full:
        return ["--full"]
    return [] if max_bytes is None else ["--max-bytes", str(max_bytes)]
