"""PersistShard: the spec as a value, and where its stores are.

Takes the spec as the API server (or `schema_check.default`) hands it over: validated and with the defaults of the
schema filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from persist_engine.base.errors import InvalidUsage
from persist_engine.storage.addresses import with_credentials

from persist_operator.api.inline_storage import InlineRefused, inline_addresses
from persist_operator.api.resource import Meta
from persist_operator.api.shard_status import ShardStatus
from persist_operator.settings import OperatorSettings

#: Where the Secret of a pod's one profile is mounted in it.
CREDENTIALS_DIR = "/var/run/secrets/persist/store"
#: Where the operator has those of all profiles, each in a folder with its profile's name.
OPERATOR_CREDENTIALS_DIR = "/var/run/secrets/persist/profiles"
#: Of a namespace that was not asked for its labels.
NO_LABELS: Mapping[str, str] = MappingProxyType({})


class StorageRefused(InvalidUsage):
    """A resource names stores that are not for it. `reason` is that of its Stalled condition."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """The two stores of a shard, as URLs without credentials, and what leads to those."""

    blob: str
    consensus: str
    secret_name: str | None = None
    """The Secret that pods mount, in their own namespace."""
    profile: str | None = None
    """The profile it is of: the operator has the credentials of each in a folder of its own."""

    def urls(self, credentials_dir: str) -> tuple[str, str]:
        """The URLs of blob and consensus for a process that has the Secret, if there is one, mounted at `credentials_dir`."""
        folder = credentials_dir if self.secret_name else None
        return with_credentials(self.blob, folder), with_credentials(self.consensus, folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineLocation(StoreLocation):
    """Stores that a resource names itself: for pods of its own namespace alone, never for the operator's own process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSchema:
    """Fields of a collection as DDL."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What the user wants of a shard. Seconds and bytes as named."""

    shard_id: str | None
    storage_profile: str | None
    storage: Mapping[str, Any] | None
    schema: ShardSchema | None
    since_lag_seconds: int
    compaction_mode: str
    max_uncompacted_batches: int
    memory_limit: str
    rollup_every_seqnos: int
    gc_enabled: bool
    gc_interval_seconds: int
    priority_class_name: str | None
    service_account_name: str | None
    maintenance_template: Mapping[str, Any]
    ttl_seconds_after_finished: int
    history_limit: int
    suspend: bool

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> ShardSpec:
        """From the defaulted dictionary form."""
        schema, maintenance = spec.get("schema"), spec["maintenance"]
        return cls(
            shard_id=spec.get("shardId"),
            storage_profile=spec.get("storageProfile"),
            storage=spec.get("storage"),
            schema=None if schema is None else ShardSchema(key=schema["key"], value=schema.get("value", "")),
            since_lag_seconds=spec["retention"]["sinceLagSeconds"],
            compaction_mode=spec["compaction"]["mode"],
            max_uncompacted_batches=spec["compaction"]["maxUncompactedBatches"],
            memory_limit=str(spec["compaction"]["memoryLimit"]),
            rollup_every_seqnos=spec["rollup"]["everySeqnos"],
            gc_enabled=spec["gc"]["enabled"],
            gc_interval_seconds=spec["gc"]["intervalSeconds"],
            priority_class_name=maintenance.get("priorityClassName"),
            service_account_name=maintenance.get("serviceAccountName"),
            maintenance_template=maintenance.get("template") or {},
            ttl_seconds_after_finished=maintenance["ttlSecondsAfterFinished"],
            history_limit=maintenance["historyLimit"],
            suspend=spec["suspend"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A PersistShard as read."""

    meta: Meta
    spec: ShardSpec
    status: Mapping[str, Any]
    known: ShardStatus = field(init=False, compare=False, repr=False)
    """The status as a value. Made once: a reconcile reads it a dozen times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", ShardStatus.of(self.status))

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Shard:
        """From the dictionary form."""
        return cls(meta=Meta.of(resource), spec=ShardSpec.of(resource["spec"]), status=resource.get("status") or {})

    def profile_name(self, settings: OperatorSettings) -> str:
        """The profile that it names, or the default one."""
        return self.spec.storage_profile or settings.default_profile

    def location(self, settings: OperatorSettings, namespace_labels: Mapping[str, str] = NO_LABELS) -> StoreLocation:
        """The stores of its profile, for a resource whose namespace carries `namespace_labels`. StorageRefused when there is
        no such profile or it is not for that namespace: then no store may hear of this resource.

        What a resource says of stores itself becomes an InlineLocation, where the installation allows it.
        """
        if self.spec.storage is not None:
            try:
                addresses = inline_addresses(self.spec.storage, settings.inline_storage)
            except InlineRefused as error:
                raise StorageRefused(error.reason, str(error)) from error
            return InlineLocation(
                blob=addresses.blob.url, consensus=addresses.consensus.url, secret_name=addresses.secret_name
            )
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
                f"storage profile {name!r} is not for namespace {self.meta.namespace}: ask who installed the operator to add it to "
                f"storageProfiles.{name}.allowedNamespaces, or use another profile",
            )
        return StoreLocation(
            blob=profile.blob, consensus=profile.consensus, secret_name=profile.secret_name, profile=name
        )
