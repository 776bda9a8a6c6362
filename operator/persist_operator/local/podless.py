"""The fields of a resource that are about pods alone: a laptop has none, so they have no effect there, and `up` says so. Pure."""

from __future__ import annotations

from typing import Any

from persist_operator.local.objects import Document

#: Blocks of a spec -> their fields about pods. None of them has a default, so one that is there was written by the user.
_OF_PODS = {
    ("maintenance",): ("priorityClassName", "queuePriority", "serviceAccountName", "template"),
    ("spark",): ("image", "imagePullPolicy", "imagePullSecrets", "serviceAccountName", "scheduler", "queuePriority"),
    ("spark", "driver"): ("template",),
    ("spark", "executor"): ("template",),
}


def without_pods(document: Document) -> Document:
    """The resource without these fields: what an installation must allow for pods does not matter here."""
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
    """For people, after the outcome of an `up`: which of these fields the resource has. Empty when it has none."""
    found = []
    for path, fields in _OF_PODS.items():
        inner: Any = document["spec"]
        for name in path:
            inner = inner.get(name) or {}
        found += [".".join(("spec", *path, name)) for name in fields if name in inner]
    return f"; without pods there is no effect of {', '.join(found)}" if found else ""
