"""Every derived name: API group, labels, ids derived from a uid or an id, names of children.

Invariant: a name is a pure function of the object that it names. Two operators, or one operator before and after a crash, make the same
child.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

GROUP = "persistshard.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
#: Field manager of every status, and value of LABEL_MANAGED_BY on the operator's children.
MANAGER = "persist-operator"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_SHARD = f"{GROUP}/shard"
LABEL_SINK = f"{GROUP}/sink"
LABEL_OWNER_UID = f"{GROUP}/owner-uid"
LABEL_KIND = f"{GROUP}/kind"
LABEL_SEQNO = f"{GROUP}/seqno"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_RUN = f"{GROUP}/run"
LABEL_REVISION = f"{GROUP}/revision"
#: On drivers and Jobs: the consensus store that they use, in the form of `store_label`.
LABEL_STORE = f"{GROUP}/store"
LABEL_ROLE = f"{GROUP}/role"
#: On the Job of a compaction: where it runs.
LABEL_RUNNER = f"{GROUP}/runner"
#: On the Lease of a replica: the name of the operator's Lease for all replicas.
LABEL_MEMBER_OF = f"{GROUP}/member-of"
#: On the Lease of all replicas: the starts of children that no list may show yet, as JSON.
ANNOTATION_STARTS = f"{GROUP}/starts"
#: On the pod of a compaction on Spark: the files that it mounts.
ANNOTATION_SPARK_CONF, ANNOTATION_EXECUTOR = f"{GROUP}/spark-conf", f"{GROUP}/executor"
ANNOTATION_REASON = f"{GROUP}/reason"
ANNOTATION_RUN_ID = f"{GROUP}/run-id"
ANNOTATION_SCHEDULED_TIME = f"{GROUP}/scheduled-time"
#: On a driver pod: `true` when the driver begins on standby.
ANNOTATION_STANDBY = f"{GROUP}/standby"
#: On a driver pod, written by the driver itself: its progress, as JSON (api.sink_status.RunningProgress).
ANNOTATION_PROGRESS = f"{GROUP}/progress"
#: On a resource: the operator must not change it; see api.pausing.
ANNOTATION_PAUSED = f"{GROUP}/paused"
#: `take-over: <shard id>`; see plan.ownership.
ANNOTATION_TAKE_OVER = f"{GROUP}/take-over"
#: `request-gc: <token>`; a request is new while its token differs from status.lastHandledRequests.gc.
REQUEST_PREFIX = f"{GROUP}/request-"
_TOKEN_MAX = 64
#: `request-approve: <id of status.plan>`
APPROVE = "approve"

#: For pods that inspect a shard on inline storage: the value of LABEL_KIND, and the word in their names.
INSPECTION, _INSPECT = "inspection", "inspect"
#: For pods that reclaim a deleted shard: the value of LABEL_KIND, and the word in their names.
RECLAIM = "reclaim"
#: Keeps a resource whose reclaimPolicy is not Retain until its shard is reclaimed.
FINALIZER = f"{GROUP}/cleanup"
MaintenanceKind = Literal["compaction", "rollup", "gc", "verify", "orphanScan"]
#: Kinds that check the stored data. They are due by time, and have no debt.
AuditKind = Literal["verify", "orphanScan"]
AUDIT_KINDS: tuple[AuditKind, ...] = ("verify", "orphanScan")
MAINTENANCE_KINDS: tuple[MaintenanceKind, ...] = ("rollup", "compaction", "gc", *AUDIT_KINDS)
#: The operator's own containers in its pods. Admission may add others.
DRIVER_CONTAINER, EXECUTOR_CONTAINER, MAINTENANCE_CONTAINER = "driver", "executor", "maintain"
#: The verb in the command line and in names of children. It has at most seven letters, because the length of names is limited.
VERB: Mapping[MaintenanceKind, str] = {
    "compaction": "compact",
    "rollup": "rollup",
    "gc": "gc",
    "verify": "verify",
    "orphanScan": "orphans",
}
#: The verb in request annotations.
REQUEST: Mapping[MaintenanceKind, str] = {**VERB, "orphanScan": "orphan-scan"}

#: The name of the port on which a driver listens for the request to stop.
STOP_PORT = "stop"
RPC_SECRET_PREFIX = "persist-rpc-"  # noqa: S105 - a prefix of its name
_CRITICAL_PURPOSE = "operator retention"
_SEQNO_DIGITS = 10
#: The most characters for version and retry in the name of a Job.
_VERSION_MAX = 14


def _derived_uuid(purpose: str, uid: str) -> str:
    digits = hashlib.sha256(f"{GROUP}/{purpose}/{uid}".encode()).hexdigest()[:32]
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def shard_id_of(uid: str) -> str:
    """The shard id to propose for a PersistShard that names no shard and had none. Every attempt proposes the same id."""
    return f"s{_derived_uuid('shard', uid)}"


def critical_id_of(shard_id: str) -> str:
    """The critical reader through which operators hold since of this shard. A new owner finds the same reader and takes it over."""
    return f"c{_derived_uuid('critical', shard_id)}"


def critical_purpose(namespace: str, name: str) -> str:
    """The purpose of the reader of `critical_id_of`; at most 126 characters."""
    return f"{_CRITICAL_PURPOSE} of {namespace}/{name}"


def maintenance_name(shard: str, kind: MaintenanceKind, seqno: int, *, retry: int) -> str:
    """Name of the Job for `kind` at state version `seqno`; at most 63 characters for shard names of at most 40.

    `retry` counts the earlier runs at the same version, so that each run has its own Job, although ended Jobs stay for a week.
    """
    suffix = f"-r{retry % 10_000}" if retry else ""
    digits = str(seqno)[-min(_SEQNO_DIGITS, _VERSION_MAX - len(suffix)) :]
    return f"{shard}-{VERB[kind]}-{digits}{suffix}"


def inspection_name(shard: str, started_s: int) -> str:
    """Name of the Job that inspects a shard, planned at `started_s`; at most 63 characters for shard names of at most 40."""
    return f"{shard}-{_INSPECT}-{str(started_s)[-_SEQNO_DIGITS:]}"


def reclaim_name(shard: str, attempt: int) -> str:
    """Name of the Job that reclaims a deleted shard; at most 59 characters for shard names of at most 40."""
    return f"{shard}-{RECLAIM}-{attempt % 10**_SEQNO_DIGITS}"


def run_id(uid: str, order: int) -> str:
    """Id of a sink's run. A run with a greater `order` is newer."""
    return f"{uid}-{order}"


