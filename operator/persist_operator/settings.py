"""The settings of an installation: stores, images, namespaces, limits. `main` reads them once from one YAML file; then they are frozen.

Names of durations carry the unit. An unknown key is an error, so that a typing error in the chart's values has no silent effect.
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

#: The name of a profile is also the name of the folder with its credentials in the operator's pod.
_PROFILE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedNamespaces:
    """The namespaces whose resources may use a profile and its credentials. Empty: none."""

    names: tuple[str, ...] = ()
    """Names of namespaces; `*` allows every namespace."""
    match_labels: Mapping[str, str] = field(default_factory=dict)
    """Allows each namespace that has all of these labels. Without labels it allows none."""

    def __post_init__(self) -> None:
        labels = [*self.match_labels, *self.match_labels.values()] if isinstance(self.match_labels, Mapping) else [None]
        if not isinstance(self.names, tuple) or not all(isinstance(one, str) and one for one in (*self.names, *labels)):
            raise InvalidUsage("allowedNamespaces: names is a list of names, matchLabels a mapping from text to text")

    def allow(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether resources of `namespace` may use the profile. `labels` are the labels of the namespace."""
        if namespace in self.names or "*" in self.names:
            return True
        return bool(self.match_labels) and self.match_labels.items() <= labels.items()


