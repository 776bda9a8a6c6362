"""What an installation decides: stores, images, namespaces, limits. Read once at main from one YAML file, frozen
after that.

Durations carry their unit in the name. Unknown keys are refused, so that a typing error in the chart's values
cannot pass silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.addresses import with_credentials

#: A profile's name is also the folder of its credentials in the operator's pod.
_PROFILE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedNamespaces:
    """Whose resources may use a profile, and with it its credentials. Empty: none."""

    names: tuple[str, ...] = ()
    """Namespaces by name; `*` for all of them."""
    match_labels: Mapping[str, str] = field(default_factory=dict)
    """Namespaces that carry all of these labels, when there are any."""

    def __post_init__(self) -> None:
        labels = [*self.match_labels, *self.match_labels.values()] if isinstance(self.match_labels, Mapping) else [None]
        if not isinstance(self.names, tuple) or not all(isinstance(one, str) and one for one in (*self.names, *labels)):
            raise InvalidUsage("allowedNamespaces: names is a list of names, matchLabels a mapping from text to text")

    def allow(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether resources of `namespace`, which carries `labels`, may use the profile."""
        if namespace in self.names or "*" in self.names:
            return True
        return bool(self.match_labels) and self.match_labels.items() <= labels.items()


#: With a resource's namespace and name it has room in a store's key.
_OPERATOR_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
TakeOver = Literal["SameNamespace", "Unowned", "Any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageProfile:
    """A named pair of stores, the credentials for them, and who may use both."""

    blob: str
    """URL of the blob store, without credentials and without a word on where they are."""
    consensus: str
    """URL of the consensus store, likewise."""
    secret_name: str | None = None
    """Secret with the optional keys aws-credentials and redis-password, in the operator's namespace and in each that may use the
    profile. What has no key there, and all without a Secret, is reached by the identity of the pod itself.
    """
    allowed_namespaces: AllowedNamespaces = field(default_factory=AllowedNamespaces)
    take_over: TakeOver = "SameNamespace"
    """What the annotation `take-over` may take from others: what the same namespace owns, also what exists without an owner
    (Unowned), or those of all namespaces and operators (Any)."""

    def __post_init__(self) -> None:
        for what, url in (("blob", self.blob), ("consensus", self.consensus)):
            if not isinstance(url, str) or ":" not in url:
                raise InvalidUsage(f"storage profile: {what} must be a URL")
            with_credentials(url, None)
        if self.take_over not in get_args(TakeOver):
            raise InvalidUsage(
                f"storage profile: takeOver must be one of {', '.join(get_args(TakeOver))}, not {self.take_over!r}"
            )


#: `host`, `*.suffix`, either with a port; an IPv6 address in brackets.
_ADDRESS_PATTERN = re.compile(
    r"((\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineStorage:
    """Whether resources may name stores themselves, which ones, and the pods that look at them in the resource's namespace."""

    enabled: bool = False
    allowed_endpoints: tuple[str, ...] = ()
    """S3 servers that `spec.storage.blob.endpoint` may name, as host, host:port or *.suffix; without a port the scheme's own."""
    allowed_consensus: tuple[str, ...] = ()
    """Redis servers that `spec.storage.consensus.address` may name, likewise; without a port 6379."""
    allowed_secrets: tuple[str, ...] = ()
    """Secrets of the resource's namespace that `spec.storage.secretName` may name."""
    inspect_seconds: float = 60
    """A shard is looked at by a new pod this often."""
    deadline_seconds: int = 120
    """A pod that has not answered by then is ended, and another one tries."""
    cpu: str = "50m"
    memory: str = "256Mi"
    """Request and limit of those pods."""

    def __post_init__(self) -> None:
        for name, patterns in (("Endpoints", self.allowed_endpoints), ("Consensus", self.allowed_consensus)):
            for one in patterns if isinstance(patterns, tuple) else (patterns,):
                if not isinstance(one, str) or _ADDRESS_PATTERN.fullmatch(one) is None:
                    raise InvalidUsage(f"inlineStorage.allowed{name}: {one!r} is not a host, host:port or *.suffix")
        secrets = self.allowed_secrets
        if not isinstance(secrets, tuple) or not all(isinstance(one, str) and one for one in secrets):
            raise InvalidUsage("inlineStorage.allowedSecrets is a list of names")
        if not isinstance(self.enabled, bool):
            raise InvalidUsage("inlineStorage.enabled is true or false")
        if self.inspect_seconds < 1 or self.deadline_seconds < 1:
            raise InvalidUsage("inlineStorage: inspectSeconds and deadlineSeconds are at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """What pods run when the resource names no image."""

    engine: str = "persist-engine:0.1.0"
    spark: str = "persist-spark:0.1.0"
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadAllow:
    """What the pod templates of resources may say beyond the closed list of `api.pod_template`."""

    host_path: bool = False
    """Volumes of the node's own file system."""
    host_network: bool = False
    privileged: bool = False
    """Security contexts of their own, whatever they ask for."""
    secrets: tuple[str, ...] = ()
    """Secrets of the resource's namespace that may be mounted, or taken into the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """Defaults of the pods that the operator starts, and limits of what a resource may ask of them."""

    driver_service_account: str = "persist-spark-driver"
    """May create, watch and delete pods in its namespace; used when a sink names none."""
    service_accounts: tuple[str, ...] = ()
    """Further ones that resources may name."""
    allow: WorkloadAllow = field(default_factory=WorkloadAllow)
    maintenance_cpu: str = "100m"
    maintenance_memory: str = "512Mi"
    """Request and limit of rollup and GC pods; compaction pods take compaction.memoryLimit."""
    maintenance_deadline_seconds: int = 3600
    """A maintenance Job that runs longer is ended and tried again."""
    executor_cpu_request: str = ""
    """CPU request per executor core when not empty, such as 500m; cores otherwise. Small clusters set it low."""
    driver_cpu_request: str = ""
    """CPU request of drivers when not empty; cores otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How often the operator looks and how long it waits."""

    workers: int = 4
    """Reconciles in flight. Grows with it: load on API server and stores."""
    resync_seconds: float = 300
    """Every resource is reconciled at least this often."""
    inspect_seconds: float = 15
    """A healthy shard's state is read at most this often."""
    numbers_seconds: float = 30
    """Numbers on a status that change all the time are written at most this often."""
    since_seconds: float = 30
    """since is advanced at most this often."""
    store_deadline_seconds: float = 10
    """A call to a store that has not answered by then counts as failed."""
    store_breaker_seconds: float = 15
    """After a failure a store is left alone this long."""
    backoff_initial_seconds: float = 0.5
    backoff_max_seconds: float = 120
    """A reconcile that raises is repeated after the first delay, doubling up to the second, with jitter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Leader election by a Lease."""

    enabled: bool = True
    namespace: str = "persist-operator"
    lease_name: str = "persist-operator"
    lease_seconds: float = 15
    renew_seconds: float = 5
    retry_seconds: float = 2
    """A replica that waits looks at the Lease this often: it leads this long after a release."""

    def __post_init__(self) -> None:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise InvalidUsage("leader: leaseSeconds must be at least twice renewSeconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """All of it."""

    operator_id: str = "persist-operator/persist-operator"
    """Who owns shards in the stores, together with a resource's namespace and name. Unique among operators that share stores,
    and the same for ever: under another one, resources do not own what they had.
    """
    storage_profiles: Mapping[str, StorageProfile] = field(default_factory=dict)
    default_profile: str = "default"
    inline_storage: InlineStorage = field(default_factory=InlineStorage)
    images: ImageSettings = field(default_factory=ImageSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; all when empty."""
    http_port: int = 8080
    """Port of /healthz, /readyz and /metrics."""
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not isinstance(self.operator_id, str) or _OPERATOR_ID.fullmatch(self.operator_id) is None:
            raise InvalidUsage(
                "operator configuration: operatorId must have 1 to 128 of the characters A-Z a-z 0-9 . _ / -"
            )

    @classmethod
    def parse(cls, text: str) -> OperatorSettings:
        """From YAML with camelCase keys (`storageProfiles`, `images`, ...). InvalidUsage names the first wrong key."""
        try:
            document = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise InvalidUsage(f"operator configuration is not YAML: {error}") from error
        values = _known(document, cls, "")
        profiles = values.get("storage_profiles") or {}
        if not isinstance(profiles, Mapping):
            raise InvalidUsage("operator configuration: storageProfiles must be a mapping")
        values["storage_profiles"] = {str(name): _profile(str(name), profile) for name, profile in profiles.items()}
        workload = values.get("workload")
        if isinstance(workload, Mapping) and "allow" in workload:
            allow = _group(WorkloadAllow, workload["allow"], "workload.allow")
            values["workload"] = {**workload, "allow": allow}
        for name, group in _GROUPS.items():
            if name in values:
                values[name] = _group(group, values[name], name)
        if "namespaces" in values:
            values["namespaces"] = tuple(values["namespaces"] or ())
        settings = cls(**values)
        if profiles and settings.default_profile not in profiles:
            raise InvalidUsage(
                f"operator configuration: defaultProfile {settings.default_profile!r} is not among storageProfiles"
            )
        return settings

    @classmethod
    def load(cls, path: Path) -> OperatorSettings:
        """`parse` of a file. InvalidUsage when it cannot be read."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidUsage(f"operator configuration {path} cannot be read: {error.strerror}") from error


_GROUPS: Mapping[str, type] = {
    "inline_storage": InlineStorage,
    "images": ImageSettings,
    "workload": WorkloadSettings,
    "loop": LoopSettings,
    "leader": LeaderSettings,
}


def _profile(name: str, document: Any) -> StorageProfile:
    path = f"storageProfiles.{name}"
    if _PROFILE_NAME.fullmatch(name) is None or ".." in name:
        raise InvalidUsage(f"operator configuration: {path} must be lower-case letters, digits, '-' and '.'")
    allowed = document.get("allowedNamespaces") if isinstance(document, Mapping) else None
    if allowed is not None:
        document = {**document, "allowedNamespaces": _group(AllowedNamespaces, allowed, f"{path}.allowedNamespaces")}
    profile: StorageProfile = _group(StorageProfile, document, path)
    return profile


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _known(document: Any, group: type, path: str) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise InvalidUsage(f"operator configuration: {path or 'the file'} must be a mapping")
    known = {one.name for one in fields(group)}
    values = {_snake(str(key)): value for key, value in document.items()}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InvalidUsage(f"operator configuration: unknown key {unknown[0]!r} in {path or 'the file'}")
    return values


def _group(group: type, document: Any, path: str) -> Any:
    values = _known(document, group, path)
    for key, value in values.items():
        if isinstance(value, list):
            values[key] = tuple(value)
    try:
        return group(**values)
    except TypeError as error:
        raise InvalidUsage(f"operator configuration: {path}: {error}") from error
