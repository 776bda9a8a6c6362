"""The dashboard Shard: one PersistShard."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as models
from panels import Row, board, lines, number, variable
from series import of


def _shard(series: str) -> str:
    return of(f"persist_shard_{series}", '{namespace="$namespace",name="$shard"}')


_ROWS = [
    Row(
        "Now",
        (
            number("Ready", "1: the operator maintains the shard.", "short", _shard("ready")),
            number("Stores answer", "1: both stores of the shard answer.", "short", _shard("storage_reachable")),
            number("Readers", "Registered readers. Each may hold history.", "short", _shard("readers")),
            number("Data behind now", "Seconds from upper to now.", "s", _shard("upper_lag_seconds")),
        ),
    ),
    Row(
        "Frontiers",
        (
            lines(
                "Upper behind now",
                "Upper is the first time without data yet. The distance grows while nothing is written.",
                "s",
                (_shard("upper_lag_seconds"), "upper behind now"),
            ),
            lines(
                "Readable history",
                "The past can be read back to since. Far above the target (spec.retention.sinceLagSeconds), something holds it back.",
                "s",
                (_shard("since_lag_seconds"), "since behind upper"),
                (_shard("since_lag_target_seconds"), "target"),
            ),
        ),
    ),
    Row(
        "Size",
        (
            lines(
                "Live bytes",
                "What the current contents occupy in the bucket.",
                "bytes",
                (_shard("live_bytes"), "live"),
            ),
            lines(
                "Batches",
                "Pieces that a read opens. Compaction merges them.",
                "short",
                (_shard("batches"), "batches"),
            ),
        ),
    ),
    Row(
        "Maintenance",
        (
            lines(
                "Compaction debt",
                "Bytes that compaction would have to read.",
                "bytes",
                (_shard("debt_bytes"), "debt"),
            ),
            lines(
                "Rewritten in 24 hours",
                "Bytes that compactions read, and what they may read (maintenance.maxRewriteBytesPerDay).",
                "bytes",
                (_shard("rewritten_bytes"), "read"),
                (_shard("rewrite_budget_bytes"), "budget"),
            ),
            lines(
                "Oldest data that no compaction merged",
                "Deleted and replaced rows may be in the bucket for this long.",
                "s",
                (_shard("oldest_uncompacted_seconds"), "age"),
                (_shard("deadline_seconds"), "deadline"),
            ),
            lines(
                "Since the last success",
                "Time since the last run that succeeded, by kind. A kind that has no work does not run.",
                "s",
                (f"time() - {_shard('last_success_timestamp_seconds')}", "{{task}}"),
            ),
            lines(
                "Failures in a row",
                "Failed runs since the last success, by kind.",
                "short",
                (_shard("consecutive_failures"), "{{task}}"),
            ),
            lines(
                "Is it current",
                "1: nothing is due, or it is being done. 0: it is due and prevented; the conditions of the resource say by what.",
                "short",
                (_shard("compaction_current"), "compaction"),
                (_shard("garbage_collected"), "garbage collection"),
            ),
        ),
    ),
    Row(
        "Readers",
        (
            lines(
                "Held by readers",
                "For how long readers have kept since from its target; 0 without such a reader.",
                "s",
                (_shard("reader_hold_seconds"), "hold"),
            ),
            lines("Readers", "Registered readers.", "short", (_shard("readers"), "readers")),
        ),
    ),
    Row(
        "Integrity",
        (
            lines(
                "Missing blobs",
                "Blobs that live versions name and that the last verification did not find. Reads of them fail.",
                "short",
                (_shard("missing_blobs"), "missing"),
            ),
            lines(
                "Orphans",
                "Blobs that no version will ever name, as the last scan left them. They cost storage only.",
                "bytes",
                (_shard("orphan_bytes"), "orphans"),
            ),
        ),
    ),
    Row(
        "State",
        (
            lines(
                "Versions",
                "Each commit makes a version. A rollup is a full copy of one.",
                "short",
                (_shard("seqno"), "newest"),
                (_shard("last_rollup_seqno"), "newest rollup"),
            ),
            lines(
                "Versions in Redis",
                "Garbage collection deletes those before a rollup that no reader needs.",
                "short",
                (_shard("live_diffs"), "versions"),
                (_shard("rollup_every_seqnos"), "between two rollups"),
            ),
        ),
    ),
]


def made() -> models.Dashboard:
    """The dashboard."""
    variables = [
        variable("namespace", "Namespace", "label_values(persist_shard_ready, namespace)"),
        variable("shard", "Shard", 'label_values(persist_shard_ready{namespace="$namespace"}, name)'),
    ]
    return board(
        "persist-shard",
        "persist / Shard",
        "One shard: how new it is, how large, how well maintained, and what holds it back.",
        variables,
        _ROWS,
    )
