"""Resources and runs as tables for people: the columns of `kubectl get` (the CRDs' printer columns), with readable values.

Pure: documents in, text out. No cell has a control character, because names and messages from other users may contain terminal commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from persist_engine.base.wording import dated, iso_text, sized

from persist_operator.api import conditions, names, times
from persist_operator.api.redact import printable

_CONDITION = re.compile(r"\.status\.conditions\[\?\(@\.type=='(\w+)'\)\]\.(\w+)")
_GAP = "   "
#: Columns that only the local table shows by default, and columns that only the cluster's table shows, because a local sink is one process.
_SHOWN, _HIDDEN = {"Written"}, {"Executors"}
#: Columns with numbers that are not counts. Their digits are never grouped.
_IDS = {"Seqno"}


class Child(Protocol):
    """A process or pod that carries out a run."""

    @property
    def name(self) -> str: ...
    @property
    def owner(self) -> str:
        """`<kind>/<name>` of its resource."""

    @property
    def labels(self) -> Mapping[str, str]:
        """At least `kind`: a kind of maintenance, or `driver`."""

    @property
    def started_ms(self) -> int: ...
    @property
    def running(self) -> bool: ...


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None) -> list[str]:
    """The header, then one line a row. Columns without values are left out. Lines longer than `width` are cut, with an ellipsis."""
    shown = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    cells = [[" ".join(printable(row[i]).split()) for i in shown] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(shown))]
    lines = [_GAP.join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def lookup(document: Mapping[str, Any], json_path: str) -> Any:
    """The value at a printer column's path (fields by dots, conditions by type). None when it is absent."""
    match = _CONDITION.fullmatch(json_path)
    if match:
        return (conditions.find(document.get("status") or {}, match[1]) or {}).get(match[2])
    value: Any = document
    for name in json_path.strip(".").split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def age(since_ms: int | None, now_ms: int) -> str:
    """The time since then, as kubectl prints it: 12s, 3m, 2h, 5d, 4y."""
    return "" if since_ms is None else duration(max(0, now_ms - since_ms))


def duration(length_ms: int) -> str:
    """12s, 3m, 2h, 5d, 4y: rounded down, in the largest unit of which there are at least two."""
    seconds = length_ms // 1000
    for unit, size_s in (("y", 31_536_000), ("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds // size_s}{unit}"
    return f"{seconds}s"


def instant(time: str | int, *, with_number: bool = True) -> str:
    """A frontier's time. An instant gets its date beside the number, or instead of it without `with_number`. Other text, such as `closed`,
    stays the same.
    """
    try:
        number = int(time)
    except ValueError:
        return str(time)
    return dated(number) if with_number else iso_text(number) or str(number)


def _shown(column: Mapping[str, Any], value: Any, now_ms: int, *, wide: bool) -> str:
    if value is None:
        return ""
    if column["type"] == "date":
        return age(times.to_ms(value), now_ms)
    if column["name"] in {"Upper", "Since"}:
        return instant(value, with_number=wide)
    if column["name"] == "Bytes":
        return sized(value)
    return f"{value:,}" if column["type"] == "integer" and column["name"] not in _IDS else str(value)


def resources_table(
    documents: Iterable[Mapping[str, Any]],
    columns: Sequence[Mapping[str, Any]],
    *,
    wide: bool,
    now_ms: int,
    width: int | None,
) -> list[str]:
    """One row a resource, with the message of Ready last. Columns of priority 1, and messages of ready resources, only when `wide`."""
    chosen = [one for one in columns if one["name"] not in _HIDDEN or wide]
    chosen = [one for one in chosen if wide or not one.get("priority") or one["name"] in _SHOWN]
    rows = []
    for document in documents:
        cells = [_shown(column, lookup(document, column["jsonPath"]), now_ms, wide=wide) for column in chosen]
        ready = conditions.find(document.get("status") or {}, "Ready") or {}
        message = "" if ready.get("status") == "True" and not wide else str(ready.get("message", ""))
        rows.append([document["metadata"]["name"], *cells, message])
    header = ["NAME", *(str(column["name"]).upper() for column in chosen), "MESSAGE"]
    return text_table(header, rows, width=width)


def runs_table(
    documents: Iterable[Mapping[str, Any]], children: Iterable[Child], *, wide: bool, now_ms: int, width: int | None
) -> list[str]:
    """Sink attempts and maintenance runs in the order of their starts: the histories of the resources, and the running children."""
    found = [(*_began(entry), _run_cells(one, entry, wide=wide)) for one in documents for entry in _history(one)]
    for child in children:
        if child.running:
            labels = child.labels
            kind = {"driver": "Sink", "gc": "GC", "orphanScan": "OrphanScan"}.get(
                labels["kind"], labels["kind"].capitalize()
            )
            took, why = age(child.started_ms, now_ms), labels.get("reason", "")
            going = [child.name, kind, "Running", took, "", "", "", "", "", *([why] if wide else []), ""]
            found.append((child.started_ms, 1, going))
    rows = [row for _, _, row in sorted(found, key=lambda one: one[:2])]
    header = ["NAME", "TYPE", "OUTCOME", "TOOK", "CPU", "READ", "WRITTEN", "BLOBS DELETED", "VERSIONS CUT"]
    header += ["WHY", "MESSAGE"] if wide else ["MESSAGE"]
    return text_table(header, rows, width=width)


def runs(documents: Iterable[Mapping[str, Any]], children: Iterable[Child]) -> list[dict[str, Any]]:
    """The rows of `runs_table` for programs: entries of the histories with resource and name (as for `logs`), and the running children."""
    found = [
        {"name": run_name(one, entry), "resource": f"{one['kind']}/{one['metadata']['name']}", **entry}
        for one in documents
        for entry in _history(one)
    ]
    return found + [
        {"name": one.name, "resource": one.owner, "outcome": "Running", "startTime": times.to_text(one.started_ms)}
        for one in children
        if one.running
    ]


def _history(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((document.get("status") or {}).get("history", ()))


def _began(entry: Mapping[str, Any]) -> tuple[int, int]:
    return times.to_ms(entry.get("startTime")) or 0, 0


def _run_cells(document: Mapping[str, Any], entry: Mapping[str, Any], *, wide: bool) -> list[str]:
    began, ended = times.to_ms(entry.get("startTime")), times.to_ms(entry.get("endTime"))

    def number(name: str, show: Callable[[int], str]) -> str:
        return show(entry[name]) if entry.get(name) else ""

    return [
        run_name(document, entry),
        f"{entry.get('type') or 'Sink'}{' (Spark)' if entry.get('runner') == 'Spark' else ''}",
        entry.get("outcome", ""),
        "" if began is None or ended is None else duration(ended - began),
        number("cpuSeconds", "{:,}s".format),
        number("bytesRead", sized),
        number("bytesWritten", sized),
        number("blobsDeleted", "{:,}".format),
        number("diffsTruncated", "{:,}".format),
        *([entry.get("reason", "")] if wide else []),
        entry.get("message", ""),
    ]


def run_name(document: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """The name for `logs` of the run of a history entry."""
    if "id" in entry:
        return str(entry["id"])
    return names.driver_name(document["metadata"]["name"], str(entry["revision"]), int(entry["attempt"]))
