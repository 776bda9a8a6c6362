"""The annotation `paused`: the operator does not change a resource and its children. Pure.

It is for work without the operator: moving stores, examining a failure before the next attempt, changing several resources that must take
effect together. `suspend` differs: it is part of the spec. The operator carries it out (it stops drivers), and the resource is then Ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist_operator.api import conditions, names
from persist_operator.api.redact import clip

PAUSED = "Paused"
#: The only value that does not pause. A value such as `yes` means to pause. A pause by mistake is harmless, and the status shows it.
_OFF = "false"
_VALUE_MAX = 64


def is_paused(resource: Mapping[str, Any]) -> bool:
    """Whether the operator must change only the status of this resource."""
    return _value(resource) != _OFF


def paused_status(resource: Mapping[str, Any], *, now_ms: int) -> dict[str, Any]:
    """The status of a paused resource. It has Ready=Unknown, so that GitOps tools report neither a failure nor success. The rest is the
    last known status. Idempotent.
    """
    metadata, status, value = resource["metadata"], resource.get("status") or {}, _value(resource)
    odd = "" if value == "true" else f" (to {clip(value, _VALUE_MAX)!r}: only {_OFF} and no annotation do not pause)"
    deletion = ", and its deletion waits" if metadata.get("deletionTimestamp") else ""
    message = (
        f"the annotation {names.ANNOTATION_PAUSED} is set{odd}: the operator starts, stops and observes nothing for it{deletion}; "
        "the rest of the status is the last known one; remove the annotation to continue"
    )
    return conditions.with_outcome(
        status,
        conditions.reconciling(PAUSED, message, ready="Unknown"),
        status.get("conditions", ()),
        generation=int(metadata.get("generation", 1)),
        now_ms=now_ms,
    )


def _value(resource: Mapping[str, Any]) -> str:
    annotations = (resource.get("metadata") or {}).get("annotations") or {}
    return str(annotations.get(names.ANNOTATION_PAUSED, _OFF))
