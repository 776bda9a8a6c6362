"""The common parts of all pods: the restricted security profile, labels, owner reference, credentials, work folders."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from persist_engine.storage.addresses import S3_CREDENTIALS_FILE

from persist_operator.api import names
from persist_operator.api.inline_storage import SecretFiles
from persist_operator.api.pod_template import PodRole, check_template
from persist_operator.api.resource import Meta
from persist_operator.api.shard import CREDENTIALS_DIR, InlineLocation, StoreLocation
from persist_operator.manifests import strategic_merge
from persist_operator.plan.actions import StartDriver
from persist_operator.plan.observed import DriverSource
from persist_operator.settings import WorkloadAllow

#: Folder and name of the file with the secret by which the driver and its executors authenticate each other.
RPC_DIR, RPC_KEY = "/var/run/secrets/persist/rpc", "secret"
#: The folder of the credentials of the stores that a driver reads, when they are not those of the stores that it writes.
INPUT_CREDENTIALS_DIR = "/var/run/secrets/persist/input"
#: The folder of the options of a driver's input that come from a Secret.
OPTIONS_DIR = "/var/run/secrets/persist/options"
#: The folder of the files of the function that makes a driver's input.
CODE_DIR = "/etc/persist-code"
#: Templates cannot have volumes whose names begin with `store`.
_INPUT_VOLUME, _OPTIONS_VOLUME, _CODE_VOLUME = "store-input", "store-options", "store-code"
_USER = 10001
_NAME_MAX = 63


def owner(kind: str, meta: Meta) -> dict[str, Any]:
    """The owner reference of every child. Kubernetes collects the children when the resource is deleted."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(
    kind: str, meta: Meta, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> dict[str, Any]:
    """Metadata of a child of `meta`."""
    return {
        "name": name,
        "namespace": meta.namespace,
        "labels": dict(labels),
        "annotations": dict(annotations),
        "ownerReferences": [owner(kind, meta)],
    }


def base_labels(meta: Meta, component: str) -> dict[str, str]:
    """The labels by which the operator finds its children."""
    return {
        "app.kubernetes.io/name": "persist",
        names.LABEL_COMPONENT: component,
        names.LABEL_MANAGED_BY: names.MANAGER,
        names.LABEL_OWNER_UID: meta.uid[:_NAME_MAX],
    }


def pod_security() -> dict[str, Any]:
    """SecurityContext of pods, as the restricted Pod Security Standard requires."""
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """SecurityContext of containers, as the same standard requires. The root file system is also read-only."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def empty_dir(name: str) -> dict[str, Any]:
    """A volume for scratch files."""
    return {"name": name, "emptyDir": {}}


def mount(name: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    """A volume mount."""
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}


def credential_volumes(location: StoreLocation) -> list[dict[str, Any]]:
    """The volume of the stores' credentials; none without a Secret (workload identity, open stores)."""
    # With mode 0440 and fsGroup, only the pod's user can read the files.
    if isinstance(location, InlineLocation) and location.secrets:
        return [{"name": "store", "projected": {"defaultMode": 0o440, "sources": [*map(_source, location.secrets)]}}]
    if location.secret_name is None:
        return []
    return [{"name": "store", "secret": {"secretName": location.secret_name, "defaultMode": 0o440}}]


def _source(secret: SecretFiles) -> dict[str, Any]:
    items = [{"key": key, "path": file} for key, file in secret.files]
    return {"secret": {"name": secret.name, "items": items, **({"optional": True} if secret.optional else {})}}


def credential_mounts(location: StoreLocation) -> list[dict[str, Any]]:
    """The mount of the credentials, a folder of files; none without a Secret."""
    return [mount("store", CREDENTIALS_DIR, read_only=True)] if location.has_credentials else []


def shares_secret(source: DriverSource, location: StoreLocation) -> bool:
    """Whether `location` and the stores of `source` have the same credentials: the same files of their common namespace, or none."""
    wanted = credential_volumes(source.location)
    return not wanted or wanted == credential_volumes(location)