#: An id of this length fits into a store's key together with a namespace and a name.
_OPERATOR_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
TakeOver = Literal["SameNamespace", "Unowned", "Any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageProfile:
    """A named pair of stores, their credentials, and the namespaces that may use both."""

    blob: str
    """URL of the blob store. It contains neither credentials nor their location."""
    consensus: str
    """URL of the consensus store. It contains neither credentials nor their location."""
    secret_name: str | None = None
    """Secret with the optional keys aws-credentials, s3-ca.crt, redis-username, redis-password, redis-ca.crt, redis-tls.crt and
    redis-tls.key, in the operator's namespace and in each namespace that may use the profile. A store whose key is absent, and every store
    without a Secret, is accessed with the identity of the pod.
    """
    allowed_namespaces: AllowedNamespaces = field(default_factory=AllowedNamespaces)
    take_over: TakeOver = "SameNamespace"
    """The shards that the annotation `take-over` may take: those that a resource of the same namespace owns (SameNamespace), also those
    without an owner (Unowned), or also those of every namespace and operator (Any).
    """

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
    """Whether resources may use inline storage, which stores they may name, and the pods that inspect such shards."""

    enabled: bool = False
    allowed_endpoints: tuple[str, ...] = ()
    """S3 servers that `spec.storage.blob.endpoint` may name, as host, host:port or *.suffix. The default port is that of the scheme."""
    allowed_consensus: tuple[str, ...] = ()
    """Redis servers that `spec.storage.consensus.address` may name, in the same form. The default port is 6379."""
    allowed_secrets: tuple[str, ...] = ()
    """Secrets of the resource's namespace that `spec.storage` may name."""
    inspect_seconds: float = 60
    """The interval at which a new pod inspects a shard."""
    deadline_seconds: int = 120
    """The time limit of an inspection pod. After it the pod is ended and another pod tries."""
    cpu: str = "50m"
    memory: str = "256Mi"
    """Memory request and limit of inspection pods; `cpu` is their CPU request."""

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
    """Images of pods for resources that name no image."""

    engine: str = "persist-engine:0.1.0"
    spark: str = "persist-spark:0.1.0"
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadAllow:
    """The fields that pod templates of resources may set beyond the closed list of `api.pod_template`."""

    host_path: bool = False
    """Volumes from the file system of the node."""
    host_network: bool = False
    privileged: bool = False
    """Any security context in templates of sinks."""
    secrets: tuple[str, ...] = ()
    """Secrets of the resource's namespace that its pods may have: those that a template mounts or puts into the environment, and the
    options of an input. `*` allows every Secret. The local runner uses `*`, because its Secrets are the user's folders.
    """

    def allows_secret(self, name: object) -> bool:
        """Whether pods may have the Secret of this name."""
        return isinstance(name, str) and (name in self.secrets or "*" in self.secrets)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """Defaults of the pods that the operator starts, and limits on what a resource may set for them."""

    driver_service_account: str = "persist-spark-driver"
    """Service account of drivers for sinks that name none. It may create, watch and delete pods in its namespace."""
    service_accounts: tuple[str, ...] = ()
    """Further service accounts that resources may name."""
    allow: WorkloadAllow = field(default_factory=WorkloadAllow)
    spark_compaction: bool = True
    """Whether `compaction.runner: Auto` may choose Spark. Without it, only `Spark` compacts on executors."""
    maintenance_cpu: str = "100m"
    maintenance_memory: str = "512Mi"
    """Memory request and limit of rollup and GC pods. Compaction pods have compaction.memoryLimit."""
    maintenance_deadline_seconds: int = 3600
    """A maintenance Job that runs longer is ended, and the operator starts another one."""
    executor_cpu_request: str = ""
    """CPU request of each executor pod, such as 500m; the cores of the executor when empty. Small clusters need a low value."""
    driver_cpu_request: str = ""
    """CPU request of drivers; the driver's cores when empty."""
    driver_metrics_port: int | None = None
    """Port on which drivers of sinks serve their engine's metrics; None: they serve nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """Graceful stops: the operator asks a driver to end before it deletes the pod."""

    port: int | None = None
    """Port on which drivers of sinks listen for the request; None: they do not, and are stopped by the deletion of their pods."""
    namespace: str = "persist-operator"
    secret_name: str = "persist-operator-stop-key"  # noqa: S105 - a name
    """The Secret in `namespace` with the key of the requests. The operator creates it if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """The most pods of this operator that run at once. None: no limit. Starts beyond a limit wait in a queue (plan.waiting)."""

    total: int | None = None
    """Drivers and maintenance together, in all namespaces."""
    drivers: int | None = None
    maintenance: int | None = None
    """Compactions, rollups and collections."""
    inspections: int | None = None
    """Pods that inspect shards on inline storage. No other limit counts them."""
    per_namespace: int | None = None
    """Drivers and maintenance of one namespace."""
    per_store: int | None = None
    """Drivers and maintenance on one consensus store."""

    def __post_init__(self) -> None:
        for one in fields(self):
            number = getattr(self, one.name)
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise InvalidUsage(f"limits: {one.name} is {number!r}; give a whole number from 1 on, or leave it out")

    @property
    def are_set(self) -> bool:
        """Whether there is a limit."""
        return self != LimitSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Intervals and deadlines of the operator."""

    workers: int = 16
    """Number of reconciles at the same time. They mostly wait for the API server and the stores; the load on both grows with the number."""
    resync_seconds: float = 300
    """Every resource is reconciled at least this often."""
    inspect_seconds: float = 15
    """The state of a healthy shard is read at most this often. A store that pushes no news of commits is asked this often."""
    idle_seconds: float = 60
    """A shard without news is planned anew this often, from the last answer of its stores, because some work becomes due with time."""
    poll_seconds: float = 300
    """The stores are asked about a shard without news at least this often."""
    numbers_seconds: float = 40
    """Numbers that always change are written to a status at most this often."""
    since_seconds: float = 40
    """The operator advances since at most this often."""
    store_deadline_seconds: float = 10
    """A call to a store fails when the store has not answered after this time."""
    store_breaker_seconds: float = 15
    """After a failure the operator does not call the store for this time."""
    backoff_initial_seconds: float = 0.5
    backoff_max_seconds: float = 120
    """A failed reconcile is repeated after `backoff_initial_seconds`. The delay doubles up to `backoff_max_seconds`, with jitter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Leader election by a Lease."""

    enabled: bool = True
    namespace: str = "persist-operator"
    lease_name: str = "persist-operator"
    lease_seconds: float = 15
    renew_seconds: float = 5
    retry_seconds: float = 2
    """A waiting replica reads the Lease this often. After a release, it leads within this time."""

    def __post_init__(self) -> None:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise InvalidUsage("leader: leaseSeconds must be at least twice renewSeconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """The PersistShard that the operator itself writes and reads, to prove the path from a resource to a commit and a read."""

    resource: str = ""
    """`namespace/name` of the resource, which must have no other writer; empty: there is no canary."""
    interval_seconds: float = 60
    """Pause between two round trips. Each takes four commits and one small blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSettings:
    """Replicas that share the resources (cluster.membership), instead of one leader. Their Leases are in `leader.namespace`, and the names
    of the Leases begin with `leader.lease_name`.
    """

    enabled: bool = False
    lease_seconds: float = 10
    """The other replicas take the slices of a replica that has not renewed its Lease for this time."""
    renew_seconds: float = 3
    poll_seconds: float = 1
    """A replica reads all Leases this often. The slices of a replica that left are taken within this time."""

    def __post_init__(self) -> None:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise InvalidUsage("sharding: leaseSeconds must be at least twice renewSeconds")
        if not 0 < self.poll_seconds <= self.renew_seconds:
            raise InvalidUsage("sharding: pollSeconds must be above 0 and at most renewSeconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """All settings of one operator."""

    operator_id: str = "persist-operator/persist-operator"
    """Together with the namespace and name of a resource, the owner of its shard in the stores. It must be unique among the operators that
    share stores. It must never change, because with another id, resources do not own their former shards.
    """
    storage_profiles: Mapping[str, StorageProfile] = field(default_factory=dict)
    default_profile: str = "default"
    inline_storage: InlineStorage = field(default_factory=InlineStorage)
    images: ImageSettings = field(default_factory=ImageSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    graceful_stop: StopSettings = field(default_factory=StopSettings)
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    canary: CanarySettings = field(default_factory=CanarySettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
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
        """From YAML with camelCase keys (`storageProfiles`, `images`, ...). Raises InvalidUsage, which names the first wrong key."""
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
        """`parse` of a file's text. Also raises InvalidUsage when the file cannot be read."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidUsage(f"operator configuration {path} cannot be read: {error.strerror}") from error


_GROUPS: Mapping[str, type] = {
    "inline_storage": InlineStorage,
    "images": ImageSettings,
    "workload": WorkloadSettings,
    "loop": LoopSettings,
    "limits": LimitSettings,
    "graceful_stop": StopSettings,
    "leader": LeaderSettings,
    "canary": CanarySettings,
    "sharding": ShardingSettings,
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
