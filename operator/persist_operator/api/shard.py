"""PersistShard: the spec as a value, and the location of its stores.

Takes the spec as the API server or `schema_check.default` returns it: valid, with the defaults of the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.addresses import with_credentials

from persist_operator.api import quantity
from persist_operator.api.inline_storage import InlineRefused, SecretFiles, inline_addresses
from persist_operator.api.names import MaintenanceKind
from persist_operator.api.resource import Meta
from persist_operator.api.shard_status import ShardStatus
from persist_operator.api.sink import Schedule
from persist_operator.settings import OperatorSettings

#: Mount path of the profile's Secret in a pod that uses one profile.
CREDENTIALS_DIR = "/var/run/secrets/persist/store"
#: Parent folder of all profiles' credentials in the operator's pod; each profile has a folder of its name.
OPERATOR_CREDENTIALS_DIR = "/var/run/secrets/persist/profiles"
#: Labels of a namespace whose labels were not read.
NO_LABELS: Mapping[str, str] = MappingProxyType({})


class StorageRefused(InvalidUsage):
    """A resource names stores that it may not use. `reason` becomes the reason of its Stalled condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """The two stores of a shard as URLs without credentials, and where a process finds the credentials."""

    blob: str
    consensus: str
    secret_name: str | None = None
    """The Secret that pods mount, each key as a file. It is in the pods' namespace."""
    profile: str | None = None
    """The storage profile. The operator's pod has a folder of credentials for each profile."""

    @property
    def has_credentials(self) -> bool:
        """Whether pods mount a folder of credentials."""
        return self.secret_name is not None

    @property
    def secrets_needed(self) -> tuple[str, ...]:
        """The names of the Secrets without which a pod does not start."""
        return () if self.secret_name is None else (self.secret_name,)

    def urls(self, credentials_dir: str) -> tuple[str, str]:
        """The URLs of blob and consensus, for a process in which the credentials (if there are any) are mounted at `credentials_dir`."""
        folder = credentials_dir if self.has_credentials else None
        return with_credentials(self.blob, folder), with_credentials(self.consensus, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineLocation(StoreLocation):
    """Inline storage: stores that a resource names itself. Only pods of its namespace connect to them, and the operator never does. It has
    `secrets` instead of one Secret.
    """

    secrets: tuple[SecretFiles, ...] = ()

    @property
    def has_credentials(self) -> bool:
        """See StoreLocation."""
        return bool(self.secrets)

    @property
    def secrets_needed(self) -> tuple[str, ...]:
        """See StoreLocation."""
        return tuple(dict.fromkeys(one.name for one in self.secrets if not one.optional))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSchema:
    """Fields of a collection as DDL."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCodecs:
    """Names of the encodings of keys and values."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"key {self.key}, value {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A maintenance window. It is open from each tick of `schedule` for `duration_seconds` of elapsed time."""

    schedule: Schedule
    duration_seconds: int

    @classmethod
    def of(cls, window: Mapping[str, Any]) -> Window:
        """From one item of `maintenance.windows`."""
        schedule = Schedule(cron=window["schedule"], time_zone=window["timeZone"], starting_deadline_seconds=None)
        return cls(schedule=schedule, duration_seconds=window["durationSeconds"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The spec of a PersistShard. Names of fields carry the unit."""

    shard_id: str | None
    storage_profile: str | None
    storage: Mapping[str, Any] | None
    schema: ShardSchema | None
    codecs: ShardCodecs | None
    """The codecs that the shard must have. None: a new shard gets those of the engine's release."""
    since_lag_seconds: int
    compaction_mode: str
    max_uncompacted_batches: int
    max_amplification_percent: int | None
    deadline_seconds: int
    memory_limit: str
    compaction_runner: Literal["Auto", "Pod", "Spark"]
    spark_threshold_bytes: int
    spark_executors: int
    rollup_every_seqnos: int
    gc_enabled: bool
    gc_interval_seconds: int
    gc_deletes_max: int
    record_days: int
    """How many days the records of deleted blobs are kept. 0: no records are written."""
    orphans_mode: Literal["Off", "Report", "Delete"]
    orphans_min_age_seconds: int
    orphans_interval_seconds: int
    verify_mode: Literal["Off", "Metadata", "Full"]
    verify_interval_seconds: int
    needs_approval: bool
    windows: tuple[Window, ...]
    """The windows in which compactions may start. Empty: they may start at any time."""
    max_rewrite_bytes_per_day: int | None
    queue_priority: int
    priority_class_name: str | None
    service_account_name: str | None
    maintenance_template: Mapping[str, Any]
    ttl_seconds_after_finished: int
    history_limit: int
    reclaim_policy: Literal["Retain", "Tombstone", "Purge"]
    suspend: bool

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> ShardSpec:
        """From a JSON object with defaults filled in."""
        schema, codecs, maintenance = spec.get("schema"), spec.get("codecs"), spec["maintenance"]
        budget = maintenance.get("maxRewriteBytesPerDay")
        return cls(
            shard_id=spec.get("shardId"),
            storage_profile=spec.get("storageProfile"),
            storage=spec.get("storage"),
            schema=None if schema is None else ShardSchema(key=schema["key"], value=schema.get("value", "")),
            codecs=None if codecs is None else ShardCodecs(key=codecs["key"], value=codecs["value"]),
            since_lag_seconds=spec["retention"]["sinceLagSeconds"],
            compaction_mode=spec["compaction"]["mode"],
            max_uncompacted_batches=spec["compaction"]["maxUncompactedBatches"],
            max_amplification_percent=spec["compaction"].get("maxSpaceAmplificationPercent"),
            deadline_seconds=spec["compaction"]["deadlineSeconds"],
            memory_limit=str(spec["compaction"]["memoryLimit"]),
            compaction_runner=spec["compaction"]["runner"],
            spark_threshold_bytes=quantity.to_bytes(spec["compaction"]["sparkThreshold"]),
            spark_executors=spec["compaction"]["sparkExecutors"],
            rollup_every_seqnos=spec["rollup"]["everySeqnos"],
            gc_enabled=spec["gc"]["enabled"],
            gc_interval_seconds=spec["gc"]["intervalSeconds"],
            gc_deletes_max=spec["gc"]["maxDeletesPerRun"],
            record_days=spec["gc"]["recordDays"],
            orphans_mode=spec["gc"]["orphans"]["mode"],
            orphans_min_age_seconds=spec["gc"]["orphans"]["minAgeSeconds"],
            orphans_interval_seconds=spec["gc"]["orphans"]["intervalSeconds"],
            verify_mode=spec["verify"]["mode"],
            verify_interval_seconds=spec["verify"]["intervalSeconds"],
            needs_approval=maintenance["approval"] == "Required",
            windows=tuple(map(Window.of, maintenance.get("windows") or ())),
            max_rewrite_bytes_per_day=None if budget is None else quantity.to_bytes(budget),
            queue_priority=maintenance.get("queuePriority", 0),
            priority_class_name=maintenance.get("priorityClassName"),
            service_account_name=maintenance.get("serviceAccountName"),
            maintenance_template=maintenance.get("template") or {},
            ttl_seconds_after_finished=maintenance["ttlSecondsAfterFinished"],
            history_limit=maintenance["historyLimit"],
            reclaim_policy=spec["reclaimPolicy"],
            suspend=spec["suspend"],
        )

    def switched_off(self, kind: MaintenanceKind) -> str:
        """The setting because of which runs of this kind wait for a request, as messages name it; empty when the operator starts them
        without a request. `suspend` also stops all kinds.
        """
        settings: Mapping[MaintenanceKind, tuple[bool, str]] = {
            "compaction": (self.compaction_mode != "Automatic", f"compaction.mode is {self.compaction_mode}"),
            "gc": (not self.gc_enabled, "gc.enabled is false"),
            "orphanScan": (self.orphans_mode == "Off", "gc.orphans.mode is Off"),
            "verify": (self.verify_mode == "Off", "verify.mode is Off"),
        }
        is_off, text = settings.get(kind, (False, ""))
        return text if is_off else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A PersistShard as the API server returned it."""

    meta: Meta
    spec: ShardSpec
    status: Mapping[str, Any]
    known: ShardStatus = field(init=False, compare=False, repr=False)
    """The status as a value. Parsed once, because a reconcile reads it a dozen times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", ShardStatus.of(self.status))

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Shard:
        """From the JSON object of the resource."""
        return cls(meta=Meta.of(resource), spec=ShardSpec.of(resource["spec"]), status=resource.get("status") or {})

    def profile_name(self, settings: OperatorSettings) -> str:
        """The storage profile of the spec, else the default profile."""
        return self.spec.storage_profile or settings.default_profile

    def location(self, settings: OperatorSettings, namespace_labels: Mapping[str, str] = NO_LABELS) -> StoreLocation:
        """The stores of the shard's profile. `namespace_labels` are the labels of the resource's namespace.

        Inline storage gives an InlineLocation. Raises StorageRefused when the profile does not exist, when the profile does not allow the
        namespace, or when the installation does not allow the inline storage. The operator must then contact no store for this resource.
        """
        if self.spec.storage is not None:
            try:
                addresses = inline_addresses(self.spec.storage, settings.inline_storage)
            except InlineRefused as error:
                raise StorageRefused(error.reason, str(error)) from error
            return InlineLocation(blob=addresses.blob.url, consensus=addresses.consensus.url, secrets=addresses.secrets)
        name = self.profile_name(settings)
        profile = settings.storage_profiles.get(name)
        if profile is None:
            raise StorageRefused(
                "UnknownStorageProfile",
                f"storage profile {name!r} is not in the operator's configuration; correct spec.storageProfile",
            )
        if not profile.allowed_namespaces.allow(self.meta.namespace, namespace_labels):
            raise StorageRefused(
                "ProfileNotAllowed",
                f"storage profile {name!r} does not allow namespace {self.meta.namespace}: add the namespace to "
                f"storageProfiles.{name}.allowedNamespaces in the operator's values, or use another profile",
            )
        return StoreLocation(
            blob=profile.blob, consensus=profile.consensus, secret_name=profile.secret_name, profile=name
        )
