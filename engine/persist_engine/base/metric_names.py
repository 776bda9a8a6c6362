"""Every metric of the engine: its name, kind, help and labels. The one place that names them.

Code counts by the short name: `metrics.count("gc_deleted_blobs", 3)`. A test reads every such call and compares name
and labels with this table, and `docs/metrics.md` is made from it. To add a metric: a line here, a call where it
happens, `make test REWRITE=1`.

Rules: units stand last and are base units (seconds, bytes). A label has a handful of values, told here, but for
`shard`, whose series are dropped when the process lets go of the shard (`Metrics.watch_shard`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "persist_"
_SUFFIX: Mapping[Kind, str] = {"counter": "_total", "gauge": "", "histogram": "_seconds"}

_SHARD = {"shard": "shard id"}
_COMMAND = {"name": "command"}
_PATH = {"path": "snapshot, listen, changes, fetch (leased parts, splits), compaction, builder, export or verify"}
_RETRY = {"kind": "external, determinate or command", "op": "what is retried"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels`: label -> its values, or what they are."""

    kind: Kind
    name: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """As Prometheus shows it."""
        return f"{PREFIX}{self.name}{_SUFFIX[self.kind]}"


def _counter(name: str, text: str, /, **labels: str) -> Metric:
    return Metric("counter", name, text, labels)


def _gauge(name: str, text: str, /, **labels: str) -> Metric:
    return Metric("gauge", name, text, labels)


def _seconds(name: str, text: str, /, **labels: str) -> Metric:
    return Metric("histogram", name, text, labels)


SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Commands": (
        _counter("command_started", "Commands taken up.", **_COMMAND),
        _counter(
            "command",
            "Attempts of commands by how they ended.",
            **_COMMAND,
            outcome="committed, refused, cas_mismatch or indeterminate",
        ),
        _seconds("command", "From taking a command up to its commit.", **_COMMAND),
        _seconds("command_turn", "Waits of commands for another one of their process, where there were any."),
        _counter("command_turn_timeout", "Commands that did not wait longer for another one of their process."),
        _counter("append_already_committed", "Appends whose retry found that an earlier attempt had committed."),
        _counter("writer_added", "Writers registered."),
        _counter("writer_removed", "Writers removed.", cause="expired or lapsed"),
        _counter("reader_added", "Leased readers registered."),
        _counter("reader_removed", "Leased readers removed; lapsed: their lease ran out.", cause="expired or lapsed"),
    ),
    "Retries": (
        _counter("retry_started", "Operations that had to be retried.", **_RETRY),
        _counter("retry_attempts", "Failed attempts.", **_RETRY),
        _counter("retry_sleep_seconds", "Time slept between attempts.", **_RETRY),
        _counter("retry_finished", "Retried operations that ended.", **_RETRY, outcome="answered or gave_up"),
    ),
    "State": (
        _counter(
            "apply_diff",
            "State diffs by how they were applied.",
            path="structured(_full), fast_append, fast_empty, fast_compaction, lenient, slow, reconstruction; hostname_mismatch",
        ),
        _counter(
            "update_state",
            "Refreshes of the cached state.",
            path="empty, fast, slow; unproven: slow, from too far behind to tell whether the log was rolled back",
        ),
        _counter("fetch_recent_diffs", "Scans on open.", path="fast (all diffs) or slow (from the newest rollup)"),
        _counter("fetch_state_stale_rollup", "Opens that met a rollup which was deleted meanwhile, and began again."),
        _counter("rollup_migrated", "Earliest rollups found through diffs, because state no longer named them."),
        _counter("rollup_write", "Rollups.", outcome="written, noop_latest or noop_truncated"),
        _counter("state_diff_bytes", "Bytes of committed state diffs.", **_SHARD),
        _seconds("codec", "Encoding and decoding.", op="encode or decode", what="diff, rollup, part or inline"),
        _counter("watch_woken", "Waits for a newer state that were woken.", by="notify or poll"),
        _counter("watch_resolved", "Waits that ended.", by="at_once, notify, poll or timeout"),
        _counter("push", "Diffs pushed by other processes.", outcome="applied, fetched (after a gap) or foreign"),
        _counter(
            "forked_log",
            "Logs found to have lost versions: this process does no more on the shard.",
            **_SHARD,
        ),
        _counter("push_disconnected", "Times the connection that pushes come by was lost."),
    ),
    "Shards": (
        _gauge("state_seqno", "Version of the newest state this process knows.", **_SHARD),
        _gauge("state_since", "Times before it can no longer be told apart; +Inf: closed.", **_SHARD),
        _gauge("state_upper", "First time not yet written; +Inf: closed.", **_SHARD),
        _gauge("state_seqnos_held", "Versions that readers keep from collection.", **_SHARD),
        _gauge("state_seqnos_since_rollup", "Versions since the newest rollup.", **_SHARD),
        _gauge("state_latest_rollup_bytes", "Size of the newest rollup.", **_SHARD),
        _gauge("state_rollups", "Rollups that state names.", **_SHARD),
        _gauge("state_rollups_bytes", "Their sizes together.", **_SHARD),
        _gauge("state_batches", "Hollow batches.", **_SHARD),
        _gauge(
            "state_spine_batches",
            "Spine batches by how far their compaction is.",
            **_SHARD,
            stage="compact, compacting (claimed) or noncompact",
        ),
        _gauge("state_parts", "Parts, in blob or inline.", **_SHARD),
        _gauge("state_rewrite_parts", "Parts whose times are rewritten on read.", **_SHARD),
        _gauge("state_inline_parts", "Parts held in state itself.", **_SHARD),
        _gauge("state_inline_bytes", "Their bytes.", **_SHARD),
        _gauge("state_updates", "Updates, an upper bound.", **_SHARD),
        _gauge("state_batches_bytes", "Bytes of all current parts in blob.", **_SHARD),
        _gauge("state_largest_batch_bytes", "Bytes of the largest batch.", **_SHARD),
        _gauge("state_writers", "Registered writers.", **_SHARD),
        _gauge("state_leased_readers", "Registered leased readers.", **_SHARD),
        _gauge("state_critical_readers", "Registered critical readers.", **_SHARD),
        _counter("shard_blob_gets", "Parts and rollups read.", **_SHARD),
        _counter("shard_blob_sets", "Parts and rollups written.", **_SHARD),
        _counter("shard_compactions_applied", "Compactions swapped in.", **_SHARD),
        _gauge(
            "usage_bytes",
            "Bytes in blob as the last audit found them.",
            **_SHARD,
            bucket="current, referenced_not_current, rollups, not_leaked_not_referenced or leaked",
        ),
    ),
    "Writing": (
        _counter("part_written", "Parts written.", kind="inline or blob"),
        _counter("part_written_bytes", "Their encoded bytes."),
        _counter("part_written_good_bytes", "Bytes of the updates in them, in memory."),
        _seconds("part_write", "Of encoding and uploading one part."),
        _counter("key_lower_cut", "Parts whose least key was too long to be kept whole."),
        _counter("write_stall", "Additions that waited for an upload."),
        _counter("inline_flushed_parts", "Inline parts rewritten as blobs."),
        _counter("inline_flushed_bytes", "Their bytes."),
        _counter("inline_combined_parts", "Inline parts of one append put together as one."),
        _counter("builder_merged_runs", "Runs that builders merged while they wrote."),
        _counter("inline_backpressure", "Appends that had to flush inline parts first."),
        _counter("inline_committed_parts", "Inline parts appended."),
        _counter("inline_committed_bytes", "Their bytes."),
    ),
    "Reading": (
        _seconds("fetched", "Of fetching one part from blob, retries included.", **_PATH),
        _counter("fetched_parts", "Parts fetched from blob.", **_PATH),
        _counter("fetched_bytes", "Their bytes.", **_PATH),
        _counter("stats_skipped_parts", "Parts not fetched because statistics rule their rows out.", **_SHARD),
        _counter(
            "stats_audits",
            "Parts fetched although statistics ruled them out, to see that they did so rightly.",
            **_SHARD,
        ),
        _counter("fetched_good_bytes", "Bytes of the updates in parts that were opened, in memory.", **_PATH),
        _counter("fetched_rewritten_rows", "Rows of parts whose times are rewritten.", **_PATH),
        _counter(
            "prefetch_parts",
            "Parts by whether they had been fetched when they were needed, or were and never needed.",
            **_PATH,
            outcome="ready, waited, skipped (not begun: the budget was spent) or wasted",
        ),
        _counter("prefetch_over_budget", "Reads that could not begin to fetch all of their parts at once.", **_PATH),
        _counter("lease_timeout_read", "Uses of readers whose lease had run out."),
        _counter("lease_dropped_parts", "Leased parts that were out when their reader was expired."),
    ),
    "Maintenance": (
        _counter("gc", "Runs of garbage collection.", outcome="Succeeded, Skipped or Failed"),
        _seconds(
            "gc_step",
            "Of the steps of garbage collection.",
            step="find_rollups, find_blobs, delete_rollups, delete_parts, truncate or remove_rollups",
        ),
        _counter("gc_deleted_blobs", "Blobs deleted by garbage collection.", kind="part or rollup"),
        _counter("gc_truncated_diffs", "Versions truncated."),
        _counter("orphans_deleted_blobs", "Blobs that no version named, deleted by orphan scans."),
        _counter("gc_merged", "Requests that another request covered."),
        _gauge("gc_live_diffs", "Versions in consensus when garbage collection last looked.", **_SHARD),
        _gauge("gc_held_parts", "Parts that only older versions name, kept for readers that hold those.", **_SHARD),
        _seconds("rollup", "Of writing and linking a rollup."),
        _counter("background_failed", "Pieces of background maintenance that raised.", work="compaction or routine"),
        _counter("heartbeat", "Heartbeats of leases.", outcome="renewed, failed or lost"),
    ),
    "Compaction": (
        _counter("compaction_requested", "Requests handed to this process."),
        _counter("compaction_skipped", "Requests not taken up.", reason="small, disabled, queue_full or closed"),
        _counter(
            "compaction_concurrency_waits", "Requests that waited for a thread: all of the client were compacting."
        ),
        _seconds("compaction_queued", "From being offered to the background to being taken up there."),
        _counter("compaction_started", "Compactions begun."),
        _counter(
            "compaction",
            "Compactions by how they ended.",
            outcome="see model.trace.MergeOutcome; inputs_replaced, noop",
        ),
        _counter("compaction_failed", "Compactions that raised."),
        _counter("compaction_timed_out", "Compactions given up after their time."),
        _counter("compaction_memory_exceeded", "Chunks that had to hold more than the memory bound."),
        _counter("compaction_chunks", "Chunks."),
        _counter("compaction_runs", "Runs merged."),
        _counter("compaction_schema", "Schema that outputs were written with.", choice="newest_input or handle"),
        _seconds("compaction", "Of one compaction."),
    ),
    "Upserts": (
        _counter("upsert_merged_updates", "Updates of the shard merged into upsert state."),
        _counter("upsert_merged_inserts", "Of those, updates with a positive diff."),
        _counter("upsert_merged_deletes", "Of those, updates with a negative diff."),
        _seconds("upsert_merge", "Of merging one chunk."),
        _gauge("upsert_state_bytes", "Size of the state.", **_SHARD),
        _seconds("upsert_rehydration", "Of rebuilding the state from the shard."),
        _gauge("upsert_rehydration_updates", "Updates read while hydrating.", **_SHARD),
        _gauge("upsert_rehydration_values", "Values that hydrating came to.", **_SHARD),
        _gauge("upsert_rehydration_bytes", "Their bytes.", **_SHARD),
        _gauge("upsert_spilled", "1 once the state has moved to disk.", **_SHARD),
        _seconds("upsert_store", "Of one call of the state's store.", verb="multi_get or multi_put"),
        _counter("upsert_store_keys", "Keys got or put.", verb="multi_get or multi_put"),
    ),
    "Sinks": (
        _counter("sink_correction_insertions", "Updates put into correction buffers."),
        _counter("sink_correction_deletions", "Updates that cancelled there."),
        _gauge("sink_correction_rows", "Updates held.", **_SHARD),
        _gauge("sink_correction_capacity_rows", "Updates there is room for before the next consolidation.", **_SHARD),
        _gauge("sink_correction_rows_max_per_worker", "Updates held by the worker that holds most.", **_SHARD),
        _gauge("sink_correction_memory_bytes", "Memory of the buffers.", **_SHARD),
        _gauge("sink_correction_spilled_bytes", "Bytes of them on disk.", **_SHARD),
        _counter("sink_append", "Appends of sinks.", outcome="appended or lost (another replica was faster)"),
        _counter("sink_lapses", "Leases of sinks that lapsed, and the sink went on.", handle="reader or writer"),
    ),
    "Stores": (
        _counter(
            "blob_calls", "Calls of the blob store.", verb="method", outcome="ok, stopped (listing left) or error class"
        ),
        _counter("blob_bytes", "Bytes moved or deleted.", verb="method"),
        _seconds("blob", "Of one call.", verb="method"),
        _counter(
            "blob_left_behind",
            "Calls that took longer than their bytes may take: each goes on in its thread.",
            verb="method",
        ),
        _gauge("blob_left_behind_running", "Those that go on still, of the location that told last."),
        _counter(
            "consensus_calls", "Calls of consensus.", verb="method", outcome="ok, mismatch, stopped or error class"
        ),
        _counter("consensus_bytes", "Bytes moved.", verb="method"),
        _seconds("consensus", "Of one call.", verb="method"),
    ),
}

CATALOGUE: Mapping[tuple[Kind, str], Metric] = {
    (metric.kind, metric.name): metric for section in SECTIONS.values() for metric in section
}
"""All of them by kind and short name."""


def as_markdown() -> str:
    """The table as `docs/metrics.md` shows it."""
    lines = [
        "# Metrics of the engine",
        "",
        "Made from `engine/persist_engine/base/metric_names.py`; a test keeps the two and the code alike.",
        "Series labelled `shard` live as long as the process holds the shard's state.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | kind | labels | what |", "|---|---|---|---|"]
        for metric in metrics:
            labels = "; ".join(f"`{label}`: {values}" for label, values in metric.labels.items())
            lines.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
