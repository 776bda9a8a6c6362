"""The view of the first page: all shards and sinks as rows, filtered and sorted by the query. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

from persist_operator.console.port import Resource
from persist_operator.console.texts import ago, block, grouped, instant, items, number, seconds, size, text, to_ms

#: The most rows of a page. A page with more rows is slow to draw and too long to read. The filter finds the other rows.
ROWS_MAX = 500
READY = ("True", "False", "Unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The filter and the order from the query string. Unknown values count as absent."""

    words: str = ""
    namespace: str = ""
    ready: str = ""
    shards_by: str = "name"
    sinks_by: str = "name"

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        """From a query string."""

        def order(name: str, columns: Mapping[str, Any]) -> str:
            value = parameters.get(name, "name")
            return value if value.removeprefix("-") in columns else "name"

        ready = parameters.get("ready", "")
        return cls(
            words=parameters.get("q", "").strip()[:200],
            namespace=parameters.get("namespace", "").strip()[:63],
            ready=ready if ready in READY else "",
            shards_by=order("shards", _SHARD_KEYS),
            sinks_by=order("sinks", _SINK_KEYS),
        )

    def href(self, **changes: str) -> str:
        """The address of the page for this query with changes. It leaves out defaults."""
        names = {"q": self.words, "namespace": self.namespace, "ready": self.ready}
        names |= {"shards": self.shards_by, "sinks": self.sinks_by} | changes
        given = {name: value for name, value in names.items() if value and value != "name"}
        return f"/?{urlencode(given)}" if given else "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A column: its title, the address that sorts by it, and the present order by it (for `aria-sort`)."""

    title: str
    href: str
    order: str
    is_number: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The condition Ready. `word` is for the badge, `tone` its class."""

    status: str
    reason: str
    message: str

    @property
    def tone(self) -> str:
        """`good`, `bad` or `wait`."""
        return {"True": "good", "False": "bad"}.get(self.status, "wait")

    @property
    def word(self) -> str:
        """Ready, Not ready or Unknown, so that the badge does not rely on its colour."""
        return {"True": "Ready", "False": "Not ready"}.get(self.status, "Unknown")

    @classmethod
    def of(cls, resource: Resource) -> Readiness:
        """The readiness of a resource; Pending before the first reconcile."""
        conditions = items(block(resource, "status").get("conditions"))
        found: Resource = next((one for one in conditions if one.get("type") == "Ready"), {})
        return cls(
            status=text(found.get("status") or "Unknown"),
            reason=text(found.get("reason") or "Pending"),
            message=text(found.get("message")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard. Texts for the cells, and the numbers by which the table is sorted."""

    namespace: str
    name: str
    ready: Readiness
    upper: str
    lag: str
    batches: str
    bytes: str
    deadline: str
    is_late: bool
    holds: str
    keys: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRow:
    """One sink."""

    namespace: str
    name: str
    ready: Readiness
    shard: str
    mode: str
    run: str
    lag: str
    written: str
    committed: str
    failures: str
    keys: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The page."""

    query: Query
    namespaces: tuple[str, ...]
    shards: tuple[ShardRow, ...]
    sinks: tuple[SinkRow, ...]
    shard_headings: tuple[Heading, ...]
    sink_headings: tuple[Heading, ...]
    shards_found: int
    sinks_found: int
    counts: tuple[tuple[str, int], ...]
    """The number of all resources, and of the ready, not ready and unknown ones. The filter does not affect them."""


_SHARD_KEYS: Mapping[str, tuple[str, bool]] = {
    "name": ("Shard", False),
    "ready": ("State", False),
    "upper": ("Upper", False),
    "lag": ("Upper lag", True),
    "batches": ("Batches", True),
    "bytes": ("Bytes", True),
    "deadline": ("Deletion due", True),
    "holds": ("Holds", True),
}
_SINK_KEYS: Mapping[str, tuple[str, bool]] = {
    "name": ("Sink", False),
    "ready": ("State", False),
    "shard": ("Shard", False),
    "mode": ("Mode", False),
    "run": ("Run", False),
    "lag": ("Lag", True),
    "written": ("Updates written", True),
    "committed": ("Last commit", True),
    "failures": ("Failures", True),
}


def fleet(shards: Iterable[Resource], sinks: Iterable[Resource], query: Query, *, now_ms: int) -> Fleet:
    """The page for these resources."""
    all_shards, all_sinks = list(shards), list(sinks)
    shard_rows = [shard_row(one, now_ms=now_ms) for one in all_shards]
    sink_rows = [sink_row(one, now_ms=now_ms) for one in all_sinks]
    found_shards, found_sinks = _chosen(shard_rows, query), _chosen(sink_rows, query)
    everything = [*(one.ready for one in shard_rows), *(one.ready for one in sink_rows)]
    tones = [one.tone for one in everything]
    return Fleet(
        query=query,
        namespaces=tuple(sorted({one.namespace for one in shard_rows} | {one.namespace for one in sink_rows})),
        shards=tuple(_sorted(found_shards, query.shards_by)[:ROWS_MAX]),
        sinks=tuple(_sorted(found_sinks, query.sinks_by)[:ROWS_MAX]),
        shard_headings=_headings(_SHARD_KEYS, query.shards_by, lambda order: query.href(shards=order)),
        sink_headings=_headings(_SINK_KEYS, query.sinks_by, lambda order: query.href(sinks=order)),
        shards_found=len(found_shards),
        sinks_found=len(found_sinks),
        counts=(
            ("shards", len(shard_rows)),
            ("sinks", len(sink_rows)),
            ("ready", tones.count("good")),
            ("not ready", tones.count("bad")),
            ("unknown", tones.count("wait")),
        ),
    )


def shard_row(resource: Resource, *, now_ms: int) -> ShardRow:
    """The row of a shard."""
    metadata, status = block(resource, "metadata"), block(resource, "status")
    frontiers, storage, holds = block(status, "frontiers"), block(status, "storage"), block(status, "holds")
    due = to_ms(block(status, "debt").get("deadlineTime"))
    ready, lag = Readiness.of(resource), number(frontiers.get("upperLagSeconds"))
    readers, blocking = number(holds.get("readers")), items(holds.get("blocking"))
    return ShardRow(
        namespace=text(metadata.get("namespace")),
        name=text(metadata.get("name")),
        ready=ready,
        upper=instant(frontiers["upper"] or None) if "upper" in frontiers else "",
        lag=seconds(lag),
        batches=grouped(storage.get("batches")),
        bytes=size(storage.get("liveBytes")),
        deadline="" if due is None else ago(block(status, "debt").get("deadlineTime"), now_ms),
        is_late=due is not None and due <= now_ms,
        holds=f"{grouped(readers)}{f' ({len(blocking)} blocking)' if blocking else ''}",
        keys={
            "name": _place(metadata),
            "ready": (ready.status, ready.reason),
            "upper": number(frontiers.get("upper")),
            "lag": lag,
            "batches": number(storage.get("batches")),
            "bytes": number(storage.get("liveBytes")),
            "deadline": due,
            "holds": readers,
        },
    )


def mode_of(sink: Resource) -> str:
    """Once, Scheduled or Streaming."""
    spec = block(sink, "spec")
    return text(spec.get("mode")) or ("Scheduled" if block(spec, "schedule") else "Once")


def lag_of(status: Mapping[str, Any]) -> int | None:
    """The seconds by which a sink is behind its input, from its running driver; None when the driver does not report them."""
    return number(block(status, "progress", "running").get("lagSeconds"))


def sink_row(resource: Resource, *, now_ms: int) -> SinkRow:
    """The row of a sink."""
    metadata, status, spec = block(resource, "metadata"), block(resource, "status"), block(resource, "spec")
    progress, run, driver = block(status, "progress"), block(status, "run"), block(status, "driver")
    ready, lag, failures = Readiness.of(resource), lag_of(status), number(status.get("consecutiveFailures"))
    written = number(block(progress, "running").get("updatesWritten"))
    written = number(progress.get("updatesWritten")) if written is None else written
    state = text(driver.get("phase") if run.get("state") == "Running" else run.get("state"))
    shard = text(block(spec, "shardRef").get("name"))
    return SinkRow(
        namespace=text(metadata.get("namespace")),
        name=text(metadata.get("name")),
        ready=ready,
        shard=shard,
        mode=mode_of(resource),
        run=state,
        lag=seconds(lag),
        written=grouped(written),
        committed=ago(progress.get("lastCommitTime"), now_ms),
        failures=grouped(failures) if failures else "",
        keys={
            "name": _place(metadata),
            "ready": (ready.status, ready.reason),
            "shard": shard,
            "mode": mode_of(resource),
            "run": state,
            "lag": lag,
            "written": written,
            "committed": to_ms(progress.get("lastCommitTime")),
            "failures": failures or None,
        },
    )


def _place(metadata: Mapping[str, Any]) -> tuple[str, str]:
    return text(metadata.get("namespace")), text(metadata.get("name"))


Row = TypeVar("Row", ShardRow, SinkRow)


def _chosen(rows: Iterable[Row], query: Query) -> list[Row]:
    """The rows that pass the filter: each word is in the namespace, name, reason or message."""
    words = query.words.lower().split()
    return [
        row
        for row in rows
        if query.namespace in {"", row.namespace}
        and query.ready in {"", row.ready.status}
        and all(word in f"{row.namespace}/{row.name} {row.ready.reason} {row.ready.message}".lower() for word in words)
    ]


def _sorted(rows: list[Row], order: str) -> list[Row]:
    """The rows sorted by a column, with `-` before it for descending. Rows without a value come last in both directions; equal rows are
    sorted by name.
    """
    column, down = order.removeprefix("-"), order.startswith("-")
    rows = sorted(rows, key=lambda row: row.keys["name"])
    with_value = [row for row in rows if row.keys[column] not in (None, "")]
    without = [row for row in rows if row.keys[column] in (None, "")]
    return sorted(with_value, key=lambda row: row.keys[column], reverse=down) + without


def _headings(columns: Mapping[str, tuple[str, bool]], order: str, href: Callable[[str], str]) -> tuple[Heading, ...]:
    """The headings. A second use of the same heading reverses the order. Numbers begin with the largest."""
    made = []
    for name, (title, is_number) in columns.items():
        first, second = (f"-{name}", name) if is_number else (name, f"-{name}")
        now = {name: "ascending", f"-{name}": "descending"}.get(order, "none")
        made.append(
            Heading(title=title, href=href(second if order == first else first), order=now, is_number=is_number)
        )
    return tuple(made)
