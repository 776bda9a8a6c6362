"""The fields of a resource that only concern pods. They have no effect on a laptop, and `up` reports this. Pure."""

from __future__ import annotations

from typing import Any

from persist_operator.local.objects import Document

#: Blocks of a spec -> their fields about pods. None of them has a default, so the user wrote any field that is present.
_OF_PODS = {
    ("maintenance",): ("priorityClassName", "queuePriority", "serviceAccountName", "template"),
    ("spark",): ("image", "imagePullPolicy", "imagePullSecrets", "serviceAccountName", "scheduler", "queuePriority"),
    ("spark", "driver"): ("template",),
    ("spark", "executor"): ("template",),
}


def without_pods(document: Document) -> Document:
    """The resource without these fields, because an installation's rules for pods do not apply here."""
    spec = dict(document["spec"])
    for path, fields in _OF_PODS.items():
        inner = spec
        for name in path:
            if name not in inner:
                break
            inner[name] = dict(inner[name])
            inner = inner[name]
        else:
            for name in fields:
                inner.pop(name, None)
    return {**document, "spec": spec}


def no_effect(document: Document) -> str:
    """The suffix for the outcome of an `up` that lists the resource's fields of this kind. Empty when it has none."""
    found = []
    for path, fields in _OF_PODS.items():
        inner: Any = document["spec"]
        for name in path:
            inner = inner.get(name) or {}
        found += [".".join(("spec", *path, name)) for name in fields if name in inner]
    return f"; without effect here, because there are no pods: {', '.join(found)}" if found else ""
