"""PersistShard: the spec as a value, and where its stores are.

Takes the spec as the API server (or `schema_check.default`) hands it over: validated and with the defaults of the
schema filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from persist_engine.base.errors import InvalidUsage

from persist_operator.api.resource import Meta
from persist_operator.settings import OperatorSettings

#: Where credentials are mounted, in the operator and in every pod it starts.
CREDENTIALS_DIR = "/var/run/secrets/persist/store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """The two stores of a shard and the Secret that pods mount to reach them."""

    blob: str
    consensus: str
    secret_name: str | None = None


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

    def location(self, settings: OperatorSettings) -> StoreLocation:
        """The stores: written out in the spec, or of its profile. InvalidUsage when there is no such profile."""
        if self.storage is not None:
            return _inline(self.storage)
        name = self.storage_profile or settings.default_profile
        profile = settings.storage_profiles.get(name)
        if profile is None:
            known = ", ".join(sorted(settings.storage_profiles)) or "none"
            raise InvalidUsage(f"storage profile {name!r} is not in the operator's configuration; it knows: {known}")
        return StoreLocation(blob=profile.blob, consensus=profile.consensus, secret_name=profile.secret_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A PersistShard as read."""

    meta: Meta
    spec: ShardSpec
    status: Mapping[str, Any]

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Shard:
        """From the dictionary form."""
        return cls(meta=Meta.of(resource), spec=ShardSpec.of(resource["spec"]), status=resource.get("status") or {})


def _inline(storage: Mapping[str, Any]) -> StoreLocation:
    blob, consensus = storage["blob"], storage["consensus"]
    prefix = f"/{blob['prefix'].strip('/')}" if blob.get("prefix") else ""
    query: dict[str, str] = {name: blob[name] for name in ("region", "endpoint") if blob.get(name)}
    if blob.get("pathStyle"):
        query["path_style"] = "true"
    redis: dict[str, str] = {"prefix": consensus["keyPrefix"]} if consensus.get("keyPrefix") else {}
    if storage.get("secretName"):
        redis["password_file"] = f"{CREDENTIALS_DIR}/redis-password"
    return StoreLocation(
        blob=f"s3://{blob['bucket']}{prefix}{_query(query)}",
        consensus=f"redis://{consensus['address']}/{consensus.get('database', 0)}{_query(redis)}",
        secret_name=storage.get("secretName"),
    )


def _query(values: Mapping[str, str]) -> str:
    return f"?{urlencode(values)}" if values else ""
