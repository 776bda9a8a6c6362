"""Merges a user's pod template into a pod of the operator, like a strategic merge patch of Kubernetes. Pure.

Maps are merged by key, and lists by the merge key that Kubernetes gives them. Other lists are appended. Values of the operator's pod win,
except in a security context, where the template wins. Must not know: which fields are allowed (`api.pod_template`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The merge key of each list; other lists have none.
_MERGE_KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}
_THEIRS = "securityContext"


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the additions of `theirs`. Changes neither of them."""
    result = dict(ours)
    for name, value in theirs.items():
        result[name] = _merged_value(name, ours[name], value) if name in ours else value
    return result


def _merged_value(name: str, ours: Any, theirs: Any) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {**merged(ours, theirs), **theirs} if name == _THEIRS else merged(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return _merged_list(_MERGE_KEYS.get(name), ours, theirs)
    return ours


def _merged_list(key: str | None, ours: list[Any], theirs: list[Any]) -> list[Any]:
    if key is None:
        return [*ours, *theirs]
    known = {one[key] for one in ours}
    both = {one[key]: one for one in theirs if one[key] in known}
    kept = [merged(one, both.get(one[key], {})) for one in ours]
    return [*kept, *(one for one in theirs if one[key] not in known)]
