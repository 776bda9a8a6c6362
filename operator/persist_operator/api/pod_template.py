"""The closed list of fields that the pod template of a resource may set. A refusal names the path of each other field. Pure.

Must not know: manifests. Invariant: a pod of the operator with an accepted template merged in (`manifests.strategic_merge`) meets the
restricted Pod Security Standard, and gets only Secrets and tokens that the installation names, unless `WorkloadAllow` permits more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from persist_engine.base.errors import InvalidUsage

from persist_operator.settings import WorkloadAllow

#: Pods of sinks run the user's code. Maintenance pods run the operator's image, with the credentials of the stores.
PodRole = Literal["driver", "executor", "maintenance"]

PLACEMENT = {
    "nodeSelector": dict,
    "tolerations": list,
    "affinity": dict,
    "topologySpreadConstraints": list,
    "runtimeClassName": str,
    "schedulerName": str,
}
#: Labels by which the operator, Spark and Jobs find their pods.
_OWNED_LABELS = re.compile(r"^((persistshard|(app|batch)\.kubernetes)\.io/.*|spark-.*|job-name|controller-uid)$")
#: Annotations of the operator, and annotations by which a container runtime gives a pod devices, profiles or options of the node.
_OWNED_ANNOTATIONS = re.compile(
    r"^((persistshard|batch\.kubernetes|cdi\.k8s|.*\bsecurity\.(alpha|beta)\.kubernetes)\.io/"
    r"|(io\.(kubernetes|katacontainers|containerd)|run\.oci|org\.systemd|dev\.gvisor)\b)"
)
#: Variables that the operator and Spark set, and variables that would set keys of Spark without the check of `api.spark_conf`.
_OWNED_ENV = re.compile(
    r"^(_SPARK_.*|SPARK_(CONF_DIR|HOME|LOCAL_.*|JAVA_OPT_.*|SUBMIT_.*|EXECUTOR_.*|DRIVER_.*|USER|APPLICATION_ID|RESOURCE_PROFILE_ID)"
    r"|PYSPARK_SUBMIT_ARGS|JAVA_TOOL_OPTIONS|JDK_JAVA_OPTIONS|_JAVA_OPTIONS|HOME|AWS_SHARED_CREDENTIALS_FILE)$"
)
_OWNED_VOLUMES = re.compile(r"^(tmp|scratch|config|store.*|rpc|kube-api-access.*)$")
#: Folders of the operator, the images and the platform. A template must not mount anything over, into or above them.
_OWNED_PATHS = (
    "/etc/persist", "/etc/persist-code", "/etc/persist-promotion", "/var/run/secrets", "/run/secrets", "/var/data",
    "/opt/persist", "/opt/app", "/proc", "/sys", "/dev",
)  # fmt: skip
_MOUNT_FIELDS = {"name", "mountPath", "readOnly", "subPath", "recursiveReadOnly"}
VOLUME_SOURCES = ("emptyDir", "configMap", "downwardAPI", "persistentVolumeClaim", "ephemeral", "secret", "projected")

Problem = tuple[str, str]


class PodRefused(InvalidUsage):
    """A resource requests a forbidden pod. `reason` becomes the condition's reason; the message names each path."""

    def __init__(self, reason: str, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{path}: {text}" for path, text in problems))
        self.reason = reason


def check_template(template: Mapping[str, Any], *, where: str, role: PodRole, allow: WorkloadAllow) -> None:
    """Raises PodRefused (InvalidTemplate) with every forbidden path in `template`. `where` is the path of the template itself."""
    problems = list(_problems(template, where, role, allow))
    if problems:
        raise PodRefused("InvalidTemplate", problems)


def check_account(name: str | None, *, where: str, known: tuple[str, ...]) -> None:
    """Raises PodRefused (ServiceAccountNotAllowed) when the resource names an account that is not in `known`."""
    if name is not None and name not in known:
        text = f"{name!r} is not among workload.serviceAccounts of the installation; it lists: {', '.join(known) or 'none'}"
        raise PodRefused("ServiceAccountNotAllowed", [(where, text)])


def check_secret(name: str | None, *, where: str, allow: WorkloadAllow) -> None:
    """Raises PodRefused (SecretNotAllowed) when the resource names a Secret that its pods may not have."""
    if name is not None and not allow.allows_secret(name):
        raise PodRefused("SecretNotAllowed", [(where, _not_allowed(name))])


def priority_problems(name: Any, where: str) -> Iterator[Problem]:
    """Refuses the priority classes of system pods, because a pod with one of them preempts the pods of every tenant."""
    if isinstance(name, str) and name.startswith("system-"):
        yield where, f"{name} is for pods of the system"


def _problems(template: Any, where: str, role: PodRole, allow: WorkloadAllow) -> Iterator[Problem]:
    yield from _closed(template, where, ("metadata", "spec"))
    if not isinstance(template, Mapping):
        return
    if "metadata" in template:
        yield from _metadata(template["metadata"], f"{where}.metadata")
    if "spec" in template:
        yield from _spec(template["spec"], f"{where}.spec", role, allow)


def _metadata(metadata: Any, where: str) -> Iterator[Problem]:
    yield from _closed(metadata, where, ("labels", "annotations"))
    for name, owned in (("labels", _OWNED_LABELS), ("annotations", _OWNED_ANNOTATIONS)):
        found = metadata.get(name, {}) if isinstance(metadata, Mapping) else {}
        if not isinstance(found, Mapping):
            yield f"{where}.{name}", "must be a mapping"
            continue
        for key, value in found.items():
            path = f"{where}.{name}[{key!r}]"
            if not isinstance(key, str) or not isinstance(value, str):
                yield path, "must be a text"
            elif owned.match(key):
                yield path, "is for the operator, Spark, Kubernetes or the container runtime to set"


def _spec(spec: Any, where: str, role: PodRole, allow: WorkloadAllow) -> Iterator[Problem]:
    # The spec of a shard has its own field for the priority class of maintenance.
    sinks = () if role == "maintenance" else ("priorityClassName", "volumes", "containers")
    asked = ("hostNetwork",) if allow.host_network else ()
    secure = ("securityContext",) if allow.privileged and role != "maintenance" else ()
    yield from _closed(spec, where, (*PLACEMENT, *sinks, *asked, *secure))
    if not isinstance(spec, Mapping):
        return
    for name, shape in {**PLACEMENT, "priorityClassName": str}.items():
        if name in spec and not isinstance(spec[name], shape):
            yield f"{where}.{name}", f"must be {_SHAPES[shape]}"
    if "priorityClassName" in spec:
        yield from priority_problems(spec["priorityClassName"], f"{where}.priorityClassName")
    if "volumes" in spec and sinks:
        yield from _each(spec["volumes"], f"{where}.volumes", lambda one, path: _volume(one, path, allow))
    if "containers" in spec and sinks:
        yield from _containers(spec, where, role, allow)


def _containers(spec: Mapping[str, Any], where: str, role: PodRole, allow: WorkloadAllow) -> Iterator[Problem]:
    containers = spec["containers"]
    if not isinstance(containers, list) or len(containers) > 1:
        yield f"{where}.containers", f"must be a list of one, the {role}: other containers in its pod are not allowed"
        return
    volumes = [one.get("name") for one in _list(spec.get("volumes")) if isinstance(one, Mapping)]
    secure = ("securityContext",) if allow.privileged else ()
    for index, one in enumerate(containers):
        path = f"{where}.containers[{index}]"
        yield from _closed(one, path, ("name", "env", "envFrom", "volumeMounts", *secure))
        if not isinstance(one, Mapping):
            continue
        if one.get("name", role) != role:
            yield f"{path}.name", f"must be {role}, or left out"
        yield from _each(one.get("env", []), f"{path}.env", lambda env, at: _env(env, at, allow))
        yield from _each(one.get("envFrom", []), f"{path}.envFrom", lambda source, at: _env_from(source, at, allow))
        yield from _each(
            one.get("volumeMounts", []), f"{path}.volumeMounts", lambda found, at: _mount(found, at, volumes)
        )


def _env(env: Any, where: str, allow: WorkloadAllow) -> Iterator[Problem]:
    yield from _closed(env, where, ("name", "value", "valueFrom"))
    if not isinstance(env, Mapping):
        return
    name = env.get("name")
    if not isinstance(name, str):
        yield f"{where}.name", "must be a text"
    elif _OWNED_ENV.match(name):
        yield f"{where}.name", f"{name} is set by the operator or Spark"
    if "valueFrom" in env:
        source, path = env["valueFrom"], f"{where}.valueFrom"
        yield from _closed(source, path, ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef"))
        yield from _secret(source, "secretKeyRef", "name", path, allow)


def _env_from(source: Any, where: str, allow: WorkloadAllow) -> Iterator[Problem]:
    yield from _closed(source, where, ("prefix", "configMapRef", "secretRef"))
    yield from _secret(source, "secretRef", "name", where, allow)


def _mount(mount: Any, where: str, volumes: list[Any]) -> Iterator[Problem]:
    yield from _closed(mount, where, _MOUNT_FIELDS)
    if not isinstance(mount, Mapping):
        return
    if mount.get("name") not in volumes:
        yield f"{where}.name", "must be one of the template's own volumes"
    path = mount.get("mountPath")
    if not isinstance(path, str) or not path.startswith("/") or ".." in path.split("/") or ":" in path:
        yield f"{where}.mountPath", "must be an absolute path"
        return
    plain = "/" + "/".join(part for part in path.split("/") if part not in {"", "."})
    taken = plain in {"/", "/tmp"} or any(_overlaps(plain, owned) for owned in _OWNED_PATHS)  # noqa: S108
    if taken:
        yield f"{where}.mountPath", f"{plain} is a folder of the operator or the image"


def _overlaps(path: str, owned: str) -> bool:
    return path == owned or path.startswith(f"{owned}/") or owned.startswith(f"{path}/")


def _volume(volume: Any, where: str, allow: WorkloadAllow) -> Iterator[Problem]:
    sources = (*VOLUME_SOURCES, "hostPath") if allow.host_path else VOLUME_SOURCES
    yield from _closed(volume, where, ("name", *sources))
    if not isinstance(volume, Mapping):
        return
    name = volume.get("name")
    if not isinstance(name, str):
        yield f"{where}.name", "must be a text"
    elif _OWNED_VOLUMES.match(name):
        yield f"{where}.name", f"{name} is a volume of the operator or Spark"
    yield from _secret(volume, "secret", "secretName", where, allow)
    if "projected" in volume:
        path = f"{where}.projected"
        yield from _closed(volume["projected"], path, ("sources", "defaultMode"))
        found = volume["projected"].get("sources", []) if isinstance(volume["projected"], Mapping) else []
        yield from _each(found, f"{path}.sources", lambda one, at: _projection(one, at, allow))


def _projection(source: Any, where: str, allow: WorkloadAllow) -> Iterator[Problem]:
    # serviceAccountToken and clusterTrustBundle are not on the list, because with a token the pod could call the API server.
    yield from _closed(source, where, ("configMap", "downwardAPI", "secret"))
    yield from _secret(source, "secret", "name", where, allow)


def _secret(holder: Any, field: str, name_field: str, where: str, allow: WorkloadAllow) -> Iterator[Problem]:
    if not isinstance(holder, Mapping) or field not in holder:
        return
    reference = holder[field]
    name = reference.get(name_field) if isinstance(reference, Mapping) else None
    if not allow.allows_secret(name):
        yield f"{where}.{field}", _not_allowed(name)


def _not_allowed(secret: object) -> str:
    return f"Secret {secret!r} is not among workload.allow.secrets of the installation"


_SHAPES: Mapping[type, str] = {dict: "a mapping", list: "a list", str: "a text"}


def _closed(value: Any, where: str, known: Any) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        yield where, "must be a mapping"
        return
    for name in value:
        if name not in known:
            yield f"{where}.{name}", f"is not allowed here; allowed: {', '.join(sorted(known))}"


def _each(values: Any, where: str, check: Callable[[Any, str], Iterator[Problem]]) -> Iterator[Problem]:
    if not isinstance(values, list):
        yield where, "must be a list"
        return
    for index, one in enumerate(values):
        yield from check(one, f"{where}[{index}]")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