def sink_volumes(action: StartDriver) -> list[dict[str, Any]]:
    """The volumes with the credentials of a driver or executor, for the stores that it writes and for those that it reads."""
    volumes, source = credential_volumes(action.location), action.source
    if source is None or shares_secret(source, action.location):
        return volumes
    return [*volumes, *({**one, "name": _INPUT_VOLUME} for one in credential_volumes(source.location))]


def sink_mounts(action: StartDriver) -> list[dict[str, Any]]:
    """The mounts of `sink_volumes`."""
    mounts, source = credential_mounts(action.location), action.source
    if source is None or shares_secret(source, action.location):
        return mounts
    return [*mounts, mount(_INPUT_VOLUME, INPUT_CREDENTIALS_DIR, read_only=True)]


def options_volumes(action: StartDriver) -> list[dict[str, Any]]:
    """The volumes with the secret options of a driver's input, and with the files of its function; none without them. Only drivers need
    them, because executors get the options and files from the driver, over Spark's encrypted connections. The pod waits until their Secret
    and ConfigMap exist.
    """
    secret, code = action.spec.options_secret, action.spec.code_config_map
    return [
        *([{"name": _OPTIONS_VOLUME, "secret": {"secretName": secret, "defaultMode": 0o440}}] if secret else []),
        *([{"name": _CODE_VOLUME, "configMap": {"name": code}}] if code else []),
    ]


def options_mounts(action: StartDriver) -> list[dict[str, Any]]:
    """The mounts of `options_volumes`."""
    spec = action.spec
    return [
        *([mount(_OPTIONS_VOLUME, OPTIONS_DIR, read_only=True)] if spec.options_secret else []),
        *([mount(_CODE_VOLUME, CODE_DIR, read_only=True)] if spec.code_config_map else []),
    ]


def credential_env(location: StoreLocation) -> list[dict[str, str]]:
    """The variable with the credentials' path for other S3 clients in the pod. The engine's client gets the path in its URL."""
    if not location.has_credentials:
        return []
    return [{"name": "AWS_SHARED_CREDENTIALS_FILE", "value": f"{CREDENTIALS_DIR}/{S3_CREDENTIALS_FILE}"}]


def rpc_secret(head: Mapping[str, Any], driver: str, meta: Meta, secret: bytes) -> dict[str, Any]:
    """The Secret of `rpc_volume`, with the metadata `head` except for its name."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**head, "name": names.rpc_secret_name(driver, meta.uid)},
        "immutable": True,
        "type": "Opaque",
        "data": {RPC_KEY: b64encode(secret).decode()},
    }


def rpc_volume(driver: str, meta: Meta) -> dict[str, Any]:
    """The volume of the Secret with which the driver and the executors of one attempt authenticate each other."""
    return {"name": "rpc", "secret": {"secretName": names.rpc_secret_name(driver, meta.uid), "defaultMode": 0o440}}


def rpc_mount() -> dict[str, Any]:
    """The mount of `rpc_volume`."""
    return mount("rpc", RPC_DIR, read_only=True)


def pull_secrets(secrets: Sequence[str]) -> dict[str, Any]:
    """The field imagePullSecrets; no field without secrets."""
    return {"imagePullSecrets": [{"name": one} for one in secrets]} if secrets else {}


def with_template(
    pod: Mapping[str, Any], template: Mapping[str, Any], *, where: str, role: PodRole, allow: WorkloadAllow
) -> dict[str, Any]:
    """`pod` (metadata, spec) with the user's template merged in. Values of `pod` win. `where`: the path of the template in the resource.
    Raises PodRefused when the template sets a forbidden field.
    """
    check_template(template, where=where, role=role, allow=allow)
    spec, ours = dict(template.get("spec") or {}), pod["spec"]["containers"][0]
    if spec.get("containers"):
        spec["containers"] = [{**spec["containers"][0], "name": ours["name"]}]
    return strategic_merge.merged(pod, {"metadata": template.get("metadata") or {}, "spec": spec})
