"""Every metric of the engine: its name, kind, help and labels. No other file defines metrics.

Code records by the short name: `metrics.count("gc_deleted_blobs", 3)`. A test finds every such call and compares its name
and labels with this table. `docs/metrics.md` is generated from it. To add a metric, add a line here and a call where the
event happens, then run `make test REWRITE=1`.

Rules: a name ends in its unit, and units are base units (seconds, bytes). A label takes a few values, which this table lists.
The exception is `shard`; its series are dropped when the process releases the shard (`Metrics.watch_shard`).
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
    """One metric. `labels`: label -> its values, or a description of them."""

    kind: Kind
    name: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """The name that Prometheus shows."""
        return f"{PREFIX}{self.name}{_SUFFIX[self.kind]}"


def _counter(name: str, text: str, /, **labels: str) -> Metric:
    return Metric("counter", name, text, labels)


def _gauge(name: str, text: str, /, **labels: str) -> Metric:
    return Metric("gauge", name, text, labels)


def _seconds(name: str, text: str, /, **labels: str) -> Metric:
    return Metric("histogram", name, text, labels)


SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Commands": (
        _counter("command_started", "Commands started.", **_COMMAND),
        _counter(
            "command",
            "Attempts of commands, by outcome.",
            **_COMMAND,
            outcome="committed, refused, cas_mismatch or indeterminate",
        ),
        _seconds("command", "Time from the start of a command to its commit.", **_COMMAND),
        _seconds("command_turn", "Time that commands waited for another command of the same process."),
        _counter("command_turn_timeout", "Commands that stopped waiting for another command of the same process."),
        _counter("append_already_committed", "Appends whose retry found that an earlier attempt had committed."),
        _counter("writer_added", "Writers registered."),
        _counter("writer_removed", "Writers removed.", cause="expired or lapsed"),
        _counter("reader_added", "Leased readers registered."),
        _counter("reader_removed", "Leased readers removed; lapsed: the lease ran out.", cause="expired or lapsed"),
    ),
    "Retries": (
        _counter("retry_started", "Operations that needed a retry.", **_RETRY),
        _counter("retry_attempts", "Failed attempts.", **_RETRY),
        _counter("retry_sleep_seconds", "Time slept between attempts.", **_RETRY),
        _counter("retry_finished", "Retried operations that ended.", **_RETRY, outcome="answered or gave_up"),
    ),
    "State": (
        _counter(
            "apply_diff",
            "State diffs applied, by path.",
            path="structured(_full), fast_append, fast_empty, fast_compaction, lenient, slow, reconstruction; hostname_mismatch",
        ),
        _counter(
            "update_state",
            "Refreshes of the cached state.",
            path="empty, fast, slow; unproven: slow, too far behind to detect whether the log was rolled back",
        ),
        _counter("fetch_recent_diffs", "Scans on open.", path="fast (all diffs) or slow (from the newest rollup)"),
        _counter("fetch_state_stale_rollup", "Opens that restarted because their rollup was deleted meanwhile."),
        _counter("rollup_migrated", "Earliest rollups found through diffs because state no longer named them."),
        _counter("rollup_write", "Rollups, by outcome.", outcome="written, noop_latest or noop_truncated"),
        _counter("state_diff_bytes", "Bytes of committed state diffs.", **_SHARD),
        _seconds("codec", "Time to encode or decode.", op="encode or decode", what="diff, rollup, part or inline"),
        _counter("watch_woken", "Wake-ups of waits for a newer state.", by="notify or poll"),
        _counter("watch_resolved", "Waits for a newer state that ended.", by="at_once, notify, poll or timeout"),
        _counter(
            "push", "Diffs received by push from other processes.", outcome="applied, fetched (after a gap) or foreign"
        ),
        _counter(
            "forked_log",
            "Logs found to have lost versions; this process stops working on the shard.",
            **_SHARD,
        ),
        _counter("push_disconnected", "Losses of the connection that delivers pushes."),
    ),
    "Shards": (
        _gauge("state_seqno", "Version of the newest state this process knows.", **_SHARD),
        _gauge("state_since", "Since: times before it are no longer distinguishable; +Inf: closed.", **_SHARD),
        _gauge("state_upper", "First time not yet written; +Inf: closed.", **_SHARD),
        _gauge("state_seqnos_held", "Versions that readers keep from collection.", **_SHARD),
        _gauge("state_seqnos_since_rollup", "Versions since the newest rollup.", **_SHARD),
        _gauge("state_latest_rollup_bytes", "Size of the newest rollup.", **_SHARD),
        _gauge("state_rollups", "Rollups that state names.", **_SHARD),
        _gauge("state_rollups_bytes", "Total size of the rollups that state names.", **_SHARD),
        _gauge("state_batches", "Hollow batches.", **_SHARD),
        _gauge(
            "state_spine_batches",
            "Spine batches, by compaction stage.",
            **_SHARD,
            stage="compact, compacting (claimed) or noncompact",
        ),
        _gauge("state_parts", "Parts, in blob or inline.", **_SHARD),
        _gauge("state_rewrite_parts", "Parts whose times a read rewrites.", **_SHARD),
        _gauge("state_inline_parts", "Parts held in state itself.", **_SHARD),
        _gauge("state_inline_bytes", "Bytes of inline parts in state.", **_SHARD),
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
            "Bytes in blob, as of the last audit.",
            **_SHARD,
            bucket="current, referenced_not_current, rollups, records, not_leaked_not_referenced or leaked",
        ),
    ),
    "Writing": (
        _counter("part_written", "Parts written.", kind="inline or blob"),
        _counter("part_written_bytes", "Encoded bytes of parts written."),
        _counter("part_written_good_bytes", "Bytes of the updates in parts written, measured in memory."),
        _seconds("part_write", "Time to encode and upload one part."),
        _counter("key_lower_cut", "Parts whose least key was too long to store whole."),
        _counter("write_stall", "Additions that waited for an upload."),
        _counter("inline_flushed_parts", "Inline parts rewritten as blobs."),
        _counter("inline_flushed_bytes", "Bytes of inline parts rewritten as blobs."),
        _counter("inline_combined_parts", "Inline parts that an append combined into one."),
        _counter("builder_merged_runs", "Runs that builders merged while writing."),
        _counter("inline_backpressure", "Appends that had to flush inline parts first."),
        _counter("inline_committed_parts", "Inline parts appended."),
        _counter("inline_committed_bytes", "Bytes of inline parts appended."),
    ),
    "Reading": (
        _seconds("fetched", "Time to fetch one part from blob, including retries.", **_PATH),
        _counter("fetched_parts", "Parts fetched from blob.", **_PATH),
        _counter("fetched_bytes", "Bytes of parts fetched from blob.", **_PATH),
        _counter("stats_skipped_parts", "Parts not fetched because statistics rule their rows out.", **_SHARD),
        _counter(
            "stats_audits",
            "Parts fetched although statistics ruled them out, to verify the statistics.",
            **_SHARD,
        ),
        _counter("fetched_good_bytes", "Bytes of the updates in opened parts, measured in memory.", **_PATH),
        _counter("fetched_rewritten_rows", "Rows whose times a read rewrote.", **_PATH),
        _counter(
            "prefetch_parts",
            "Prefetched parts, by whether they were ready when needed, or never needed.",
            **_PATH,
            outcome="ready, waited, skipped (not begun: the budget was spent) or wasted",
        ),
        _counter("prefetch_over_budget", "Reads that could not prefetch all of their parts at once.", **_PATH),
        _counter("lease_timeout_read", "Uses of a reader after its lease ran out."),
        _counter("lease_dropped_parts", "Leased parts not yet returned when their reader was expired."),
    ),
    "Maintenance": (
        _counter("gc", "Runs of garbage collection.", outcome="Succeeded, Skipped or Failed"),
        _seconds(
            "gc_step",
            "Time of each step of garbage collection.",
            step="find_rollups, find_blobs, delete_rollups, delete_parts, truncate or remove_rollups",
        ),
        _counter("gc_deleted_blobs", "Blobs deleted by garbage collection.", kind="part or rollup"),
        _counter("gc_truncated_diffs", "Versions truncated."),
        _counter("orphans_deleted_blobs", "Blobs that no version named, deleted by orphan scans."),
        _counter("gc_merged", "GC requests merged into another request."),
        _gauge("gc_live_diffs", "Versions in consensus at the last garbage collection.", **_SHARD),
        _gauge(
            "gc_held_parts",
            "Parts that only older versions reference, kept for readers that hold those versions.",
            **_SHARD,
        ),
        _seconds("rollup", "Time to write and link a rollup."),
        _counter("background_failed", "Pieces of background maintenance that raised.", work="compaction or routine"),
        _counter("heartbeat", "Heartbeats of leases.", outcome="renewed, failed or lost"),
    ),
    "Compaction": (
        _counter("compaction_requested", "Compaction requests received."),
        _counter("compaction_skipped", "Compaction requests skipped.", reason="small, disabled, queue_full or closed"),
        _counter(
            "compaction_concurrency_waits", "Requests that waited because all threads of the client were compacting."
        ),
        _seconds("compaction_queued", "Time a request waited in the background queue."),
        _counter("compaction_started", "Compactions started."),
        _counter(
            "compaction",
            "Compactions, by outcome.",
            outcome="see model.spine.trace.MergeOutcome; inputs_replaced, noop",
        ),
        _counter("compaction_failed", "Compactions that raised."),
        _counter("compaction_timed_out", "Compactions given up at their time limit."),
        _counter("compaction_memory_exceeded", "Chunks that exceeded the memory bound."),
        _counter("compaction_chunks", "Chunks compacted."),
        _counter("compaction_runs", "Runs that compactions merged."),
        _counter(
            "compaction_schema",
            "Compaction outputs, by the schema they were written with.",
            choice="newest_input or handle",
        ),
        _seconds("compaction", "Time of one compaction."),
    ),
    "Upserts": (
        _counter("upsert_merged_updates", "Updates of the shard merged into upsert state."),
        _counter("upsert_merged_inserts", "Merged updates with a positive diff."),
        _counter("upsert_merged_deletes", "Merged updates with a negative diff."),
        _seconds("upsert_merge", "Time to merge one chunk."),
        _gauge("upsert_state_bytes", "Size of the upsert state.", **_SHARD),
        _seconds("upsert_rehydration", "Time to rebuild the state from the shard."),
        _gauge("upsert_rehydration_updates", "Updates read while hydrating.", **_SHARD),
        _gauge("upsert_rehydration_values", "Values in the state after hydrating.", **_SHARD),
        _gauge("upsert_rehydration_bytes", "Bytes of the values in the state after hydrating.", **_SHARD),
        _gauge("upsert_spilled", "1 once the state has moved to disk.", **_SHARD),
        _seconds("upsert_store", "Time of one call to the state's store.", verb="multi_get or multi_put"),
        _counter("upsert_store_keys", "Keys read or written.", verb="multi_get or multi_put"),
    ),
    "Sinks": (
        _counter("sink_correction_insertions", "Updates put into correction buffers."),
        _counter("sink_correction_deletions", "Updates that cancelled in correction buffers."),
        _gauge("sink_correction_rows", "Updates held in correction buffers.", **_SHARD),
        _gauge("sink_correction_capacity_rows", "Updates that fit before the next consolidation.", **_SHARD),
        _gauge("sink_correction_rows_max_per_worker", "Updates held by the worker that holds the most.", **_SHARD),
        _gauge("sink_correction_memory_bytes", "Memory of the correction buffers.", **_SHARD),
        _gauge("sink_correction_spilled_bytes", "Bytes of the correction buffers on disk.", **_SHARD),
        _counter("sink_append", "Appends of sinks.", outcome="appended or lost (another replica was faster)"),
        _counter("sink_lapses", "Lapsed leases that a sink survived.", handle="reader or writer"),
    ),
    "Stores": (
        _counter(
            "blob_calls",
            "Calls to the blob store.",
            verb="method",
            outcome="ok, stopped (listing abandoned) or error class",
        ),
        _counter("blob_bytes", "Bytes moved or deleted.", verb="method"),
        _seconds("blob", "Time of one call to the blob store.", verb="method"),
        _counter(
            "blob_left_behind",
            "Calls that exceeded the time allowed for their bytes; each continues in its thread.",
            verb="method",
        ),
        _gauge("blob_left_behind_running", "Calls left behind that still run, for the location that reported last."),
        _counter(
            "consensus_calls", "Calls to consensus.", verb="method", outcome="ok, mismatch, stopped or error class"
        ),
        _counter("consensus_bytes", "Bytes moved.", verb="method"),
        _seconds("consensus", "Time of one call to consensus.", verb="method"),
    ),
}

CATALOGUE: Mapping[tuple[Kind, str], Metric] = {
    (metric.kind, metric.name): metric for section in SECTIONS.values() for metric in section
}
"""All metrics by kind and short name."""


def as_markdown() -> str:
    """Return the table in the form of `docs/metrics.md`."""
    lines = [
        "# Metrics of the engine",
        "",
        "Generated from `engine/persist_engine/base/metric_names.py`; a test keeps this table, that file and the code consistent.",
        "Series labelled `shard` exist as long as the process holds the shard's state.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | kind | labels | what |", "|---|---|---|---|"]
        for metric in metrics:
            labels = "; ".join(f"`{label}`: {values}" for label, values in metric.labels.items())
            lines.append(f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
