"""The annotation `paused`: the operator leaves a resource and its children as they are. Pure.

For work beside the operator: a move of stores, a look at a failure before the next attempt, a change of several resources that must not act
one by one. `suspend` is another thing: it is a wish, which the operator carries out (it stops drivers) and which then is Ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist_operator.api import conditions, names
from persist_operator.api.redact import clip

PAUSED = "Paused"
#: The one value that does not pause. A value such as `yes` is a wish to pause, and to pause in error shows on the status and harms nothing.
_OFF = "false"
_VALUE_MAX = 64


def is_paused(resource: Mapping[str, Any]) -> bool:
    """Whether the operator must change nothing of this resource but its status."""
    return _value(resource) != _OFF


def paused_status(resource: Mapping[str, Any], *, now_ms: int) -> dict[str, Any]:
    """The status of a paused resource: Ready=Unknown, so that GitOps tools neither fail nor call it done. The rest is what was last known.
    Idempotent.
    """
    metadata, status, value = resource["metadata"], resource.get("status") or {}, _value(resource)
    odd = "" if value == "true" else f" (to {clip(value, _VALUE_MAX)!r}: only {_OFF} and no annotation do not pause)"
    deletion = ", and its deletion waits" if metadata.get("deletionTimestamp") else ""
    message = (
        f"the annotation {names.ANNOTATION_PAUSED} is set{odd}: the operator starts, stops and observes nothing of it{deletion}; "
        "the rest of the status is what was last known; remove the annotation to go on"
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
