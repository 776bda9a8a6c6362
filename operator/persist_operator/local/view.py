"""Resources as people see them: the tables of `kubectl get`, from the printer columns of the CRDs; `describe` as a story.

Pure: documents in, renderables out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.tree import Tree

from persist_operator.api import times

_CONDITION = re.compile(r"\.status\.conditions\[\?\(@\.type=='(\w+)'\)\]\.(\w+)")


def lookup(document: Mapping[str, Any], json_path: str) -> Any:
    """The value at a printer column's path (fields by dots, conditions by type), or None."""
    match = _CONDITION.fullmatch(json_path)
    if match:
        for condition in document.get("status", {}).get("conditions", ()):
            if condition["type"] == match[1]:
                return condition.get(match[2])
        return None
    value: Any = document
    for name in json_path.strip(".").split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def age(since_ms: int | None, now_ms: int) -> str:
    """How long ago, as kubectl prints it: 12s, 3m, 2h, 5d."""
    if since_ms is None:
        return ""
    seconds = max(0, now_ms - since_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def resources_table(
    documents: Iterable[Mapping[str, Any]], columns: Sequence[Mapping[str, Any]], *, wide: bool, now_ms: int
) -> Table:
    """One row a resource; columns of priority 1 only when `wide`."""
    shown = [column for column in columns if wide or not column.get("priority")]
    table = Table("NAME", *(column["name"].upper() for column in shown), box=None, pad_edge=False, header_style="bold")
    for document in documents:
        cells = [document["metadata"]["name"]]
        for column in shown:
            value = lookup(document, column["jsonPath"])
            if column["type"] == "date":
                value = age(times.to_ms(value), now_ms)
            cells.append("" if value is None else str(value))
        table.add_row(*cells)
    return table


def runs_table(documents: Iterable[Mapping[str, Any]]) -> Table:
    """Maintenance runs and sink attempts from the histories on the resources."""
    names = ("RESOURCE", "RUN", "OUTCOME", "SECONDS", "READ", "WRITTEN", "BLOBS DELETED", "WHY")
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for document in documents:
        resource = f"{document['kind']}/{document['metadata']['name']}"
        for entry in document.get("status", {}).get("history", ()):
            began, ended = times.to_ms(entry.get("startTime")), times.to_ms(entry.get("endTime"))
            seconds = "" if began is None or ended is None else f"{(ended - began) / 1000:.0f}"
            what = entry.get("type") or f"attempt {entry.get('attempt', '')}"
            sizes = [size(entry[name]) if entry.get(name) else "" for name in ("bytesRead", "bytesWritten")]
            deleted = str(entry["blobsDeleted"]) if entry.get("blobsDeleted") else ""
            why = entry.get("reason") or entry.get("message") or ""
            table.add_row(resource, what, entry.get("outcome", ""), seconds, *sizes, deleted, why)
    return table


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def describe(document: Mapping[str, Any]) -> Tree:
    """Conditions first, then the rest of the status, then the spec."""
    metadata = document["metadata"]
    tree = Tree(f"[bold]{document['kind']}/{metadata['name']}[/] (generation {metadata['generation']})")
    status = dict(document.get("status") or {})
    conditions = tree.add("conditions")
    for condition in status.pop("conditions", ()):
        text = f"{condition['type']}={condition['status']} {condition['reason']}"
        conditions.add(f"{text}: {condition['message']}" if condition.get("message") else text)
    _branch(tree, "status", status)
    _branch(tree, "spec", document["spec"])
    return tree


def _branch(tree: Tree, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        branch = tree.add(name)
        for key, item in value.items():
            _branch(branch, str(key), item)
    elif isinstance(value, list):
        branch = tree.add(name)
        for index, item in enumerate(value):
            _branch(branch, str(index), item)
    else:
        tree.add(f"{name}: {value}")