def run_order(identifier: str) -> int:
    """The `order` in an id that `run_id` made; 0 for any other text."""
    digits = identifier.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0


def driver_name(sink: str, revision: str, attempt: int) -> str:
    """Name of the driver pod, its Service and its ConfigMap; at most 56 characters for sink names of at most 40."""
    return f"{sink}-{revision[:8]}-{attempt}"


def promotion_name(driver: str) -> str:
    """Name of the ConfigMap whose appearance orders a driver on standby to take over; at most 64 characters."""
    return f"{driver}-promote"


def rpc_secret_name(driver: str, uid: str) -> str:
    """Name of the Secret with which the driver and the executors of one attempt authenticate each other. The name contains the sink's
    uid, so a Secret of this name belongs to this sink, and the operator never has to read it.
    """
    return f"{RPC_SECRET_PREFIX}{driver}-{uid[:8]}"


def executor_prefix(resource: str, uid: str, attempt: int | str) -> str:
    """Prefix of executor pods, unique per attempt of a sink or Job of a shard; Spark allows 47 characters."""
    return f"{resource[:30].rstrip('-')}-{hashlib.sha256(f'{uid}/{attempt}'.encode()).hexdigest()[:10]}"


def revision_of(value: Mapping[str, Any]) -> str:
    """Eight hex digits over the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:8]


def request_token(annotations: Mapping[str, str], verb: str) -> str:
    """The token of the request `verb`, at most as long as a status takes; empty without one. A long value keeps its beginning, and gets a
    hash of all of it: a new request may differ at its end only, where the date is.
    """
    value = annotations.get(f"{REQUEST_PREFIX}{verb}", "")
    if len(value) <= _TOKEN_MAX:
        return value
    digest = hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{value[: _TOKEN_MAX - 17]}-{digest}"


def store_label(consensus: str) -> str:
    """A short name of the consensus store at this URL, for a label. Equal URLs have equal names."""
    return hashlib.sha256(consensus.encode()).hexdigest()[:12]
