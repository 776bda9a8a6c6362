"""The metadata that all resources share: identity, generation, age."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from persist_operator.api import times


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The fields of `metadata` that the operator uses."""

    namespace: str
    name: str
    uid: str
    generation: int
    created_ms: int
    deleting: bool
    annotations: Mapping[str, str]
    finalizers: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Meta:
        """From the JSON object of any resource."""
        metadata = resource["metadata"]
        return cls(
            namespace=metadata.get("namespace", "default"),
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            generation=int(metadata.get("generation", 1)),
            created_ms=times.to_ms(metadata.get("creationTimestamp")) or 0,
            deleting=bool(metadata.get("deletionTimestamp")),
            annotations=dict(metadata.get("annotations") or {}),
            finalizers=tuple(metadata.get("finalizers") or ()),
        )
